"""Fixes of the activation of the MLP."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import cast

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.formulas import formulas, inputs, only, unused
from compat.adaptation.repair.held import unread
from compat.adaptation.repair.source import (
    code_around,
    code_of,
    enclosing,
    find,
    find_calls,
    following,
    operand_code,
    parent_of,
    source_of,
    span,
)
from compat.adaptation.repair.syntax import (
    argument,
    called,
    constant,
    is_self,
    name_of,
    root,
    sides,
    variable,
    variables,
)
from compat.adaptation.repair.values import assigned_values, definition

CODES = ("erf_gelu", "relu", "silu", "other_activation")

# The names in torch of the checkpoint's activation, as a module and as a function. A fix that
# looks another one up ends there.
TORCH = {
    "gelu_new": ("GELU", "gelu"),
    "gelu": ("GELU", "gelu"),
    "relu": ("ReLU", "relu"),
    "silu": ("SiLU", "silu"),
}
# The other names of an activation, in small letters and without underscores.
NAMES = {
    "silu": {"silu", "swish"},
    "relusquared": {"relu", "squaredrelu", "relusquare", "relu2"},
    "quickgelu": {"quickgelu", "gelu"},
    "afunctionthatcompatdoesnotknow": {
        "gelu", "relu6", "hardswish", "hardtanh", "hardsigmoid", "celu", "rrelu", "prelu",
        "softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink", "leakyrelu",
    },
}  # fmt: skip
# How functions and modules of activations are called.
ACTIVATION = re.compile("silu|swish|gelu|relu|sigmoid|act|nonlin", re.IGNORECASE)
STRINGS = ("gelu_new", "gelu_pytorch_tanh", "gelu_tanh", "tanh_gelu", "new_gelu", "gelu_approx")


@fixes("other_activation")
def earlier_activation(site: Site) -> Iterator[Edits]:
    """Apply an activation before the second projection of the MLP instead of after it."""
    values, statement = site.values, site.statement
    if not values.get("after"):
        return
    if not values["moved"]:  # there is one before it as well
        for sequence in find_calls("Sequential", within=site.tree):
            for item in sequence.args[2:]:
                if item.lineno <= site.line <= (item.end_lineno or 0):
                    yield [Edit.remove_argument(sequence, item)]
        for node, inner, dropped in _applied(site):
            yield [*only(node, inner), *dropped]
        return
    yield from _earlier_item(site)
    for place in site.everywhere[1:]:
        if place.source is site.source and _is_of_one_variable([place.statement, statement]):
            start, end = span(statement)
            line = site.source.text[start : site.source.text.find("\n", end)]
            yield [Edit.insert_before(place.statement, line), Edit.remove(statement)]
    for node, inner, dropped in _applied(site):
        without = only(node, inner)
        for place in site.everywhere[::-1]:
            if place.function_or_none is site.function_or_none:  # it can be called there as it was
                code = code_around(node, inner)
                yield from ([*without, *edits] for edits in _on_operand(place, node, *code))
            if values["expected"] in TORCH:
                before, _, after = _of_torch(place, "{}").partition("{}")
                for edits in _on_operand(place, node, before, after):
                    yield [*without, *dropped, *edits]
        if values["expected"] in TORCH:
            yield from ([*without, *dropped, *edits] for edits in _between_items(site))


def _earlier_item(site: Site) -> Iterator[Edits]:
    """Move an item of a Sequential in front of a linear layer."""
    for sequence in _sequences(site):
        items = sequence.args
        linear = [i for i, n in enumerate(items) if isinstance(n, ast.Call) and "Lin" in called(n)]
        for j in linear[:0:-1]:
            for k in range(j + 1, len(items)):
                order = [items[k], *items[j:k]]
                pairs = zip(items[j : k + 1], order, strict=True)
                yield [Edit.replace(old, code_of(new)) for old, new in pairs]


def _is_of_one_variable(statements: list[ast.stmt]) -> bool:
    """Return whether each statement assigns the same variable a function of itself."""
    name = variable(statements[0])
    return all(variable(each) == name and name in variables(each, ast.Load) for each in statements)


def _applied(site: Site) -> Iterator[tuple[ast.expr, ast.expr, Edits]]:
    """Yield the finding's expressions that may be the activation.

    Each comes with its operand, and with the removal of what only the activation uses.
    """
    found: list[tuple[ast.expr, list[ast.expr]]] = [(call, call.args[:1]) for call in site.calls]
    found += [(node, inputs(site, node)) for node in formulas(site, site.statement)]
    for node, operands in found:
        if len(operands) == 1 and not isinstance(operands[0], ast.Starred):
            if operands[0] is not node:
                functions: list[ast.AST] = [node.func] if isinstance(node, ast.Call) else []
                yield node, operands[0], unused(site, functions)


def _on_operand(place: Site, activation: ast.expr, before: str, after: str) -> Iterator[Edits]:
    """Apply an activation to an operand of a product or of a call, such as of `c_proj(x)`.

    Args:
        place: the line of the projection.
        activation: the expression that is removed.
        before, after: the code of the activation around its operand.
    """
    operands = [call.args[0] for call in place.calls if call.args and call is not activation]
    products = find(ast.BinOp, place.statement)
    operands += [node.left for node in products if isinstance(node.op, ast.MatMult)]
    for operand in operands:
        if activation not in set(ast.walk(operand)) and not isinstance(operand, ast.Starred):
            yield [Edit.prefix(operand, before), Edit.suffix(operand, after)]


@fixes(*CODES)
def activation_by_name(site: Site) -> Iterator[Edits]:
    """Replace the name of an activation by that of the tanh approximation of GELU."""
    if site.values["expected"] != "gelu_new":
        return
    for source in site.ordered:
        strings = {n: n.value for n in find(ast.Constant, source.tree) if isinstance(n.value, str)}
        known = [name for name in STRINGS if name in strings.values()]
        known += ["gelu_new"] if "ACT2FN" in source.text and "gelu_new" not in known else []
        for node, value in strings.items():
            if _plain(value) not in _names(site):
                continue
            call = enclosing(node, ast.Call)
            if call is not None and called(call).startswith("Transformer"):
                yield [Edit.replace(node, f"lambda x: {_of_torch(site, 'x')}")]
            elif isinstance(above := parent_of(node), ast.Subscript):
                yield from ([Edit.replace(node, source.quoted(name))] for name in known)
                yield [Edit.replace(above, _of_torch(site))]
            elif not isinstance(above, (ast.Compare, ast.Dict)):
                yield from ([Edit.replace(node, source.quoted(name))] for name in known)
                if value != "gelu":
                    for found in _mentions(site, {"gelu"}):
                        yield [Edit.replace(node, source.quoted("gelu")), *_replaced(site, found)]


@fixes(*CODES)
def replaced_activation(site: Site) -> Iterator[Edits]:
    """Replace a module or function of torch by the checkpoint's activation."""
    for node in islice(_mentions(site, _names(site)), 6):
        yield _replaced(site, node)


