"""Sizes at module level: `n_embd = 384`, `CONFIG["emb_dim"]`, `Config.n_embd`.

A number with an unknown name, such as `A = 8` in `Block(n_embd, n_head=A)`, has the role of the
parameter as which it is passed. Values that were computed from the sizes during the import are
updated too: other globals, such as `inner = 4 * n_embd`, and default arguments, such as `def
__init__(self, dim=n_embd)`. Sizes that the code reads and does not define, as in a notebook whose
cell with the hyperparameters was deleted, are defined.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import dis
import inspect
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType, NoneType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from compat.config import GPT2Config
from compat.user_models.config_object import is_namespace
from compat.user_models.missing import Unknown, known_sizes
from compat.user_models.synonyms import (
    AMBIGUOUS,
    SIZES,
    is_ambiguous_size,
    is_window,
    neutral,
    role_of,
    role_of_number,
    size_role,
    takes_sizes,
    value_of,
)
from compat.user_models.usage import (
    MOST_MODULES,
    assigned,
    embeddings,
    is_users_class,
    name_of,
    nodes_of,
    rows_role,
    source_of,
    tree_of,
    user_modules,
)
from compat.user_models.vocabulary_argument import Vocabulary

# All threads share a module's globals, so only one thread at a time may change them.
_LOCK = threading.RLock()
_GLOBAL = "LOAD_GLOBAL"  # the operation that reads a global name in a function
MOST_ENTRIES = 500  # of a config; a larger dictionary is data, such as a vocabulary
# The syntax of arithmetic with names, which can be computed again.
_ARITHMETIC = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip


@contextlib.contextmanager
def resized(target: Callable[..., nn.Module], config: GPT2Config) -> Iterator[None]:
    """Run the body with the checkpoint's sizes in the globals of the target's modules.

    The globals are restored afterwards, also if the body raises. Other threads that call this
    function wait; code that reads these globals without calling it sees the changed values. For a
    function nothing changes, because it chooses the sizes itself.
    """
    with _LOCK, known_sizes(config, Vocabulary(config)), contextlib.ExitStack() as undo:
        modules = user_modules(target) if isinstance(target, type) else []
        _execute_what_is_read(modules)
        changed, by_use, aliases = False, _roles_by_use(modules), _roles_of_aliases(modules)
        by_use |= (in_tables := _roles_in_embeddings(modules))
        aliases |= {
            name: role for name, role in in_tables.items()
            if is_ambiguous_size(name) or _has_the_name_of_another(name, in_tables)
        }  # fmt: skip
        repeated = set[str]().union(*(_repeated(tree_of(module)) for module in modules))
        arguments = {name for module in modules for name in _constructor_arguments(module)}
        for module in modules:
            for value in list(vars(module).values()):
                for owner, entries in _configs(value):
                    layers = _number_of_layers(entries, repeated)
                    changed |= _resize(owner, entries, config, undo, aliases=layers)
            own_aliases = aliases | _number_of_layers(vars(module), repeated)
            of_flags = {n for _, n, key in _names_read(tree_of(module)) if key == "value"}
            computed = _computed_sizes(module)
            given = {name: v for name, v in vars(module).items() if name not in computed}
            changed |= _resize(
                vars(module), given, config, undo, by_use, own_aliases, arguments, of_flags
            )
            for name, value in _undefined(module, config).items():
                _replace(vars(module), name, value, undo)
            for _, owner, key, value in _undefined_entries(module, modules, config):
                _replace(owner, key, value, undo)
        for module in modules if changed else []:
            _recompute_globals(module, undo)
            _recompute_defaults(module, undo)
        yield


def _has_the_name_of_another(name: str, in_tables: Mapping[str, str]) -> bool:
    """Return whether a size in an embedding has the role of another one by its name.

    An example is `nn.Embedding(CHANNELS, EMB_DIM)`, where the channels are the vocabulary.
    """
    by_name = role_of(name)
    others = {role for other, role in in_tables.items() if other != name}
    return by_name != in_tables[name] and by_name in others


def _execute_what_is_read(modules: Sequence[ModuleType]) -> None:
    """Execute what others read off a module of which only the names that are read are executed."""
    lazy = [module for module in modules if "__getattr__" in vars(module)]
    for module in modules if lazy else ():
        for node in nodes_of(module):
            match node:
                case ast.Attribute(ast.Name(owner), name):
                    read = vars(module).get(owner)
                    if isinstance(read, ModuleType) and read in lazy:
                        with contextlib.suppress(Exception, SystemExit):
                            getattr(read, name)


def undefined_sizes(target: Callable[..., nn.Module], config: GPT2Config) -> dict[str, Any]:
    """Return values for the global names that the target's modules read and do not define."""
    modules = user_modules(target) if isinstance(target, type) else []
    found = {n: value for m in modules for n, value in _undefined(m, config).items()}
    for module in modules:
        entries = _undefined_entries(module, modules, config)
        found |= {name: value for name, _, _, value in entries}
    return found


