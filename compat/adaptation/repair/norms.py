"""Fixes of the formulas of norms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from compat.adaptation.repair.fixes import Edits, Site, fixes
from compat.adaptation.repair.source import Edit, Source
from compat.adaptation.repair.syntax import (
    argument,
    assignments,
    called,
    constant,
    constructor,
    is_self,
    name_of,
    self_assignments,
)
from compat.adaptation.repair.values import (
    Written,
    attempts,
    calls_of,
    classes,
    numeral,
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
    calls = [
        (source, call) for source, call in site.every(ast.Call)
        if called(call) in (*SPREADS, "mean", "sum")
    ]  # fmt: skip
    edits = []
    for source, call in calls:
        axes = [k.value for k in call.keywords if k.arg in ("dim", "axis")]
        for axis in axes or call.args:
            value = constant(axis)
            if type(value) is int and value != -1:
                edits.append(source.replace(axis, "-1"))
    yield from attempts(site, edits)


# The variance


@fixes("unbiased_var")
def biased_variance(site: Site) -> Iterator[Edits]:
    """Let `var` and `std` divide by C."""
    calls = [
        (source, call) for source, call in site.every(ast.Call)
        if called(call) in SPREADS
    ]  # fmt: skip
    yield from attempts(site, [_biased(source, call) for source, call in calls])


def _biased(source: Source, call: ast.Call) -> Edit:
    for keyword in call.keywords:
        if keyword.arg in ("unbiased", "correction"):
            return source.replace(keyword.value, "0" if keyword.arg == "correction" else "False")
    flags = [each for each in call.args if isinstance(constant(each), bool)]
    return (
        source.replace(flags[0], "False")
        if flags
        else source.set_keyword(call, "unbiased", "False")
    )


@fixes("unbiased_var")
def divide_by_width(site: Site) -> Iterator[Edits]:
    """Remove the `- 1` of a divisor."""
    edits = [
        source.replace_group(node, source.code(node.left))
        for source, node in site.every(ast.BinOp)
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
    expected = numeral(site.finding.values["expected"])
    found = list(_eps_expressions(site))
    written = [
        place for source, node in found for place in origins(site, source, node)
        if _is_close(constant(place.node), site.finding.values["found"])
    ]  # fmt: skip
    yield from attempts(site, [source.replace(node, expected) for source, node in written])
    if not written:
        direct = [source.replace(node, expected) for source, node in found]
        yield from attempts(site, direct)


def _eps_expressions(site: Site) -> Iterator[Written]:
    """Yield the arguments and terms that are an eps: those of the finding's function first."""
    sources = sorted(site.sources.values(), key=lambda source: source is not site.source)
    for source in sources:
        for call in source.nodes(ast.Call):
            for keyword in call.keywords:
                if keyword.arg and "eps" in keyword.arg:
                    yield Written(source, keyword.value)
            place = EPS_PLACES.get(called(call))
            if place is not None and len(call.args) > place:
                yield Written(source, call.args[place])
    for term in _terms(site):
        yield Written(site.source, term.eps)


@fixes("eps_value")
def eps_argument(site: Site) -> Iterator[Edits]:
    """Pass eps to the norms of torch that use their default."""
    if not _is_close(LAYER_NORM_EPS, site.finding.values["found"]):
        return
    expected, edits = numeral(site.finding.values["expected"]), []
    for source, call in site.every(ast.Call):
        name = called(call)
        keyword = EPS_KEYWORDS.get(name, "eps")
        takes_eps = name in EPS_PLACES or name in EPS_KEYWORDS
        if takes_eps and argument(call, EPS_PLACES.get(name, 99), keyword) is None:
            edits.append(source.set_keyword(call, keyword, expected))
    yield from attempts(site, edits)


@fixes("eps_value")
def eps_in_root(site: Site) -> Iterator[Edits]:
    """Add eps to a variance that has none."""
    if site.finding.values["found"] or site.function is None:
        return
    expected = numeral(site.finding.values["expected"])
    for node in site.source.nodes(ast.expr, site.function):
        inner = _variance(node)
        if inner is not None:
            yield [plus(site.source, inner, expected)]
        elif _is_std(node) and (text := _root_of(site, node, expected)) is not None:
            yield [site.source.replace(node, text)]


