"""Where the user's code writes the values that it passes on by names, arguments and configs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from compat.adaptation.repair.fixes import Site
from compat.adaptation.repair.source import Edit, Source
from compat.adaptation.repair.syntax import (
    argument,
    assigned,
    assignments,
    assigns,
    called,
    constant,
    default_of,
    is_self,
    last_name,
    name_of,
    parameters,
    self_assignments,
    targets,
)
from compat.user_models.synonyms import is_config_name, role_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEPTH = 8  # how many names a value is followed through


class Written(NamedTuple):
    """An expression and the file that it is in."""

    source: Source
    node: ast.expr


def numeral(value: float) -> str:
    """Return a number as people write it: `1e-5`, not `1e-05`."""
    digits, exponent, power = f"{value:g}".partition("e")
    return f"{digits}e{int(power)}" if exponent else digits


def origins(site: Site, source: Source, node: ast.expr) -> list[Written]:
    """Return the literals that an expression gets its value from, the most specific first."""
    return [each for each in chain(site, source, node) if constant(each.node) is not ...]


def chain(site: Site, source: Source, node: ast.expr) -> list[Written]:
    """Return an expression and those that it gets its value from, through names and arguments."""
    found: dict[ast.expr, Written] = {}
    level = [Written(source, node)]
    for _ in range(DEPTH):
        following: list[Written] = []
        for each in level:
            if each.node not in found:
                found[each.node] = each
                if constant(each.node) is ...:
                    following += _before(site, each)
        level = following
    return list(found.values())


def _before(site: Site, written: Written) -> Iterator[Written]:
    """Yield the expressions that an expression may get its value from directly."""
    source, node = written
    if isinstance(node, ast.Name):
        yield from _of_name(site, source, node)
    elif isinstance(node, ast.Attribute):
        cls = source.parent(node, ast.ClassDef)
        if is_self(node) and cls is not None:
            yield from _of_attribute(site, source, cls, node.attr)
        else:
            yield from entries(site, node.attr)
    elif isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
        yield from entries(site, str(constant(node.slice)))
    elif isinstance(node, ast.Call):
        name = called(node)
        key, default = {"get": (0, 1), "getattr": (1, 2)}.get(name, (99, 99))
        if len(node.args) > key and isinstance(constant(node.args[key]), str):
            yield from entries(site, str(constant(node.args[key])))
            yield from (Written(source, each) for each in node.args[default : default + 1])
        elif name in ("bool", "float", "int"):
            yield from (Written(source, each) for each in node.args[:1])


def _of_name(site: Site, source: Source, node: ast.Name) -> Iterator[Written]:
    """Yield the values assigned to a name in its function, its argument's, or else the file's."""
    for scope in source.ancestors(node):
        if not isinstance(scope, FUNCTIONS):
            continue
        assigned = list(assignments(scope, node.id))
        yield from (Written(source, value) for value in assigned)
        if node.id in parameters(scope):
            if not isinstance(scope, ast.Lambda):
                yield from passed(site, source, scope, node.id)
            default = default_of(scope, node.id)
            if default is not None:
                yield Written(source, default)
            return
        if assigned:
            return
    for each in site.sources.values():
        for statement in each.tree.body:
            yield from (Written(each, v) for v in assignments(statement, node.id, deep=False))


def _of_attribute(site: Site, source: Source, cls: ast.ClassDef, name: str) -> Iterator[Written]:
    """Yield the values of `self.name` in a class, or else in its bases."""
    own = [Written(source, value) for value in self_assignments(cls, name)]
    for statement in cls.body:
        own += [Written(source, v) for v in assignments(statement, name, deep=False)]
    yield from own
    if not own:
        for base in cls.bases:
            for other, found in classes(site, base.id if isinstance(base, ast.Name) else ""):
                yield from _of_attribute(site, other, found, name)


def entries(site: Site, name: str) -> Iterator[Written]:
    """Yield the values of a config's entry: a field, a key, a keyword, or a module's variable."""
    for source in site.sources.values():
        for statement in source.tree.body:
            yield from (Written(source, v) for v in assignments(statement, name, deep=False))
        for node in source.all_nodes:
            if isinstance(node, ast.ClassDef):
                for statement in node.body:
                    found = list(assignments(statement, name, deep=False))
                    yield from (Written(source, value) for value in found)
                yield from (Written(source, value) for value in self_assignments(node, name))
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if constant(key) == name:
                        yield Written(source, value)
            elif isinstance(node, ast.Call):
                keywords = {
                    keyword.arg: Written(source, keyword.value) for keyword in node.keywords
                }
                yield from (keywords[key] for key in [name] if key in keywords)
                is_option = called(node) == "add_argument" and "default" in keywords
                if is_option and f"--{name}" in map(constant, node.args):
                    yield keywords["default"]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                if constant(node.targets[0].slice) == name:
                    yield Written(source, node.value)


def classes(site: Site, name: str) -> Iterator[tuple[Source, ast.ClassDef]]:
    """Yield the classes of a name."""
    return ((source, cls) for source, cls in site.every(ast.ClassDef) if cls.name == name)


def calls_of(site: Site, *names: str) -> Iterator[tuple[Source, ast.Call]]:
    """Yield the calls of functions or classes of these names."""
    return ((source, call) for source in site.sources.values() for call in source.calls(*names))


def functions(site: Site, name: str) -> list[ast.FunctionDef]:
    """Return the functions and methods of a name."""
    return [function for _, function in site.every(ast.FunctionDef) if function.name == name]


def constructions(site: Site) -> list[tuple[Source, ast.Call]]:
    """Return the calls of the finding's statement, and those that build what it calls."""
    built = [
        value
        for call in site.calls if is_self(call.func) and site.cls is not None
        for value in self_assignments(site.cls, call.func.attr) if isinstance(value, ast.Call)
    ]  # fmt: skip
    return [(site.source, call) for call in [*site.calls, *built]]


