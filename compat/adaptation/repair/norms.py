"""Fixes of the formulas of norms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.source import (
    ancestors,
    code_around,
    code_of,
    find,
    find_calls,
    operand_code,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    argument,
    assignments,
    called,
    constant,
    constructor,
    is_product,
    is_self,
    is_sum,
    name_of,
    sides,
)
from compat.adaptation.repair.values import (
    attempts,
    calls_of,
    calls_of_class,
    classes,
    constructions,
    functions,
    is_method,
    numeral,
    operand,
    operands,
    origins,
    plus,
)

SPREADS = ("var", "std", "var_mean", "std_mean")
EPS_PLACES = {"LayerNorm": 1, "layer_norm": 4, "native_layer_norm": 4, "RMSNorm": 1, "rms_norm": 3}
EPS_KEYWORDS = {"TransformerEncoderLayer": "layer_norm_eps"}
LAYER_NORM_EPS = 1e-5  # the default of torch
MAX_EPS = 0.1


@fixes("norm_axis")
def over_channels(site: Site) -> Iterator[Edits]:
    """Reduce the last axis."""
    edits = []
    for call in calls_of(site, *SPREADS, "mean", "sum"):
        axes = [k.value for k in call.keywords if k.arg in ("dim", "axis")]
        for axis in axes or call.args:
            value = constant(axis)
            if type(value) is int and value != -1:
                edits.append(Edit.replace(axis, "-1"))
    yield from attempts(site, edits)


@fixes("bias_before_scale")
def bias_added_last(site: Site) -> Iterator[Edits]:
    """Write `(x + bias) * weight` as `x * weight + bias`."""
    for product in find(ast.BinOp, site.within):
        for total, weight in sides(product) if is_product(product) else ():
            for bias, x in sides(total) if is_sum(total) else ():
                if is_self(bias) and not is_self(x):
                    scaled = f"{operand_code(x)} * {code_of(weight)} + {code_of(bias)}"
                    yield [Edit.replace_group(product, scaled)]


# The variance


@fixes("unbiased_var")
def biased_variance(site: Site) -> Iterator[Edits]:
    """Let `var` and `std` divide by C."""
    yield from attempts(site, [_biased(call) for call in calls_of(site, *SPREADS)])


def _biased(call: ast.Call) -> Edit:
    for keyword in call.keywords:
        if keyword.arg in ("unbiased", "correction"):
            return Edit.replace(keyword.value, "0" if keyword.arg == "correction" else "False")
    for flag in call.args:
        if isinstance(constant(flag), bool):
            return Edit.replace(flag, "False")
    return Edit.set_keyword(call, "unbiased", "False")


@fixes("unbiased_var")
def divide_by_width(site: Site) -> Iterator[Edits]:
    """Remove the `- 1` of a divisor."""
    edits = [
        Edit.replace_group(node, code_of(node.left))
        for node in site.every(ast.BinOp)
        if isinstance(node.op, ast.Sub) and constant(node.right) == 1
    ]  # fmt: skip
    yield from attempts(site, edits)


# eps


def _is_close(value: object, number: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(float(str(value)) - number) <= 1e-3 * abs(number)


@fixes("eps_value")
def eps_literal(site: Site) -> Iterator[Edits]:
    """Change the literal that eps comes from, or else the expression itself."""
    expected = numeral(site.values["expected"])
    found = list(_eps_expressions(site))
    written = [place for eps in found for place in _literals(site, eps)]
    edits = [Edit.replace(node, expected) for node in written or found]
    yield from attempts(site, edits)


def _eps_expressions(site: Site) -> Iterator[ast.expr]:
    """Yield the arguments and terms that are an eps: those of the finding's function first."""
    for source in site.ordered:
        for call in find(ast.Call, source.tree):
            for keyword in call.keywords:
                if keyword.arg and "eps" in keyword.arg:
                    yield keyword.value
            place = EPS_PLACES.get(called(call))
            if place is not None and len(call.args) > place:
                yield call.args[place]
    yield from (term.eps for term in _terms(site))


@fixes("eps_value")
def eps_argument(site: Site) -> Iterator[Edits]:
    """Pass eps to the norms of torch that use their default."""
    if not _is_close(LAYER_NORM_EPS, site.values["found"]):
        return
    expected, edits = numeral(site.values["expected"]), []
    for call in site.every(ast.Call):
        name = called(call)
        keyword = EPS_KEYWORDS.get(name, "eps")
        takes_eps = name in EPS_PLACES or name in EPS_KEYWORDS
        if takes_eps and argument(call, EPS_PLACES.get(name, 99), keyword) is None:
            edits.append(Edit.set_keyword(call, keyword, expected))
    yield from attempts(site, edits)


@fixes("eps_value")
def eps_in_root(site: Site) -> Iterator[Edits]:
    """Add eps to a variance that has none."""
    expected = numeral(site.values["expected"])
    for node in find(ast.expr, site.function) if not site.values["found"] else ():
        if (inner := _variance(site, node)) is not None:
            yield [plus(inner, expected)]
        elif (text := _root_of(site, node, expected)) is not None:
            yield [Edit.replace(node, text)]


