"""Fixes of the scores of attention: what scales them, their softmax, and the causal mask."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations
from typing import TypeGuard

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes, followed
from compat.adaptation.repair.source import (
    Source,
    code_around,
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
    argument,
    called,
    constant,
    is_integer,
    is_product,
    is_self,
    is_size,
    is_sum,
    last_name,
    name_of,
    own_attribute,
    parameters,
    sides,
    targets,
    unpacked_sizes,
    variable,
    variables,
)
from compat.adaptation.repair.values import (
    HEAD_SIZE,
    assigned_values,
    definition,
    is_method,
    is_number,
    operand,
    operands,
    settings,
    size_of,
)

SDPA = "scaled_dot_product_attention"


# The products, the softmax and the masks of the code.


@dataclass(frozen=True)
class Product:
    """A product of two tensors.

    Args:
        node: the whole expression.
        left, right: its operands.
        subscripts: the subscripts of einsum, or "".
    """

    node: ast.expr
    left: ast.expr
    right: ast.expr
    subscripts: str = ""


def products(within: ast.AST) -> list[Product]:
    """Return the products of tensors in the order in which they are computed."""
    found = []
    for node in find(ast.expr, within):
        match node:
            case ast.BinOp(left, ast.MatMult(), right):
                found.append(Product(node, left, right))
            case ast.Call(_, [subscripts, left, right]) if called(node) == "einsum":
                text = subscripts.value if isinstance(subscripts, ast.Constant) else ""
                found.append(Product(node, left, right, str(text)))
            case ast.Call(_, [_, left, right]) if called(node) == "baddbmm":
                found.append(Product(node, left, right))
            case ast.Call(_, [left, right]) | ast.Call(ast.Attribute(left), [right]):
                if called(node) in ("matmul", "bmm", "mm"):
                    found.append(Product(node, left, right))
    return sorted(found, key=lambda product: span(product.node)[1])


def score_products(site: Site) -> list[Product]:
    """Return the products that may compute the scores, those of the finding's line first."""
    found = [
        product for product in products(site.function)
        if not any(_is_own(operand) for operand in (product.left, product.right))
    ]  # fmt: skip
    inside = set(ast.walk(site.statement))
    return sorted(found, key=lambda product: product.node not in inside)


def _is_own(node: ast.expr) -> bool:
    """Return whether a node is `self.name` or a transpose of it."""
    while isinstance(node, (ast.Call, ast.Attribute)) and not own_attribute(node):
        node = node.func if isinstance(node, ast.Call) else node.value
    return own_attribute(node) is not None


def minus_inf(source: Source) -> str:
    """Write `float("-inf")` with the quotes that the file uses."""
    return f"float({source.quoted('-inf')})"


def softmax_calls(site: Site) -> list[tuple[ast.Call, ast.expr]]:
    """Return the calls that compute the probabilities, with the scores."""
    inside = site.function
    if "softmax" in site.function.name:  # a function of the user's
        calls = find_calls(site.function.name, within=site.tree)
    else:
        calls = [c for c in find(ast.Call, inside) if is_softmax(site, c)]
    at = set(ast.walk(site.statement))
    calls.sort(key=lambda call: (call not in at, call.lineno < site.line))
    found = [(call, scores) for call in calls if (scores := operand(site, call)) is not None]
    if found:
        return found
    written_out = find_calls("exp", within=inside)
    return [(call, scores) for call in written_out if (scores := operand(site, call)) is not None]


def is_softmax(site: Site, call: ast.Call) -> bool:
    if "softmax" in called(call).lower():
        return True
    value = definition(site, call.func) if own_attribute(call.func) else None
    return isinstance(value, ast.Call) and called(value) == "Softmax"


def named_scores(site: Site, scores: ast.expr) -> tuple[str, list[str], list[Edit]]:
    """Return a variable for a softmax's argument, and what assigns it if it is an expression."""
    inner = scores
    while isinstance(inner, ast.BinOp) and not isinstance(inner.op, ast.MatMult):
        inner = inner.left
    if isinstance(inner, ast.Name):
        return inner.id, [], []
    name = site.new_name("scores", "att", "attn_scores", "logits")
    return name, [f"{name} = {code_of(scores)}"], [Edit.replace(scores, name)]


def with_mask(scores: ast.expr, hidden: str) -> str:
    """Return scores with a mask, as an expression."""
    return f"{operand_code(scores)}.masked_fill({hidden}, {minus_inf(source_of(scores))})"


def mask_line(source: Source, scores: str, hidden: str) -> str:
    """Return the statement that masks a variable."""
    return f"{scores} = {scores}.masked_fill({hidden}, {minus_inf(source)})"


