"""Edits of the user's files, which leave all characters around them alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from compat.adaptation.repair.source import (
    TIGHT,
    grouped_span,
    indent_of,
    parent_of,
    source_of,
    span,
)
from compat.adaptation.repair.syntax import name_of


@dataclass(frozen=True)
class Edit:
    """Replace the characters from `start` to `end` of a file's text by `text`."""

    file: str
    start: int
    end: int
    text: str

    @staticmethod
    def at(node: ast.AST, start: int, end: int, text: str) -> Edit:
        """Return a change of a part of the file that a node is in."""
        return Edit(source_of(node).file, start, end, text)

    @staticmethod
    def replace(node: ast.AST, text: str) -> Edit:
        return Edit.at(node, *span(node), text)

    @staticmethod
    def replace_group(node: ast.AST, text: str) -> Edit:
        """Replace a node and the parentheses directly around it."""
        return Edit.at(node, *grouped_span(node), text)

    @staticmethod
    def rename(name: ast.expr, new: str) -> Edit:
        """Replace the last part of a dotted name."""
        end = span(name)[1]
        return Edit.at(name, end - len(name_of(name)), end, new)

    @staticmethod
    def prefix(node: ast.AST, text: str) -> Edit:
        """Return text directly before a node."""
        start, _ = span(node)
        return Edit.at(node, start, start, text)

    @staticmethod
    def suffix(node: ast.AST, text: str) -> Edit:
        """Return text directly after a node."""
        _, end = span(node)
        return Edit.at(node, end, end, text)

    @staticmethod
    def last_argument(call: ast.Call, text: str) -> Edit:
        """Return text directly before the closing parenthesis of a call."""
        close = span(call)[1] - 1
        return Edit.at(call, close, close, text)

    @staticmethod
    def insert_before(statement: ast.stmt, *lines: str) -> Edit:
        """Return new lines before a statement, indented like it."""
        start = source_of(statement).offset(statement.lineno, 0)
        text = "".join(f"{indent_of(statement)}{line}".rstrip() + "\n" for line in lines)
        return Edit.at(statement, start, start, text)

    @staticmethod
    def insert_after(statement: ast.stmt, *lines: str) -> Edit:
        """Return new lines after a statement, indented like it."""
        source, line = source_of(statement), statement.end_lineno
        assert line is not None
        end = source.offset(line, 0) + len(source.lines[line - 1])
        return Edit.at(
            statement, end, end, "".join(f"\n{indent_of(statement)}{line}" for line in lines)
        )

    @staticmethod
    def remove(statement: ast.stmt) -> Edit:
        """Delete the lines of a statement that stands on lines of its own."""
        source = source_of(statement)
        assert statement.end_lineno is not None
        end = min(source.starts[statement.end_lineno], len(source.text))
        return Edit.at(statement, source.starts[statement.lineno - 1], end, "")

    @staticmethod
    def set_keyword(call: ast.Call, name: str, value: str) -> Edit:
        """Return a call with a keyword argument added or changed."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return Edit.replace(keyword.value, value)
        ends = [span(node)[1] for node in (*call.args, *call.keywords)]
        if not ends:
            return Edit.last_argument(call, f"{name}={value}")
        # After the last argument, parentheses around it and a comma, but before a comment.
        after = re.match(r"(\s*\))*(\s*,)?", source_of(call).text[max(ends) : span(call)[1] - 1])
        assert after is not None
        end = max(ends) + after.end()
        return Edit.at(call, end, end, f"{' ' if after[2] else ', '}{name}={value}")

    @staticmethod
    def set_argument(call: ast.Call, place: int, name: str, value: str) -> Edit:
        """Return a call with an argument added or changed, which may be passed by its place."""
        if len(call.args) > place:
            return Edit.replace(call.args[place], value)
        return Edit.set_keyword(call, name, value)

    @staticmethod
    def remove_argument(call: ast.Call, value: ast.AST) -> Edit:
        """Remove an argument, or a keyword of this value, and the lines that only it is on."""
        text = source_of(call).text
        argument = next((keyword for keyword in call.keywords if keyword.value is value), value)
        every = sorted([*call.args, *call.keywords], key=span)
        i = next(i for i, node in enumerate(every) if node is argument)
        start, end = span(argument)
        line = text.rfind("\n", 0, start) + 1
        rest = re.match(r",?[ \t]*\n", text[end:])
        if rest is not None and not text[line:start].strip():
            return Edit.at(call, line, end + rest.end(), "")
        if i + 1 < len(every):
            end = span(every[i + 1])[0]
        elif i and "#" not in text[span(every[i - 1])[1] : start]:
            start = span(every[i - 1])[1]
        return Edit.at(call, start, end, "")

    @staticmethod
    def unwrap(outer: ast.expr, inner: ast.expr) -> list[Edit]:
        """Replace an expression by a part of it, which can be edited at the same time."""
        (start, end), (first, last) = span(outer), span(inner)
        around = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript)
        bare = isinstance(inner, TIGHT) or not isinstance(parent_of(outer), around)
        grouped = not bare or (last < end and inner.lineno != inner.end_lineno)
        before, after = "()" if grouped else ("", "")
        return [Edit.at(outer, start, first, before), Edit.at(outer, last, end, after)]


Edits = list[Edit]


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return the text after the edits of one file, which must not overlap."""
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def edited_texts(texts: Mapping[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """Return the new texts of the files that edits change."""
    by_file: dict[str, Edits] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    return {file: apply(texts[file], own) for file, own in by_file.items()}


def with_import_of_torch(text: str) -> str:
    """Return a file's text with `import torch` if it reads `torch` without importing it.

    Other names of torch, as those of `import torch.nn as nn`, do not import it.
    """
    with suppress(SyntaxError):
        tree = ast.parse(text)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        aliases = [alias for node in ast.walk(tree) for alias in _aliases(node)]
        bound = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        if any(node.id == "torch" for node in names) and bound.isdisjoint({"torch", "*"}):
            imports = [node for node in tree.body if _aliases(node)]
            later = [node for node in imports if getattr(node, "module", "") != "__future__"]
            if later:
                lines = text.split("\n")
                lines.insert(later[0].lineno - 1, "import torch")
                return "\n".join(lines)
    return text


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []
