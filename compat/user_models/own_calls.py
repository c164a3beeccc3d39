"""The arguments that the user's own code passes to a constructor: `GPT(vocab, kinds=KINDS)`.

The calls are found in the source of the project, and their arguments are computed without running
the code around them: a name is replaced by what is assigned to it, and a size by the checkpoint's.
Only the user's classes, those of torch.nn and a few builtins are called. A class that only the call
names is imported.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compat.config import GPT2Config
from compat.user_code import is_project_top
from compat.user_models.arguments import required_names
from compat.user_models.config_object import is_namespace, set_attribute
from compat.user_models.notebook import read_source
from compat.user_models.synonyms import AMBIGUOUS, CONFIG_CLASSES, size_role, value_of
from compat.user_models.target import imported
from compat.user_models.usage import assigned, is_users_class, tree_of, user_modules, users_folders

MOST_FILES = 200  # of a project
MOST_BYTES = 200_000  # of a file
MOST_CALLS = 8
# Sizes below it are often equal without being the same: 12 layers and 12 heads.
DISTINCTIVE = 32
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip
_BUILTINS = (dict, list, tuple, set, int, float, len, range, partial, types.SimpleNamespace)
_KNOWN = {"nn": nn, "torch": torch, **{each.__name__: each for each in _BUILTINS}}
_OBJECTS = (ast.Call, ast.List, ast.ListComp, ast.Dict)


class _Unknown(Exception):
    """A value that cannot be computed from the source."""


@dataclass(frozen=True)
class OwnCall:
    """A call of a constructor in the user's project.

    Args:
        node: the call.
        names: the expressions assigned to the names that it can read.
        options: the defaults of the command line's options, by their names.
        values: the attributes of the target's module.
        target: the class.
    """

    node: ast.Call
    names: Mapping[str, ast.expr]
    options: Mapping[str, ast.expr]
    values: Mapping[str, Any]
    target: type[nn.Module]

    @property
    def numbers(self) -> list[str]:
        """The names that may be numbers. A letter is not the size that one of them denotes."""
        return [name for name, value in self.names.items() if not isinstance(value, _OBJECTS)]

    def arguments(self, config: GPT2Config) -> dict[str, Any]:
        """Return the arguments that can be computed, with the sizes of `config`."""
        evaluation = _Evaluation(self, config)
        for _ in range(2):  # the first time finds which numbers are sizes
            found = evaluation.passed(self.node, self.target)
        return found


@dataclass
class _Evaluation:
    call: OwnCall
    config: GPT2Config
    # The roles of the user's numbers; GPT-2's vocabulary is also padded to a multiple of 128.
    sizes: dict[int, set[str]] = field(
        default_factory=lambda: {50257: {"vocab_size"}, 50304: {"vocab_size"}}
    )
    depth: int = 0

    def passed(self, node: ast.Call, callee: Any) -> dict[str, Any]:
        """Return the arguments of a call that can be computed, by their names."""
        try:
            parameters = inspect.signature(callee).parameters.values()
        except (TypeError, ValueError):
            return {}
        order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        pairs = [*zip(order, node.args, strict=False)]
        pairs += [(k.arg, k.value) for k in node.keywords if k.arg is not None]
        found: dict[str, Any] = {}
        for unpacked in (k.value for k in node.keywords if k.arg is None):
            with contextlib.suppress(_Unknown):
                entries = self.value(unpacked)
                found |= entries if isinstance(entries, dict) else {}
        for name, each in pairs:
            with contextlib.suppress(_Unknown):
                found[name] = self.named(name, each, [*order, *(n for n, _ in pairs)])
        return found

    def named(self, name: str, node: ast.expr, among: list[str]) -> Any:
        """Return the value of an expression that is bound to a name, which may denote a size."""
        role = size_role(name, among)
        if role is None:
            return self.value(node)
        try:
            value = self.value(node)
        except _Unknown:
            if name.lower() in AMBIGUOUS:
                raise
            return value_of(role, self.config)
        if type(value) not in (int, float) or self._is_size(node):
            return value
        if isinstance(node, ast.Constant) and type(value) is int and value >= DISTINCTIVE:
            self.sizes.setdefault(value, set()).add(role)
        return value_of(role, self.config)

    def _is_size(self, node: ast.expr) -> bool:
        """Return whether an expression has the checkpoint's sizes by the names in it."""
        match node:
            case ast.Name(name):
                return size_role(name, self.call.numbers) is not None
            case ast.Attribute(_, name) | ast.Subscript(_, ast.Constant(str(name))):
                return size_role(name) is not None
            case ast.BinOp(left, _, right):
                return self._is_size(left) or self._is_size(right)
        return False

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            _Unknown: it cannot be computed.
        """
        self.depth += 1
        try:
            if self.depth > 40:
                raise _Unknown
            return self._value(node)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _Unknown from error
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value):
                roles = self.sizes.get(value, set()) if isinstance(value, int) else set()
                return value_of(min(roles), self.config) if len(roles) == 1 else value
            case ast.List(items):
                return [self.value(item) for item in items]
            case ast.Tuple(items):
                return tuple(self.value(item) for item in items)
            case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
                names = [str(key.value) for key in keys if isinstance(key, ast.Constant)]
                return {n: self.named(n, v, names) for n, v in zip(names, values, strict=True)}
            case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.value(operand))
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.value(left), self.value(right))
            case ast.ListComp(each, [ast.comprehension(iter=items)]):
                return [self.value(each) for _ in self.value(items)]
            case ast.Name(name):
                return self._of_name(name)
            case ast.Attribute(owner, name) | ast.Subscript(owner, ast.Constant(str(name))):
                return self._entry(owner, name)
            case ast.Subscript(owner, index):
                return self.value(owner)[self.value(index)]
            case ast.Call(function):
                return self._called(node, self.value(function))
            case ast.Lambda(ast.arguments([], [*parameters]), body):
                names = [each.arg for each in parameters]
                return lambda *args: self._of_function(names, body, *args)
        raise _Unknown

    def _of_function(self, parameters: list[str], body: ast.expr, *args: Any) -> Any:
        """Return what a function such as `lambda config: Attention(config)` returns."""
        values = {**self.call.values, **dict(zip(parameters, args, strict=True))}
        names = {n: value for n, value in self.call.names.items() if n not in parameters}
        call = replace(self.call, names=names, values=values)
        return replace(self, call=call, depth=0).value(body)

    def _of_name(self, name: str) -> Any:
        if name in self.call.names:
            return self.named(name, self.call.names[name], self.call.numbers)
        for scope in (self.call.values, _KNOWN):
            if name in scope:
                return scope[name]
        if role := size_role(name, self.call.numbers):
            return value_of(role, self.config)  # an argument of a function, or a length of data
        raise _Unknown

    def _entry(self, owner: ast.expr, name: str) -> Any:
        """Return `owner.name` or `owner["name"]`, or else a size or an option's default."""
        with contextlib.suppress(_Unknown, AttributeError, LookupError, TypeError):
            value = self.value(owner)
            found = value[name] if isinstance(value, Mapping) else getattr(value, name)
            role = size_role(name) if type(found) is int else None
            return value_of(role, self.config) if role else found
        if name in self.call.options:
            return self.named(name, self.call.options[name], [*self.call.options])
        if role := size_role(name):
            return value_of(role, self.config)
        raise _Unknown

    def _called(self, node: ast.Call, callee: Any) -> Any:
        """Call a builtin, a class of torch.nn, or a user's module or config class."""
        if callee in _BUILTINS or str(getattr(callee, "__module__", "")).startswith("torch.nn."):
            named: dict[str, Any] = {}
            for keyword in node.keywords:
                value = self.value(keyword.value)
                named |= {keyword.arg: value} if keyword.arg else value
            return callee(*(self.value(each) for each in node.args), **named)
        if not _is_module_or_config(callee):
            raise _Unknown
        found = self.passed(node, callee)
        if len(found) < len(node.args) + sum(k.arg is not None for k in node.keywords):
            raise _Unknown
        try:
            made = callee(**found)
        except Exception as error:
            raise _Unknown from error
        if not isinstance(made, nn.Module):
            for name, value in self._in_sizes(made).items():
                set_attribute(made, name, value)
        return made

    def _in_sizes(self, config: Any) -> dict[str, Any]:
        """Return the attributes of a user's config that are sizes, with those of the checkpoint.

        Sections of a config may be classes.
        """
        found = dict[str, Any]()
        for name in dir(config):
            value, role = None, size_role(name)
            with contextlib.suppress(Exception):  # of a property
                value = getattr(config, name)
            if role and type(value) is int:
                found[name] = value_of(role, self.config)
            elif name[0] != "_" and isinstance(value, type) and is_namespace(value):
                found[name] = type(value.__name__, (value,), self._in_sizes(value))
        return found