@fixes("eps_value")
def any_literal(site: Site) -> Iterator[Edits]:
    """Change every number of the value, or one of them."""
    found, expected = site.finding.values["found"], site.finding.values["expected"]
    if 0 < found <= MAX_EPS:
        edits = [
            source.replace(node, numeral(expected))
            for source, node in site.every(ast.Constant)
            if _is_close(node.value, found)
        ]  # fmt: skip
        yield from attempts(site, edits)


class Term(NamedTuple):
    """A sum with eps: the sum, its other operand, and eps."""

    whole: ast.expr | ast.AugAssign
    base: ast.expr
    eps: ast.expr


def _terms(site: Site) -> Iterator[Term]:
    """Yield the sums with eps of the finding's class or file, those of its line first."""
    source = site.source
    nodes = source.nodes(ast.AST, site.function or source.tree)
    if site.cls is not None:
        nodes += source.nodes(ast.AST, site.cls)
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
    values = [constant(place.node) for place in origins(site, site.source, node)]
    return "eps" in name_of(node) or any(isinstance(v, float) and 0 < v <= MAX_EPS for v in values)


@fixes("eps_outside_sqrt")
def eps_inside(site: Site) -> Iterator[Edits]:
    """Move eps from the root into it; also with the checkpoint's eps."""
    found, expected = site.finding.values["found"], site.finding.values["expected"]
    for term in _terms(site):
        yield from _moved(site, term, site.source.code(term.eps))
        if not _is_close(found, expected):
            written = _eps_written(site, term.eps)
            is_literal = any(place.node is term.eps for place in written)
            eps = numeral(expected) if is_literal else site.source.code(term.eps)
            other = [place for place in written if place.node is not term.eps]
            changed = [source.replace(node, numeral(expected)) for source, node in other]
            yield from ([*edits, *changed] for edits in _moved(site, term, eps))


def _eps_written(site: Site, eps: ast.expr) -> list[Written]:
    """Return the literals that an eps of the finding's file gets the value of the finding from."""
    found = site.finding.values["found"]
    places = origins(site, site.source, eps)
    return [place for place in places if _is_close(constant(place.node), found)]


def _moved(site: Site, term: Term, eps: str) -> Iterator[Edits]:
    """Yield edits that move eps into the root: where it is computed, or else a new root."""
    source = site.source
    if isinstance(term.whole, ast.AugAssign):
        for value in assignments(site.function or source.tree, source.code(term.base)):
            if (text := _root_of(site, value, eps)) is not None:
                yield [source.replace(value, text), source.remove(term.whole)]
        return
    if (text := _root_of(site, term.base, eps)) is not None:
        yield [source.replace_group(term.whole, text)]
    elif isinstance(term.base, ast.Name):
        for value in assignments(site.function or source.tree, term.base.id):
            if (text := _root_of(site, value, eps)) is not None:
                yield [source.replace(value, text), source.replace_group(term.whole, term.base.id)]
    root = f"{site.torch('torch.sqrt')}({source.operand(term.base)}**2 + {eps})"
    yield [source.replace_group(term.whole, root)]


def _is_function(call: ast.Call) -> bool:
    """Return whether a call is `torch.sqrt(x)` or `sqrt(x)`, and not `x.sqrt()`."""
    match call.func:
        case ast.Name() | ast.Attribute(ast.Name("torch" | "th" | "F" | "math")):
            return True
    return False


def _variance(node: ast.expr) -> ast.expr | None:
    """Return the operand of a square root."""
    match node:
        case ast.BinOp(base, ast.Pow(), exponent) if constant(exponent) in (0.5, -0.5):
            return base
        case ast.Call() if called(node).rstrip("_") in ("sqrt", "rsqrt"):
            return next(iter(_operands(node)), None)
        case ast.Call() if called(node).rstrip("_") == "pow":
            base, *exponents = _operands(node)
            is_root = [constant(each) in (0.5, -0.5) for each in exponents] == [True]
            return base if is_root else None
    return None