def _undefined_entries(
    module: ModuleType, modules: Sequence[ModuleType], config: GPT2Config
) -> list[tuple[str, dict[str, Any], str, Any]]:
    """Return what the modules read from a dictionary or an object of one of them that lacks it.

    A script may add it before it builds the model, as in `PARAMS["vocab_size"] = len(chars)` or
    `config.set(n_embd=384)`.

    Returns:
        The code that reads each entry, the dictionary or the object's attributes, the name of the
        entry, and a value.
    """
    found: list[tuple[str, dict[str, Any], str, Any]] = []
    for name, value in list(vars(module).items()):
        if isinstance(value, dict) and takes_sizes([key for key in value if isinstance(key, str)]):
            read = _keys_read(name, modules, ast.Subscript)
            for key in sorted(read - {*value}):
                role = role_of_number(key, [*read, *value])
                if role and role in SIZES:
                    found.append((f'{name}["{key}"]', value, key, value_of(role, config)))
        elif is_users_class(type(value)) and not isinstance(value, (type, nn.Module)):
            read = _keys_read(name, modules, ast.Attribute)
            lacking = sorted(key for key in read if not hasattr(value, key))
            for key in lacking if hasattr(value, "__dict__") and takes_sizes(lacking) else ():
                role = role_of(key)
                is_known, new = (True, value_of(role, config)) if role else neutral(key)
                if is_known:
                    found.append((f"{name}.{key}", vars(value), key, new))
    return found


def _keys_read(name: str, modules: Sequence[ModuleType], kind: type[ast.expr]) -> set[str]:
    """Return the keys (of `ast.Subscript`) or attributes of a global name that the modules read."""
    every = (found for module in modules for found in _names_read(tree_of(module)))
    return {key for node, owner, key in every if (node, owner) == (kind, name)}


@lru_cache(maxsize=MOST_MODULES)
def _names_read(tree: ast.Module) -> frozenset[tuple[type[ast.expr], str, str]]:
    """Return the kind, the name, and the key or attribute of all `NAME["key"]` and `NAME.key`."""
    found = set[tuple[type[ast.expr], str, str]]()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(ast.Name(name), ast.Constant(str(key))) | ast.Attribute(
                ast.Name(name), key
            ):
                found.add((type(node), name, key))
    return frozenset(found)


def _undefined(module: ModuleType, config: GPT2Config) -> dict[str, Any]:
    """Return values for the sizes that the methods of a module's classes read as globals."""
    methods = (f.__code__ for f in _functions(module) if "." in f.__qualname__)
    read = dict.fromkeys(name for code in methods for name in _globals_read(code))
    names = [n for n in read if n not in vars(module) and not hasattr(builtins, n)]
    among = frozenset([*names, *vars(module)])
    roles = {n: role_of_number(n, among) for n in names}
    return {n: value_of(role, config) for n, role in roles.items() if role}


