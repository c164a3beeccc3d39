"""Fixes of the activation of the MLP."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from compat.adaptation.repair.fixes import Edits, Site, fixes
from compat.adaptation.repair.formulas import formulas, inputs, only, unused
from compat.adaptation.repair.source import Edit, Source
from compat.adaptation.repair.syntax import argument, called, name_of
from compat.adaptation.repair.tensors import assigned_values

CODES = ("erf_gelu", "relu", "silu", "other_activation")

# The names in torch of the checkpoint's activation, as a module and as a function.
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
    values, source, statement = site.finding.values, site.source, site.statement
    if not values.get("after"):
        return
    if not values["moved"]:  # there is one before it as well
        yield from _without_item(site)
        for node, inner in _applied(site):
            functions: list[ast.AST] = [node.func] if isinstance(node, ast.Call) else []
            yield [*only(source, node, inner), *unused(site, functions)]
        return
    yield from _earlier_item(site)
    for place in site.everywhere[1:]:
        if place.source is source and _is_of_one_variable([place.statement, statement]):
            start, end = source.span(statement)
            line = source.text[start : source.text.find("\n", end)]
            yield [source.insert_before(place.statement, line), source.remove(statement)]
    for node, inner in _applied(site):
        without = only(source, node, inner)
        dropped = unused(site, [node.func]) if isinstance(node, ast.Call) else []
        for place in site.everywhere[::-1]:
            if place.function is site.function:  # it can be called there as it was
                (start, end), (first, last) = source.span(node), source.span(inner)
                code = source.text[start:first], source.text[last:end]
                yield from ([*without, *edits] for edits in _on_operand(place, node, *code))
            if values["expected"] in TORCH:
                code = _function(place, "{}").partition("{}")[::2]
                yield from (
                    [*without, *dropped, *edits] for edits in _on_operand(place, node, *code)
                )
        if values["expected"] in TORCH:
            yield from ([*without, *dropped, *edits] for edits in _between_items(site))


def _without_item(site: Site) -> Iterator[Edits]:
    """Remove an item of a Sequential that begins on the finding's line."""
    for sequence in site.source.nodes(ast.Call):
        if called(sequence) == "Sequential":
            for item in sequence.args[2:]:
                if item.lineno <= site.line <= (item.end_lineno or 0):
                    yield [site.source.remove_argument(sequence, item)]


def _earlier_item(site: Site) -> Iterator[Edits]:
    """Move an item of a Sequential in front of a linear layer."""
    source = site.source
    for sequence in _nearest(site, source.nodes(ast.Call)):
        items = sequence.args if called(sequence) == "Sequential" else []
        linear = [i for i, n in enumerate(items) if isinstance(n, ast.Call) and "Lin" in called(n)]
        for j in linear[:0:-1]:
            for k in range(j + 1, len(items)):
                order = [items[k], *items[j:k]]
                pairs = zip(items[j : k + 1], order, strict=True)
                yield [source.replace(old, source.code(new)) for old, new in pairs]


def _is_of_one_variable(statements: list[ast.stmt]) -> bool:
    """Return whether each statement assigns the same variable a function of itself."""
    names = set()
    for statement in statements:
        match statement:
            case ast.Assign([ast.Name(name)], value):
                read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
                names.add(name if name in read else "")
            case _:
                names.add("")
    return len(names) == 1 and "" not in names


def _applied(site: Site) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the finding's expressions that may be the activation, and its operand."""
    for call in site.calls:
        if call.args and not isinstance(call.args[0], ast.Starred):
            yield call, call.args[0]
    for formula in formulas(site, site.statement):
        operands = inputs(site, formula)
        if len(operands) == 1 and operands[0] is not formula:
            yield formula, operands[0]


def _on_operand(place: Site, activation: ast.expr, before: str, after: str) -> Iterator[Edits]:
    """Apply an activation to an operand of a product or of a call, such as of `c_proj(x)`.

    Args:
        place: the line of the projection.
        activation: the expression that is removed.
        before, after: the code of the activation around its operand.
    """
    source = place.source
    operands = [call.args[0] for call in place.calls if call.args and call is not activation]
    products = source.nodes(ast.BinOp, place.statement)
    operands += [node.left for node in products if isinstance(node.op, ast.MatMult)]
    for operand in operands:
        if activation not in set(ast.walk(operand)) and not isinstance(operand, ast.Starred):
            start, end = source.span(operand)
            yield [Edit(source.file, start, start, before), Edit(source.file, end, end, after)]


