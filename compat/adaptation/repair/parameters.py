"""Fixes of parameters: missing biases and weights, parameters without a counterpart, and sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.held import reads
from compat.adaptation.repair.source import (
    Source,
    code_of,
    enclosing,
    find,
    find_calls,
    grouped_code,
    grouped_span,
    operand_code,
    parent_of,
    source_of,
    span,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    argument,
    assigned,
    assignments,
    called,
    constant,
    constructor,
    default_of,
    is_product,
    is_self,
    is_sum,
    last_name,
    parameters,
    sides,
    variable,
)
from compat.adaptation.repair.values import (
    attempts,
    chain,
    classes,
    constructions,
    functions,
    hyperparameters,
    hyperparameters_at,
    origins,
    plus,
)
from compat.user_models.synonyms import role_of

BIASES = ("no_qkv_bias", "no_proj_bias", "no_mlp_bias")
NORMS = ("no_ln_bias", "no_ln_weight")
FLAG = re.compile(r"bias|affine|shift")  # the names of flags that create parameters
FLAG_PLACES = {"Linear": 2, "Bilinear": 3, "MultiheadAttention": 3}  # the flag's place in a call
NORM_FLAG_PLACES = (2, 3)  # the same, in calls of nn.LayerNorm
# The functions that create a tensor, and those of a learned factor.
CREATORS = ("ones", "zeros", "empty", "randn", "rand", "full", "Tensor", "FloatTensor", "normal")
GATES = ("sigmoid", "tanh", "exp", "softplus", "relu")
# The names that belong together in norms: of the weight, and of the bias.
PAIRS = (
    ("weight", "bias"), ("gamma", "beta"), ("gain", "bias"), ("scale", "shift"), ("alpha", "beta"),
    ("a_2", "b_2"), ("g", "b"), ("w", "b"), ("a", "b"),
)  # fmt: skip


# Flags such as bias=False


@fixes(*BIASES, *NORMS)
def bias_flag(site: Site) -> Iterator[Edits]:
    """Turn on the flag with which the module creates the parameter."""
    every = [
        call for call in site.every(ast.Call)
        if not _is_head(call) and (site.finding.code not in NORMS or _is_norm(call))
    ]  # fmt: skip
    own = [call for call in every if enclosing(call, ast.ClassDef) is site.cls_or_none]
    for calls in (constructions(site), own, every):
        yield from attempts(site, [_turned_on(site, flag) for flag in _flags(site, calls)])


def _is_head(call: ast.Call) -> bool:
    """Return whether a call builds the head, by a size that is the vocabulary's."""
    names = [last_name(node) for each in call.args for node in ast.walk(each)]
    return any(role_of(name) == "vocab_size" for name in names if name)


def _is_norm(call: ast.Call) -> bool:
    """Return whether a call builds a norm, or a function that builds one."""
    name = called(call).lower()
    return "norm" in name or "ln" in name or name in ("partial", "dict")


def _flags(site: Site, calls: list[ast.Call]) -> list[ast.expr]:
    """Return the literals False that reach a flag of one of the calls."""
    flags: list[ast.expr] = []
    for call in calls:
        flags += _flag_arguments(site, call)
        for cls in classes(site, called(call)):
            flags += [each.test for each in find(ast.IfExp, cls)]
            flags += [each.test for each in find(ast.If, cls)]
            flags += [
                flag for inner in find(ast.Call, cls) for flag in _flag_arguments(site, inner)
            ]
    found = [literal for flag in flags for literal in origins(site, flag)]
    return [literal for literal in dict.fromkeys(found) if constant(literal) is False]


def _flag_arguments(site: Site, call: ast.Call) -> Iterator[ast.expr]:
    """Yield the arguments of a call that say whether a parameter is created."""
    tree = source_of(call).tree
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Name):  # **options
            for value in assignments(tree, keyword.value.id):
                yield from _flag_entries(value)
        elif keyword.arg is not None and FLAG.search(keyword.arg):
            yield keyword.value
    name = called(call)
    if name == "LayerNorm" and not any(classes(site, name)):
        yield from (call.args[i] for i in NORM_FLAG_PLACES if i < len(call.args))
    elif name in FLAG_PLACES and len(call.args) > FLAG_PLACES[name]:
        yield call.args[FLAG_PLACES[name]]
    if isinstance(call.func, ast.Name):  # a function made by partial
        for value in assignments(tree, call.func.id):
            yield from _flag_entries(value)


