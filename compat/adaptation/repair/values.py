"""Where the user's code writes the values that it passes on by names, arguments and configs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site
from compat.adaptation.repair.source import (
    ancestors,
    code_of,
    enclosing,
    find,
    find_calls,
    grouped_span,
    parent_of,
    source_of,
    span,
)
from compat.adaptation.repair.syntax import (
    Function,
    argument,
    assigned,
    assignments,
    assigns,
    called,
    constant,
    default_of,
    is_self,
    is_size,
    last_name,
    name_of,
    own_attribute,
    parameters,
    root,
    self_assignments,
    targets,
    unpacked_sizes,
    variables,
)
from compat.user_models.synonyms import is_config_name, role_of

NUMERIC = ("sqrt", "rsqrt", "pow", "float", "int", "tensor", "item", "Tensor")  # of numbers


HEAD_SIZE = re.compile(
    r"^(d_?k|d_?h|hd|hs|d_?head|dim_?head|k_channels|.*head_?(dim|size|width|channels|features)"
    r"|.*(dim|size|width|channels|features)_?per_?head)s?$",
    re.IGNORECASE,
)


def assigned_values(within: ast.AST, name: str, *, unpacked: bool = False) -> list[ast.expr]:
    """Return the values assigned to a variable or attribute, also those that are unpacked."""
    return [
        value
        for node in find(ast.stmt, within)
        for target, value in assigned(node)
        for each in (target.elts if unpacked and isinstance(target, ast.Tuple) else [target])
        if assigns(each, name)
    ]  # fmt: skip


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
        value for scope in reversed(scopes) for value in assigned_values(scope, name)
        if not any(inner is node or own_attribute(inner) == held for inner in ast.walk(value))
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
    if any(node.id in unpacked_sizes(statement) for statement in find(ast.Assign, scope)):
        return True
    # A global name may be one of those that are imported from another module.
    aliases = [alias for each in find(ast.ImportFrom, site.tree) for alias in each.names]
    is_imported = not {"*", node.id}.isdisjoint(alias.asname or alias.name for alias in aliases)
    return is_imported and node.id not in variables(scope, ast.Store)


def size_of(site: Site, name: str, axis: int) -> str:
    """Return a size of a tensor, written as elsewhere in the file."""
    calls = len(find_calls("size", within=site.tree))
    shapes = sum(node.attr == "shape" for node in find(ast.Attribute, site.tree))
    return f"{name}.size({axis})" if calls > shapes else f"{name}.shape[{axis}]"


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


DEPTH = 8  # how many names a value is followed through


def numeral(value: float) -> str:
    """Return a number as people write it: `1e-5`, not `1e-05`."""
    digits, exponent, power = f"{value:g}".partition("e")
    return f"{digits}e{int(power)}" if exponent else digits


def origins(site: Site, node: ast.expr) -> list[ast.expr]:
    """Return the literals that an expression gets its value from, the most specific first."""
    return [each for each in chain(site, node) if constant(each) is not ...]


def chain(site: Site, node: ast.expr) -> list[ast.expr]:
    """Return an expression and those that it gets its value from, through names and arguments."""
    found: dict[ast.expr, None] = {}
    level = [node]
    for _ in range(DEPTH):
        new = [each for each in dict.fromkeys(level) if each not in found]
        found |= dict.fromkeys(new)
        level = [other for each in new if constant(each) is ... for other in _before(site, each)]
    return list(found)


def _before(site: Site, node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions that an expression may get its value from directly."""
    if isinstance(node, ast.Name):
        yield from _of_name(site, node)
    elif isinstance(node, ast.Attribute):
        cls = enclosing(node, ast.ClassDef)
        if is_self(node) and cls is not None:
            yield from _of_attribute(site, cls, node.attr)
        else:
            yield from entries(site, node.attr)
    elif isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
        yield from entries(site, str(constant(node.slice)))
    elif isinstance(node, ast.Call):
        name = called(node)
        key, default = {"get": (0, 1), "getattr": (1, 2)}.get(name, (99, 99))
        if len(node.args) > key and isinstance(constant(node.args[key]), str):
            yield from entries(site, str(constant(node.args[key])))
            yield from node.args[default : default + 1]
        elif name in ("bool", "float", "int"):
            yield from node.args[:1]