@fixes(*CODES)
def activation_by_name(site: Site) -> Iterator[Edits]:
    """Replace the name of an activation by that of the tanh approximation of GELU."""
    if site.finding.values["expected"] != "gelu_new":
        return
    for source in _ordered(site):
        strings = {n: n.value for n in source.nodes(ast.Constant) if isinstance(n.value, str)}
        known = [name for name in STRINGS if name in strings.values()]
        known += ["gelu_new"] if "ACT2FN" in source.text and "gelu_new" not in known else []
        for node, value in strings.items():
            if value.lower().replace("_", "") not in _names(site):
                continue
            call = source.parent(node, ast.Call)
            if call is not None and called(call).startswith("Transformer"):
                yield [source.replace(node, f"lambda x: {_function(site, 'x')}")]
            elif isinstance(above := source.parents.get(node), ast.Subscript):
                yield from ([source.replace(node, source.quoted(name))] for name in known)
                yield [source.replace(above, _module(site))]
            elif not isinstance(above, (ast.Compare, ast.Dict)):
                yield from ([source.replace(node, source.quoted(name))] for name in known)
                if value != "gelu":
                    for other, found in _mentions(site, {"gelu"}):
                        renamed = source.replace(node, source.quoted("gelu"))
                        yield [renamed, *_replaced(site, other, found)]


@fixes(*CODES)
def replaced_activation(site: Site) -> Iterator[Edits]:
    """Replace a module or function of torch by the checkpoint's activation."""
    if site.finding.values["expected"] in TORCH:
        mentions = islice(_mentions(site, _names(site)), 6)
        yield from (_replaced(site, source, node) for source, node in mentions)


@fixes("gated_mlp")
def without_gate(site: Site) -> Iterator[Edits]:
    """Keep the activated factor of the product, and remove the other with its module.

    The activation is replaced afterwards.
    """
    for source, product in site.every(ast.BinOp):
        function = source.parent(product, ast.FunctionDef)
        if not isinstance(product.op, ast.Mult) or not isinstance(function, ast.FunctionDef):
            continue
        for kept, dropped in ((product.left, product.right), (product.right, product.left)):
            inner = {source.code(a) for call in source.nodes(ast.Call, kept) for a in call.args}
            if source.code(dropped) in inner:  # x * sigmoid(x) is an activation
                continue
            if _is_activated(source, function, kept) and not _is_activated(
                source, function, dropped
            ):
                at = replace(site.finding, file=source.file, line=product.lineno)
                named = dropped.id if isinstance(dropped, ast.Name) else ""
                lost: list[ast.AST] = [dropped]
                lost += [value for value, _ in assigned_values(source, function, named)]
                edits = unused(replace(site, finding=at), lost)
                yield [*source.unwrap(product, kept), *edits]


def _is_activated(source: Source, function: ast.FunctionDef, value: ast.expr) -> bool:
    """Return whether a value is the result of an activation, also if it was assigned before."""
    if isinstance(value, ast.Name):
        assigned = [v for v, _ in assigned_values(source, function, value.id)]
        return any(not isinstance(v, ast.Name) and _applies(source, v) for v in assigned)
    return _applies(source, value)


def _applies(source: Source, value: ast.expr) -> bool:
    calls = source.nodes(ast.Call, value)
    return any(ACTIVATION.search(called(call) or source.code(call.func)) for call in calls)


@fixes(*CODES)
def encoder_activation(site: Site) -> Iterator[Edits]:
    """Pass the activation to torch's own layers, which use ReLU by default."""
    for source in _ordered(site):
        for call in source.nodes(ast.Call):
            layer = re.fullmatch("Transformer(Encoder|Decoder)Layer", called(call))
            if layer and argument(call, 4, "activation") is None:
                function = f"lambda x: {_function(site, 'x')}"
                yield [source.set_keyword(call, "activation", function)]


@fixes(*CODES)
def replaced_own_activation(site: Site) -> Iterator[Edits]:
    """Replace the user's class or function of another activation where it is used."""
    if site.finding.values["expected"] not in TORCH or site.function is None:
        return
    owner = site.cls or site.function
    if re.search(r"gelu", owner.name, re.I) and not re.search(r"quick|erf", owner.name, re.I):
        return
    if site.cls is not None and any(
        called(c) == "Linear" for c in site.source.nodes(ast.Call, owner)
    ):
        return
    name = {owner.name.lower().replace("_", "")}
    for source, node in islice(_mentions(site, name), 2):
        yield _replaced(site, source, node, module=site.cls is not None)