def _flag_entries(value: ast.expr) -> Iterator[ast.expr]:
    """Yield the values of flags in a dictionary, or in `partial(nn.Linear, bias=False)`."""
    for node in ast.walk(value):
        pairs: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(map(constant, node.keys), node.values, strict=True))
        yield from (each for key, each in pairs if FLAG.search(str(key)))


def _turned_on(site: Site, node: ast.expr) -> Edit:
    """Return the flag as True, or without the argument if True is its default."""
    keyword = parent_of(node)
    call = parent_of(keyword) if isinstance(keyword, ast.keyword) else None
    if isinstance(keyword, ast.keyword) and isinstance(call, ast.Call) and keyword.arg is not None:
        if called(call) not in ("partial", "dict") and _is_on_by_default(site, call, keyword.arg):
            return Edit.remove_argument(call, keyword)
    return Edit.replace(node, "True")


def _is_on_by_default(site: Site, call: ast.Call, name: str) -> bool:
    for cls in classes(site, called(call)):
        function = constructor(cls)
        return function is not None and constant(default_of(function, name)) is True
    func = call.func
    is_torch = isinstance(func, ast.Attribute) or called(call) in (*FLAG_PLACES, "LayerNorm")
    return is_torch and name in ("bias", "elementwise_affine")


# Parameters that do not exist yet


@fixes("no_ln_bias")
def norm_bias(site: Site) -> Iterator[Edits]:
    """Create the bias of a hand-written norm and add it, or add one that is not used."""
    for cls in _modules(site):
        created_here = [name for _, name, _ in _created(cls)]
        for unused in (name for name in created_here if not reads(cls, name)):
            for used in (each for name in created_here for each in reads(cls, name)):
                if is_sum(above := parent_of(used)) and used in (above.left, above.right):
                    yield [Edit.replace(used, f"self.{unused}")]
        for statement, name, created in _created(cls):
            bias = _partner(name, 0)
            edits = _declared(cls, statement, created, bias)
            for used in reads(cls, name):
                if (edit := _norm_bias_used(used, bias)) is not None:
                    yield [*edits, edit]
            yield edits


def _modules(site: Site) -> Iterator[ast.ClassDef]:
    """Yield the classes of the modules that the finding's statement builds or calls, or its own."""
    names = [called(call) for call in constructions(site)]
    found = [each for name in names for each in classes(site, name)]
    if site.cls_or_none is not None:
        found.append(site.cls)
    yield from dict.fromkeys(found)


def _created(cls: ast.ClassDef) -> Iterator[tuple[ast.stmt, str, ast.expr]]:
    """Yield the statements that create parameters, with their names and values."""
    for node in find(ast.Assign, cls):
        for target, value in assigned(node):
            if is_self(target) and _is_parameter(value):
                yield node, target.attr, value
    for call in find_calls("register_parameter", within=cls):
        match call.args:
            case [name, ast.Call() as value]:
                yield statement_of(call), str(constant(name)), value


def _is_parameter(value: ast.expr) -> bool:
    """Return whether a value is a parameter, built here or by a function of the file."""
    names = {called(call) for call in find(ast.Call, value)}
    return "Parameter" in names or any(_builder(source_of(value), name) for name in names)


def _builder(source: Source, name: str) -> bool:
    """Return whether a function of the file returns a new parameter."""
    named = (each for each in find(ast.FunctionDef, source.tree) if each.name == name)
    values = [node.value for each in named for node in find(ast.Return, each)]
    return any(isinstance(value, ast.Call) and called(value) == "Parameter" for value in values)