def _of_name(site: Site, node: ast.Name) -> Iterator[ast.expr]:
    """Yield the values assigned to a name in its function, its argument's, or else the file's."""
    for scope in ancestors(node):
        if not isinstance(scope, Function):
            continue
        assigned = list(assignments(scope, node.id))
        yield from assigned
        if node.id in parameters(scope):
            if not isinstance(scope, ast.Lambda):
                yield from passed(site, scope, node.id)
            default = default_of(scope, node.id)
            if default is not None:
                yield default
            return
        if assigned:
            return
    for source in site.sources.values():
        for statement in source.tree.body:
            yield from assignments(statement, node.id, deep=False)


def _of_attribute(site: Site, cls: ast.ClassDef, name: str) -> Iterator[ast.expr]:
    """Yield the values of `self.name` in a class, or else in its bases."""
    for each in site.lineage(cls):
        if own := [*self_assignments(each, name), *_fields(each, name)]:
            yield from own
            return


def _fields(cls: ast.ClassDef, name: str) -> Iterator[ast.expr]:
    """Yield the values of a field of a class."""
    return (value for each in cls.body for value in assignments(each, name, deep=False))


def entries(site: Site, name: str) -> Iterator[ast.expr]:
    """Yield the values of a config's entry: a field, a key, a keyword, or a module's variable."""
    for source in site.sources.values():
        for statement in source.tree.body:
            yield from assignments(statement, name, deep=False)
        for node in source.all_nodes:
            match node:
                case ast.ClassDef():
                    yield from _fields(node, name)
                    yield from self_assignments(node, name)
                case ast.Dict():
                    yield from entry_of(node, name)
                case ast.Call():
                    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                    if name in keywords:
                        yield keywords[name]
                    is_option = called(node) == "add_argument" and "default" in keywords
                    if is_option and f"--{name}" in map(constant, node.args):
                        yield keywords["default"]
                case ast.Assign([ast.Subscript(_, key), *_], value) if constant(key) == name:
                    yield value


def entry_of(node: ast.Dict, name: str) -> Iterator[ast.expr]:
    """Yield the value of a key in a dictionary."""
    pairs = zip(node.keys, node.values, strict=True)
    return (value for key, value in pairs if constant(key) == name)


def classes(site: Site, name: str) -> Iterator[ast.ClassDef]:
    """Yield the classes of a name."""
    return (cls for cls in site.every(ast.ClassDef) if cls.name == name)