@fixes(*CODES)
def replaced_formula(site: Site) -> Iterator[Edits]:
    """Replace a formula, written in one statement or in several, by the function of torch."""
    if site.finding.values["expected"] not in TORCH:
        return
    yield from reversed(list(_chains(site)))
    for formula in formulas(site, site.statement):
        operands = inputs(site, formula)
        tensors = [o for o in operands if not isinstance(o, ast.Attribute)] or operands
        if len(tensors) == 1:
            new = _function(site, site.source.code(tensors[0]))
            yield [site.source.replace(formula, _stored(site, formula, tensors[0], new))]
    statement = site.statement
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        yield [site.source.replace(statement, f"{name} = {_function(site, name)}")]


@fixes(*CODES)
def replaced_attribute(site: Site) -> Iterator[Edits]:
    """Replace whatever the constructor assigns to the attribute that is called on the line."""
    if site.cls is None or site.finding.values["expected"] not in TORCH:
        return
    names = {c.func.attr for c in site.calls if isinstance(c.func, ast.Attribute)}
    for node in site.source.nodes(ast.Assign, site.cls):
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Attribute) and target.attr in names:
            if not isinstance(value, ast.Call) or called(value) == "getattr":
                yield [site.source.replace(value, _module(site))]


@fixes("other_activation")
def added_activation(site: Site) -> Iterator[Edits]:
    """Call the activation between the two projections where there is none."""
    values = site.finding.values
    if values["found"] != "identity" or values["expected"] not in TORCH:
        return
    yield from _inserted(site)
    yield from _between_items(site)


def _between_items(site: Site) -> Iterator[Edits]:
    """Insert the activation between two items of a Sequential."""
    for sequence in _nearest(site, site.source.nodes(ast.Call)):
        if called(sequence) == "Sequential" and len(sequence.args) > 1:
            new = _module(site, site.torch("torch.nn"))
            for before, after in zip(sequence.args, sequence.args[1:], strict=False):
                end, start = site.source.span(before)[1], site.source.span(after)[0]
                gap = site.source.text[end:start]
                edit = site.source.replace(before, f"{site.source.code(before)}{gap}{new}")
                yield [edit]


def _inserted(site: Site) -> Iterator[Edits]:
    """Apply an activation to the argument of a projection on the finding's line."""
    unused = _unused_module(site)
    for call in site.calls:
        if len(call.args) != 1 or isinstance(call.args[0], ast.Starred):
            continue
        tensor = site.source.code(call.args[0])
        new = f"self.{unused}({tensor})" if unused else _function(site, tensor)
        whole = isinstance(site.statement, ast.Assign) and site.statement.value is call
        if whole and isinstance(call.args[0], ast.Name):
            yield [site.source.insert_before(site.statement, f"{tensor} = {new}")]
        else:
            yield [site.source.replace(call.args[0], new)]


def _unused_module(site: Site) -> str | None:
    """Return the attribute of the class that holds an activation and is not used."""
    if site.cls is None:
        return None
    for node in site.source.nodes(ast.Assign, site.cls):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and isinstance(node.value, ast.Call):
            read = [a for a in site.source.nodes(ast.Attribute, site.cls) if a.attr == target.attr]
            if "gelu" in called(node.value).lower() and len(read) == 1:
                return target.attr
    return None


def _chains(site: Site) -> Iterator[Edits]:
    """Replace a formula that begins on the finding's line and ends in a later statement."""
    source, first = site.source, site.statement
    if not isinstance(first, ast.Assign) or not isinstance(first.targets[0], ast.Name):
        return
    operands = inputs(site, first.value)
    if len(operands) != 1 or operands[0] is first.value or not isinstance(operands[0], ast.Name):
        return
    tensor, derived = operands[0].id, {first.targets[0].id}
    block, absorbed = source.block(first), [first]
    for statement in block[block.index(first) + 1 :]:
        whole: ast.stmt | None = None
        for formula in formulas(site, statement):
            names = {o.id if isinstance(o, ast.Name) else "" for o in inputs(site, formula)}
            if names <= derived | {tensor} and names & derived:
                new = source.replace(formula, _function(site, tensor))
                yield [*(source.remove(node) for node in absorbed), new]
                if isinstance(statement, ast.Assign) and statement.value is formula:
                    whole = statement
        if not isinstance(whole, ast.Assign) or not isinstance(whole.targets[0], ast.Name):
            return
        derived.add(whole.targets[0].id)
        absorbed.append(whole)