def _partner(name: str, wanted: int) -> str:
    """Return the name of a norm's weight (1) or bias (0), to go with the other's name."""
    for pair in PAIRS:
        part = rf"(?<![a-z]){pair[wanted]}(?![a-z])"
        if re.search(part, name):
            return re.sub(part, pair[1 - wanted], name)
    return ("bias", "weight")[wanted]


def _declared(
    cls: ast.ClassDef,
    statement: ast.stmt,
    created: ast.expr,
    name: str,
    shape: str | None = None,
) -> Edits:
    """Create a bias like another parameter; what was registered under its name is replaced."""
    new = f"self.{name} = {_parameter(created, 'zeros', shape)}"
    for node in find(ast.stmt, cls):
        present = any(is_self(target, name) for target, _ in assigned(node))
        match node:
            case ast.Expr(ast.Call(_, [registered, *_]) as call):
                registers = called(call) in ("register_buffer", "register_parameter")
                present = registers and constant(registered) == name
        if present:
            return [Edit.replace(node, new)]
    return [Edit.insert_after(statement, new)]


def _parameter(like: ast.expr, fill: str, shape: str | None) -> str:
    """Write `nn.Parameter(torch.zeros(dim))` in the style of another parameter."""
    wrapper, tensor = "nn.Parameter", f"torch.{fill}"
    for call in find(ast.Call, like):
        if called(call) == "Parameter":
            wrapper = code_of(call.func)
        elif call.args and called(call) in CREATORS:
            if isinstance(call.func, ast.Attribute):
                tensor = f"{code_of(call.func.value)}.{fill}"
            if shape is None:
                arguments = call.args[:1] if called(call) == "full" else call.args
                options = [k for k in call.keywords if k.arg in ("device", "dtype")]
                shape = ", ".join(code_of(each) for each in [*arguments, *options])
    return f"{wrapper}({tensor}({shape}))"


def _user(node: ast.expr) -> ast.AST:
    """Return the expression or statement that an expression is a part or an argument of."""
    above = parent_of(node)
    return parent_of(above) if isinstance(above, ast.keyword) else above


def _norm_bias_used(weight: ast.expr, bias: str) -> Edit | None:
    """Add the bias to the product with the weight, or pass it to the kernel."""
    above = _user(weight)
    match above:
        case ast.Call() if called(above) == "layer_norm":
            return Edit.set_argument(above, 3, "bias", f"self.{bias}")
        case ast.Call() if called(above) in ("mul", "mul_", "multiply"):
            return plus(above, f"self.{bias}")
        case ast.AugAssign(target):
            return Edit.insert_after(above, f"{code_of(target)} += self.{bias}")
    product: ast.expr | None = None  # the whole product
    while is_product(above):
        product, above = above, parent_of(above)
    return None if product is None else plus(product, f"self.{bias}")


@fixes("no_ln_weight")
def norm_weight(site: Site) -> Iterator[Edits]:
    """Create the weight of a hand-written norm and multiply by it."""
    for cls in _modules(site):
        for statement, name, created in _created(cls):
            weight = _partner(name, 1)
            new = f"self.{weight} = {_parameter(created, 'ones', None)}"
            for used in reads(cls, name):
                if (edit := _norm_weight_used(used, weight)) is not None:
                    yield [Edit.insert_before(statement, new), edit]


def _norm_weight_used(bias: ast.expr, weight: str) -> Edit | None:
    """Multiply what the bias is added to by the weight, or pass the weight to the kernel."""
    above = _user(bias)
    match above:
        case ast.Call() if called(above) == "layer_norm":
            return Edit.set_argument(above, 2, "weight", f"self.{weight}")
        case ast.Call(ast.Attribute(inner, "add" | "add_")):
            return Edit.replace(inner, f"({operand_code(inner)} * self.{weight})")
        case ast.AugAssign(target):
            return Edit.insert_before(above, f"{code_of(target)} *= self.{weight}")
        case ast.BinOp(left, ast.Add(), right):
            other = left if right is bias else right
            grouped = grouped_span(other) != span(other)
            is_total = isinstance(other, ast.BinOp) and isinstance(other.op, (ast.Add, ast.Sub))
            code = f"({code_of(other)})" if grouped or is_total else code_of(other)
            return Edit.replace_group(other, f"{code} * self.{weight}")
    return None