def bool_like(site: Site, tensor: str, fill: str = "ones") -> str:
    """Return a mask in the shape of a tensor."""
    return f"{site.torch(f'torch.{fill}_like')}({tensor}, dtype={site.torch('torch.bool')})"


def is_cached(function: ast.AST | None) -> bool:
    """Return whether a function may have more keys than queries, because it has a KV cache."""
    if not isinstance(function, ast.FunctionDef):
        return False
    names = [node.id for node in find(ast.Name, function)]
    names += parameters(function)
    joined = find_calls("cat", "concat", "update", within=function)
    return bool(joined) or any(re.search(r"cache|past", name) for name in names)


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
        case ast.BinOp(_, ast.FloorDiv(), _) | ast.Call(
            ast.Name("int"), [ast.BinOp(_, ast.Div(), _)]
        ):
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
            value = next(iter(assigned_values(cls, name)), None)
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
            match product.left, product.right:
                case (ast.Name(name), _) | (
                    _, ast.Call(ast.Attribute(ast.Name(name), "transpose"))
                    | ast.Attribute(ast.Name(name))  # k.mT
                ):  # fmt: skip
                    found.append(size_of(site, name, -1))
    for call in find_calls(SDPA, within=function):
        if call.args and isinstance(call.args[0], ast.Name):
            found.append(size_of(site, call.args[0].id, -1))
    return found


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


@fixes("no_attn_scale", "no_mask")
def flipped_flags(site: Site) -> Iterator[Edits]:
    """Change a flag that switches a part of attention off."""
    tests = [n.test for n in ast.walk(site.function) if isinstance(n, (ast.If, ast.IfExp))]
    if not is_cached(site.function):
        tests += [k.value for call in site.calls for k in call.keywords]
    names = [name for test in tests for node in ast.walk(test) if (name := name_of(node))]
    names += [name_of(value) for name in dict.fromkeys(names) for value in settings(site, name)]
    for name in dict.fromkeys(filter(None, names)):
        for value in settings(site, name):
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                yield [Edit.replace(value, str(not value.value))]


@fixes("scale_by_d_model", "wrong_scale", "no_attn_scale")
def head_size_in_scale(site: Site) -> Iterator[Edits]:
    """Write the number that scales the scores with the size of a head."""
    values, code = site.values, site.finding.code
    found, expected = values["found"], values["expected"]
    factors = _factors(site)
    if code == "no_attn_scale":  # one that has no effect, or one that undoes the default of SDPA
        if find_calls(SDPA, within=site.region):
            yield from ([_without(factor)] for factor in factors if factor.rest is not None)
        factors = [f for f in factors if _is_one(site, f.node)]
    else:
        yield from _one_of_two(site, factors)
    change = math.log(expected / found) / math.log(values["d_head"]) if found > 0 else math.nan
    inverse = found > 0 and abs(found * expected - 1) < 1e-5
    for factor in factors:
        if inverse:
            yield _turned(factor)
        parts = list(_parts(site, factor.node, factor.divides))
        if code == "wrong_scale":
            yield from _other_factor(site, factor, change)
            for part, divides in parts:
                for exponent, power in _exponents(part):
                    for step in (change, change / 2):
                        quarters = 4 * (power - step if divides else power + step)
                        if round(quarters) and abs(quarters - round(quarters)) < 1e-3:
                            yield [Edit.replace(exponent, f"{round(quarters) / 4:g}")]
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
            yield [_without(factor)]


def _one_of_two(site: Site, factors: list[Factor]) -> Iterator[Edits]:
    """Write one factor in place of two, as in `scores * k.shape[-1] * C**-0.5`."""
    for outer, inner in permutations(factors, 2):
        if outer.rest is inner.whole:
            for size in _head_sizes(site, outer.node)[:3]:
                root = _replaced(outer.node, _root(site, size, outer.divides))
                yield [_without(inner), root]


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
        value = next(iter(assigned_values(cls, name)), None)
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


def _turned(factor: Factor) -> Edits:
    """Divide instead of multiplying, or the other way round."""
    old, new, method = ("/", "*", "mul") if factor.divides else ("*", "/", "div")
    match factor.whole:
        case ast.BinOp(left, _, right) if factor.node is right:
            start, end = grouped_span(left)[1], grouped_span(right)[0]
        case ast.AugAssign(target, _, value):
            start, end = span(target)[1], grouped_span(value)[0]
        case ast.Call(ast.Attribute(attr=name) as func) if name.rstrip("_") in FACTORS:
            return [Edit.rename(func, f"{method}_" if name.endswith("_") else method)]
        case _:
            return []
    operator = source_of(factor.node).text[start:end]
    return [Edit.at(factor.node, start, end, operator.replace(old, new, 1))]