@lru_cache(maxsize=4096)
def _globals_read(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function and those inside it read, without calling them."""
    reads = (i for i in dis.get_instructions(code) if i.opname == _GLOBAL)
    names = [str(i.argval) for i in reads if "NULL" not in i.argrepr]
    for inner in code.co_consts:
        names += _globals_read(inner) if isinstance(inner, CodeType) else ()
    return tuple(names)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the module's functions, and the methods of its classes."""
    own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    methods = (v for c in own if isinstance(c, type) for v in vars(c).values())
    yield from (v for v in (*own, *methods) if isinstance(v, FunctionType))


def _constructor_arguments(module: ModuleType) -> Iterator[str]:
    """Yield the names of the arguments of the constructors of a module's classes."""
    for function in _functions(module):
        if function.__name__ == "__init__":
            code = function.__code__
            yield from code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def _configs(
    value: Any, most: int = 3
) -> Iterator[tuple[dict[Any, Any] | type, Mapping[Any, Any]]]:
    """Yield what holds the entries of a config and of those in it, and the entries; `most` deep."""
    entries: Mapping[Any, Any] = {}
    if isinstance(value, dict) and len(value) <= MOST_ENTRIES:
        entries = value
        yield value, entries
    elif is_namespace(value):
        entries = {n: inspect.getattr_static(value, n) for n in dir(value)}
        yield value if isinstance(value, type) else vars(value), entries
    elif is_users_class(value) and issubclass(value, nn.Module):  # sizes as attributes of a class
        own = {name: entry for name, entry in vars(value).items() if type(entry) is int}
        if takes_sizes(own):
            yield value, own
    for entry in list(entries.values()) if most > 1 else ():
        yield from _configs(entry, most - 1)


def _resize(
    owner: dict[Any, Any] | type,
    entries: Mapping[Any, Any],
    config: GPT2Config,
    undo: contextlib.ExitStack,
    by_use: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    arguments: Collection[str] = (),
    of_flags: Collection[str] = (),
) -> bool:
    """Write the checkpoint's value for each integer that is a size by its name or its use.

    Devices become the CPU, on which models are compared.
    A global that is None, such as `vocab_size = None`, is set by the code that reads the data. One
    that is unknown may be any hyperparameter; of `of_flags` the code reads the attribute `value`.

    Returns:
        Whether there was one.
    """
    kinds = (int, Unknown, *((NoneType,) if by_use is not None else ()))
    numbers = {n: v for n, v in entries.items() if type(v) in kinds and isinstance(n, str)}
    roles = {
        n: (role_of_number if type(v) is int else role_of)(
            n, [*numbers, *arguments] if is_window(n) else numbers
        )
        or (by_use or {}).get(n)
        for n, v in numbers.items()
    } | {n: role for n, role in (aliases or {}).items() if n in numbers}
    roles |= {
        n: "n_head" for n, role in roles.items()
        if role == "d_head" and (by_use or {}).get(n) == "n_head"
    }  # fmt: skip
    # A head that is as wide as the model is the width of all heads.
    widths = {numbers[n] for n, role in roles.items() if role == "n_embd"} - {None}
    heads = {numbers[n] for n, role in roles.items() if role == "n_head"} - {None, 1}
    if heads:
        roles |= {n: "n_embd" for n, r in roles.items() if r == "d_head" and numbers[n] in widths}
    for name, value in entries.items():
        if isinstance(value, (str, torch.device)) and role_of(str(name)) == "device":
            _replace(owner, name, type(value)("cpu"), undo)
    sizes = {
        name: value_of(role, config) for name, role in roles.items()
        if role and (role in SIZES or isinstance(numbers[name], Unknown))
        and (numbers[name] is not None or name.lower() not in AMBIGUOUS)
    }  # fmt: skip
    for name, size in sizes.items():
        is_flag = isinstance(numbers[name], Unknown) and name in of_flags  # as absl defines them
        _replace(owner, name, SimpleNamespace(value=size) if is_flag else size, undo)
    if sizes and isinstance(owner, type) and dataclasses.is_dataclass(owner):
        _resize_fields(owner, sizes, undo)
    return bool(sizes)


def _resize_fields(owner: type, sizes: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
    """Replace the defaults of a data class's fields, for code that builds it without arguments."""
    init = inspect.getattr_static(owner, "__init__")
    old = getattr(init, "__defaults__", None) or ()
    undo.callback(setattr, init, "__defaults__", init.__defaults__)
    pairs = zip(_positional(init)[-len(old) :], old, strict=True) if old else ()
    init.__defaults__ = tuple(sizes.get(n, v) if type(v) is int else v for n, v in pairs) or None


def _roles_by_use(modules: Sequence[ModuleType]) -> dict[str, str]:
    """Return the roles of globals that are passed as a parameter whose name stands for a size.

    Globals that are computed from others, or passed as parameters of different roles, are left out.
    """
    found: dict[str, set[str | None]] = {}
    own = {module.__name__ for module in modules}
    for module in modules:
        local = _local_names(tree_of(module))
        for call in (node for node in nodes_of(module) if isinstance(node, ast.Call)):
            passed = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
            callee = vars(module).get(call.func.id) if isinstance(call.func, ast.Name) else None
            if getattr(callee, "__module__", None) in own:
                passed += zip(_positional(callee), call.args, strict=False)
            names = [name for name, _ in passed]
            for name, value in passed:
                if isinstance(value, ast.Name) and value not in local:
                    found.setdefault(value.id, set()).add(role_of(name, among=names))
        for name, value in _assignments(module):
            if name in found and not isinstance(value, ast.Constant):
                found[name].add(None)
    return {name: role for name, (role, *more) in found.items() if role in SIZES and not more}


@lru_cache(maxsize=MOST_MODULES)
def _local_names(tree: ast.Module) -> frozenset[ast.AST]:
    """Return the names in functions that are arguments or variables of these."""
    found = set[ast.AST]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            own = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            body = [node for each in function.body for node in ast.walk(each)]
            names = [node for node in body if isinstance(node, ast.Name)]
            own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            found |= {node for node in names if node.id in own}
    return frozenset(found)


@lru_cache(maxsize=MOST_MODULES)
def _repeated(tree: ast.Module) -> frozenset[str]:
    """Return the names of the numbers in `[Block(config) for _ in range(config.depth)]`."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case (ast.ListComp() | ast.GeneratorExp()) as made if isinstance(made.elt, ast.Call):
                match made.generators[0].iter:
                    case ast.Call(ast.Name("range"), [times]):
                        found.add(name_of(times))
    return frozenset(found)


def _number_of_layers(entries: Mapping[Any, Any], repeated: Collection[str]) -> dict[str, str]:
    """Return the role of the only repeated number among sizes, if no other name has it."""
    numbers = [n for n, v in entries.items() if isinstance(n, str) and type(v) is int]
    unknown = [n for n in numbers if n in repeated and role_of(n, numbers) is None]
    if len(unknown) > 1 or not takes_sizes(numbers) or "n_layer" in map(role_of, numbers):
        return {}
    return dict.fromkeys(unknown, "n_layer")


def _roles_in_embeddings(modules: Sequence[ModuleType]) -> dict[str, str]:
    """Return the roles of the globals in `self.position_table = nn.Embedding(rows, width)`."""
    found: dict[str, set[str]] = {}
    for module in modules:
        for table, sizes in embeddings(module):
            for size, role in (("num_embeddings", rows_role(table)), ("embedding_dim", "n_embd")):
                name = sizes.get(size)
                if table and isinstance(name, ast.Name) and name.id in vars(module):
                    found.setdefault(name.id, set()).add(role)
    return {name: min(roles) for name, roles in found.items() if len(roles) == 1}


def _roles_of_aliases(modules: Sequence[ModuleType]) -> dict[str, str]:
    """Return the roles of globals that are another size, as in `head_size = n_embd`."""
    found: dict[str, str] = {}
    for module in modules:
        for name, value in _assignments(module):
            if isinstance(value, ast.Name) and (role := size_role(value.id, vars(module))):
                found[name] = role
    return found


def _assignments(module: ModuleType) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns, also as `B, C = batch_size, n_embd`, with values."""
    pairs = (pair for node in tree_of(module).body for pair in assigned(node))
    return ((target.id, value) for target, value in pairs if isinstance(target, ast.Name))


def _computed_sizes(module: ModuleType) -> set[str]:
    """Return the globals that are computed from other sizes alone, as `head_s = n_embd // n_head`.

    They are computed again, whatever their names suggest.
    """
    own, found = vars(module), set[str]()
    for name, value in _assignments(module):
        match value:
            case ast.BinOp(ast.Name(left), ast.Mult() | ast.FloorDiv(), ast.Name(right)):
                if all(each in own and size_role(each, own) for each in (left, right)):
                    found.add(name)
    return found


def _positional(function: Any) -> list[str]:
    """Return the names of a function's or a class's parameters that take positional arguments."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return []


def _recompute_globals(module: ModuleType, undo: contextlib.ExitStack) -> None:
    """Compute other integers, such as `fused = 3 * n_embd`, from the new sizes."""
    own = vars(module)
    numbers = {name for name, value in own.items() if type(value) in (int, Unknown)}
    others = {name for name in numbers if role_of(name, among=numbers) not in SIZES}
    others |= _computed_sizes(module) & numbers
    for name, value in _assignments(module):
        if name in others and isinstance(found := _computed(value, module), int):
            _replace(own, name, found, undo)


def _recompute_defaults(module: ModuleType, undo: contextlib.ExitStack) -> None:
    """Compute the integer defaults of the module's functions and methods from the new sizes."""
    for function in _functions(module):
        try:
            node = ast.parse(textwrap.dedent(source_of(function))).body[0]
        except (SyntaxError, IndexError):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        old, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        undo.callback(setattr, function, "__defaults__", function.__defaults__)
        undo.callback(setattr, function, "__kwdefaults__", function.__kwdefaults__)
        if len(old) == len(node.args.defaults):
            pairs = zip(old, node.args.defaults, strict=True)
            function.__defaults__ = tuple(_again(a, b, module) for a, b in pairs) or None
        by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        given = {arg.arg: default for arg, default in by_name if default is not None}
        function.__kwdefaults__ = {
            name: _again(value, given[name], module) if name in given else value
            for name, value in named.items()
        } or None


def _again(value: Any, expression: ast.expr, module: ModuleType) -> Any:
    """Return a default computed again, if it is an integer from the module's globals."""
    found = _computed(expression, module) if type(value) in (int, Unknown) else None
    return found if isinstance(found, int) else value


def _computed(expression: ast.expr, module: ModuleType) -> Any:
    """Return the value of arithmetic with the module's globals; None for any other expression."""
    nodes = list(ast.walk(expression))
    names = any(isinstance(node, ast.Name) for node in nodes)
    if not names or not all(isinstance(node, _ARITHMETIC) for node in nodes):
        return None
    with contextlib.suppress(Exception):
        return eval(compile(ast.Expression(expression), "<default>", "eval"), vars(module))
    return None


def _replace(
    owner: dict[Any, Any] | type, name: str, value: object, undo: contextlib.ExitStack
) -> None:
    """Set an entry or a class attribute, and restore what it was when `undo` is closed."""
    if isinstance(owner, type):
        undo.enter_context(patch.object(owner, name, value))
        return
    if name in owner:
        undo.callback(owner.__setitem__, name, owner[name])
    else:
        undo.callback(owner.__delitem__, name)
    owner[name] = value
