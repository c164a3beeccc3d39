"""What a function of the user's computes with tensors: products, softmaxes, numbers and sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site
from compat.adaptation.repair.source import (
    Source,
    code_of,
    enclosing,
    find,
    find_calls,
    operand_code,
    source_of,
    span,
)
from compat.adaptation.repair.syntax import (
    assigned,
    assigns,
    called,
    is_self,
    is_size,
    name_of,
    own_attribute,
    parameters,
    root,
    unpacked_sizes,
)
from compat.adaptation.repair.values import settings

SDPA = "scaled_dot_product_attention"
NUMERIC = ("sqrt", "rsqrt", "pow", "float", "int", "tensor", "item", "Tensor")  # of numbers
HEAD_SIZE = re.compile(
    r"^(d_?k|d_?h|hd|hs|d_?head|dim_?head|k_channels|.*head_?(dim|size|width|channels|features)"
    r"|.*(dim|size|width|channels|features)_?per_?head)s?$",
    re.IGNORECASE,
)


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


def assigned_values(within: ast.AST, name: str) -> list[tuple[ast.expr, ast.expr | None]]:
    """Yield values assigned to a variable or attribute, with the tuple of an unpacking."""
    found: list[tuple[ast.expr, ast.expr | None]] = []
    for node in find(ast.stmt, within):
        for target, value in assigned(node):
            if isinstance(target, ast.Tuple) and any(assigns(each, name) for each in target.elts):
                found.append((value, target))
            elif assigns(target, name):
                found.append((value, None))
    return found


def definition(site: Site, node: ast.expr) -> ast.expr | None:
    """Return the last expression that is assigned to a variable, or to an attribute of the class.

    What an attribute is replaced by that contains it, as by `compile(self.model)`, is left out.
    """
    scopes: Sequence[ast.AST] = ()
    if name := own_attribute(node):
        cls = enclosing(node, ast.ClassDef) or site.cls_or_none
        scopes = site.lineage(cls) if cls is not None else ()
    elif isinstance(node, ast.Name):
        name, scopes = node.id, [enclosing(node, ast.FunctionDef) or site.tree]
    if name is None or not scopes:
        return None
    held = own_attribute(node) or ...
    found = [
        value for scope in reversed(scopes)
        for value, unpacked in assigned_values(scope, name) if unpacked is None
        and not any(inner is node or own_attribute(inner) == held for inner in ast.walk(value))
        and (isinstance(node, ast.Attribute) or value.lineno <= node.lineno)
    ]  # fmt: skip
    if not found and isinstance(scopes[0], ast.FunctionDef) and name not in parameters(scopes[0]):
        pairs = (pair for statement in site.tree.body for pair in assigned(statement))
        found = [value for target, value in pairs if assigns(target, name)]
    return found[-1] if found else None


def is_number(site: Site, node: ast.AST | None, depth: int = 4) -> bool:
    """Return whether an expression looks like a number rather than a tensor of activations."""
    match node:
        case ast.Constant(value):
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case ast.UnaryOp(_, operand):
            return is_number(site, operand, depth)
        case ast.BinOp(left, _, right):
            return is_number(site, left, depth) and is_number(site, right, depth)
        case ast.Subscript() | ast.Call() if is_size(node):
            return True
        case ast.Subscript(_, ast.Constant(str())):  # as in config["scale"]
            return True
        case ast.Call(func, values) if called(node) in NUMERIC:
            if isinstance(func, ast.Attribute) and name_of(func.value) not in site.imported:
                values = [func.value, *values]
            return bool(values) and all(is_number(site, value, depth) for value in values)
        case ast.Name() | ast.Attribute() if depth:
            return _is_number_by_name(site, node, depth)
    return False


def _is_number_by_name(site: Site, node: ast.Name | ast.Attribute, depth: int) -> bool:
    value = definition(site, node)
    if value is not None:
        return is_number(site, value, depth - 1)
    if isinstance(node, ast.Attribute):
        return not is_self(node) and node.attr not in ("T", "mT", "mH", "weight", "bias")
    scope = enclosing(node, ast.FunctionDef)
    if scope is None:
        return False
    if node.id in parameters(scope):
        numeric = re.search(r"scal|factor|temp|norm|dim|size|width", node.id)
        return scope.name == "__init__" or bool(numeric or HEAD_SIZE.match(node.id))
    every = find(ast.Assign, scope)
    if any(node.id in unpacked_sizes(statement) for statement in every):
        return True
    is_local = any(n.id == node.id and isinstance(n.ctx, ast.Store) for n in find(ast.Name, scope))
    return not is_local and _is_imported(site, node.id)


def _is_imported(site: Site, name: str) -> bool:
    """Return whether a global name is, or may be, one of those imported from another module."""
    sources = [alias for node in find(ast.ImportFrom, site.tree) for alias in node.names]
    return any("*" in (a.name, a.asname) or name == (a.asname or a.name) for a in sources)


def size_of(site: Site, name: str, axis: int) -> str:
    """Return a size of a tensor, written as elsewhere in the file."""
    calls = len(find_calls("size", within=site.tree))
    shapes = sum(node.attr == "shape" for node in find(ast.Attribute, site.tree))
    return f"{name}.size({axis})" if calls > shapes else f"{name}.shape[{axis}]"


# The softmax of the scores.


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


def operand(site: Site, call: ast.Call) -> ast.expr | None:
    """Return the tensor that a call computes with: the owner of a method, or the first argument."""
    return next(iter(operands(site, call)), None)


def operands(site: Site, call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, and before them the tensor whose method is called."""
    match call.func:
        case ast.Attribute(owner) if is_method(site, call):
            return [owner, *call.args]
    return call.args


def is_method(site: Site, call: ast.Call) -> bool:
    """Return whether a method of a tensor is called, not a function of a module or of `self`."""
    known = root(call.func) in {"self", *site.imported}
    return isinstance(call.func, ast.Attribute) and not known


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


# What several parts of attention share.


def is_cached(function: ast.AST | None) -> bool:
    """Return whether a function may have more keys than queries, because it has a KV cache."""
    if not isinstance(function, ast.FunctionDef):
        return False
    names = [node.id for node in find(ast.Name, function)]
    names += parameters(function)
    joined = find_calls("cat", "concat", "update", within=function)
    return bool(joined) or any(re.search(r"cache|past", name) for name in names)


def unique(candidates: Iterator[Edits]) -> Iterator[Edits]:
    seen = set()
    for edits in candidates:
        if tuple(edits) not in seen:
            seen.add(tuple(edits))
            yield edits


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