def _names(site: Site) -> set[str]:
    """Return the names of the found activation, in lower case and without underscores."""
    found = str(site.finding.values["found"]).partition(" with")[0]
    found = found.replace("_", "").replace(" ", "").lower()
    return NAMES.get(found, {found})


def _ordered(site: Site) -> list[Source]:
    """Return the sources, the finding's first."""
    return sorted(site.sources.values(), key=lambda source: source is not site.source)


def _nearest(site: Site, nodes: list[ast.Call]) -> list[ast.Call]:
    """Return the nodes in the finding's class, then the others."""
    within = set(ast.walk(site.cls)) if site.cls is not None else set()
    return sorted(nodes, key=lambda node: node not in within)


def _mentions(site: Site, names: set[str]) -> Iterator[tuple[Source, ast.expr]]:
    """Yield calls and references of activations with these names, nearest to the line first."""
    around: list[ast.AST | None] = [site.statement, site.function, site.cls, site.source.tree]
    seen: set[ast.AST] = set()
    regions = [(site.source, node) for node in around if node is not None]
    regions += [(source, source.tree) for source in _ordered(site)[1:]]
    for source, region in regions:
        for node in source.nodes(ast.expr, region):
            if node in seen or not _is_mention(site, source, node, names):
                continue
            parent = source.parents.get(node)
            if isinstance(parent, ast.Call) and parent.func is node:
                node = parent
            if node not in seen:
                seen.add(node)
                yield source, node


def _is_mention(site: Site, source: Source, node: ast.expr, names: set[str]) -> bool:
    if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
        return False
    if name_of(node).lower().replace("_", "") not in names:
        return False
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id != "self"
    return True


def _replaced(site: Site, source: Source, node: ast.expr, module: bool | None = None) -> Edits:
    """Replace the call of an activation, or a reference to it."""
    expected = site.finding.values["expected"]
    func = node.func if isinstance(node, ast.Call) else node
    name = name_of(func)
    is_module = name[:1].isupper() if module is None else module
    base = source.code(func.value) if isinstance(func, ast.Attribute) else ""
    if not isinstance(node, ast.Call):
        tensor = "" if is_module else " x"
        new = _module(site, base) if is_module else _function(site, "x", base)
        above = source.parents.get(node)
        within = isinstance(above, (ast.BoolOp, ast.IfExp, ast.Compare))
        function = f"lambda{tensor}: {new}"
        if isinstance(above, ast.stmt) and isinstance(source.parents.get(above), ast.ClassDef):
            function = f"staticmethod({function})"  # without self, as a function of torch is called
        return [source.replace(node, f"({function})" if within else function)]
    if name == TORCH[expected][0 if is_module else 1] and expected == "gelu_new":
        approximate = argument(node, 0 if is_module else 1, "approximate")
        if approximate is not None:
            return [source.replace(approximate, source.quoted("tanh"))]
        if is_module or node.args:
            return [source.set_keyword(node, "approximate", source.quoted("tanh"))]
    if is_module:
        return [source.replace(node, _module(site, base))]
    tensor_node = (
        node.args[0] if node.args else func.value if isinstance(func, ast.Attribute) else func
    )
    new = _function(site, source.code(tensor_node), base)
    return [source.replace(node, _stored(site, node, tensor_node, new))]


def _module(site: Site, base: str = "") -> str:
    """Return the checkpoint's activation as a module of torch."""
    expected = site.finding.values["expected"]
    known = base if base.split(".")[-1] == "nn" else site.torch("torch.nn")
    keyword = f"approximate={site.source.quoted('tanh')}" if expected == "gelu_new" else ""
    return f"{known}.{TORCH[expected][0]}({keyword})"


def _function(site: Site, tensor: str, base: str = "") -> str:
    """Return the checkpoint's activation of a tensor as a function of torch."""
    expected = site.finding.values["expected"]
    known = base if base.split(".")[-1] == "functional" else site.torch("torch.nn.functional")
    keyword = f", approximate={site.source.quoted('tanh')}" if expected == "gelu_new" else ""
    return f"{known}.{TORCH[expected][1]}({tensor}{keyword})"


def _stored(site: Site, node: ast.expr, tensor: ast.expr, new: str) -> str:
    """Return the new expression, assigned to the tensor if the old one changed it in place."""
    in_place = isinstance(site.source.parents.get(node), ast.Expr) and isinstance(tensor, ast.Name)
    return f"{site.source.code(tensor)} = {new}" if in_place else new