def _without(factor: Factor) -> Edit:
    """Leave the factor out."""
    whole = factor.whole
    if isinstance(whole, ast.AugAssign):
        return Edit.remove(whole)
    rest = needed(factor.rest)
    match parent_of(whole):
        case ast.Expr() as statement:
            return Edit.remove(statement)
        case ast.Assign([target]) as statement if code_of(target) == code_of(rest):
            return Edit.remove(statement)
        case ast.Assign() | ast.Return() | ast.AugAssign():
            return Edit.replace(whole, code_of(rest))
    return Edit.replace(whole, operand_code(rest))


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


# The softmax.

ACTIVATIONS = "sigmoid relu relu6 softplus elu silu gelu tanh exp square".split()
DIMENSIONS = "softmax log_softmax Softmax sum max amax logsumexp cumsum".split()


@fixes("scaled_probs")
def scale_before_softmax(site: Site) -> Iterator[Edits]:
    """Multiply the scores and not the probabilities by a number, or neither of them."""
    for scaled in filter(is_product, find(ast.BinOp, site.statement)):
        sign = "/" if isinstance(scaled.op, ast.Div) else "*"
        for factor, probs in sides(scaled)[: 1 if sign == "/" else 2]:
            alone = Edit.unwrap(scaled, probs)
            for _, scores in softmax_calls(site)[:2]:
                moved = f"{operand_code(scores)} {sign} {operand_code(factor)}"
                yield [*alone, Edit.replace(scores, moved)]
            yield alone


@fixes("other_softmax")
def usual_sum(site: Site) -> Iterator[Edits]:
    """Remove the 1 that is added to the sum of exponentials."""
    for place in site.everywhere:
        for node in filter(is_sum, find(ast.BinOp, place.statement)):
            yield from (Edit.unwrap(node, part) for part, one in sides(node) if constant(one) == 1)


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
        yield from islice(followed(site, edits, mask_before_softmax), 4)


@fixes("mask_after_softmax")
def mask_before_softmax(site: Site) -> Iterator[Edits]:
    """Set the scores that a mask hides to -inf, and leave the probabilities alone."""
    for whole, kept, hidden in _late_masks(site):
        for call, scores in softmax_calls(site)[:2]:
            yield _moved_mask(site, whole, kept, hidden, call, scores)


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
    site: Site, whole: ast.AST, kept: ast.expr, hidden: str, call: ast.Call, scores: ast.expr
) -> Edits:
    """Return a mask that hides `hidden`, moved from one statement to the scores of a softmax."""
    statement = whole if isinstance(whole, ast.stmt) else statement_of(whole)
    softmax = statement_of(call)
    if softmax is statement and hidden:  # softmax(scores) * mask
        if scores not in set(ast.walk(kept)):
            return []
        text = with_mask(scores, hidden).join(code_around(kept, scores))
        return [Edit.replace_group(whole, text)]
    alone = isinstance(whole, ast.stmt) or isinstance(parent_of(whole), ast.Expr)
    above = parent_of(whole)
    if isinstance(above, ast.Assign):
        alone = code_of(above.targets[0]) == code_of(kept)
    without = Edit.replace_group(whole, operand_code(kept))
    removed = Edit.remove(statement) if alone else without
    late = {
        node.id for node in find(ast.Name, site.region)
        if isinstance(node.ctx, ast.Store) and softmax.lineno < node.lineno < statement.lineno
    } & set(re.findall(r"\w+", hidden))  # fmt: skip
    name, before, edits = named_scores(site, scores)
    if not hidden:  # the probabilities pass through tril
        hidden = f"{bool_like(site, name)}.triu(1)"
    line = mask_line(site.source, name, hidden)
    if not late:
        return [*edits, Edit.insert_before(softmax, *before, line), removed]
    if not alone:
        return []
    lines = [line, code_of(softmax)]  # the mask is created between the two
    if not isinstance(scores, ast.Name):
        lines = [with_mask(scores, hidden).join(code_around(softmax, scores))]
    return [Edit.remove(softmax), Edit.insert_before(statement, *lines), removed]


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


# The causal mask.

MASK = re.compile(r"mask|causal|tril|triu|future|visible|^bias$", re.IGNORECASE)


@fixes("mask_value")
def minus_inf_value(site: Site) -> Iterator[Edits]:
    """Fill hidden scores with −∞."""
    for call in site.calls:
        if called(call) in ("masked_fill", "masked_fill_", "where"):
            for value in reversed(call.args):
                if is_number(site, value):
                    yield [Edit.replace(value, minus_inf(site.source))]
    yield from _filled_products(site)