def _operands(call: ast.Call) -> list[ast.expr]:
    """Return the arguments, and before them the tensor whose method is called."""
    if isinstance(call.func, ast.Attribute) and not _is_function(call):
        return [call.func.value, *call.args]
    return call.args


def _is_std(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and called(node) == "std"


def _root_of(site: Site, node: ast.expr, eps: str) -> str | None:
    """Return the code of a root, or of a standard deviation, with eps under the root."""
    source = site.source
    start, end = source.span(node)
    if isinstance(node, ast.Call) and _is_std(node):
        name = source.span(node.func)[1]
        var = f"{source.text[start : name - len('std')]}var{source.text[name:end]}"
        return f"{site.torch('torch.sqrt')}({var} + {eps})"
    inner = _variance(node)
    if inner is None:
        return None
    edit = plus(source, inner, eps)
    return f"{source.text[start : edit.start]}{edit.text}{source.text[edit.end : end]}"


# RMSNorm


@fixes("rmsnorm", "no_ln_bias")
def layer_norm_of_torch(site: Site) -> Iterator[Edits]:
    """Use torch's LayerNorm instead of its RMSNorm."""
    edits: Edits = []
    imports: Edits = []
    for name, new in (("RMSNorm", "LayerNorm"), ("rms_norm", "layer_norm")):
        if any(classes(site, name)) or _is_defined(site, name):
            continue
        imports += _imported_instead(site, name, new)
        for source, call in calls_of(site, name):
            if isinstance(call.func, ast.Attribute):
                end = source.span(call.func)[1]
                edits.append(Edit(source.file, end - len(name), end, new))
            else:
                edits.append(source.replace(call.func, new))
            if name == "rms_norm" and len(call.args) > 3:  # where layer_norm has its bias
                start = source.span(call.args[3])[0]
                edits.append(Edit(source.file, start, start, "eps="))
    if imports:
        yield [*imports, *edits]
    else:
        yield from attempts(site, edits)


def _imported_instead(site: Site, name: str, new: str) -> Edits:
    """Import another name in the place of one."""
    return [
        source.replace(alias, new)
        for source, statement in site.every(ast.ImportFrom)
        for alias in statement.names
        if alias.name == name and new not in [other.name for other in statement.names]
    ]  # fmt: skip


def _is_defined(site: Site, name: str) -> bool:
    return any(
        function.name == name
        for source, function in site.every(ast.FunctionDef)
    )  # fmt: skip


def _torch_norm(site: Site, name: str) -> str:
    return site.torch(f"torch.nn.{'functional.' if name.islower() else ''}{name}")


@fixes("rmsnorm", "no_ln_bias")
def module_of_torch_for_rms(site: Site) -> Iterator[Edits]:
    """Replace a class that is named for RMSNorm by nn.LayerNorm."""
    yield from _module_of_torch(site, named_rms=True)


@fixes("rmsnorm")
def subtract_mean(site: Site) -> Iterator[Edits]:
    """Subtract the mean before the mean square is computed."""
    source = site.source
    scopes: list[ast.AST] = [site.statement]
    scopes += [scope for scope in (site.function, site.cls) if scope is not None]
    scopes += [cls for call in site.calls for _, cls in classes(site, called(call))]
    seen = set()
    for node in [node for scope in scopes for node in source.nodes(ast.expr, scope)]:
        squared = _squared(node)
        statement = source.parent(node, ast.stmt)
        if squared is None or statement is None or node in seen:
            continue
        seen.add(node)
        x = source.code(squared)
        mean = _mean_like(source, node, x)
        centred = source.insert_before(statement, f"{x} = {x} - {mean}")
        yield [centred]
        written = [
            place for term in _terms(site) for place in _eps_written(site, term.eps)
            if not _is_close(site.finding.values["found"], site.finding.values["expected"])
        ]  # fmt: skip
        if written:
            expected = numeral(site.finding.values["expected"])
            places = dict.fromkeys(written)
            yield [centred, *(other.replace(node, expected) for other, node in places)]


def _squared(node: ast.expr) -> ast.Name | None:
    """Return the tensor of which an expression is the square or the norm."""
    base: ast.expr | None = None
    match node:
        case ast.BinOp(left, ast.Pow(), right) if constant(right) == 2:
            base = left
        case ast.BinOp(left, ast.Mult(), right) if ast.dump(left) == ast.dump(right):
            base = left
        case ast.Call(_, arguments) if called(node) in ("vector_norm", "normalize"):
            base = next(iter(arguments), None)
        case ast.Call() if called(node) in ("square", "norm"):
            base = next(iter(_operands(node)), None)
        case ast.Call() if called(node) == "pow":
            tensor, *exponents = _operands(node)
            base = tensor if [constant(each) for each in exponents] == [2] else None
    while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute):
        base = base.func.value  # `x` of `x.float()`
    return base if isinstance(base, ast.Name) else None


