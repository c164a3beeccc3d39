"""Fixes of the number that scales the scores of attention."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import TypeGuard

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.source import (
    code_of,
    enclosing,
    find,
    find_calls,
    grouped_code,
    grouped_span,
    needed,
    operand_code,
    parent_of,
    source_of,
    span,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    called,
    constant,
    is_product,
    is_self,
    is_size,
    name_of,
    own_attribute,
    parameters,
    unpacked_sizes,
    variables,
)
from compat.adaptation.repair.tensors import (
    HEAD_SIZE,
    SDPA,
    assigned_values,
    definition,
    flipped_flags,
    is_number,
    score_products,
    size_of,
)
from compat.adaptation.repair.values import settings

# The size of a head, as the user can write it.


def _head_sizes(site: Site, place: ast.expr) -> list[str]:
    """Return expressions for the size of a head at a place in the code, the likeliest first."""
    function = enclosing(place, ast.FunctionDef)
    cls = enclosing(place, ast.ClassDef)
    found: list[str] = []
    if function is not None:
        for node in find(ast.Assign, function):
            if node.lineno < place.lineno:
                found += [
                    t.id for t in node.targets
                    if isinstance(t, ast.Name) and is_number(site, node.value)
                    and (_is_quotient(node.value) or HEAD_SIZE.match(t.id))
                ]  # fmt: skip
                sizes = unpacked_sizes(node)
                found += [sizes[-1]] if len(sizes) == 4 and sizes[-1] != "_" else []
        found += list(filter(HEAD_SIZE.match, parameters(function)))
    found += [] if cls is None else _own_head_sizes(site, cls, function, place)
    found += [] if function is None else _operand_sizes(site, function)
    found += [] if cls is None else _quotients(cls, function)
    return list(dict.fromkeys(found))


def _is_quotient(node: ast.AST) -> bool:
    """Return whether a node is `a // b` or `int(a / b)`."""
    match node:
        case ast.Call(ast.Name("int"), [ast.BinOp(_, ast.Div(), _)]):
            return True
        case ast.BinOp(_, ast.FloorDiv(), _):
            return True
    return False


def _own_head_sizes(
    site: Site, cls: ast.ClassDef, function: ast.FunctionDef | None, place: ast.expr
) -> list[str]:
    """Return attributes such as `self.head_dim` and `self.config.head_dim`."""
    found = []
    inside = set() if function is None else set(ast.walk(function))
    for node in find(ast.Attribute, cls):
        name = own_attribute(node)
        if isinstance(node.ctx, ast.Store) and name:
            value = next((v for v, u in assigned_values(cls, name) if u is None), None)
            early = node not in inside or node.lineno < place.lineno
            named = HEAD_SIZE.match(name) is not None and is_number(site, value)
            if early and value is not None and (_is_quotient(value) or named):
                found.append(f"self.{name}")
        elif isinstance(node.ctx, ast.Load) and HEAD_SIZE.match(node.attr):
            root = next((n.id for n in ast.walk(node) if isinstance(n, ast.Name)), "")
            if name is None and (root == "self" or node in inside):
                found.append(code_of(node))
    for name in sorted(_fields(site)):  # attributes of the same object
        for node in [n for n in ast.walk(place) if isinstance(n, ast.Attribute)]:
            if HEAD_SIZE.match(name) and not is_self(node):
                found.append(f"{code_of(node.value)}.{name}")
    return found


def _fields(site: Site) -> set[str]:
    """Return the names of fields and properties of the classes of the file."""
    found = set()
    for node in [node for cls in find(ast.ClassDef, site.tree) for node in cls.body]:
        match node:
            case ast.FunctionDef(name, decorator_list=[_, *_]) | ast.AnnAssign(ast.Name(name)):
                found.add(name)
    return found


def _operand_sizes(site: Site, function: ast.FunctionDef) -> list[str]:
    """Return the contracted size of the product of q and k, such as `q.size(-1)`."""
    found = []
    for product in score_products(site):
        if enclosing(product.node, ast.FunctionDef) is not function:
            continue
        terms = re.fullmatch(r"(\w+),(\w+)->(\w+)", product.subscripts.replace(" ", ""))
        if terms and isinstance(product.left, ast.Name):
            summed = [i for i, letter in enumerate(terms[1]) if letter not in terms[3]]
            found += [size_of(site, product.left.id, i - len(terms[1])) for i in summed]
        elif not product.subscripts:
            left, right = product.left, product.right
            if isinstance(left, ast.Name):
                found.append(size_of(site, left.id, -1))
            elif (name := _transposed(right)) is not None:
                found.append(size_of(site, name, -1))
    for call in find_calls(SDPA, within=function):
        if call.args and isinstance(call.args[0], ast.Name):
            found.append(size_of(site, call.args[0].id, -1))
    return found


def _transposed(node: ast.expr) -> str | None:
    """Return `k` for `k.transpose(-2, -1)` and `k.mT`."""
    match node:
        case ast.Call(ast.Attribute(ast.Name(name), "transpose")) | ast.Attribute(ast.Name(name)):
            return name
    return None


def _quotients(cls: ast.ClassDef, function: ast.FunctionDef | None) -> list[str]:
    """Return `a // b` for every such pair of sizes in the class that can be written."""
    found = []
    for node in find(ast.BinOp, cls):
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            elsewhere = enclosing(node, ast.FunctionDef) is not function
            if elsewhere and variables(node) - {"self"}:
                continue
            parts = [operand_code(part) for part in (node.left, node.right)]
            found.append(f"({parts[0]} // {parts[1]})")
    return found


def _root(site: Site, size: str, divides: bool, exponent: float = 0.5) -> str:
    """Return a factor for the scores, written as a square root or a power."""
    if divides and exponent == 0.5 and "math" in site.imported:
        inside = size[1:-1] if size.startswith("(") and size.endswith(")") else size
        return f"math.sqrt({inside})"
    space = "" if re.fullmatch(r"[\w.]+", size) else " "
    return f"{size}{space}**{space}{exponent if divides else -exponent:g}"


# The scale of the scores.

FACTORS = ("mul", "multiply", "div", "divide", "true_divide")


@dataclass(frozen=True)
class Factor:
    """A number that the scores, q or k are multiplied by.

    Args:
        node: the number.
        divides: whether they are divided by it.
        whole: the expression or statement that applies it.
        rest: what it is applied to; None if the number is a keyword of a call.
    """

    node: ast.expr
    divides: bool
    whole: ast.expr | ast.AugAssign
    rest: ast.expr | None = None


def _factors(site: Site) -> list[Factor]:
    """Return the factors in the function, those of the finding's line first."""
    found = []
    for node in ast.walk(site.function):
        match node:
            case ast.BinOp(left, ast.Mult(), right):
                found += [Factor(right, False, node, left), Factor(left, False, node, right)]
            case ast.BinOp(left, ast.Div(), right):
                found.append(Factor(right, True, node, left))
            case ast.AugAssign(target, ast.Mult() | ast.Div(), value):
                found.append(Factor(value, isinstance(node.op, ast.Div), node, target))
            case ast.Call():
                found += _factors_of_call(node)
    found = [
        f for f in found
        if is_number(site, f.node) and (f.rest is None or not is_number(site, f.rest))
    ]  # fmt: skip
    inside = set(ast.walk(site.statement))
    lines = {f: abs(f.node.lineno - site.line) for f in found}
    return sorted(found, key=lambda f: (f.whole not in inside, lines[f]))[:4]