def calls_of(site: Site, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of functions or classes of these names."""
    return (call for call in site.every(ast.Call) if called(call) in names)


def calls_of_class(site: Site, cls: ast.ClassDef) -> Iterator[ast.Call]:
    """Yield the calls that build a class, and not another one of its name in another file."""
    defined = source_of(cls)
    others = {source_of(each).file for each in classes(site, cls.name)} - {defined.file}
    for call in calls_of(site, cls.name):
        source = source_of(call)
        modules = {
            (statement.module or "").rpartition(".")[2]
            for statement in find(ast.ImportFrom, source.tree)
            for alias in statement.names
            if alias.name == cls.name
        }
        imported = not modules or Path(defined.file).stem in modules
        if not others or (source.file not in others and imported):
            yield call


def functions(site: Site, name: str) -> list[ast.FunctionDef]:
    """Return the functions and methods of a name."""
    return [function for function in site.every(ast.FunctionDef) if function.name == name]


def constructions(site: Site) -> list[ast.Call]:
    """Return the calls of the finding's statement, and those that build what it calls."""
    built = [
        value
        for call in site.calls if is_self(call.func) and site.cls_or_none
        for value in self_assignments(site.cls, call.func.attr) if isinstance(value, ast.Call)
    ]  # fmt: skip
    return [*site.calls, *built]


def settings(site: Site, name: str) -> Iterator[ast.expr]:
    """Yield a name's values in the user's files: keywords, then defaults and assignments."""
    for source in site.sources.values():
        for node in source.all_nodes:
            if isinstance(node, ast.keyword) and node.arg == name:
                yield node.value
        for node in source.all_nodes:
            if isinstance(node, ast.FunctionDef):
                default = default_of(node, name)
                if default is not None:
                    yield default
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                if any(assigns(target, name) for target in targets(node)):
                    yield node.value
            elif isinstance(node, ast.Dict):
                yield from entry_of(node, name)


def passed(
    site: Site, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[ast.expr]:
    """Yield what calls of a function, or of the class that it constructs, pass as an argument."""
    place, target = parameters(function).index(name), function.name
    if isinstance(cls := parent_of(function), ast.ClassDef):
        place -= 1
        target = cls.name if target == "__init__" else target
    for call in calls_of(site, target):
        if (found := argument(call, place, name)) is not None:
            yield found


def attempts(site: Site, edits: Edits) -> Iterator[Edits]:
    """Yield edits that may belong together: the finding's statement's, then all, then each."""
    edits = list(dict.fromkeys(edits))
    for region in (site.statement, site.within):
        start, end = span(region)
        yield [e for e in edits if e.file == site.source.file and start <= e.start <= end]
    yield edits
    yield from ([edit] for edit in edits)


def plus(node: ast.expr, text: str) -> Edit:
    """Add a term to an expression, in parentheses where the code around it needs them."""
    above, total = parent_of(node), f"{code_of(node)} + {text}"
    binds = isinstance(above, (ast.Attribute, ast.Subscript, ast.UnaryOp)) or (
        isinstance(above, ast.BinOp) and not isinstance(above.op, ast.Add)
    )
    bare = grouped_span(node) == span(node)
    return Edit.replace(node, f"({total})" if binds and bare else total)


def hyperparameters(site: Site, init: ast.FunctionDef, role: str) -> list[str]:
    """Return how a constructor can write a size of the model: an argument, or an entry of a config.

    Args:
        site: the finding.
        init: the constructor.
        role: see `compat.user_models.synonyms`.
    """
    names = [name for name in parameters(init) if name != "self"]
    found = [name for name in names if role_of(name) == role]
    entries = [each for each in _entry_names(site) if role_of(each) == role]
    for name in names:
        reads = [
            node for node in find(ast.expr, init)
            if isinstance(node, (ast.Attribute, ast.Subscript)) and name_of(node.value) == name
        ]  # fmt: skip
        found += [code_of(node) for node in reads if role_of(last_name(node)) == role]
        if any(isinstance(node, ast.Attribute) for node in reads):
            found += [f"{name}.{entry}" for entry in entries]
        elif reads:
            found += [f"{name}[{source_of(init).quoted(entry)}]" for entry in entries]
    module = (node for each in site.sources.values() for node in each.tree.body)
    for target, value in (pair for node in module for pair in assigned(node)):
        # A letter such as `n` is a size if its value is a number, and not computed from the data.
        if isinstance(target, ast.Name) and role_of(target.id) == role:
            found += [target.id] if len(target.id) > 1 or type(constant(value)) is int else []
    return list(dict.fromkeys(found))


def hyperparameters_at(site: Site, node: ast.AST, role: str) -> list[str]:
    """Return how code in a constructor can write a size; nothing for code elsewhere."""
    function = enclosing(node, ast.FunctionDef)
    if function is None or function.name != "__init__":
        return []
    return hyperparameters(site, function, role)


def _entry_names(site: Site) -> list[str]:
    """Return the names of the entries of configs: fields of classes, keys, and what code reads."""
    found: list[str] = []
    for node in site.every(ast.AST):
        match node:
            case ast.ClassDef():
                fields = [target for each in node.body for target in targets(each)]
                found += [target.id for target in fields if isinstance(target, ast.Name)]
            case ast.Dict():
                keys = [constant(key) for key in node.keys]
                found += [key for key in keys if isinstance(key, str)]
            case ast.Attribute() | ast.Subscript() if is_config_name(name_of(node.value)):
                found.append(last_name(node))
    return list(dict.fromkeys(found))
