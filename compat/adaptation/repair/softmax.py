"""Fixes of the softmax of the scores: its axis, and a mask that is applied after it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import islice

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, edited, fixes, rewritten
from compat.adaptation.repair.source import (
    code_around,
    code_of,
    find,
    find_calls,
    operand_code,
    parent_of,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    argument,
    called,
    constant,
    is_integer,
    name_of,
    sides,
    variable,
)
from compat.adaptation.repair.tensors import (
    bool_like,
    definition,
    is_method,
    is_softmax,
    mask_line,
    named_scores,
    operand,
    operands,
    softmax_calls,
    with_mask,
)
from compat.adaptation.repair.values import settings

ACTIVATIONS = "sigmoid relu relu6 softplus elu silu gelu tanh exp square".split()
DIMENSIONS = "softmax log_softmax Softmax sum max amax logsumexp cumsum".split()


@fixes("scaled_probs")
def scale_before_softmax(site: Site) -> Iterator[Edits]:
    """Multiply the scores and not the probabilities by a number, or neither of them."""
    for scaled in find(ast.BinOp, site.statement):
        if not isinstance(scaled.op, (ast.Mult, ast.Div)):
            continue
        sign = "/" if isinstance(scaled.op, ast.Div) else "*"
        sides = [(scaled.left, scaled.right)]
        sides += [(scaled.right, scaled.left)] if sign == "*" else []
        for probs, factor in sides:
            alone = Edit.unwrap(scaled, probs)
            for _, scores in softmax_calls(site)[:2]:
                moved = f"{operand_code(scores)} {sign} {operand_code(factor)}"
                yield [*alone, Edit.replace(scores, moved)]
            yield alone


@fixes("other_softmax")
def usual_sum(site: Site) -> Iterator[Edits]:
    """Remove the 1 that is added to the sum of exponentials."""
    for place in site.everywhere:
        for node in find(ast.BinOp, place.statement):
            for part, other in sides(node):
                if isinstance(node.op, ast.Add) and constant(other) == 1:
                    yield Edit.unwrap(node, part)


@fixes("other_softmax")
def softmax_of_scores(site: Site) -> Iterator[Edits]:
    """Compute a softmax where another function, or none, turns the scores into weights."""
    if "each score is" not in site.values["found"]:
        return
    softmax, candidates = site.torch("torch.softmax"), []
    for call in site.calls:
        if called(call) in ACTIVATIONS and (scores := operand(site, call)) is not None:
            candidates.append([Edit.replace(call, f"{softmax}({code_of(scores)}, dim=-1)")])
    if name := variable(site.statement):
        line = f"{name} = {softmax}({name}, dim=-1)"
        candidates.append([Edit.insert_after(site.statement, line)])
    yield from candidates
    for edits in candidates:  # a mask may multiply the other function's weights
        changed = edited(site, edits)
        for moved in islice(mask_before_softmax(changed), 4):
            yield rewritten(site, changed, moved)


@fixes("mask_after_softmax")
def mask_before_softmax(site: Site) -> Iterator[Edits]:
    """Set the scores that a mask hides to -inf, and leave the probabilities alone."""
    for whole, kept, hidden in _late_masks(site):
        statement = whole if isinstance(whole, ast.stmt) else statement_of(whole)
        for call, scores in softmax_calls(site)[:2]:
            yield from _moved_mask(site, statement, whole, kept, hidden, call, scores)


def _late_masks(site: Site) -> Iterator[tuple[ast.AST, ast.expr, str]]:
    """Yield each operation that masks probabilities, its operand and what it hides.

    What `tril` hides is "".
    """

    def is_zero(mask: ast.expr) -> str:
        match mask:
            case ast.Call(
                ast.Attribute(ast.Compare() as inner, "float" | "to" | "type_as" | "int")
            ):
                return f"~{operand_code(inner)}"
        return f"{operand_code(mask)} == 0"

    def negated(mask: ast.expr) -> str:
        match mask:
            case ast.UnaryOp(ast.Invert(), operand):
                return code_of(operand)
            case ast.Compare(left, [ast.Eq() | ast.NotEq()], [right]):
                operator = "!=" if isinstance(mask.ops[0], ast.Eq) else "=="
                return f"{code_of(left)} {operator} {code_of(right)}"
        return f"~{operand_code(mask)}"

    for node in [*ast.walk(site.statement), *ast.walk(site.within)]:
        match node:
            case ast.AugAssign(target, ast.Mult(), value):
                yield node, target, is_zero(value)
            case ast.BinOp(left, ast.Mult(), right):
                yield node, left, is_zero(right)
                yield node, right, is_zero(left)
            case ast.Call():
                every = operands(site, node)
                match called(node).rstrip("_"), every:
                    case "masked_fill", [tensor, mask, *_]:
                        yield node, tensor, code_of(mask)
                    case "tril", [ast.Name() | ast.Call() as tensor, *_]:
                        yield node, tensor, ""
                    case "mul" | "multiply", [tensor, mask]:
                        yield node, tensor, is_zero(mask)
                    case "where", [tensor, mask, _] if is_method(site, node):  # p.where(mask, 0)
                        yield node, tensor, negated(mask)
                    case "where", [mask, shown, hidden]:
                        yield node, shown, negated(mask)
                        yield node, hidden, code_of(mask)


def _moved_mask(
    site: Site, statement: ast.stmt, whole: ast.AST, kept: ast.expr, hidden: str,
    call: ast.Call, scores: ast.expr,
) -> Iterator[Edits]:  # fmt: skip
    """Yield a mask that hides `hidden`, moved from one statement to the scores of a softmax."""
    softmax = statement_of(call)
    if softmax is statement and hidden:  # softmax(scores) * mask
        if scores in set(ast.walk(kept)):
            text = with_mask(scores, hidden).join(code_around(kept, scores))
            yield [Edit.replace_group(whole, text)]
        return
    alone = isinstance(whole, ast.stmt) or isinstance(parent_of(whole), ast.Expr)
    above = parent_of(whole)
    if isinstance(above, ast.Assign):
        alone = code_of(above.targets[0]) == code_of(kept)
    if alone:
        removed = Edit.remove(statement)
    else:
        removed = Edit.replace_group(whole, operand_code(kept))
    late = {
        node.id for node in find(ast.Name, site.region)
        if isinstance(node.ctx, ast.Store) and softmax.lineno < node.lineno < statement.lineno
    } & set(re.findall(r"\w+", hidden))  # fmt: skip
    name, before, edits = named_scores(site, scores)
    if not hidden:  # the probabilities pass through tril
        hidden = f"{bool_like(site, name)}.triu(1)"
    line = mask_line(site.source, name, hidden)
    if not late:
        yield [*edits, Edit.insert_before(softmax, *before, line), removed]
    elif alone:  # the mask is created between the two
        if isinstance(scores, ast.Name):
            lines = [line, code_of(softmax)]
        else:
            lines = [with_mask(scores, hidden).join(code_around(softmax, scores))]
        yield [Edit.remove(softmax), Edit.insert_before(statement, *lines), removed]


@fixes("softmax_dim")
def softmax_over_keys(site: Site) -> Iterator[Edits]:
    """Compute the softmax over the last dimension."""
    for scope in site.scopes:
        calls = find_calls(*DIMENSIONS, within=scope)
        calls += [c for c in find(ast.Call, scope) if is_softmax(site, c) and c not in calls]
        changes = {call: edits for call in calls if (edits := _last_dimension(site, call))}
        ours = [edits for call, edits in changes.items() if "softmax" not in called(call).lower()]
        if len(ours) > 1:  # a softmax that is written out
            yield list(dict.fromkeys(edit for edits in ours for edit in edits))
        yield from changes.values()


def _last_dimension(site: Site, call: ast.Call) -> Edits:
    """Return a call that reduces the last dimension, if it does not yet."""
    name = called(call)
    place = 0 if name == "Softmax" or is_method(site, call) else 1
    present = argument(call, place, "dim") or argument(call, 9, "axis")
    if present is None:
        return [Edit.set_keyword(call, "dim", "-1")] if "softmax" in name.lower() else []
    if isinstance(present, (ast.Name, ast.Attribute)):
        value = definition(site, present)
        if value is not None and is_integer(value):
            return [Edit.replace(value, "-1")]
        for value in settings(site, name_of(present)):
            if is_integer(value) and code_of(value) != "-1":
                return [Edit.replace(value, "-1")]
    return [] if code_of(present) == "-1" else [Edit.replace(present, "-1")]