@fixes("gated_mlp")
def without_gate(site: Site) -> Iterator[Edits]:
    """Keep the activated factor of the product, and remove the other with its module.

    The activation is replaced afterwards.
    """
    for product in site.every(ast.BinOp):
        function = enclosing(product, ast.FunctionDef)
        if not isinstance(product.op, ast.Mult) or not isinstance(function, ast.FunctionDef):
            continue
        for kept, dropped in reversed(sides(product)):
            inner = {code_of(a) for call in find(ast.Call, kept) for a in call.args}
            if code_of(dropped) in inner:  # x * sigmoid(x) is an activation
                continue
            activated, other = (_is_activated(function, v) for v in (kept, dropped))
            if activated and not other:
                yield [*Edit.unwrap(product, kept), *_unused_gate(site, function, dropped)]


@fixes("gated_mlp")
def without_gate_in_place(site: Site) -> Iterator[Edits]:
    """Remove `h *= gate` or `h.mul_(gate)`, where h is the result of an activation."""
    for statement in [*site.every(ast.AugAssign), *site.every(ast.Expr)]:
        match statement:
            case ast.AugAssign(ast.Name(kept), ast.Mult(), dropped) | ast.Expr(
                ast.Call(ast.Attribute(ast.Name(kept), "mul_"), [dropped])
            ):
                function = enclosing(statement, ast.FunctionDef)
            case _:
                continue
        if function is not None and _is_activated(function, ast.Name(kept)):
            yield [Edit.remove(statement), *_unused_gate(site, function, dropped)]