def _is_module_or_config(value: Any) -> bool:
    if not isinstance(value, type) or not is_users_class(value):
        return False
    named = value.__name__.lower().endswith(CONFIG_CLASSES)
    return named or issubclass(value, nn.Module) or dataclasses.is_dataclass(value)


def own_calls(target: type[nn.Module]) -> list[OwnCall]:
    """Return the calls of a class in the user's project, those in its own file first.

    A dictionary that holds all arguments that the class requires counts as a call: `GPT(**it)`.
    """
    modules, folders = user_modules(target), users_folders(target)
    trees = {str(module.__file__): tree_of(module) for module in modules[:1]}
    values = {n: v for module in reversed(modules) for n, v in list(vars(module).items())}
    required = required_names(target)
    constructor: Callable[..., Any] = target
    for file, source in _sources(constructor).items():
        is_call = f"{target.__name__}(" in source
        if file not in trees and (is_call or (len(required) > 2 and _names_all(source, required))):
            with contextlib.suppress(SyntaxError):
                trees[file] = ast.parse(source)
    found = [
        OwnCall(node, names, _options(tree), values | _imported(node, names, tree, folders), target)
        for tree in trees.values()
        for node, names in _calls(tree, target.__name__, required, {})
    ]
    return [*{ast.unparse(call.node): call for call in reversed(found)}.values()][::-1][:MOST_CALLS]


