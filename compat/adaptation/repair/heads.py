"""Fixes of the heads: how they are split and merged, and what projects them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes, followed
from compat.adaptation.repair.held import unread
from compat.adaptation.repair.modules import unused_module
from compat.adaptation.repair.scores import SDPA, head_size_in_scale, products, score_products
from compat.adaptation.repair.source import (
    code_of,
    enclosing,
    find,
    find_calls,
    following,
    grouped_code,
    needed,
    operand_code,
    parent_of,
    source_of,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    assigned,
    called,
    constant,
    constructor,
    name_of,
    own_attribute,
    parameters,
    unpacked_sizes,
    variable,
    variables,
)
from compat.adaptation.repair.values import HEAD_SIZE, classes, hyperparameters, operand, size_of
from compat.user_models.synonyms import role_of


@fixes("no_head_split_transpose")
def split_with_transpose(site: Site) -> Iterator[Edits]:
    """Change `x.view(B, H, T, D)` to `x.view(B, T, H, D).transpose(1, 2)`."""
    within = site.within
    swap = ".transpose(1, 2)"
    for calls in (find(ast.Call, within), site.calls):
        yield [edit for call in calls for edit in _exchanged(call)]
    for call in find_calls(SDPA, within=within):
        if len(call.args) >= 3:
            turned = [Edit.replace(each, operand_code(each) + swap) for each in call.args[:3]]
            yield [*turned, Edit.suffix(call, swap)]


def _exchanged(call: ast.Call) -> Edits:
    """Return the edits that exchange the second and third size of a reshape to four axes."""
    sizes = call.args
    if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = sizes[0].elts
    if called(call) not in ("view", "reshape") or len(sizes) != 4:
        return []
    if name_of(parent_of(call)) in ("transpose", "permute", "swapaxes"):
        return []
    _, second, third, _ = sizes
    return [
        Edit.replace(second, code_of(third)),
        Edit.replace(third, code_of(second)),
        Edit.suffix(call, ".transpose(1, 2)"),
    ]


@fixes("no_head_merge_transpose")
def transposed_heads(site: Site) -> Iterator[Edits]:
    """Transpose the heads back before they are merged."""
    others = [c for c in find(ast.Call, site.function) if c not in site.calls]
    for call in [*site.calls, *reversed(others)]:
        name, heads = called(call), operand(site, call)
        if name not in ("view", "reshape", "flatten", "contiguous", "rearrange") or heads is None:
            continue
        if name == "view" and isinstance(heads, ast.Call) and called(heads) == "contiguous":
            continue  # a candidate of its own
        contiguous = ".contiguous()" if name == "view" else ""
        code = grouped_code(heads)
        if isinstance(heads, ast.BinOp) and not code.startswith("("):
            code = f"({code})"
        for swap in [*_unflattened(site.function), *_swaps(site.function)]:
            yield [Edit.replace_group(heads, f"{code}{swap}{contiguous}")]


def _unflattened(function: ast.FunctionDef) -> list[str]:
    """Return how heads are separated that the function has as one axis with the batch."""
    found = []
    for call in find_calls("view", "reshape", within=function):
        match call.args:
            case [ast.BinOp(batch, ast.Mult(), heads), length, _]:
                parts = ", ".join(code_of(part) for part in (batch, heads, length))
                found.append(f".view({parts}, -1).transpose(1, 2)")
    return found[:1]


def _swaps(function: ast.FunctionDef) -> list[str]:
    """Return how the function exchanges tokens and heads."""
    found = []
    scope = enclosing(function, ast.ClassDef) or source_of(function).tree
    for call in [*find(ast.Call, function), *find(ast.Call, scope)]:
        places = [code_of(a) for a in call.args]
        method = isinstance(call.func, ast.Attribute)
        if called(call) in ("transpose", "swapaxes") and method and len(places) == 2:
            if "-1" not in places:
                found.append(f".{called(call)}({', '.join(places)})")
        elif called(call) == "permute" and method and places == ["0", "2", "1", "3"]:
            found.append(".permute(0, 2, 1, 3)")
    return list(dict.fromkeys([*found, ".transpose(1, 2)"]))[:3]


@fixes("shared_kv", "shared_parameters")
def own_value(site: Site) -> Iterator[Edits]:
    """Use the value, or another part of q, k and v, that the code has but does not use."""
    function = site.function
    if site.values.get("part") in ("norm", "layer"):
        return
    for name in _unused_names(function):
        for product in reversed(products(function)):
            for factor in (product.right, product.left):
                for node in find(ast.Name, factor):
                    yield [Edit.replace(node, name)]
        for call in reversed(find(ast.Call, function)):
            for passed in reversed(call.args):
                if isinstance(passed, ast.Name) and passed.id != name:
                    yield [Edit.replace(passed, name)]
    stores = [n for n in find(ast.Name, function) if isinstance(n.ctx, ast.Store)]
    for assignment in find(ast.Assign, function):
        name = variable(assignment)
        if any(node.id == name and node.lineno < assignment.lineno for node in stores):
            for other in find(ast.Name, assignment.value)[:1]:
                yield [Edit.replace(other, name)]
    yield from unused_module(site)


def _unused_names(function: ast.FunctionDef) -> list[str]:
    """Return the variables and parameters whose last value is never used."""
    names = find(ast.Name, function)
    last = {arg.arg: 0 for arg in function.args.args if arg.arg != "self"}
    for node in names:
        if isinstance(node.ctx, ast.Store):
            last[node.id] = statement_of(node).end_lineno or 0
    read = {
        node.id for node in names
        if isinstance(node.ctx, ast.Load) and node.lineno > last.get(node.id, 0)
    }  # fmt: skip
    return [name for name in last if name not in {"_", *read}]


@fixes("missing_ln")
def projected_from_the_norm(site: Site) -> Iterator[Edits]:
    """Project what the other projections of q, k and v project."""
    within = find(ast.Call, site.within) if "raw" in site.values else []
    names = [c.args[0].id for c in within if len(c.args) == 1 and isinstance(c.args[0], ast.Name)]
    for argument in (argument for call in site.calls for argument in call.args):
        for name in dict.fromkeys(names):
            if isinstance(argument, ast.Name) and name != argument.id:
                yield [Edit.replace(argument, name)]


# The width of a head.


@fixes("head_width")
def divided_width(site: Site) -> Iterator[Edits]:
    """Divide the width of the model among the heads, each of which has all of it."""
    products, widths = [], []
    for cls in site.every(ast.ClassDef):
        if (init := constructor(cls)) is None:
            continue
        numbers = hyperparameters(site, init, "n_head")
        for width in hyperparameters(site, init, "n_embd"):
            for node in find(ast.BinOp, init):
                sides = {code_of(node.left), code_of(node.right)}
                if isinstance(node.op, ast.Mult) and width in sides and sides & set(numbers):
                    products.append(Edit.replace_group(node, width))
            for own in [*_head_sizes(init, width, numbers), *_passed_sizes(site, init, width)]:
                if numbers:
                    widths.append(Edit.replace(own, f"{width} // {numbers[0]}"))
    if widths:
        yield list(dict.fromkeys([*products, *widths]))


def _head_sizes(init: ast.FunctionDef, width: str, numbers: list[str]) -> Iterator[ast.expr]:
    """Yield where a constructor uses the width of the model as that of a head."""
    for node in find(ast.Assign, init):
        for target, value in assigned(node):
            if HEAD_SIZE.match(name_of(target)) and code_of(value) == width:
                yield value
    for each in find(ast.ListComp, init):  # of one projection for each head
        counts = [code_of(node) for one in each.generators for node in ast.walk(one.iter)
                  if isinstance(node, ast.expr)]  # fmt: skip
        if isinstance(each.elt, ast.Call) and set(counts) & set(numbers):
            for size in each.elt.args[1:2] if called(each.elt) == "Linear" else ():
                if code_of(size) == width:
                    yield size


def _passed_sizes(site: Site, init: ast.FunctionDef, width: str) -> Iterator[ast.expr]:
    """Yield where a constructor passes the width of the model to another as that of a head."""
    for call in find(ast.Call, init):
        passed = {each.arg or "": each.value for each in call.keywords}
        for cls in classes(site, called(call)):
            if (other := constructor(cls)) is not None:
                passed |= dict(zip(parameters(other)[1:], call.args, strict=False))
        yield from (
            value for name, value in passed.items()
            if HEAD_SIZE.match(name) and code_of(value) == width
        )  # fmt: skip


# Heads that are not split.


@fixes("n_head_mismatch")
def split_heads(site: Site) -> Iterator[Edits]:
    """Split q, k and v into heads before their product, where none of them is split."""
    if site.values["found"] != 1:
        return
    for last, names in _attended(site):
        simple = [node for node in find(ast.stmt, site.function) if not hasattr(node, "body")]
        both = (node for node in simple if set(names[:2]) <= variables(node, ast.Load))
        first = needed(next(both, None))
        sizes = _leading_sizes(site, names[0])
        for heads, stored in _numbers_of_heads(site):
            lines = [f"{x} = {x}.view({sizes}, {heads}, -1).transpose(1, 2)" for x in names]
            split = [Edit.insert_before(first, *lines), *stored, *_last_axes(site, names)]
            merged = f"{operand_code(last)}.transpose(1, 2).flatten(2)"
            for edits in (split, [*split, Edit.replace_group(last, merged)]):
                yield edits
                yield from _rescaled(site, edits)


def _last_axes(site: Site, names: list[str]) -> Edits:
    """Count the axes of `k.transpose(1, 2)` from the end, so that heads may come first."""
    edits = []
    for product in score_products(site):
        for call in find(ast.Call, product.node):
            axes = [constant(each) for each in call.args]
            if axes in ([1, 2], [2, 1], [0, 2, 1]) and isinstance(call.func, ast.Attribute):
                if name_of(tensor := call.func.value) in names:
                    edits.append(Edit.replace(call, f"{code_of(tensor)}.transpose(-2, -1)"))
    return edits


def _rescaled(site: Site, split: Edits) -> Iterator[Edits]:
    """Yield the split, and the size of a head in the place of the width that scaled the scores."""
    d_head = site.config.n_embd // site.values["expected"]
    values = {"found": site.config.n_embd**-0.5, "expected": d_head**-0.5, "d_head": d_head}

    def scaled(changed: Site) -> Iterator[Edits]:
        finding = replace(changed.finding, code="scale_by_d_model", values=values)
        return islice(_unique(head_size_in_scale(replace(changed, finding=finding))), 4)

    yield from followed(site, split, scaled)


def _unique(candidates: Iterator[Edits]) -> Iterator[Edits]:
    seen: list[Edits] = []
    for edits in candidates:
        if edits not in seen:
            seen.append(edits)
            yield edits


def _attended(site: Site) -> Iterator[tuple[ast.expr, list[str]]]:
    """Yield expressions whose value is the output of the heads, with the names of q, k and v."""
    for call in find_calls(SDPA, within=site.region):
        names = [each.id for each in call.args[:3] if isinstance(each, ast.Name)]
        if len(names) == 3:
            yield call, names
    found = products(site.within)
    for scores in score_products(site):
        operands = [scores.left, scores.right]
        names = [n.id for each in operands for n in find(ast.Name, each)][:2]
        for product in found:
            if product.node is not scores.node and isinstance(product.right, ast.Name):
                yield product.node, [*names, product.right.id]


def _leading_sizes(site: Site, name: str) -> str:
    """Return the sizes of the batch and of the sequence, as the function can write them."""
    for node in find(ast.Assign, site.region):
        sizes = unpacked_sizes(node)
        if len(sizes) == 3 and "_" not in sizes[:2]:
            return ", ".join(sizes[:2])
    return f"{size_of(site, name, 0)}, {size_of(site, name, 1)}"


def _numbers_of_heads(site: Site) -> Iterator[tuple[str, Edits]]:
    """Yield code for the number of heads, with what stores it if nothing does."""
    every = [node for node in find(ast.Attribute, site.cls) if role_of(node.attr) == "n_head"]
    written = [code for node in every if (code := code_of(node)).startswith("self.")]
    yield from ((each, []) for each in dict.fromkeys(written))
    if not written and (init := site.init_or_none) is not None:
        for name in hyperparameters(site, init, "n_head"):
            last = re.findall(r"[A-Za-z_][A-Za-z_0-9]*", name)[-1]  # of cfg["n_head"] as well
            line = f"self.{last} = {name}"
            yield f"self.{last}", [Edit.insert_after(init.body[-1], line)]


# The output projection.


@fixes("no_out_proj")
def output_projection(site: Site) -> Iterator[Edits]:
    """Project the merged heads: with an unused module of the class, or with a new one."""
    init = site.init
    unused = [e.name for e in unread(site.cls) if called(e.built) in ("Linear", "Conv1D")]
    created: list[tuple[str, Edits]] = [(name, []) for name in unused]
    if not unused:
        name, statement = _name_of_projection(init), _last_built(init)
        written = [code_of(call.func) for call in find_calls("Linear", within=init)]
        linear = [*written, site.torch("torch.nn.Linear")][0]
        for width in _widths(site, init):
            new = f"self.{name} = {linear}({width}, {width})"
            created.append((name, [Edit.insert_after(statement, new)]))
    for name, edits in created:
        for applied in _projected(site, name):
            yield [*edits, *applied]


def _name_of_projection(init: ast.FunctionDef) -> str:
    """Return a name for the output projection in the style of the other modules' names."""
    names = {n.attr for n in find(ast.Attribute, init) if own_attribute(n)}
    styles = (
        ("c_attn", "c_proj"), ("q_proj", "o_proj"), ("W_query", "out_proj"), ("W_q", "W_o"),
        ("w_q", "w_o"), ("Wq", "Wo"), ("wq", "wo"), ("q_linear", "out_linear"),
    )  # fmt: skip
    found = next((new for old, new in styles if old in names), "proj")
    return f"out_{found}" if found in names else found