def _unused_gate(site: Site, function: ast.FunctionDef, gate: ast.expr) -> Edits:
    """Return the removal of what only a gate reads that is removed, such as its projection."""
    lost: list[ast.AST] = [gate]
    if isinstance(gate, ast.Name):
        lost += assigned_values(function, gate.id, unpacked=True)
    return unused(site.around(gate), lost)


@fixes("gated_mlp")
def without_half(site: Site) -> Iterator[Edits]:
    """Keep the activated half of a wide projection, as of `a, b = self.w12(x).chunk(2, dim=-1)`.

    The activation is replaced afterwards.
    """
    for statement in site.every(ast.Assign):
        match statement:
            case ast.Assign(
                [ast.Tuple([ast.Name(), ast.Name()] as halves)], ast.Call(ast.Attribute()) as call
            ) if called(call) in ("chunk", "split", "tensor_split"):
                of_torch = root(call.func) == "torch"
                tensor = call.args[0] if of_torch else cast(ast.Attribute, call.func).value
                yield from _of_one_half(site, statement, halves, tensor)


def _of_one_half(
    site: Site, statement: ast.Assign, halves: Sequence[ast.expr], tensor: ast.expr
) -> Iterator[Edits]:
    """Yield the product of two halves without one, and half the width of their projection."""
    function = enclosing(statement, ast.FunctionDef)
    projected = tensor if isinstance(tensor, ast.Call) else definition(site, tensor)
    built = definition(site, projected.func) if isinstance(projected, ast.Call) else None
    width = argument(built, 1, "out_features") if isinstance(built, ast.Call) else None
    if function is None or width is None:
        return
    factors = sides(width) if isinstance(width, ast.BinOp) else []
    rests = [rest for number, rest in factors if constant(number) == 2]
    narrowed = code_of(rests[0]) if rests else f"{operand_code(width)} // 2"
    for product in find(ast.BinOp, function):
        for kept, dropped in reversed(sides(product)) if isinstance(product.op, ast.Mult) else ():
            for half, other in itertools.permutations(map(name_of, halves), 2):
                if name_of(dropped) == other and half in variables(kept) and _applies(kept):
                    whole = Edit.replace(statement, f"{half} = {code_of(tensor)}")
                    yield [*Edit.unwrap(product, kept), whole, Edit.replace(width, narrowed)]


def _is_activated(function: ast.FunctionDef, value: ast.expr) -> bool:
    """Return whether a value is the result of an activation, also if it was assigned before."""
    if isinstance(value, ast.Name):
        assigned = assigned_values(function, value.id, unpacked=True)
        return any(not isinstance(v, ast.Name) and _applies(v) for v in assigned)
    return _applies(value)


def _applies(value: ast.expr) -> bool:
    calls = find(ast.Call, value)
    return any(ACTIVATION.search(called(call) or code_of(call.func)) for call in calls)


@fixes(*CODES)
def encoder_activation(site: Site) -> Iterator[Edits]:
    """Pass the activation to torch's own layers, which use ReLU by default."""
    layers = ("TransformerEncoderLayer", "TransformerDecoderLayer")
    for source in site.ordered:
        for call in find_calls(*layers, within=source.tree):
            if argument(call, 4, "activation") is None:
                function = f"lambda x: {_of_torch(site, 'x')}"
                yield [Edit.set_keyword(call, "activation", function)]