@fixes("eps_value")
def any_literal(site: Site) -> Iterator[Edits]:
    """Change every number of the value, or one of them."""
    found, new = site.values["found"], numeral(site.values["expected"])
    if 0 < found <= MAX_EPS:
        every = (node for node in site.every(ast.Constant) if _is_close(node.value, found))
        yield from attempts(site, [Edit.replace(node, new) for node in every])


class Term(NamedTuple):
    """A sum with eps: the sum, its other operand, and eps."""

    whole: ast.expr | ast.AugAssign
    base: ast.expr
    eps: ast.expr


def _terms(site: Site) -> Iterator[Term]:
    """Yield the sums with eps of the finding's class or file, those of its line first."""
    nodes = find(ast.AST, site.region)
    if site.cls_or_none is not None:
        nodes += find(ast.AST, site.cls)
    nodes = list(dict.fromkeys(nodes))
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0) != site.line):
        match node:
            case ast.BinOp(left, ast.Add(), right):
                pairs = [(left, right), (right, left)]
            case ast.AugAssign(target, ast.Add(), value):
                pairs = [(target, value)]
            case ast.Call(_, [base, eps]) | ast.Call(ast.Attribute(base), [eps, *_]):
                pairs = [(base, eps)] if called(node) in ("add", "add_") else []
            case _:
                continue
        yield from (Term(node, base, eps) for base, eps in pairs if _is_eps(site, eps))


def _is_eps(site: Site, node: ast.expr) -> bool:
    """Return whether an expression is a small number, or named like one."""
    values = [constant(literal) for literal in origins(site, node)]
    return "eps" in name_of(node) or any(isinstance(v, float) and 0 < v <= MAX_EPS for v in values)


@fixes("eps_outside_sqrt")
def eps_inside(site: Site) -> Iterator[Edits]:
    """Move eps from the root into it; also with the checkpoint's eps."""
    found, expected = site.values["found"], site.values["expected"]
    for term in _terms(site):
        yield from _moved(site, term, code_of(term.eps))
        if not _is_close(found, expected):
            written = _literals(site, term.eps)
            other = [literal for literal in written if literal is not term.eps]
            eps = code_of(term.eps) if other == written else numeral(expected)
            changed = [Edit.replace(node, numeral(expected)) for node in other]
            yield from ([*edits, *changed] for edits in _moved(site, term, eps))


def _literals(site: Site, eps: ast.expr) -> list[ast.expr]:
    """Return the literals that an eps gets the value of the finding from."""
    found = site.values["found"]
    return [literal for literal in origins(site, eps) if _is_close(constant(literal), found)]


def _moved(site: Site, term: Term, eps: str) -> Iterator[Edits]:
    """Yield edits that move eps into the root: where it is computed, or else a new root."""
    whole, base = term.whole, code_of(term.base)
    without = Edit.remove(whole) if isinstance(whole, ast.stmt) else Edit.replace_group(whole, base)
    if isinstance(whole, ast.expr) and (text := _root_of(site, term.base, eps)) is not None:
        yield [Edit.replace_group(whole, text)]
    else:
        for value in assignments(site.region, base):
            if (text := _root_of(site, value, eps)) is not None:
                yield [Edit.replace(value, text), without]
    if isinstance(whole, ast.expr):
        root = f"{site.torch('torch.sqrt')}({operand_code(term.base)}**2 + {eps})"
        yield [Edit.replace_group(whole, root)]


def _variance(site: Site, node: ast.expr) -> ast.expr | None:
    """Return the operand of a square root."""
    match node:
        case ast.BinOp(base, ast.Pow(), exponent) if constant(exponent) in (0.5, -0.5):
            return base
        case ast.Call() if called(node).rstrip("_") in ("sqrt", "rsqrt"):
            return operand(site, node)
        case ast.Call() if called(node).rstrip("_") == "pow":
            base, *exponents = operands(site, node)
            is_root = [constant(each) in (0.5, -0.5) for each in exponents] == [True]
            return base if is_root else None
    return None


def _root_of(site: Site, node: ast.expr, eps: str) -> str | None:
    """Return the code of a root, or of a standard deviation, with eps under the root."""
    if isinstance(node, ast.Call) and called(node) == "std":
        _, arguments = code_around(node, node.func)
        var = f"{code_of(node.func).removesuffix('std')}var{arguments}"
        return f"{site.torch('torch.sqrt')}({var} + {eps})"
    inner = _variance(site, node)
    return None if inner is None else plus(inner, eps).text.join(code_around(node, inner))


# RMSNorm