@fixes("no_ln_bias", "no_ln_weight")
def norm_parameters(site: Site) -> Iterator[Edits]:
    """Create both parameters of a norm that has none and apply them to what it returns."""
    for cls in _modules(site):
        function = constructor(cls)
        if function is None or any(_created(cls)) or len(function.args.args) < 2:
            continue
        names = [each.arg for each in function.args.args if role_of(each.arg) == "n_embd"]
        width = (names or [function.args.args[1].arg])[0]
        tensor, parameter = site.torch("torch.{}"), site.torch("torch.nn.Parameter")
        new = [
            f"self.{name} = {parameter}({tensor.format(fill)}({width}))"
            for name, fill in (("weight", "ones"), ("bias", "zeros"))
        ]
        declared = Edit.insert_after(function.body[-1], *new)
        for node in find(ast.Return, cls):
            match node.value:
                case ast.Call() as call if called(call) == "layer_norm":
                    both = ", weight=self.weight, bias=self.bias"
                    yield [declared, Edit.last_argument(call, both)]
                case ast.expr() as value if function is not enclosing(node, ast.FunctionDef):
                    code = code_of(value) if is_product(value) else operand_code(value)
                    result = f"{code} * self.weight + self.bias"
                    yield [declared, Edit.replace(value, result)]


@fixes("no_ln_bias", "no_ln_weight")
def norm_modules(site: Site) -> Iterator[Edits]:
    """Create modules for norms that are computed by a function without parameters."""
    name = site.function.name if site.function_or_none else "layer_norm"
    if site.cls_or_none is not None:
        name = next((called(call) for call in site.calls if "norm" in called(call)), name)
    edits: Edits = []
    module = site.torch("torch.nn.LayerNorm")
    for cls in site.every(ast.ClassDef):
        function, calls = constructor(cls), find_calls(name, within=cls)
        widths = [] if function is None else hyperparameters(site, function, "n_embd")
        if function is None or not calls or not widths or not calls[0].args:
            continue
        names = [f"ln_{i + 1}" for i in range(len(calls))] if len(calls) > 1 else ["ln_f"]
        created = [f"self.{each} = {module}({widths[0]})" for each in names]
        edits.append(Edit.insert_after(function.body[-1], *created))
        edits += [
            Edit.replace(call, f"self.{each}({code_of(call.args[0])})")
            for call, each in zip(calls, names, strict=True)
        ]
    yield edits


@fixes(*BIASES)
def projection_bias(site: Site) -> Iterator[Edits]:
    """Create the bias of a hand-written projection and add it."""
    found: list[tuple[int, Edits]] = []
    for cls in _modules(site):
        for statement, name, created in _created(cls):
            for used in reads(cls, name):
                for shape, whole, form in _projection(created, used):
                    bias = _bias_name(name)
                    edits = _declared(cls, statement, created, bias, shape)
                    edits.append(_bias_added(whole, form.format(f"self.{bias}")))
                    found.append((statement.lineno != site.line, edits))
    found.sort(key=lambda each: each[0])
    yield from (edits for _, edits in found)
    if len(found) > 1:
        yield [edit for _, edits in found for edit in edits]


def _bias_name(weight: str) -> str:
    """Name the bias of a weight: `b_q` for `W_q`, `bq` for `wq`, `bias` for `weight`."""
    for old, new in (("weight", "bias"), ("kernel", "bias"), ("W", "b"), ("w", "b")):
        pattern = rf"(?<![A-Za-z]){old}(?![a-z])|(?<=_){old}$"
        if re.search(pattern, weight):
            return re.sub(pattern, new, weight, count=1)
    if re.fullmatch("[wW][qkvoQKVO12]", weight):
        return f"{'b' if weight[0] == 'w' else 'B'}{weight[1:]}"
    return f"{weight}_bias"


