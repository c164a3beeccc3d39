"""The text and syntax of the user's files, whose nodes know their file and the node above them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

from compat.adaptation.repair.syntax import called
from compat.user_models.notebook import blanked_magics, older_syntax

Node = TypeVar("Node", bound=ast.AST)
# Expressions that bind as tightly as a call.
TIGHT = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


class Source:
    """The text of one file, or of one cell of a notebook.

    Args:
        file: as findings name it.
        text: the text, with line ends "\\n".
    """

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.lines = text.split("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax, with magics left out; empty where it is not Python, as in a `%%bash` cell."""
        tree = ast.Module(body=[], type_ignores=[])
        for text in map(older_syntax, (self.text, blanked_magics(self.text))):
            with suppress(SyntaxError):
                tree = ast.parse(text)
                break
        _WithoutAnnotations().visit(tree)
        for node in ast.walk(tree):
            vars(node)["source"] = self
            for child in ast.iter_child_nodes(node):
                vars(child)["parent"] = node
        return tree

    @cached_property
    def all_nodes(self) -> list[ast.AST]:
        """All nodes of its syntax, as `ast.walk` returns them."""
        return list(ast.walk(self.tree))

    @cached_property
    def starts(self) -> list[int]:
        """The place in the text of every line."""
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def offset(self, line: int, column: int) -> int:
        """Return the place in the text of a line, counted from 1, and a column in UTF-8 bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def quoted(self, value: str) -> str:
        """Return a string in the quotes that the file uses most."""
        written = [code_of(node) for node in find(ast.Constant, self.tree)]
        single = sum(code.startswith("'") for code in written)
        double = sum(code.startswith('"') and not code.startswith('"""') for code in written)
        return f"'{value}'" if single > double else f'"{value}"'

    def statements_at(self, line: int) -> list[ast.stmt]:
        """Return the statements that a line belongs to, the innermost first."""
        found = [
            node for node in self.all_nodes
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]  # fmt: skip
        return sorted(found, key=lambda node: (node.end_lineno or 0) - node.lineno)


class _WithoutAnnotations(ast.NodeTransformer):
    """Let `x: Tensor = y` have the syntax of `x = y`, except for the fields of classes."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = [each if isinstance(each, ast.AnnAssign) else self.visit(each)
                     for each in node.body]  # fmt: skip
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


# The nodes around and inside a node.


def source_of(node: ast.AST) -> Source:
    """Return the file that a node is in."""
    source: Source = vars(node)["source"]
    return source


def parent_of(node: ast.AST) -> ast.AST:
    """Return the node that a node is a child of."""
    parent: ast.AST = vars(node)["parent"]
    return parent


def ancestors(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes around a node, the innermost first."""
    while not isinstance(node, ast.Module):
        node = parent_of(node)
        yield node


def enclosing(node: ast.AST, kind: type[Node]) -> Node | None:
    """Return the innermost node of a kind that contains a node."""
    return next((above for above in ancestors(node) if isinstance(above, kind)), None)


def needed(node: Node | None) -> Node:
    """Return a node.

    Raises:
        LookupError: it is None, so the code lacks what a fix changes.
    """
    if node is None:
        raise LookupError("the code has another form")
    return node


def statement_of(node: ast.AST) -> ast.stmt:
    """Return the innermost statement that contains an expression."""
    return needed(enclosing(node, ast.stmt))


def find(kind: type[Node], within: ast.AST) -> list[Node]:
    """Return the nodes of a kind, in the order of the text."""
    inside = source_of(within).all_nodes if isinstance(within, ast.Module) else ast.walk(within)
    found = [node for node in inside if isinstance(node, kind)]
    return sorted(found, key=lambda n: (getattr(n, "lineno", 1), getattr(n, "col_offset", 0)))


def find_calls(*names: str, within: ast.AST) -> list[ast.Call]:
    """Return the calls of functions, methods and classes of these names."""
    return [call for call in find(ast.Call, within) if called(call) in names]


def block_of(statement: ast.stmt) -> list[ast.stmt]:
    """Return the list of statements that a statement is in."""
    for name in ("body", "orelse", "finalbody"):
        found = getattr(parent_of(statement), name, None)
        if isinstance(found, list) and any(node is statement for node in found):
            return found
    return [statement]


def preceding(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a statement's block before it."""
    block = block_of(statement)
    return block[: block.index(statement)]


def following(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a statement's block after it."""
    block = block_of(statement)
    return block[block.index(statement) + 1 :]


# Nodes as the user wrote them.


def span(node: ast.AST) -> tuple[int, int]:
    """Return where a node begins and ends in the text of its file."""
    assert isinstance(node, (ast.expr, ast.stmt, ast.keyword, ast.arg, ast.alias))
    assert node.end_lineno is not None and node.end_col_offset is not None
    offset = source_of(node).offset
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def code_of(node: ast.AST) -> str:
    """Return a node as the user wrote it."""
    start, end = span(node)
    return source_of(node).text[start:end]


def code_around(outer: ast.AST, inner: ast.AST) -> tuple[str, str]:
    """Return the code of a node before and after a part of it."""
    (start, end), (first, last) = span(outer), span(inner)
    text = source_of(outer).text
    return text[start:first], text[last:end]


def indent_of(statement: ast.stmt) -> str:
    """Return the space before a statement."""
    return source_of(statement).lines[statement.lineno - 1][: statement.col_offset]


def operand_code(node: ast.AST) -> str:
    """Return a node's code, in parentheses unless it binds as tightly as a call."""
    return code_of(node) if isinstance(node, TIGHT) else f"({code_of(node)})"


def grouped_span(node: ast.AST) -> tuple[int, int]:
    """Return where a node begins and ends, with the parentheses directly around it."""
    (start, end), text, above = span(node), source_of(node).text, parent_of(node)
    limit = span(above)[1] if isinstance(above, ast.Call) else len(text) + 1
    while True:
        before, after = text[:start].rstrip(), text[end:].lstrip()
        close = len(text) - len(after) + 1
        if not before.endswith("(") or not after.startswith(")") or close == limit:
            return start, end
        start, end = len(before) - 1, close


def grouped_code(node: ast.AST) -> str:
    """Return a node's code with the parentheses directly around it."""
    start, end = grouped_span(node)
    return source_of(node).text[start:end]
