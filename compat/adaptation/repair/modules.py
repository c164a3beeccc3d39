"""Fixes of how modules are kept and of parts that GPT-2 does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from compat.adaptation.repair.fixes import Edits, Site, called, fixes
from compat.adaptation.repair.source import Edit


@fixes("plain_list")
def module_list(site: Site) -> Iterator[Edits]:
    """`self.blocks = [...]` becomes `self.blocks = nn.ModuleList([...])`."""
    name = str(site.finding.values["name"])
    for node in site.source.nodes(ast.Assign):
        stored = any(isinstance(t, ast.Attribute) and t.attr == name for t in node.targets)
        if stored and node.lineno <= site.line <= (node.end_lineno or 0):
            kind = "ModuleDict" if site.finding.values["kind"] == "dict" else "ModuleList"
            module = site.torch(f"torch.nn.{kind}")
            value = node.value
            generator = isinstance(value, ast.Call) and called(value) in ("list", "tuple")
            inner = value.args[0] if isinstance(value, ast.Call) and generator else value
            yield [site.source.replace(value, f"{module}({site.source.code(inner)})")]


@fixes("no_head_split_transpose")
def split_with_transpose(site: Site) -> Iterator[Edits]:
    """`x.view(B, H, T, D)` becomes `x.view(B, T, H, D).transpose(1, 2)`."""
    every = [
        edit
        for call in site.source.nodes(ast.Call, site.function or site.statement)
        for edit in _exchanged(site, call)
    ]
    own = [edit for call in site.calls for edit in _exchanged(site, call)]
    yield every
    yield own


def _exchanged(site: Site, call: ast.Call) -> Edits:
    """The edits that exchange the second and third size of a reshape to four axes."""
    sizes = call.args
    if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = sizes[0].elts
    if called(call) not in ("view", "reshape") or len(sizes) != 4:
        return []
    parent = site.source.parents.get(call)
    if isinstance(parent, ast.Attribute) and parent.attr in ("transpose", "permute", "swapaxes"):
        return []
    source = site.source
    start, end = source.span(sizes[1])[0], source.span(sizes[2])[1]
    between = source.text[source.span(sizes[1])[1] : source.span(sizes[2])[0]]
    exchanged = f"{source.code(sizes[2])}{between}{source.code(sizes[1])}"
    close = source.span(call)[1]
    return [
        Edit(source.file, start, end, exchanged),
        Edit(source.file, close, close, ".transpose(1, 2)"),
    ]


@fixes("qk_norm")
def without_normalization(site: Site) -> Iterator[Edits]:
    """Remove the statements that normalize q and k, or replace the calls by their arguments."""
    removed = [
        site.source.remove(node)
        for node in site.source.nodes(ast.Assign, site.function or site.statement)
        if _normalizes(node.value)
    ]
    if removed:
        yield removed
    yield [
        site.source.replace(call, site.source.code(call.args[0]))
        for call in site.source.nodes(ast.Call, site.function or site.statement)
        if call.args and "norm" in called(call).lower()
    ]


def _normalizes(value: ast.expr) -> bool:
    """Whether a value, or every item of a tuple, is a call of something named like a norm."""
    items = value.elts if isinstance(value, ast.Tuple) else [value]
    return all(isinstance(item, ast.Call) and "norm" in called(item).lower() for item in items)
