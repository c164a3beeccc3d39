"""A file of the user's as text and syntax, and edits that leave all other characters alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from compat.adaptation.repair.syntax import called
from compat.user_models.notebook import blanked_magics, older_syntax

Node = TypeVar("Node", bound=ast.AST)
# Expressions that bind as tightly as a call.
TIGHT = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


@dataclass(frozen=True)
class Edit:
    """Replace the characters from `start` to `end` of a file's text by `text`."""

    file: str
    start: int
    end: int
    text: str


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
        for text in map(older_syntax, (self.text, blanked_magics(self.text))):
            with suppress(SyntaxError):
                return ast.parse(text)
        return ast.Module(body=[], type_ignores=[])

    @cached_property
    def all_nodes(self) -> list[ast.AST]:
        """All nodes of its syntax, as `ast.walk` returns them."""
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node that every node is a child of."""
        return {child: node for node in self.all_nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def offset(self, line: int, column: int) -> int:
        """Return the place in the text of a line, counted from 1, and a column in UTF-8 bytes."""
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword, ast.arg, ast.alias))
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def code(self, node: ast.AST) -> str:
        """Return a node as the user wrote it."""
        start, end = self.span(node)
        return self.text[start:end]

    def around(self, outer: ast.AST, inner: ast.AST) -> tuple[str, str]:
        """Return the code of a node before and after a part of it."""
        (start, end), (first, last) = self.span(outer), self.span(inner)
        return self.text[start:first], self.text[last:end]

    def indent(self, statement: ast.stmt) -> str:
        """Return the space before a statement."""
        return self.lines[statement.lineno - 1][: statement.col_offset]

    def operand(self, node: ast.AST) -> str:
        """Return a node's code, in parentheses unless it binds as tightly as a call."""
        return self.code(node) if isinstance(node, TIGHT) else f"({self.code(node)})"

    def grouped(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends, with the parentheses directly around it."""
        start, end = self.span(node)
        above = self.parents.get(node)
        limit = self.span(above)[1] if isinstance(above, ast.Call) else len(self.text) + 1
        while True:
            before, after = self.text[:start].rstrip(), self.text[end:].lstrip()
            close = len(self.text) - len(after) + 1
            if not before.endswith("(") or not after.startswith(")") or close == limit:
                return start, end
            start, end = len(before) - 1, close

    def quoted(self, value: str) -> str:
        """Return a string in the quotes that the file uses most."""
        written = [self.code(node) for node in self.nodes(ast.Constant)]
        single = sum(code.startswith("'") for code in written)
        double = sum(code.startswith('"') and not code.startswith('"""') for code in written)
        return f"'{value}'" if single > double else f'"{value}"'

    def replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.file, *self.span(node), text)

    def replace_group(self, node: ast.AST, text: str) -> Edit:
        """Replace a node and the parentheses directly around it."""
        return Edit(self.file, *self.grouped(node), text)

    def insert_before(self, statement: ast.stmt, *lines: str) -> Edit:
        """Return new lines before a statement, indented like it."""
        start, indent = self.offset(statement.lineno, 0), self.indent(statement)
        text = "".join(f"{indent}{line}".rstrip() + "\n" for line in lines)
        return Edit(self.file, start, start, text)

    def insert_after(self, statement: ast.stmt, *lines: str) -> Edit:
        """Return new lines after a statement, indented like it."""
        assert statement.end_lineno is not None
        end = self.offset(statement.end_lineno, 0) + len(self.lines[statement.end_lineno - 1])
        text = "".join(f"\n{self.indent(statement)}{line}" for line in lines)
        return Edit(self.file, end, end, text)

    def remove(self, statement: ast.stmt) -> Edit:
        """Delete the lines of a statement that stands on lines of its own."""
        assert statement.end_lineno is not None
        end = min(self._starts[statement.end_lineno], len(self.text))
        return Edit(self.file, self._starts[statement.lineno - 1], end, "")

    def set_keyword(self, call: ast.Call, name: str, value: str) -> Edit:
        """Return a call with a keyword argument added or changed."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return self.replace(keyword.value, value)
        close = self.span(call)[1] - 1
        ends = [self.span(node)[1] for node in (*call.args, *call.keywords)]
        if not ends:
            return Edit(self.file, close, close, f"{name}={value}")
        # After the last argument, parentheses around it and a comma, but before a comment.
        after = re.match(r"(\s*\))*(\s*,)?", self.text[max(ends) : close])
        assert after is not None
        end = max(ends) + after.end()
        return Edit(self.file, end, end, f"{' ' if after[2] else ', '}{name}={value}")

    def set_argument(self, call: ast.Call, place: int, name: str, value: str) -> Edit:
        """Return a call with an argument added or changed, which may be passed by its place."""
        if len(call.args) > place:
            return self.replace(call.args[place], value)
        return self.set_keyword(call, name, value)

    def unwrap(self, outer: ast.expr, inner: ast.expr) -> list[Edit]:
        """Replace an expression by a part of it, which can be edited at the same time."""
        (start, end), (first, last) = self.span(outer), self.span(inner)
        around = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript)
        bare = isinstance(inner, TIGHT) or not isinstance(self.parents.get(outer), around)
        grouped = not bare or (last < end and inner.lineno != inner.end_lineno)
        before, after = "()" if grouped else ("", "")
        return [Edit(self.file, start, first, before), Edit(self.file, last, end, after)]

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that a statement is in."""
        above = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(above, name, None)
            if isinstance(found, list) and any(node is statement for node in found):
                return found
        return [statement]

    def before(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of a statement's block before it."""
        block = self.block(statement)
        return block[: block.index(statement)]

    def after(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of a statement's block after it."""
        block = self.block(statement)
        return block[block.index(statement) + 1 :]

    def remove_argument(self, call: ast.Call, value: ast.AST) -> Edit:
        """Remove an argument, or a keyword of this value, and the lines that only it is on."""
        argument = next((keyword for keyword in call.keywords if keyword.value is value), value)
        every = sorted([*call.args, *call.keywords], key=lambda node: self.span(node)[0])
        i = next(i for i, node in enumerate(every) if node is argument)
        start, end = self.span(argument)
        line = self.text.rfind("\n", 0, start) + 1
        rest = re.match(r",?[ \t]*\n", self.text[end:])
        if rest is not None and not self.text[line:start].strip():
            return Edit(self.file, line, end + rest.end(), "")
        if i + 1 < len(every):
            end = self.span(every[i + 1])[0]
        elif i and "#" not in self.text[self.span(every[i - 1])[1] : start]:
            start = self.span(every[i - 1])[1]
        return Edit(self.file, start, end, "")

    def parent(self, node: ast.AST, kind: type[Node]) -> Node | None:
        """Return the innermost node of a kind that contains a node."""
        return next((above for above in self.ancestors(node) if isinstance(above, kind)), None)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        above = self.parents.get(node)
        while above is not None:
            yield above
            above = self.parents.get(above)

    def statements_at(self, line: int) -> list[ast.stmt]:
        """Return the statements that a line belongs to, the innermost first."""
        found = [
            node for node in self.all_nodes
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]  # fmt: skip
        return sorted(found, key=lambda node: (node.end_lineno or 0) - node.lineno)

    def nodes(self, kind: type[Node], within: ast.AST | None = None) -> list[Node]:
        """Return the nodes of a kind, in the order of the text."""
        inside = self.all_nodes if within is None else ast.walk(within)
        found = [node for node in inside if isinstance(node, kind)]
        return sorted(found, key=lambda n: self.span(n)[0] if hasattr(n, "lineno") else 0)

    def calls(self, *names: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Return the calls of functions, methods and classes of these names."""
        return [call for call in self.nodes(ast.Call, within) if called(call) in names]


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return the text after the edits of one file, which must not overlap."""
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def edited_texts(texts: Mapping[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """Return the new texts of the files that edits change."""
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    return {file: apply(texts[file], own) for file, own in by_file.items()}