def _shape(created: ast.expr) -> list[str]:
    """Return the sizes of a parameter, as code."""
    for call in find(ast.Call, created):
        if call.args and (called(call) in CREATORS or _builder(source_of(call), called(call))):
            sizes = list(call.args)
            if isinstance(sizes[0], (ast.Tuple, ast.List)):
                sizes = sizes[0].elts
            return [code_of(each) for each in sizes]
    return []


def _projection(created: ast.expr, weight: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the bias's shape, the product, and how the bias is added, for a use of a weight."""
    match _shape(created), parent_of(weight):
        case [layers, _, *_] as sizes, (
            ast.Subscript(_, ast.Name() | ast.Constant() as layer) as one
        ):
            for width, whole, form in _products(sizes[1:], one):
                form = form.replace("{}", f"{{}}[{code_of(layer)}]")
                yield f"{layers}, {width}", whole, form
        case [_, _, *_] as sizes, _:
            yield from _products(sizes, weight)


def _products(sizes: list[str], node: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the same as `_projection`, for a weight of these sizes."""
    above, transposed = parent_of(node), False
    while isinstance(above, ast.Attribute) and above.attr in ("T", "mT", "t", "transpose"):
        whole = above if above.attr in ("T", "mT") else parent_of(above)
        if not isinstance(whole, ast.expr):
            return
        node, above, transposed = whole, parent_of(whole), not transposed
    width = sizes[0] if transposed else sizes[-1]
    match above:
        case ast.BinOp(_, ast.MatMult(), right) if right is node:
            yield width, above, "{}"
        case ast.Call(_, arguments) if node in arguments:
            if called(above) in ("matmul", "mm", "bmm"):
                yield width, above, "{}"
            elif called(above) == "linear":
                yield sizes[0], above, "{}"
            elif called(above) == "einsum":
                yield from _einsum(above, node, sizes[::-1] if transposed else sizes)


def _einsum(
    call: ast.Call, weight: ast.expr, sizes: list[str]
) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the same for an einsum. Its equation is its first argument, in einops its last."""
    first, *operands = call.args
    if isinstance(constant(first), str):
        terms = re.split(",|->", str(constant(first)).replace(" ", ""))
        *inputs, output = map(list[str], terms)
    else:
        operands, equation = call.args[:-1], str(constant(call.args[-1]))
        *inputs, output = (term.split() for term in re.split(",|->", equation))
    place = operands.index(weight)
    axes = inputs[place]
    others = {axis for term in (*inputs[:place], *inputs[place + 1 :]) for axis in term}
    own = [axis for axis in output if axis in axes and axis not in others]
    if not own or len(axes) != len(sizes):
        return
    shape = ", ".join(sizes[axes.index(axis)] for axis in own)
    after = output[output.index(own[0]) :]  # the dimensions of the bias, and those between
    index = ", ".join(":" if axis in own else "None" for axis in after)
    yield shape, call, "{}" if "None" not in index else f"{{}}[{index}]"


def _bias_added(whole: ast.expr, bias: str) -> Edit:
    if not isinstance(whole, ast.Call) or called(whole) != "linear":
        return plus(whole, bias)
    present = argument(whole, 2, "bias")
    return Edit.replace(present, bias) if present else Edit.last_argument(whole, f", {bias}")


# Parameters without a counterpart


@fixes("random_parameters")
def remove_parameter(site: Site) -> Iterator[Edits]:
    """Remove a parameter, or a module with it, and its uses."""
    cls, statement = site.cls, site.statement
    for target, _ in assigned(statement):
        if is_self(target):
            uses = [_without(used) for used in reads(cls, target.attr)]
            edits = [edit for edit in uses if edit is not None]
            if len(edits) == len(uses):
                yield [Edit.remove(statement), *edits]


@fixes("random_parameters")
def remove_term(site: Site) -> Iterator[Edits]:
    """Remove a module whose result is a variable that is added to others, and the variable."""
    cls, statement = site.cls, site.statement
    for target, _ in assigned(statement):
        for used in reads(cls, target.attr) if is_self(target) else ():
            made = enclosing(used, ast.Assign)
            if made is None or not (name := variable(made)):
                continue
            function = enclosing(made, ast.FunctionDef)
            removed = [Edit.remove(statement), Edit.remove(made)]
            for node in filter(is_sum, find(ast.BinOp, function or site.tree)):
                for term, other in sides(node):
                    if isinstance(term, ast.Name) and term.id == name:
                        yield [*removed, Edit.replace(node, code_of(other))]


def _without(used: ast.expr) -> Edit | None:
    """Return the code without a parameter: `y` of `self.gate * y` or of `self.scale(y)`."""
    above = parent_of(used)
    while isinstance(above, (ast.Attribute, ast.Subscript)) or (  # self.gate.sigmoid()
        isinstance(above, ast.Call) and above.func is used
        and isinstance(used, ast.Attribute) and not is_self(used)
    ):  # fmt: skip
        used, above = above, parent_of(above)
    if isinstance(above, ast.Call) and above.func is not used and called(above) in GATES:
        used, above = above, parent_of(above)
    match above:
        case ast.Call(func, [tensor]) if func is used:
            return Edit.replace(above, code_of(tensor))
        case ast.BinOp(left, _, right):
            return Edit.replace(above, grouped_code(left if right is used else right))
        case ast.AugAssign(_, _, value) if value is used:
            return Edit.remove(above)
    return None


# Sizes


@fixes("inner_dim")
def inner_ratio(site: Site) -> Iterator[Edits]:
    """Change the factor between the width and the inner width of the MLP."""
    found, expected = site.values["found"], site.values["expected"]
    ratio, rest = divmod(expected, site.config.n_embd)
    if rest:
        return
    edits = []
    factors = (factor for node in _inner_expressions(site) for factor in find(ast.expr, node))
    for literal in (each for factor in factors for each in origins(site, factor)):
        value = constant(literal)
        if isinstance(value, (int, float)) and value * site.config.n_embd == found:
            text = f"{ratio:.1f}" if isinstance(value, float) else str(ratio)
            edits.append(Edit.replace(literal, text))
    yield from attempts(site, edits)


@fixes("inner_dim")
def inner_width_of_torch(site: Site) -> Iterator[Edits]:
    """Pass the inner width to a layer of torch's encoder, whose default is 2048."""
    for call in site.calls:
        if called(call).startswith("Transformer") and (width := argument(call, 0, "d_model")):
            ratio = site.values["expected"] // site.config.n_embd
            text = f"{ratio} * {operand_code(width)}"
            yield [Edit.set_keyword(call, "dim_feedforward", text)]


@fixes("inner_dim")
def inner_width(site: Site) -> Iterator[Edits]:
    """Derive the inner width of the MLP from the width."""
    ratio, rest = divmod(site.values["expected"], site.config.n_embd)
    calls = [call for call in site.calls if len(call.args) >= 2 and called(call) != "Sequential"]
    for call in calls[:1] if not rest else ():
        text, hidden = f"{ratio} * {operand_code(call.args[0])}", call.args[1]
        for node in chain(site, hidden)[1:]:
            same_function = enclosing(node, ast.FunctionDef) is site.function_or_none
            if same_function and source_of(node) is site.source:
                yield [Edit.replace(node, text)]
        code, scope = code_of(hidden), site.cls_or_none or site.tree
        yield [
            Edit.replace(each, text)
            for other in find(ast.Call, scope) for each in other.args
            if code_of(each) == code
        ]  # fmt: skip
        alike = [each for each in find_calls(called(call), within=scope) if each.args]
        for back in alike[alike.index(call) + 1 :][:1]:  # of the same width at both ends
            if code_of(back.args[0]) == code:
                yield [Edit.replace(hidden, text), Edit.replace(back.args[0], text)]


def _inner_expressions(site: Site) -> Iterator[ast.expr]:
    """Yield the arguments of the calls around the finding, with what they get their values from."""
    names = dict.fromkeys(called(call) for call in site.calls)  # that may build the MLP
    builders = [function for name in names for function in functions(site, name)]
    for scope in [*builders, site.function_or_none or site.cls_or_none or site.tree]:
        for node in (each for call in find(ast.Call, scope) for each in call.args):
            yield from chain(site, node)


@fixes("n_embd_mismatch")
def width_literal(site: Site) -> Iterator[Edits]:
    """Write the checkpoint's width where the embedding gets its width from."""
    found, expected = site.values["found"], str(site.values["expected"])
    edits = [
        Edit.replace(literal, expected)
        for call in site.calls
        if "embedding" in called(call).lower()
        and (width := argument(call, 1, "embedding_dim")) is not None
        for literal in origins(site, width)
        if constant(literal) == found
    ]  # fmt: skip
    yield from attempts(site, edits)


ROLES = {
    "vocab_mismatch": "vocab_size",
    "n_layer_mismatch": "n_layer",
    "n_head_mismatch": "n_head",
    "context_too_short": "n_positions",
}


@fixes(*ROLES)
def size_of_constructor(site: Site) -> Iterator[Edits]:
    """Use the size that the constructor is called with instead of another one."""
    role, found = ROLES[site.finding.code], site.values["found"]
    sized: dict[ast.expr, str] = {}
    for node in site.every(ast.expr):
        if constant(node) == found and not isinstance(parent_of(node), ast.BinOp):
            for name in hyperparameters_at(site, node, role)[:1]:
                sized[node] = name
    yield from _size_attempts(site, sized)


@fixes(*ROLES)
def size_without_arithmetic(site: Site) -> Iterator[Edits]:
    """Remove the arithmetic with a size, such as padding of the vocabulary."""
    role = ROLES[site.finding.code]
    sized: dict[ast.expr, str] = {}
    for node in site.every(ast.BinOp):
        if not isinstance(parent_of(node), ast.BinOp):
            names = _variables(node)
            if len(names) == 1 and role_of(last_name(names[0])) == role:
                sized[node] = code_of(names[0])
    yield from _size_attempts(site, sized)


@fixes(*ROLES)
def literal_size(site: Site) -> Iterator[Edits]:
    """Write the checkpoint's size in place of another number, as in `Block(dim, n_head=6)`."""
    role, found = ROLES[site.finding.code], site.values["found"]
    expected = str(site.values["expected"])
    sized: dict[ast.expr, str] = {
        node: expected for node in site.every(ast.Constant)
        if constant(node) == found and role_of(_name_of_value(site, node)) == role
    }  # fmt: skip
    yield from _size_attempts(site, sized)


def _name_of_value(site: Site, node: ast.expr) -> str:
    """Return the name of a value in the code: an argument, a variable, an attribute or a key."""
    match parent_of(node):
        case ast.keyword(str(name)):
            return name
        case ast.Assign([target]) | ast.AnnAssign(target):
            return last_name(target)
        case ast.Dict(keys, values) if node in values:
            return str(constant(keys[values.index(node)]))
        case ast.Call(_, arguments) as call if node in arguments:
            inits = [constructor(cls) for cls in classes(site, called(call))]
            names = [name for init in inits if init for name in parameters(init)]
            return next(iter(names[arguments.index(node) + 1 :]), "")
        case ast.arguments() as above:
            function = parent_of(above)
            if isinstance(function, ast.FunctionDef):
                names = parameters(function)
                return next((name for name in names if default_of(function, name) is node), "")
    return ""


def _variables(node: ast.expr) -> list[ast.expr]:
    """Return the operands of arithmetic that are not numbers."""
    if isinstance(node, ast.BinOp):
        return [*_variables(node.left), *_variables(node.right)]
    return [] if constant(node) is not ... else [node]


def _size_attempts(site: Site, sized: dict[ast.expr, str]) -> Iterator[Edits]:
    """Replace sizes: those written like the finding's, then as for other edits."""
    near = {code_of(node) for node in ast.walk(site.statement) if node in sized}
    edits = {node: Edit.replace_group(node, text) for node, text in sized.items()}
    if alike := [edit for node, edit in edits.items() if code_of(node) in near]:
        yield alike
    yield from attempts(site, list(edits.values()))