@fixes(*CODES)
def replaced_own_activation(site: Site) -> Iterator[Edits]:
    """Replace the user's class or function of another activation where it is used."""
    function, cls = site.function, site.cls_or_none
    owner = cls or function
    if re.search(r"gelu", owner.name, re.I) and not re.search(r"quick|erf", owner.name, re.I):
        return
    if cls is not None and find_calls("Linear", within=cls):
        return
    for node in islice(_mentions(site, {_plain(owner.name)}), 2):
        yield _replaced(site, node, module=cls is not None)


@fixes(*CODES)
def replaced_formula(site: Site) -> Iterator[Edits]:
    """Replace a formula, written in one statement or in several, by the function of torch."""
    yield from reversed(list(_chains(site)))
    for formula in formulas(site, site.statement):
        operands = inputs(site, formula)
        tensors = [o for o in operands if not isinstance(o, ast.Attribute)] or operands
        if len(tensors) == 1:
            new = _of_torch(site, code_of(tensors[0]))
            yield [Edit.replace(formula, _stored(formula, tensors[0], new))]
    statement = site.statement
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        yield [Edit.replace(statement, f"{name} = {_of_torch(site, name)}")]


@fixes(*CODES)
def replaced_attribute(site: Site) -> Iterator[Edits]:
    """Replace whatever the constructor assigns to the attribute that is called on the line."""
    names = {c.func.attr for c in site.calls if isinstance(c.func, ast.Attribute)}
    for node in find(ast.Assign, site.cls):
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Attribute) and target.attr in names:
            if not isinstance(value, ast.Call) or called(value) == "getattr":
                yield [Edit.replace(value, _of_torch(site))]


@fixes("other_activation")
def added_activation(site: Site) -> Iterator[Edits]:
    """Call the activation between the two projections where there is none."""
    if site.values["found"] == "identity" and site.values["expected"] in TORCH:
        yield from _inserted(site)
        yield from _between_items(site)


def _between_items(site: Site) -> Iterator[Edits]:
    """Insert the activation between two items of a Sequential."""
    for sequence in _sequences(site):
        for before, after in pairwise(sequence.args):
            between = site.source.text[span(before)[1] : span(after)[0]]
            yield [Edit.suffix(before, f"{between}{_of_torch(site)}")]


def _inserted(site: Site) -> Iterator[Edits]:
    """Apply an activation to the argument of a projection on the finding's line."""
    modules = unread(site.cls) if site.cls_or_none else []
    unused = next((e.name for e in modules if "gelu" in called(e.built).lower()), "")
    for call in site.calls:
        if len(call.args) != 1 or isinstance(call.args[0], ast.Starred):
            continue
        tensor = code_of(call.args[0])
        new = f"self.{unused}({tensor})" if unused else _of_torch(site, tensor)
        whole = isinstance(site.statement, ast.Assign) and site.statement.value is call
        if whole and isinstance(call.args[0], ast.Name):
            yield [Edit.insert_before(site.statement, f"{tensor} = {new}")]
        else:
            yield [Edit.replace(call.args[0], new)]


def _chains(site: Site) -> Iterator[Edits]:
    """Replace a formula that begins on the finding's line and ends in a later statement."""
    first = site.statement
    if not isinstance(first, ast.Assign) or not variable(first):
        return
    operands = inputs(site, first.value)
    if len(operands) != 1 or operands[0] is first.value or not isinstance(operands[0], ast.Name):
        return
    tensor, derived = operands[0].id, {variable(first)}
    absorbed: list[ast.stmt] = [first]
    for statement in following(first):
        result = ""
        for formula in formulas(site, statement):
            names = {o.id if isinstance(o, ast.Name) else "" for o in inputs(site, formula)}
            if names <= derived | {tensor} and names & derived:
                new = Edit.replace(formula, _of_torch(site, tensor))
                yield [*map(Edit.remove, absorbed), new]
                if isinstance(statement, ast.Assign) and statement.value is formula:
                    result = variable(statement)
        if not result:
            return
        derived.add(result)
        absorbed.append(statement)


