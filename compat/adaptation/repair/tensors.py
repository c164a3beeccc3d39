"""What a function of the user's computes with tensors: products, softmaxes, numbers and sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from compat.adaptation.repair.fixes import Edits, Site, assigns, called, name_of, targets
from compat.adaptation.repair.source import Edit, Source
from compat.adaptation.repair.values import is_self, parameters, settings

SDPA = "scaled_dot_product_attention"
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
        subscripts: of einsum, otherwise "".
    """

    node: ast.expr
    left: ast.expr
    right: ast.expr
    subscripts: str = ""


def products(source: Source, within: ast.AST) -> list[Product]:
    """The products of tensors in the order in which they are computed."""
    found = []
    for node in source.nodes(ast.expr, within):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.append(Product(node, node.left, node.right))
        elif isinstance(node, ast.Call):
            operands, subscripts = list(node.args), ""
            if called(node) == "einsum" and len(operands) == 3:
                first = operands.pop(0)
                subscripts = str(first.value) if isinstance(first, ast.Constant) else ""
            elif called(node) == "baddbmm" and len(operands) == 3:
                operands.pop(0)
            elif called(node) in ("matmul", "bmm", "mm"):
                if len(operands) == 1 and isinstance(node.func, ast.Attribute):
                    operands.insert(0, node.func.value)
            else:
                continue
            if len(operands) == 2:
                found.append(Product(node, operands[0], operands[1], subscripts))
    return sorted(found, key=lambda product: source.span(product.node)[1])


def score_products(site: Site) -> list[Product]:
    """The products that may compute the scores, those of the finding's line first."""
    assert site.function is not None
    found = [
        product for product in products(site.source, site.function)
        if not any(_is_own(operand) for operand in (product.left, product.right))
    ]  # fmt: skip
    inside = set(ast.walk(site.statement))
    return sorted(found, key=lambda product: product.node not in inside)


def _is_own(node: ast.expr) -> bool:
    """Whether a node is `self.name` or a transpose of it."""
    while isinstance(node, (ast.Call, ast.Attribute)) and not own_attribute(node):
        node = node.func if isinstance(node, ast.Call) else node.value
    return own_attribute(node) is not None


def own_attribute(node: ast.AST) -> str | None:
    """`name` if a node is `self.name`."""
    return node.attr if isinstance(node, ast.Attribute) and is_self(node) else None


def assigned_values(
    source: Source, within: ast.AST, name: str
) -> list[tuple[ast.expr, ast.expr | None]]:
    """The values that are assigned to a variable or attribute, with the tuple of an unpacking."""
    found: list[tuple[ast.expr, ast.expr | None]] = []
    for node in source.nodes(ast.stmt, within):
        value = getattr(node, "value", None)
        for target in targets(node):
            if isinstance(target, ast.Tuple):
                for i, part in enumerate(target.elts):
                    if assigns(part, name) and isinstance(value, ast.Tuple):
                        found.append((value.elts[i], None))
                    elif assigns(part, name) and value is not None:
                        found.append((value, target))
            elif (
                assigns(target, name) and value is not None and not isinstance(node, ast.AugAssign)
            ):
                found.append((value, None))
    return found


def definition(site: Site, node: ast.expr, scope: ast.AST | None) -> ast.expr | None:
    """The last expression that is assigned to a variable, or to an attribute of the class."""
    source = site.source
    if name := own_attribute(node):
        scope = source.parent(node, ast.ClassDef) or site.cls
    elif isinstance(node, ast.Name):
        name, scope = node.id, scope or source.tree
    if name is None or scope is None:
        return None
    found = [
        value for value, unpacked in assigned_values(source, scope, name)
        if unpacked is None and not any(inner is node for inner in ast.walk(value))
        and (isinstance(node, ast.Attribute) or value.lineno <= node.lineno)
    ]  # fmt: skip
    if not found and isinstance(scope, ast.FunctionDef) and not is_parameter(scope, name):
        found = [
            value for statement in source.tree.body
            for target in targets(statement) if assigns(target, name)
            for value in [getattr(statement, "value", None)] if value is not None
        ]  # fmt: skip
    return found[-1] if found else None


def is_parameter(function: ast.FunctionDef, name: str) -> bool:
    return any(parameter.arg == name for parameter in parameters(function))


def enclosing(source: Source, node: ast.AST) -> ast.FunctionDef | None:
    return source.parent(node, ast.FunctionDef)