def _mean_like(source: Source, square: ast.expr, x: str) -> str:
    """Return the mean of x, written like the mean of its square."""
    for above in source.ancestors(square):
        if isinstance(above, ast.stmt):
            break
        if isinstance(above, ast.Call) and called(above) == "mean":
            rest = above.args[1:] if _is_function(above) else above.args
            others = ", ".join(source.code(each) for each in [*rest, *above.keywords])
            start = source.code(above.func) if _is_function(above) else f"{x}.mean"
            return f"{start}({x}, {others})" if _is_function(above) else f"{start}({others})"
    return f"{x}.mean(-1, keepdim=True)"


@fixes("rmsnorm", "other_norm")
def module_of_torch(site: Site) -> Iterator[Edits]:
    """Replace a hand-written norm by nn.LayerNorm."""
    yield from _module_of_torch(site, named_rms=False)


def _module_of_torch(site: Site, *, named_rms: bool) -> Iterator[Edits]:
    names = [] if site.cls is None else [site.cls.name]
    names += [called(call) for call in site.calls]
    for call in site.calls:
        if is_self(call.func):
            assert isinstance(call.func, ast.Attribute)
            built = self_assignments(site.cls or site.source.tree, call.func.attr)
            names += [called(value) for value in built if isinstance(value, ast.Call)]
    for name in dict.fromkeys(names):
        if named_rms and "rms" not in name.lower():
            continue
        edits: Edits = []
        for _, cls in classes(site, name):
            for source, call in calls_of(site, name):
                width = _width(site, cls, source, call)
                if width is not None:
                    edits.append(source.replace(call, _layer_norm(site, width)))
        if edits:
            yield edits


def _layer_norm(site: Site, width: str) -> str:
    eps = site.config.layer_norm_epsilon
    keyword = "" if _is_close(LAYER_NORM_EPS, eps) else f", eps={numeral(eps)}"
    return f"{_torch_norm(site, 'LayerNorm')}({width}{keyword})"


def _width(site: Site, cls: ast.ClassDef, source: Source, call: ast.Call) -> str | None:
    """Return the width of a norm that a call builds: what its class creates a parameter of."""
    function = constructor(cls)
    if function is None:
        return None
    own = next(source for source, found in classes(site, cls.name) if found is cls)
    names = [each.arg for each in function.args.args[1:]]
    for created in own.nodes(ast.Call, function):
        if called(created) not in ("ones", "zeros", "empty", "full", "tensor") or not created.args:
            continue
        shape = created.args[0]
        if isinstance(shape, ast.BinOp) and isinstance(shape.left, ast.List):
            shape = shape.right  # [1.0] * width
        if isinstance(shape, (ast.Tuple, ast.List)):
            shape = shape.elts[-1]
        name = next((n.id for n in ast.walk(shape) if isinstance(n, ast.Name)), "")
        if name in names:
            passed = argument(call, names.index(name), name)
            if passed is not None and isinstance(shape, (ast.Name, ast.Attribute, ast.Subscript)):
                return source.code(passed) + own.code(shape).removeprefix(name)
    return None