def _names_all(source: str, names: Iterable[str]) -> bool:
    return all(re.search(rf"\b{name}\b", source) for name in names)


def constants_named(target: Callable[..., Any], name: str) -> list[Any]:
    """Return the constants that the user's project gives to a name, those in its own files first.

    They are assigned to it, or are the value of an argument, a default, an option or an entry.
    """
    trees = [tree_of(module) for module in user_modules(target)]
    for source in _sources(target).values():
        if _names_all(source, [name]):
            with contextlib.suppress(SyntaxError):
                trees.append(ast.parse(source))
    found: list[Any] = []
    for value in chain.from_iterable(_values_of(tree, name) for tree in trees):
        with contextlib.suppress(ValueError, TypeError):  # no constant
            constant = _literal(value)
            if (type(constant), constant) not in [(type(each), each) for each in found]:
                found.append(constant)
    return found


def _literal(node: ast.expr) -> Any:
    """Return a literal's value, or that of `float(os.environ.get("CAP", 30.0))` by default.

    Raises:
        ValueError: the expression is neither.
    """
    match node:
        case ast.Call(ast.Name("int"), [inner]):
            return int(_literal(inner))
        case ast.Call(ast.Name("float"), [inner]):
            return float(_literal(inner))
        case ast.Call(function, [_, default]) if re.search(
            r"env(iron\.get)?$", ast.unparse(function)
        ):
            return ast.literal_eval(default)
    return ast.literal_eval(node)