def _last_built(init: ast.FunctionDef) -> ast.stmt:
    """Return the last statement of a constructor that stores a module."""
    built = [
        node for node in init.body
        if isinstance(node, ast.Assign) and own_attribute(node.targets[0])
        and any(isinstance(each, ast.Call) for each in ast.walk(node.value))
    ]  # fmt: skip
    return (built or init.body)[-1]


def _widths(site: Site, init: ast.FunctionDef) -> list[str]:
    """Return how a constructor can write the width of the model, the likeliest first."""
    found = [
        code_of(call.args[0])
        for call in find_calls("Linear", "Conv1D", within=init) if len(call.args) > 1
    ]  # fmt: skip
    found += hyperparameters(site, init, "n_embd")
    heads = hyperparameters(site, init, "n_head")
    head_sizes = hyperparameters(site, init, "d_head")
    found += [f"{one} * {other}" for one in heads for other in head_sizes]
    return list(dict.fromkeys(found))[:4]


def _projected(site: Site, name: str) -> Iterator[Edits]:
    """Apply a projection to the value of the finding's statement, or to what is returned."""
    statement = site.statement
    if target := variable(statement):
        for after in following(statement)[:1]:
            match after:
                case ast.Return(ast.Name() as result) if result.id == target:
                    yield [Edit.replace(result, f"self.{name}({target})")]
        yield [Edit.insert_after(statement, f"{target} = self.{name}({target})")]
    outputs = {  # the first of several
        node: value.elts[0] if isinstance(value, ast.Tuple) else value
        for node in find(ast.Return, site.region) if (value := node.value)
    }  # fmt: skip
    merging = ("cat", "concat", "view", "reshape", "flatten", "contiguous")
    projected: list[ast.expr] = [
        *(output for node, output in outputs.items() if node is statement),
        *(call for call in site.calls if called(call) in merging),
        *(output for node, output in outputs.items() if node is not statement),
    ]
    for value in projected:
        yield [Edit.replace(value, f"self.{name}({code_of(value)})")]