def _factors_of_call(call: ast.Call) -> list[Factor]:
    name = called(call).rstrip("_")
    match call:
        case ast.Call(_, [left, right]) | ast.Call(ast.Attribute(left), [right]) if name in FACTORS:
            return [Factor(right, name not in ("mul", "multiply"), call, left)]
    return [
        Factor(keyword.value, False, call) for keyword in call.keywords
        if (keyword.arg, name) in (("scale", SDPA), ("alpha", "baddbmm"))
    ]  # fmt: skip


def _parts(site: Site, node: ast.expr, divides: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the parts of a factor and the definitions of their names, the innermost first."""
    value = definition(site, node)
    if value is not None and is_number(site, value):
        yield from _parts(site, value, divides)
    elif is_product(node):
        for part, turned in ((node.left, False), (node.right, isinstance(node.op, ast.Div))):
            if not isinstance(part, ast.Constant):
                yield from _parts(site, part, divides != turned)
    yield node, divides


def _sizes_in(node: ast.expr) -> list[ast.expr]:
    """Return the sizes that an expression is computed from."""
    named = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    if named or is_size(node) or _is_quotient(node):
        return [node]
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        base = node.func.value if isinstance(node.func, ast.Attribute) else None
        children = [*([base] if isinstance(base, (ast.Call, ast.BinOp)) else []), *node.args]
    return [size for child in children if isinstance(child, ast.expr)
            for size in _sizes_in(child)]  # fmt: skip


def _exponents(node: ast.expr) -> Iterator[tuple[ast.expr, float]]:
    """Yield the exponents in an expression that are numbers."""
    for power in ast.walk(node):
        match power:
            case ast.BinOp(_, ast.Pow(), exponent) | ast.Call(
                ast.Name("pow") | ast.Attribute(attr="pow"), [*_, exponent]
            ):
                if isinstance(value := constant(exponent), (int, float)):
                    yield exponent, float(value)


@fixes("no_attn_scale", "scale_by_d_model", "wrong_scale")
def default_scale(site: Site) -> Iterator[Edits]:
    """Remove the scale of `scaled_dot_product_attention`, whose default is right."""
    for call in site.calls:
        for keyword in call.keywords if called(call) == SDPA else ():
            named = isinstance(keyword.value, (ast.Name, ast.Attribute))
            if keyword.arg == "scale" and not named:
                yield [Edit.remove_argument(call, keyword)]


@fixes("no_attn_scale")
def flag_of_scale(site: Site) -> Iterator[Edits]:
    """Change a flag that switches the scale off."""
    yield from flipped_flags(site)


@fixes("scale_by_d_model", "wrong_scale", "no_attn_scale")
def head_size_in_scale(site: Site) -> Iterator[Edits]:
    """Write the number that scales the scores with the size of a head."""
    values = site.values
    code, found, expected = site.finding.code, values["found"], values["expected"]
    factors = _factors(site)
    if code == "no_attn_scale":  # one that has no effect, or one that undoes the default of SDPA
        if find_calls(SDPA, within=site.region):
            for factor in factors:
                if factor.rest is not None:
                    yield from _without(factor)
        factors = [f for f in factors if _is_one(site, f.node)]
    change = math.log(expected / found) / math.log(values["d_head"]) if found > 0 else math.nan
    inverse = found > 0 and abs(found * expected - 1) < 1e-5
    if code != "no_attn_scale":
        yield from _one_of_two(site, factors)
    for factor in factors:
        if inverse:
            yield from _turned(factor)
        parts = list(_parts(site, factor.node, factor.divides))
        if code == "wrong_scale":
            yield from _other_factor(site, factor, change)
            for part, divides in parts:
                for exponent, power in _exponents(part):
                    for step in (change, change / 2):
                        new = power - step if divides else power + step
                        if round(new * 4) and abs(new * 4 - round(new * 4)) < 1e-3:
                            yield [Edit.replace(exponent, f"{round(new * 4) / 4:g}")]
        if code == "scale_by_d_model":
            for part, _ in parts:
                for size in _sizes_in(part):
                    value = definition(site, size)
                    named = HEAD_SIZE.match(name_of(size))
                    if isinstance(value, (ast.Name, ast.Attribute)) and named:
                        for other in _substitutes(site, value)[:2]:
                            yield [_replaced(value, other)]
                    if not _is_root(value):
                        for other in _substitutes(site, size)[:3]:
                            yield [_replaced(size, other)]
        for part, divides in parts:
            own = [operand_code(size) for size in _sizes_in(part)]
            root = 0.25 if _is_shared(site, factor) else 0.5
            for known in _known_scales(site, part, divides):
                yield [_replaced(part, known)]
            for other in list(dict.fromkeys([*own, *_head_sizes(site, part)]))[:3]:
                yield [_replaced(part, _root(site, other, divides, root))]
        if factor.rest is not None:
            yield from _without(factor)


def _one_of_two(site: Site, factors: list[Factor]) -> Iterator[Edits]:
    """Write one factor in place of two, as in `scores * k.shape[-1] * C**-0.5`."""
    for outer, inner in permutations(factors, 2):
        if outer.rest is inner.whole:
            for size in _head_sizes(site, outer.node)[:3]:
                root = _replaced(outer.node, _root(site, size, outer.divides))
                for removed in _without(inner):
                    yield [*removed, root]


def _is_one(site: Site, node: ast.expr) -> bool:
    value = definition(site, node) or node
    values = [value]
    if isinstance(value, ast.Name):
        values += settings(site, value.id)
    return any(isinstance(other, ast.Constant) and other.value == 1 for other in values)


def _is_root(node: ast.expr | None) -> TypeGuard[ast.expr]:
    """Return whether an expression contains a square root, a power or a division."""
    return node is not None and any(
        isinstance(n, (ast.Pow, ast.Div)) or (isinstance(n, ast.Call) and "sqrt" in called(n))
        for n in ast.walk(node)
    )


def _is_shared(site: Site, factor: Factor) -> bool:
    """Return whether a factor is a variable that is used twice, for q and for k."""
    if not isinstance(factor.node, ast.Name):
        return False
    name, names = factor.node.id, find(ast.Name, site.function)
    return sum(n.id == name and isinstance(n.ctx, ast.Load) for n in names) == 2


def _substitutes(site: Site, size: ast.expr) -> list[str]:
    """Return the sizes of a head, those first that are written like another size."""
    found = _head_sizes(site, size)
    shaped = re.compile(r"\.(shape\[|size\()")
    alike = bool(shaped.search(code_of(size)))
    return sorted(found, key=lambda other: bool(shaped.search(other)) != alike)


def _known_scales(site: Site, place: ast.expr, divides: bool) -> list[str]:
    """Yield attributes of the class that hold the scale, such as `self.norm_factor`."""
    found = []
    cls = enclosing(place, ast.ClassDef)
    function = enclosing(place, ast.FunctionDef)
    if cls is None or function is None or function.name == "__init__":
        return []
    for node in find(ast.Attribute, cls):
        name = own_attribute(node)
        if name is None or not isinstance(node.ctx, ast.Store):
            continue
        value = next((v for v, u in assigned_values(cls, name) if u is None), None)
        if _is_root(value) and is_number(site, value):
            inverse = f"(1.0 / self.{name})" if divides else f"1.0 / self.{name}"
            found.append(f"self.{name}" if _is_reciprocal(value) != divides else inverse)
    return list(dict.fromkeys(found))


def _is_reciprocal(node: ast.expr) -> bool:
    """Return whether a scale is written as `d**-0.5` or `1 / …`."""
    is_quotient = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return is_quotient or any(power < 0 for _, power in _exponents(node))


def _replaced(node: ast.expr, text: str) -> Edit:
    """Replace an expression and the parentheses around it."""
    above = parent_of(node)
    if is_product(above) and above.right is node and text.startswith("1.0 / "):
        text = f"({text})"
    operand = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript)
    if grouped_span(node) == span(node) and not isinstance(above, operand):
        text = text[1:-1] if re.fullmatch(r"\([^()]*\)", text) else text
    return Edit.replace_group(node, text)


def _turned(factor: Factor) -> Iterator[Edits]:
    """Divide instead of multiplying, or the other way round."""
    old, new, method = ("/", "*", "mul") if factor.divides else ("*", "/", "div")
    match factor.whole:
        case ast.BinOp(left, _, right) if factor.node is right:
            start, end = grouped_span(left)[1], grouped_span(right)[0]
        case ast.AugAssign(target, _, value):
            start, end = span(target)[1], grouped_span(value)[0]
        case ast.Call(ast.Attribute(attr=name) as func) if name.rstrip("_") in FACTORS:
            yield [Edit.rename(func, f"{method}_" if name.endswith("_") else method)]
            return
        case _:
            return
    operator = source_of(factor.node).text[start:end]
    yield [Edit.at(factor.node, start, end, operator.replace(old, new, 1))]


def _without(factor: Factor) -> Iterator[Edits]:
    """Leave the factor out."""
    whole = factor.whole
    if isinstance(whole, ast.AugAssign):
        yield [Edit.remove(whole)]
        return
    rest = needed(factor.rest)
    match parent_of(whole):
        case ast.Expr() as statement:
            yield [Edit.remove(statement)]
        case ast.Assign([target]) as statement if code_of(target) == code_of(rest):
            yield [Edit.remove(statement)]
        case ast.Assign() | ast.Return() | ast.AugAssign():
            yield [Edit.replace(whole, code_of(rest))]
        case _:
            yield [Edit.replace(whole, operand_code(rest))]


def _other_factor(site: Site, factor: Factor, change: float) -> Iterator[Edits]:
    """Scale k like q, or q like k, where only one has a factor."""
    function = site.function
    statement = statement_of(factor.node)
    if abs(change + 0.25) > 1e-3 or not isinstance(statement, ast.Assign):
        return
    scaled = code_of(statement.targets[0])
    for product in score_products(site):
        names = variables(product.node)
        if scaled in names:
            operation = f"{'/' if factor.divides else '*'} {operand_code(factor.node)}"
            for node in find(ast.Assign, function):
                other = node.targets[0]
                if isinstance(other, ast.Name) and other.id in names - {scaled}:
                    whole = operand_code if isinstance(node.value, ast.BinOp) else code_of
                    yield [Edit.replace(node.value, f"{whole(node.value)} {operation}")]


@fixes("no_attn_scale", "wrong_scale", "scale_by_d_model")
def scaled_scores(site: Site) -> Iterator[Edits]:
    """Divide the product of q and k by the square root of the size of a head."""
    for product in score_products(site)[:2]:
        scales = [f"* {scale}" for scale in _known_scales(site, product.node, divides=False)
                  if not scale.startswith("1")]  # fmt: skip
        scales += [f"/ {scale}" for scale in _known_scales(site, product.node, divides=True)
                   if not scale.startswith("(1")]  # fmt: skip
        sizes = _head_sizes(site, product.node)[:3]
        scales += [f"/ {_root(site, size, divides=True)}" for size in sizes]
        for scale in scales:
            yield [_applied(product.node, scale)]


def _applied(node: ast.expr, operation: str) -> Edit:
    """Append an operation such as `/ scale` to an expression."""
    above, code = parent_of(node), grouped_code(node)
    if grouped_span(node) != span(node):
        if isinstance(above, ast.Attribute):
            return Edit.replace(node, f"{code_of(node)} {operation}")
    elif isinstance(node, ast.BinOp):
        code = f"({code})"
    inner = isinstance(above, ast.Attribute) or (
        isinstance(above, ast.BinOp) and not isinstance(above.op, (ast.Add, ast.Sub))
        and above.right is node
    )  # fmt: skip
    text = f"{code} {operation}"
    return Edit.replace_group(node, f"({text})" if inner else text)
