"""Fixes of the positions and the causal mask in a model's KV cache."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from compat.adaptation.repair.fixes import Edits, Site, fixes
from compat.adaptation.repair.source import Source
from compat.adaptation.repair.syntax import argument, called


@fixes("kv_cache")
def cached_positions(site: Site) -> Iterator[Edits]:
    """Begin the positions after the cached ones, whose number the finding's `past` computes."""
    function, past = site.function, site.finding.values.get("past")
    if function is None:
        return
    yield from _without_ones(site, function)
    if not past:
        return
    source = site.source
    for start in source.nodes(ast.Assign, function):  # start = 0
        if isinstance(start.value, ast.Constant) and start.value.value == 0:
            yield [source.replace(start.value, past)]
    name = site.new_name("past", "past_length")
    for node, edits in _from_zero(source, function, name):
        statement = source.parent(node, ast.stmt)
        if statement is not None:
            yield [source.insert_before(statement, f"{name} = {past}"), *edits]


@fixes("kv_cache")
def causal_without_a_cache(site: Site) -> Iterator[Edits]:
    """Apply the causal mask of fused attention only where there are as many queries as keys."""
    source = site.source
    for call in site.calls:
        causal = argument(call, 5, "is_causal")
        query, key = argument(call, 0, "query"), argument(call, 1, "key")
        if called(call) == "scaled_dot_product_attention" and causal and query and key:
            same = f"{source.operand(query)}.shape[-2] == {source.operand(key)}.shape[-2]"
            always = isinstance(causal, ast.Constant)
            new = same if always else f"({source.code(causal)}) and {same}"
            yield [source.replace(causal, new)]


def _without_ones(site: Site, function: ast.FunctionDef) -> Iterator[Edits]:
    """Remove a 1 that is added or subtracted."""
    for node in site.source.nodes(ast.BinOp, function):
        is_one = isinstance(node.right, ast.Constant) and node.right.value in (1, 2)
        if is_one and isinstance(node.op, (ast.Add, ast.Sub)):
            yield [site.source.replace(node, site.source.code(node.left))]


def _from_zero(
    source: Source, function: ast.FunctionDef, past: str
) -> Iterator[tuple[ast.AST, Edits]]:
    """Yield `arange(T)`, `arange(0, T)`, `table[:T]` and `table[:, :T]`, and edits of each.

    The edits let the positions begin at a variable.
    """
    for call in source.calls("arange", within=function):
        match call.args:
            case [end]:
                yield call, [source.replace(end, f"{past}, {past} + {source.operand(end)}")]
            case [start, end, *_]:
                moved = source.replace(end, f"{past} + {source.operand(end)}")
                yield call, [source.replace(start, past), moved]
    for node in source.nodes(ast.Slice, function):
        if node.lower is None and node.upper is not None and node.step is None:
            new = f"{past} : {past} + {source.operand(node.upper)}"
            yield node, [source.replace(node, new)]