@fixes("rmsnorm", "no_ln_bias")
def layer_norm_of_torch(site: Site) -> Iterator[Edits]:
    """Use torch's LayerNorm instead of its RMSNorm."""
    edits: Edits = []
    imports: Edits = []
    for name, new in (("RMSNorm", "LayerNorm"), ("rms_norm", "layer_norm")):
        if any(classes(site, name)) or functions(site, name):
            continue
        imports += [
            Edit.replace(alias, new)
            for statement in site.every(ast.ImportFrom)
            for alias in statement.names
            if alias.name == name and new not in [other.name for other in statement.names]
        ]  # fmt: skip
        for call in calls_of(site, name):
            edits.append(Edit.rename(call.func, new))
            if name == "rms_norm" and len(call.args) > 3:  # where layer_norm has its bias
                edits.append(Edit.prefix(call.args[3], "eps="))
    yield from [[*imports, *edits]] if imports else attempts(site, edits)


@fixes("rmsnorm", "no_ln_bias")
def module_of_torch_for_rms(site: Site) -> Iterator[Edits]:
    """Replace a class that is named for RMSNorm by nn.LayerNorm."""
    yield from _module_of_torch(site, named_rms=True)


@fixes("rmsnorm")
def subtract_mean(site: Site) -> Iterator[Edits]:
    """Subtract the mean before the mean square is computed."""
    called_here = [cls for call in site.calls for cls in classes(site, called(call))]
    scopes = [*site.scopes, *called_here]
    for node in [node for scope in scopes for node in find(ast.expr, scope)]:
        if (x := _squared(site, node)) is not None:
            new = f"{x} = {x} - {_mean_like(site, node, x)}"
            yield [Edit.insert_before(statement_of(node), new)]


def _squared(site: Site, node: ast.expr) -> str | None:
    """Return the variable of which an expression is the square or the norm."""
    base: ast.expr | None = None
    match node:
        case ast.BinOp(left, ast.Pow(), right) if constant(right) == 2:
            base = left
        case ast.BinOp(left, ast.Mult(), right) if ast.dump(left) == ast.dump(right):
            base = left
        case ast.Call(_, [tensor, *_]) if called(node) in ("vector_norm", "normalize"):
            base = tensor
        case ast.Call() if called(node) in ("square", "norm") and not is_self(node.func):
            base = operand(site, node)
        case ast.Call() if called(node) == "pow":
            tensor, *exponents = operands(site, node)
            base = tensor if [constant(each) for each in exponents] == [2] else None
    while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute):
        base = base.func.value  # `x` of `x.float()`
    return base.id if isinstance(base, ast.Name) else None


def _mean_like(site: Site, square: ast.expr, x: str) -> str:
    """Return the mean of x, written like the mean of its square."""
    for above in ancestors(square):
        if isinstance(above, ast.stmt):
            break
        if isinstance(above, ast.Call) and called(above) == "mean":
            _, *rest = operands(site, above)
            others = ", ".join(code_of(each) for each in [*rest, *above.keywords])
            if is_method(site, above):
                return f"{x}.mean({others})"
            return f"{code_of(above.func)}({x}, {others})"
    return f"{x}.mean(-1, keepdim=True)"


@fixes("rmsnorm", "other_norm")
def module_of_torch(site: Site) -> Iterator[Edits]:
    """Replace a hand-written norm by nn.LayerNorm."""
    yield from _module_of_torch(site, named_rms=False)


def _module_of_torch(site: Site, *, named_rms: bool) -> Iterator[Edits]:
    eps, module = site.config.layer_norm_epsilon, site.torch("torch.nn.LayerNorm")
    keyword = "" if _is_close(LAYER_NORM_EPS, eps) else f", eps={numeral(eps)}"
    names = [site.cls.name] if site.cls_or_none else []
    names += [called(call) for call in constructions(site)]
    for name in dict.fromkeys(names):
        if named_rms and "rms" not in name.lower():
            continue
        for cls in classes(site, name):
            yield [
                Edit.replace(call, f"{module}({width}{keyword})")
                for call in calls_of_class(site, cls)
                if (width := _width(cls, call)) is not None
            ]


def _width(cls: ast.ClassDef, call: ast.Call) -> str | None:
    """Return the width of a norm that a call builds: what its class creates a parameter of."""
    if (function := constructor(cls)) is None:
        return None
    names = [each.arg for each in function.args.args[1:]]
    creators = ("ones", "zeros", "empty", "full", "tensor", "rand", "randn")
    for created in [each for each in find_calls(*creators, within=function) if each.args]:
        shape = created.args[0]
        if isinstance(shape, ast.BinOp) and isinstance(shape.left, ast.List):
            shape = shape.right  # [1.0] * width
        if isinstance(shape, (ast.Tuple, ast.List)):
            shape = shape.elts[-1]
        name = next((n.id for n in ast.walk(shape) if isinstance(n, ast.Name)), "")
        if name in names:
            passed = argument(call, names.index(name), name)
            if passed is not None and isinstance(shape, (ast.Name, ast.Attribute, ast.Subscript)):
                return code_of(passed) + code_of(shape).removeprefix(name)
    return None