def _names(site: Site) -> set[str]:
    """Return the names of the found activation, in lower case and without underscores."""
    found = _plain(str(site.values["found"]).partition(" with")[0].replace(" ", ""))
    return NAMES.get(found, {found})


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _sequences(site: Site) -> list[ast.Call]:
    """Return where the file builds a Sequential, the finding's class first."""
    within = set(ast.walk(site.cls_or_none or site.tree))
    found = find_calls("Sequential", within=site.tree)
    return sorted(found, key=lambda call: call not in within)


def _mentions(site: Site, names: set[str]) -> Iterator[ast.expr]:
    """Yield calls and references of activations with these names, nearest to the line first."""
    seen: set[ast.AST] = set()
    for region in [*site.scopes, *(source.tree for source in site.ordered)]:
        for node in find(ast.expr, region):
            is_read = isinstance(getattr(node, "ctx", None), ast.Load) and not is_self(node)
            if not is_read or _plain(name_of(node)) not in names:
                continue
            parent = parent_of(node)
            if isinstance(parent, ast.Call) and parent.func is node:
                node = parent
            if node not in seen:
                seen.add(node)
                yield node


def _replaced(site: Site, node: ast.expr, module: bool | None = None) -> Edits:
    """Replace the call of an activation, or a reference to it."""
    expected = site.values["expected"]
    func = node.func if isinstance(node, ast.Call) else node
    name = name_of(func)
    is_module = name[:1].isupper() if module is None else module
    base = code_of(func.value) if isinstance(func, ast.Attribute) else ""
    if not isinstance(node, ast.Call):
        tensor = "" if is_module else "x"
        above = parent_of(node)
        within = isinstance(above, (ast.BoolOp, ast.IfExp, ast.Compare))
        function = f"{f'lambda {tensor}'.rstrip()}: {_of_torch(site, tensor, base)}"
        if isinstance(above, ast.stmt) and isinstance(parent_of(above), ast.ClassDef):
            function = f"staticmethod({function})"  # without self, as a function of torch is called
        return [Edit.replace(node, f"({function})" if within else function)]
    if name == TORCH[expected][0 if is_module else 1] and expected == "gelu_new":
        approximate = argument(node, 0 if is_module else 1, "approximate")
        if approximate is not None:
            return [Edit.replace(approximate, source_of(node).quoted("tanh"))]
        if is_module or node.args:
            return [Edit.set_keyword(node, "approximate", source_of(node).quoted("tanh"))]
    if is_module:
        return [Edit.replace(node, _of_torch(site, base=base))]
    owner = func.value if isinstance(func, ast.Attribute) else func
    operand = node.args[0] if node.args else owner
    new = _of_torch(site, code_of(operand), base)
    return [Edit.replace(node, _stored(node, operand, new))]


def _of_torch(site: Site, tensor: str = "", base: str = "") -> str:
    """Return the checkpoint's activation of torch: the function of a tensor, or else a module."""
    expected = site.values["expected"]
    module, function = TORCH[expected]
    name, package = (function, "torch.nn.functional") if tensor else (module, "torch.nn")
    known = base if base.split(".")[-1] == package.split(".")[-1] else site.torch(package)
    keyword = f"approximate={site.source.quoted('tanh')}" if expected == "gelu_new" else ""
    return f"{known}.{name}({', '.join(filter(None, (tensor, keyword)))})"


def _stored(node: ast.expr, tensor: ast.expr, new: str) -> str:
    """Return the new expression, assigned to the tensor if the old one changed it in place."""
    in_place = isinstance(parent_of(node), ast.Expr) and isinstance(tensor, ast.Name)
    return f"{code_of(tensor)} = {new}" if in_place else new