def _filled_products(site: Site) -> Iterator[Edits]:
    """Fill the scores where the mask, by which they are multiplied, is 0."""
    statement = site.statement

    def filled(scores: ast.expr, mask: ast.expr) -> str:
        return with_mask(scores, f"{operand_code(mask)} == 0")

    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        new = filled(statement.target, statement.value)
        yield [Edit.replace(statement, f"{code_of(statement.target)} = {new}")]
    for node in find(ast.BinOp, statement):
        if isinstance(node.op, ast.Mult):
            yield from ([Edit.replace(node, filled(*pair))] for pair in reversed(sides(node)))


@fixes("id_condition")
def no_padding(site: Site) -> Iterator[Edits]:
    """Hide no id as padding: a mask of ones in place of `ids != pad`, here or in the whole file."""
    every = list(_without_padding(site, site.tree))
    for value, edit in _without_padding(site, site.statement):
        yield [edit]
        yield [other for each, other in every if last_name(each) == last_name(value) != ""]


def _without_padding(site: Site, within: ast.AST) -> Iterator[tuple[ast.expr, Edit]]:
    """Yield what tensors are compared with, and the comparison as if no id were equal to it."""
    for node in find(ast.Compare, within):
        if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            fill = "ones" if isinstance(node.ops[0], ast.NotEq) else "zeros"
            new = bool_like(site, code_of(node.left), fill)
            yield node.comparators[0], Edit.replace_group(node, new)
    for call in find_calls("eq", "ne", "not_equal", "eq_", "ne_", within=within):  # ids.eq(pad)
        if (ids := operand(site, call)) is not None and call.args:
            fill = "zeros" if called(call).startswith("eq") else "ones"
            yield call.args[-1], Edit.replace(call, bool_like(site, code_of(ids), fill))