def is_number(site: Site, node: ast.AST | None, depth: int = 4) -> bool:
    """Whether an expression looks like a number rather than a tensor of activations."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return is_number(site, node.operand, depth)
    if isinstance(node, ast.BinOp):
        return all(is_number(site, part, depth) for part in (node.left, node.right))
    if isinstance(node, ast.Subscript):
        key = node.slice
        return is_size(node) or (isinstance(key, ast.Constant) and isinstance(key.value, str))
    if isinstance(node, ast.Call):
        if is_size(node):
            return True
        base = node.func.value if isinstance(node.func, ast.Attribute) else None
        if called(node) not in ("sqrt", "rsqrt", "pow", "float", "int", "tensor", "item", "Tensor"):
            return False
        module = base is None or (isinstance(base, ast.Name) and base.id in site.imported)
        values = [*node.args] if module else [base, *node.args]
        return bool(values) and all(is_number(site, value, depth) for value in values)
    if not isinstance(node, (ast.Name, ast.Attribute)) or depth == 0:
        return False
    scope = enclosing(site.source, node)
    value = definition(site, node, scope)
    if value is not None and not (isinstance(value, ast.Name) and value is node):
        return is_number(site, value, depth - 1)
    if isinstance(node, ast.Attribute):
        return own_attribute(node) is None and node.attr not in ("T", "mT", "mH", "weight", "bias")
    if scope is None:
        return False
    if is_parameter(scope, node.id):
        numeric = re.search(r"scal|factor|temp|norm|dim|size|width", node.id)
        return scope.name == "__init__" or bool(numeric or HEAD_SIZE.match(node.id))
    sizes = [v for v, unpacked in assigned_values(site.source, scope, node.id) if unpacked]
    return any(isinstance(v, ast.Attribute) or (isinstance(v, ast.Call) and called(v) == "size")
               for v in sizes)  # fmt: skip


def is_size(node: ast.AST) -> bool:
    """Whether a node is `x.shape[i]`, `x.size(i)` or `len(x)`."""
    if isinstance(node, ast.Subscript):
        of = node.value
        return (isinstance(of, ast.Attribute) and of.attr == "shape") or (
            isinstance(of, ast.Call) and called(of) == "size"
        )
    return isinstance(node, ast.Call) and bool(node.args) and called(node) in ("size", "len")


def size_of(site: Site, name: str, axis: int) -> str:
    """A size of a tensor, written as elsewhere in the file."""
    calls = sum(called(call) == "size" for call in site.source.nodes(ast.Call))
    shapes = sum(node.attr == "shape" for node in site.source.nodes(ast.Attribute))
    return f"{name}.size({axis})" if calls > shapes else f"{name}.shape[{axis}]"


def is_integer(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


# The softmax of the scores.


def minus_inf(source: Source) -> str:
    """`float("-inf")` with the quotes that the file uses."""
    return f"float({source.quoted('-inf')})"


def softmax_calls(site: Site) -> list[tuple[ast.Call, ast.expr]]:
    """The calls that compute the probabilities, with the scores."""
    assert site.function is not None
    source, inside = site.source, site.function
    if "softmax" in site.function.name:  # a function of the user's
        calls = [c for c in source.nodes(ast.Call) if called(c) == site.function.name]
    else:
        calls = [c for c in source.nodes(ast.Call, inside) if is_softmax(site, c)]
    at = set(ast.walk(site.statement))
    calls.sort(key=lambda call: (call not in at, call.lineno < site.line))
    found = [(call, scores) for call in calls if (scores := _operand(site, call)) is not None]
    if found:
        return found
    written_out = [call for call in source.nodes(ast.Call, inside) if called(call) == "exp"]
    return [(call, scores) for call in written_out if (scores := _operand(site, call)) is not None]


def _operand(site: Site, call: ast.Call) -> ast.expr | None:
    """The tensor that a call computes with: the owner of a method, or the first argument."""
    if isinstance(call.func, ast.Attribute) and not is_function(site, call.func):
        return call.func.value
    return call.args[0] if call.args else None


def is_function(site: Site, node: ast.Attribute) -> bool:
    """Whether an attribute is a function of a module such as `F`, or belongs to `self`."""
    base = node.value
    while isinstance(base, ast.Attribute):
        base = base.value
    return isinstance(base, ast.Name) and base.id in {"self", *site.imported}


def is_softmax(site: Site, call: ast.Call) -> bool:
    if "softmax" in called(call).lower():
        return True
    value = definition(site, call.func, None) if own_attribute(call.func) else None
    return isinstance(value, ast.Call) and called(value) == "Softmax"


def named_scores(site: Site, scores: ast.expr) -> tuple[str, list[str], list[Edit]]:
    """A variable for the argument of a softmax, and what assigns it if it is an expression."""
    source, inner = site.source, scores
    while isinstance(inner, ast.BinOp) and not isinstance(inner.op, ast.MatMult):
        inner = inner.left
    if isinstance(inner, ast.Name):
        return inner.id, [], []
    name = site.new_name("scores", "att", "attn_scores", "logits")
    return name, [f"{name} = {source.code(scores)}"], [source.replace(scores, name)]


def with_mask(source: Source, scores: ast.expr, hidden: str, inf: str) -> str:
    """Scores with a mask, as an expression."""
    return f"{source.operand(scores)}.masked_fill({hidden}, {inf})"


# What several parts of attention share.


def is_cached(source: Source, function: ast.AST | None) -> bool:
    """Whether a function may have more keys than queries, because it has a KV cache."""
    if not isinstance(function, ast.FunctionDef):
        return False
    names = [node.id for node in source.nodes(ast.Name, function)]
    names += [parameter.arg for parameter in parameters(function)]
    joined = any(called(c) in ("cat", "concat", "update") for c in source.nodes(ast.Call, function))
    return joined or any(re.search(r"cache|past", name) for name in names)


def unique(candidates: Iterator[Edits]) -> Iterator[Edits]:
    seen = set()
    for edits in candidates:
        if tuple(edits) not in seen:
            seen.add(tuple(edits))
            yield edits


def flipped_flags(site: Site) -> Iterator[Edits]:
    """Change a flag that switches a part of attention off."""
    assert site.function is not None
    tests = [n.test for n in ast.walk(site.function) if isinstance(n, (ast.If, ast.IfExp))]
    if not is_cached(site.source, site.function):
        tests += [k.value for call in site.calls for k in call.keywords]
    names = [name for test in tests for node in ast.walk(test) if (name := name_of(node))]
    for name in list(dict.fromkeys(names)):
        for _, value in settings(site, name):
            if other := name_of(value):
                names.append(other)
    for name in dict.fromkeys(names):
        for source, value in settings(site, name):
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                yield [source.replace(value, str(not value.value))]