def _values_of(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """Yield the expressions that a file binds to a name."""
    for node in ast.walk(tree):
        for target, value in assigned(node):
            if isinstance(target, (ast.Name, ast.Attribute)) and _last_name(target) == name:
                yield value
        match node:
            case ast.keyword(arg, value) if arg == name:
                yield value
            case ast.Dict(keys, values):
                pairs = zip(keys, values, strict=True)
                yield from (v for k, v in pairs if isinstance(k, ast.Constant) and k.value == name)
            case ast.FunctionDef():
                yield from (value for own, value in _defaults(node).items() if own == name)
    yield from (value for own, value in _options(tree).items() if own == name)


def _last_name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _imported(
    call: ast.Call, assigned: Mapping[str, ast.expr], tree: ast.Module, folders: list[Path]
) -> dict[str, Any]:
    """Return the classes of the project that a call's arguments need and that its file imports."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    names = set[str]()
    for each in arguments:  # grows
        used = {node.id for node in ast.walk(each) if isinstance(node, ast.Name)} - names
        arguments += [assigned[name] for name in used if name in assigned]
        names |= used
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            files = [folder / f"{node.module.replace('.', '/')}.py" for folder in folders]
            source = next((read_source(file) for file in files if file.is_file()), "")
            for alias in node.names:
                name = alias.asname or alias.name
                if name in names and re.search(rf"^class {alias.name}\b", source, re.MULTILINE):
                    with contextlib.suppress(Exception):
                        found[name] = imported(node.module, alias.name, folders)
    return found


@lru_cache(maxsize=8)  # read for each name whose value is unknown
def _sources(target: Callable[..., Any]) -> dict[str, str]:
    """Return the source of the Python files of the target's project, the nearest first.

    Files with a class of the same name are left out, which is another one.

    Subfolders are searched if a file such as pyproject.toml marks the top of the project: other
    folders may hold other projects.
    """
    found: dict[Path, None] = {}
    for folder in users_folders(target):
        depth = 3 if is_project_top(folder) else 1
        for pattern in ("*.py", "*/*.py", "*/*/*.py")[:depth]:
            found |= dict.fromkeys(sorted(folder.glob(pattern)))
    small = (file for file in found if file.stat().st_size <= MOST_BYTES)
    sources: dict[str, str] = {}
    for file in islice(small, MOST_FILES):
        with contextlib.suppress(Exception):  # it cannot be read
            sources[str(file)] = read_source(file)
    is_another = f"class {target.__name__}"
    return {file: source for file, source in sources.items() if is_another not in source}


def _calls(
    node: ast.AST, name: str, required: Sequence[str], names: Mapping[str, ast.expr]
) -> Iterator[tuple[ast.Call, Mapping[str, ast.expr]]]:
    """Yield the calls of a name below a node, and what is assigned to names in their scopes.

    A dictionary of the required arguments is yielded as a call too, if these are several.
    """
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
        names = {**names, **_assigned(node)}
    match node:
        case ast.Call(ast.Name(called) | ast.Attribute(_, called)) if called == name:
            yield node, names
        case ast.Call(ast.Name("dict"), [], keywords) if _holds(
            required, [k.arg for k in keywords]
        ):
            yield node, names
        case ast.Dict(keys, values) if _holds(required, map(_constant, keys)):
            pairs = zip(map(_constant, keys), values, strict=True)
            keywords = [ast.keyword(key, value) for key, value in pairs if isinstance(key, str)]
            yield ast.Call(ast.Name("dict"), [], keywords), names
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, name, required, names)


def _holds(required: Sequence[str], names: Iterable[object]) -> bool:
    """Return whether these are the arguments of a constructor that requires several."""
    return len(required) > 2 and {*required} <= {*names}


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _assigned(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """Return the expressions assigned to names in a scope, and a function's defaults."""
    found: dict[str, ast.expr] = {}
    if not isinstance(scope, ast.Module):
        found = _defaults(scope)
    inner = [*scope.body]
    for node in inner:  # grows
        found |= {t.id: value for t, value in assigned(node) if isinstance(t, ast.Name)}
        if isinstance(node, (ast.If, ast.With, ast.For, ast.Try)):
            inner += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
    return found


def _defaults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """Return the defaults of a function's arguments."""
    own = function.args
    last = own.args[len(own.args) - len(own.defaults) :]
    found = {arg.arg: value for arg, value in zip(last, own.defaults, strict=True)}
    named = zip(own.kwonlyargs, own.kw_defaults, strict=True)
    return found | {arg.arg: value for arg, value in named if value is not None}


def _options(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the defaults of the options that a file adds to its command line."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "add_argument"), [*texts]):
                options = [t.value for t in texts if isinstance(t, ast.Constant)]
                names = [str(text).lstrip("-").replace("-", "_") for text in options]
                default = next((k.value for k in node.keywords if k.arg == "default"), None)
                found |= {name: default for name in names if default is not None}
    return found