def _masks(site: Site, place: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """Return masks that the function could use, with their definitions: variables, then buffers."""
    function = site.function
    found: list[tuple[str, ast.expr | None]] = []
    for node in find(ast.Name, function):
        if isinstance(node.ctx, ast.Store) and MASK.search(node.id) and node.lineno < place.lineno:
            found.append((node.id, next(reversed(assigned_values(function, node.id)), None)))
    found += [(a.arg, None) for a in function.args.args if MASK.search(a.arg)]
    cls = site.cls_or_none
    for call in find_calls("register_buffer", within=cls) if cls is not None else []:
        first = argument(call, 0, "name")
        if isinstance(first, ast.Constant):
            name, value = str(first.value), argument(call, 1, "tensor")
            if isinstance(value, ast.Name):
                value = definition(site, value) or value
            if value is not None and (MASK.search(name) or _triangle(value)):
                views = find_calls("view", "reshape", "unsqueeze", "expand", within=value)
                new_axes = [n for n in find(ast.Constant, value) if n.value is None]
                part = "[:, :, :{T}, :{T}]" if views or new_axes else "[:{T}, :{T}]"
                found.append((f"self.{name}{part}", value))
    if is_cached(function):  # only those that begin at an offset fit
        found = [
            (name, value) for name, value in found
            if value is None or any(isinstance(n, ast.Sub) for n in ast.walk(value))
        ]  # fmt: skip
    used = {code_of(n) for n in find(ast.Attribute, cls)} if cls is not None else set()
    return [(name, value) for name, value in dict(found).items() if name.split("[")[0] not in used]


def _triangle(node: ast.expr | None) -> str:
    """Return the name "tril" or "triu" if an expression contains such a call."""
    calls = [] if node is None else [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return next((name.rstrip("_") for name in calls if name.rstrip("_") in ("tril", "triu")), "")


def _length(site: Site) -> str | None:
    """Return the name of the number of tokens, as in `B, T, C = x.shape`."""
    for node in find(ast.Assign, site.function):
        sizes = unpacked_sizes(node)
        if len(sizes) in (2, 3) and sizes[1] != "_":
            return sizes[1]
        match node:  # T = x.size(1), T = x.shape[1]
            case ast.Assign(
                [ast.Name(name)],
                ast.Call(_, [ast.Constant(1)]) | ast.Subscript(_, ast.Constant(1)) as value,
            ) if is_size(value):
                return name
    return None


def _masked(site: Site, scores: str, mask: str, value: ast.expr | None) -> list[str]:
    """Return scores to which a mask is applied, for the likeliest meanings of the mask."""
    inf, part = minus_inf(site.source), "" if value is None else code_of(value)
    hidden = f"{scores}.masked_fill({mask} == 0, {inf})"
    shown = f"{scores}.masked_fill({mask}{'' if 'bool' in part else '.bool()'}, {inf})"
    added = f"{scores} + {mask}"
    if "inf" in part or "finfo" in part or "1e" in part:
        return [added]
    if _triangle(value) == "tril":
        return [hidden]
    return [shown] if _triangle(value) == "triu" else [added, hidden, shown]


@fixes("no_mask")
def cached_mask(site: Site) -> Iterator[Edits]:
    """Pass a mask to `scaled_dot_product_attention` where a KV cache rules out `is_causal`."""
    name = site.new_name("attn_mask", "causal_mask", "visible")
    ones, dtype = site.torch("torch.ones"), site.torch("torch.bool")
    for call in site.calls if is_cached(site.function_or_none) else ():
        match call.args:
            case [ast.Name(q), ast.Name(k), *_] if called(call) == SDPA:
                queries, keys = size_of(site, q, -2), size_of(site, k, -2)
                lines = [
                    f"{name} = {ones}({queries}, {keys}, dtype={dtype}, device={q}.device)",
                    f"{name} = {name}.tril({keys} - {queries})",
                ]
                edits = [Edit.insert_before(statement_of(call), *lines)]
                causal = argument(call, 5, "is_causal")
                if causal is not None and not isinstance(causal, ast.Constant):
                    edits.insert(0, Edit.replace(causal, "False"))
                yield [*edits, Edit.set_argument(call, 3, "attn_mask", name)]


@fixes("no_mask")
def is_causal(site: Site) -> Iterator[Edits]:
    """Let `scaled_dot_product_attention` hide the tokens after each one."""
    for call in site.calls:
        if called(call) != SDPA or is_cached(site.function_or_none):
            continue
        causal = Edit.set_argument(call, 5, "is_causal", "True")
        mask = argument(call, 3, "attn_mask")
        if mask is None or constant(mask) is None:
            yield [causal]
        elif mask in call.args:
            yield [Edit.replace(mask, "None"), causal]
        else:
            yield [Edit.remove_argument(call, mask), causal]


@fixes("no_mask")
def assigned_mask(site: Site) -> Iterator[Edits]:
    """Assign the result of `masked_fill`, where it is not used."""
    for node in find(ast.Expr, site.region):
        match node.value:
            case ast.Call(ast.Attribute(ast.Name(name), "masked_fill")) as call:
                yield [Edit.replace(node, f"{name} = {code_of(call)}")]


@fixes("no_mask")
def masked_scores(site: Site) -> Iterator[Edits]:
    """Mask the scores before the softmax, with a mask of the user's if there is one."""
    source = site.source
    for call, scores in softmax_calls(site)[:2]:
        statement = statement_of(call)
        name, before, edits = named_scores(site, scores)
        length = _length(site) or f"{name}.size(-1)"
        for mask, value in _masks(site, statement):
            for text in _masked(site, name, mask.format(T=length), value):
                yield [*edits, Edit.insert_before(statement, *before, f"{name} = {text}")]
        cached = find_calls("cat", "concat", within=site.region)
        diagonal = f"{name}.size(-1) - {name}.size(-2) + 1" if cached else "1"
        mask = site.new_name("mask", "causal_mask", "future", "hidden")
        created = f"{mask} = {bool_like(site, name)}.triu({diagonal})"
        lines = [*before, created, mask_line(source, name, mask)]
        yield [*edits, Edit.insert_before(statement, *lines)]


MODULE_MASKS = {
    "MultiheadAttention": "attn_mask", "TransformerEncoderLayer": "src_mask",
    "TransformerEncoder": "mask",
}  # fmt: skip


@fixes("no_mask")
def module_mask(site: Site) -> Iterator[Edits]:
    """Pass a causal mask to a module of torch."""
    built = [called(call) for call in find(ast.Call, site.tree)]
    for call in site.calls:
        kinds = [kind for kind in _built(site, call.func) if kind in MODULE_MASKS]
        if not kinds and isinstance(call.func, (ast.Name, ast.Subscript)):
            kinds = [kind for kind in MODULE_MASKS if kind in built]
        first = argument(call, 0, "query") or argument(call, 0, "src")
        if not kinds or first is None:
            continue
        statement = statement_of(call)
        keyword = MODULE_MASKS[kinds[0]]
        names = [n.id for n in find(ast.Name, first) if n.id != "self"]
        x = names[-1] if names else operand_code(first)
        length, new = _new_mask(site, x)
        for mask, _ in _masks(site, statement):
            for size in dict.fromkeys([_length(site) or length, length]):
                text = mask.format(T=size).replace("[:, :, ", "[")
                yield [Edit.set_keyword(call, keyword, text)]
        for present in call.keywords:
            if present.arg == keyword and isinstance(present.value, ast.Name):
                name = present.value.id
                lines = (f"if {name} is None:", f"    {name} = {new}")
                yield [Edit.insert_before(statement, *lines)]
        created = Edit.insert_before(statement, f"{keyword} = {new}")
        yield [created, Edit.set_keyword(call, keyword, keyword)]


@fixes("no_mask")
def mask_in_loop(site: Site) -> Iterator[Edits]:
    """Call torch's layers in a loop, because an nn.Sequential of them passes no mask on."""
    match site.statement:
        case ast.Assign([ast.Name(x)], ast.Call(func, [ast.Name() as passed], []) as call):
            kinds = _built(site, func)
        case _:
            return
    layers = [kind for kind in kinds if kind in MODULE_MASKS]
    if kinds[:1] != ["Sequential"] or not layers:
        return
    keyword = MODULE_MASKS[layers[0]]
    lines = [
        f"{keyword} = {_new_mask(site, passed.id)[1]}",
        *([] if x == passed.id else [f"{x} = {passed.id}"]),
        f"for layer in {code_of(func)}:",
    ]
    yield [
        Edit.insert_before(site.statement, *lines),
        Edit.prefix(site.statement, "    "),
        Edit.replace(func, "layer"),
        *([] if x == passed.id else [Edit.replace(passed, x)]),
        Edit.set_keyword(call, keyword, keyword),
    ]


def _built(site: Site, func: ast.expr) -> list[str]:
    """Return the classes of the modules that are built for an attribute of `self`."""
    value = definition(site, func) if own_attribute(func) else None
    return [] if value is None else [called(n) for n in ast.walk(value) if isinstance(n, ast.Call)]


def _new_mask(site: Site, x: str) -> tuple[str, str]:
    """Return the length of x, and a causal mask of its size that is True at hidden tokens."""
    batch_first = any(keyword.arg == "batch_first" for keyword in find(ast.keyword, site.tree))
    length = f"{x}.size({1 if batch_first else 0})"
    ones, dtype = site.torch("torch.ones"), site.torch("torch.bool")
    return length, f"{ones}({length}, {length}, dtype={dtype}, device={x}.device).triu(1)"


@fixes("other_attention", "nan_scores", "no_mask", "mask_value")
def infinite_mask(site: Site) -> Iterator[Edits]:
    """Set masked scores to -inf, where they are set to, or combined with, another number."""
    source, function = site.source, site.function
    calls = find(ast.Call, function)
    masked = any(keyword.arg in MODULE_MASKS.values() for c in calls for keyword in c.keywords)
    if not masked and not find_calls(SDPA, within=function) and not products(function):
        return
    for call in calls:
        name = called(call).rstrip("_")
        value = argument(call, 1, "value") if name == "masked_fill" else None
        if name == "where" and len(call.args) == 3:
            value = next((a for a in call.args[1:] if is_number(site, a)), None)
        if value is not None and is_number(site, value):
            yield [Edit.replace(value, minus_inf(source))]
        passed = [k.value for k in call.keywords if k.arg in MODULE_MASKS.values()]
        mask = argument(call, 3, "attn_mask") if name == SDPA else next(iter(passed), None)
        if mask is not None and constant(mask) is not None:
            yield [Edit.replace(mask, f"{operand_code(mask)}.bool()")]
            yield [Edit.replace(mask, f"{operand_code(mask)} == 0")]
    for node in find(ast.BinOp, function):
        for mask, scores in sides(node) if isinstance(node.op, (ast.Add, ast.Mult)) else ():
            if _is_mask(mask):
                yield [Edit.replace(node, with_mask(scores, f"{operand_code(mask)} == 0"))]
    for augmented in find(ast.AugAssign, function):
        if _is_mask(augmented.value):
            hidden = f"{operand_code(augmented.value)} == 0"
            line = mask_line(source, code_of(augmented.target), hidden)
            yield [Edit.replace(augmented, line)]


def _is_mask(node: ast.expr) -> bool:
    """Return whether an operand is named like a mask or creates one, or is 1 less a mask."""
    if isinstance(node, ast.BinOp) and constant(node.left) == 1:
        node = node.right
    while isinstance(node, ast.Subscript):
        node = node.value
    return bool(_triangle(node) or MASK.search(name_of(node)))


@fixes("mask_off", "no_mask", "sliding_window")
def causal_mask(site: Site) -> Iterator[Edits]:
    """Change what creates or applies a mask so that it hides the tokens after each one."""
    scopes: list[ast.AST] = [site.statement]
    if site.finding.code == "no_mask" or site.function_or_none is None:
        scopes = [site.function] if site.function_or_none else []
    elif site.cls_or_none is not None:
        scopes += [site.function, *find(ast.FunctionDef, site.cls)]
    scopes = list(dict.fromkeys([*scopes, site.tree]))
    yield from _diagonals(scopes[0])
    yield from _comparisons(scopes[0])
    yield from _restrictions(scopes[0])
    for scope in scopes[1:]:
        yield from _diagonals(scope)
        yield from _applications(scope)
    for scope in scopes:
        yield from _shifts(scope)
        yield from _comparisons(scope)
    for scope in scopes[:2]:
        yield from _changes_of_mask(scope)
        yield from _other_triangles(scope)


def _triangles(scope: ast.AST) -> list[ast.Call]:
    return find_calls("tril", "triu", "tril_", "triu_", within=scope)


def _diagonal(call: ast.Call) -> ast.expr | None:
    """Return the diagonal that a call of tril or triu passes."""
    match call.func:
        case ast.Name() | ast.Attribute(ast.Name("torch" | "np" | "numpy")):
            return argument(call, 1, "diagonal")
    return argument(call, 0, "diagonal")


def _diagonals(scope: ast.AST) -> Iterator[Edits]:
    """Begin at the diagonal above the main one (triu), or end at the main one (tril)."""
    for call in _triangles(scope):
        upper, diagonal = called(call).startswith("triu"), _diagonal(call)
        if diagonal is None and upper:
            keywords = find(ast.keyword, source_of(call).tree)
            keyword = any(k.arg == "diagonal" for k in keywords)
            if keyword or (isinstance(call.func, ast.Attribute) and not call.args):
                yield [Edit.set_keyword(call, "diagonal", "1")]
            yield [Edit.last_argument(call, ", 1" if call.args else "1")]
        elif diagonal is not None and is_integer(diagonal):
            if upper:
                yield [Edit.replace(diagonal, "1")]
            elif code_of(diagonal) != "0":
                yield [Edit.remove_argument(call, diagonal)]
        elif diagonal is not None:
            yield from _other_offsets(call, diagonal, upper)


def _other_offsets(call: ast.Call, diagonal: ast.expr, upper: bool) -> Iterator[Edits]:
    """Shift a diagonal that is computed, such as `n_key - n_query + 1` or a variable."""
    function = enclosing(call, ast.FunctionDef)
    places = [diagonal]
    if isinstance(diagonal, ast.Name) and function is not None:
        places += assigned_values(function, diagonal.id)
    for place in places:
        for node in find(ast.BinOp, place):
            if isinstance(node.op, (ast.Add, ast.Sub)) and is_integer(node.right):
                yield [Edit.replace(node, code_of(node.left))]
            elif isinstance(node.op, ast.Add) and is_integer(node.left):
                yield [Edit.replace(node, code_of(node.right))]
    code = code_of(diagonal)
    for sign in ("+", "-") if upper else ("-", "+"):
        yield [Edit.replace(diagonal, f"{code} {sign} 1")]
    if not is_cached(function):
        yield [Edit.replace(diagonal, "1" if upper else "0")]


OPPOSITES: dict[type[ast.cmpop], tuple[str, list[str]]] = {
    ast.Gt: (">", [">=", "<", "<="]), ast.GtE: (">=", [">", "<=", "<"]),
    ast.Lt: ("<", ["<=", ">", ">="]), ast.LtE: ("<=", ["<", ">=", ">"]),
    ast.Eq: ("==", ["!="]), ast.NotEq: ("!=", ["=="]),
}  # fmt: skip


def _comparisons(scope: ast.AST) -> Iterator[Edits]:
    """Compare positions, or a mask with 0 or 1, in another way."""
    for node in find(ast.Compare, scope):
        old, others = OPPOSITES.get(type(node.ops[0]), ("", []))
        parts = [node.left, node.comparators[0]]
        for part in parts:
            if isinstance(part, ast.BinOp) and is_integer(part.right) and len(others) > 1:
                yield [Edit.replace(part, code_of(part.left))]
        start, end = span(parts[0])[1], span(parts[1])[0]
        if None in map(constant, parts) or (len(others) == 1 and not _near_mask(node)):
            continue
        for other in others:
            text = source_of(node).text[start:end].replace(old, other, 1)
            yield [Edit.at(node, start, end, text)]


def _near_mask(node: ast.AST) -> bool:
    """Return whether a statement of a node names a mask."""
    statement = enclosing(node, ast.stmt)
    return any(MASK.search(name_of(each)) for each in ast.walk(statement or node))


def _restrictions(scope: ast.AST) -> Iterator[Edits]:
    """Leave out one of two conditions, such as a window."""
    for node in find(ast.BinOp, scope):
        tight = isinstance(parent_of(node), (ast.BinOp, ast.UnaryOp, ast.Attribute))
        is_condition = isinstance(node.op, (ast.BitAnd, ast.BitOr))
        for part in (node.left, node.right):
            changes_mask = isinstance(node.op, (ast.Mult, ast.Sub, ast.Add)) and _triangle(part)
            if is_condition or changes_mask:
                bare = is_condition and not tight
                yield [Edit.replace(node, code_of(part) if bare else grouped_code(part))]
    for call in _triangles(scope):
        base = call.func.value if isinstance(call.func, ast.Attribute) else None
        inner = base if _triangle(base) else next(iter(call.args), None)
        if inner is not None and _triangle(inner):
            yield [Edit.replace(call, code_of(inner))]


def _applications(scope: ast.AST) -> Iterator[Edits]:
    """Use a mask the other way round, and without a step that leaves something out."""
    for call in find(ast.Call, scope):
        name = called(call).rstrip("_")
        keyword = {"masked_fill": "mask", "where": "condition"}.get(name)
        mask = argument(call, 0, keyword) if keyword else None
        if name in (SDPA, "MultiheadAttention") or any(k.arg == "attn_mask" for k in call.keywords):
            mask = argument(call, 3, "attn_mask")
        match mask:
            case None | ast.Constant(None):
                continue
            case ast.UnaryOp(ast.Invert(), operand):
                yield [Edit.replace(mask, code_of(operand))]
            case ast.Compare(_, [ast.Eq() | ast.NotEq(), *_], [value, *_]):
                if constant(value) in (0, 1):
                    yield [Edit.replace(value, "0" if constant(value) else "1")]
                yield from _comparisons(mask)
            case _:
                yield [Edit.replace(mask, f"~{operand_code(mask)}")]


def _shifts(scope: ast.AST) -> Iterator[Edits]:
    """Slice a mask without an offset of one."""
    for node in find(ast.Subscript, scope):
        name = code_of(node.value)
        if not MASK.search(name):
            continue
        shifted: Edits = []
        for part in find(ast.Slice, node.slice):
            if part.lower is not None and is_integer(part.lower) and part.upper is not None:
                shifted.append(Edit.replace(part.lower, ""))
            if isinstance(part.upper, ast.BinOp) and is_integer(part.upper.right):
                shifted.append(Edit.replace(part.upper, code_of(part.upper.left)))
        yield shifted
        for binary in find(ast.BinOp, node.slice):
            if is_integer(binary.right):
                yield [Edit.replace(binary, code_of(binary.left))]


def _changes_of_mask(scope: ast.AST) -> Iterator[Edits]:
    """Leave out what changes a mask after it was created, and what transposes it."""
    items: Edits = []
    for node in find(ast.stmt, scope):
        for target in targets(node):
            base = target.value if isinstance(target, ast.Subscript) else target
            if not isinstance(base, ast.Name) or not MASK.search(base.id):
                continue
            value = getattr(node, "value", None)
            own = base.id in variables(value or node)
            if isinstance(target, ast.Subscript):
                items.append(Edit.remove(node))
            elif isinstance(node, ast.AugAssign) or own:
                yield [Edit.remove(node)]
    yield items
    for inner in find(ast.expr, scope):
        match inner:
            case (
                ast.Call(ast.Attribute(mask, "transpose" | "flip" | "t"))
                | ast.Attribute(mask, "T" | "mT")
            ) if _near_mask(inner):  # fmt: skip
                yield [Edit.replace(inner, code_of(mask))]


def _other_triangles(scope: ast.AST) -> Iterator[Edits]:
    """Exchange the lower and the upper triangle."""
    for call in _triangles(scope):
        name = called(call)
        other = name.replace("tril", "triu") if "tril" in name else name.replace("triu", "tril")
        edits, diagonal = [Edit.rename(call.func, other)], _diagonal(call)
        if diagonal is not None and not is_integer(diagonal):
            continue
        if "tril" in other:
            edits += [] if diagonal is None else [Edit.remove_argument(call, diagonal)]
        elif diagonal is None:
            edits.append(Edit.last_argument(call, f"{', ' if call.args else ''}diagonal=1"))
        else:
            edits.append(Edit.replace(diagonal, "1"))
        yield edits