def settings(site: Site, name: str) -> Iterator[tuple[Source, ast.expr]]:
    """Yield a name's values in the user's files: keywords, then defaults and assignments."""
    for source in site.sources.values():
        for node in source.all_nodes:
            if isinstance(node, ast.keyword) and node.arg == name:
                yield source, node.value
        for node in source.all_nodes:
            if isinstance(node, ast.FunctionDef):
                default = default_of(node, name)
                if default is not None:
                    yield source, default
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                if any(assigns(target, name) for target in targets(node)):
                    yield source, node.value
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield source, value


def passed(
    site: Site, source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Written]:
    """Yield what calls of a function, or of the class that it constructs, pass as an argument."""
    cls = source.parents.get(function)
    is_method = isinstance(cls, ast.ClassDef)
    names = parameters(function)
    place = names.index(name) - is_method
    target = function.name
    if isinstance(cls, ast.ClassDef) and function.name == "__init__":
        target = cls.name
    for other, call in calls_of(site, target):
        found = argument(call, place, name)
        if found is not None:
            yield Written(other, found)


def attempts(site: Site, edits: list[Edit]) -> Iterator[list[Edit]]:
    """Yield edits that may belong together: the finding's statement's, then all, then each."""
    edits = list(dict.fromkeys(edits))
    start, end = site.source.span(site.statement)
    near = [e for e in edits if e.file == site.source.file and start <= e.start <= end]
    if site.function is not None:
        start, end = site.source.span(site.function)
    around = [e for e in edits if e.file == site.source.file and start <= e.start <= end]
    yield from (group for group in (near, around, edits) if group)
    yield from ([edit] for edit in edits)


def plus(source: Source, node: ast.expr, text: str) -> Edit:
    """Add a term to an expression, in parentheses where the code around it needs them."""
    return source.replace(node, with_term(source, node, text, source.parents.get(node)))


def with_term(source: Source, node: ast.expr, text: str, above: ast.AST | None) -> str:
    """Return the code of an expression with a term added."""
    total = f"{source.code(node)} + {text}"
    binds = isinstance(above, (ast.Attribute, ast.Subscript, ast.UnaryOp)) or (
        isinstance(above, ast.BinOp) and not isinstance(above.op, ast.Add)
    )
    return f"({total})" if binds and source.grouped(node) == source.span(node) else total


def hyperparameters(site: Site, source: Source, init: ast.FunctionDef, role: str) -> list[str]:
    """Return how a constructor can write a size of the model: an argument, or an entry of a config.

    Args:
        site: the finding.
        source: the file of the constructor.
        init: the constructor.
        role: see `compat.user_models.synonyms`.
    """
    names = [name for name in parameters(init) if name != "self"]
    found = [name for name in names if role_of(name) == role]
    entries = [each for each in _entry_names(site) if role_of(each) == role]
    for name in names:
        reads = [
            node for node in source.nodes(ast.expr, init)
            if isinstance(node, (ast.Attribute, ast.Subscript)) and name_of(node.value) == name
        ]  # fmt: skip
        found += [source.code(node) for node in reads if role_of(last_name(node)) == role]
        if any(isinstance(node, ast.Attribute) for node in reads):
            found += [f"{name}.{entry}" for entry in entries]
        elif reads:
            found += [f"{name}[{source.quoted(entry)}]" for entry in entries]
    module = [target.id for each in site.sources.values() for node in each.tree.body
              for target, _ in assigned(node) if isinstance(target, ast.Name)]  # fmt: skip
    found += [name for name in module if role_of(name) == role]
    return list(dict.fromkeys(found))


def hyperparameters_at(site: Site, source: Source, node: ast.AST, role: str) -> list[str]:
    """Return how code in a constructor can write a size; nothing for code elsewhere."""
    function = source.parent(node, ast.FunctionDef)
    if function is None or function.name != "__init__":
        return []
    return hyperparameters(site, source, function, role)


def _entry_names(site: Site) -> list[str]:
    """Return the names of the entries of configs: fields of classes, keys, and what code reads."""
    found: list[str] = []
    for _, node in site.every(ast.AST):
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
