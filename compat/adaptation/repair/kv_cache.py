"""Fixes of the positions and the causal mask in a model's KV cache."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.source import code_of, find, find_calls, operand_code, statement_of
from compat.adaptation.repair.syntax import argument, called

START = re.compile(r"start|offset|past.*(len|size|pos)|(len|size|pos).*past", re.IGNORECASE)


@fixes("kv_cache")
def cached_positions(site: Site) -> Iterator[Edits]:
    """Begin the positions after the cached ones, whose number the finding's `past` computes."""
    function, past = site.function, site.values.get("past")
    yield from _without_ones(function)
    for name in _starts(function):
        for _, edits in _from_zero(function, name):
            yield edits
    if not past:
        return
    for start in find(ast.Assign, function):  # start = 0
        if isinstance(start.value, ast.Constant) and start.value.value == 0:
            yield [Edit.replace(start.value, past)]
    name = site.new_name("past", "past_length")
    for node, edits in _from_zero(function, name):
        yield [Edit.insert_before(statement_of(node), f"{name} = {past}"), *edits]


@fixes("kv_cache")
def causal_without_a_cache(site: Site) -> Iterator[Edits]:
    """Apply the causal mask of fused attention only where there are as many queries as keys."""
    for call in site.calls:
        causal = argument(call, 5, "is_causal")
        query, key = argument(call, 0, "query"), argument(call, 1, "key")
        if called(call) == "scaled_dot_product_attention" and causal and query and key:
            same = f"{operand_code(query)}.shape[-2] == {operand_code(key)}.shape[-2]"
            always = isinstance(causal, ast.Constant)
            new = same if always else f"({code_of(causal)}) and {same}"
            yield [Edit.replace(causal, new)]


def _starts(function: ast.FunctionDef) -> list[str]:
    """Return variables that may hold the number of cached tokens, such as `start_pos`."""
    targets = [target for node in find(ast.Assign, function) for target in node.targets]
    names = dict.fromkeys(target.id for target in targets if isinstance(target, ast.Name))
    return list(filter(START.search, names))


def _without_ones(function: ast.FunctionDef) -> Iterator[Edits]:
    """Remove a 1 that is added or subtracted."""
    for node in find(ast.BinOp, function):
        is_one = isinstance(node.right, ast.Constant) and node.right.value in (1, 2)
        if is_one and isinstance(node.op, (ast.Add, ast.Sub)):
            yield [Edit.replace(node, code_of(node.left))]


def _from_zero(function: ast.FunctionDef, past: str) -> Iterator[tuple[ast.AST, Edits]]:
    """Yield `arange(T)`, `arange(0, T)`, `table[:T]` and `table[:, :T]`, and edits of each.

    The edits let the positions begin at a variable.
    """
    for call in find_calls("arange", within=function):
        match call.args:
            case [end]:
                yield call, [Edit.replace(end, f"{past}, {past} + {operand_code(end)}")]
            case [start, end, *_]:
                moved = Edit.replace(end, f"{past} + {operand_code(end)}")
                yield call, [Edit.replace(start, past), moved]
    for node in find(ast.Slice, function):
        match node:
            case ast.Slice(None, ast.expr() as upper, None):
                new = f"{past} : {past} + {operand_code(upper)}"
                yield node, [Edit.replace(node, new)]
