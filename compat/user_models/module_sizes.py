"""Sizes that a file keeps at module level: `n_embd = 384`, `CONFIG["emb_dim"]`, `Config.n_embd`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from compat.config import GPT2Config
from compat.user_models.config_object import CONFIG_CLASS
from compat.user_models.synonyms import SIZES, role_of, value_of
from compat.user_models.usage import functions, is_foreign

# A module has its globals once for all threads: only one at a time may have them changed.
_LOCK = threading.RLock()


@contextlib.contextmanager
def resized(cls: type[nn.Module], config: GPT2Config) -> Iterator[None]:
    """Run the body with the checkpoint's sizes in the globals of the class's modules.

    Afterwards they are as before, also if the body raises. Other threads wait here meanwhile; code
    that reads these globals without coming here sees the changed ones.
    """
    with _LOCK, contextlib.ExitStack() as undo:
        modules = _modules(cls)
        used = {name for module in modules for name in _used(module)}
        for module in modules:
            for name in sorted(used & set(vars(module))):
                value = vars(module)[name]
                if isinstance(value, dict):
                    _resize(value, config, undo, value, value.__setitem__, value.__delitem__)
                elif _is_namespace(value):
                    _resize_attributes(value, _entries(value), config, undo)
            known = {name: vars(module)[name] for name in used if name in vars(module)}
            _resize_attributes(module, known, config, undo)
        yield


def _resize_attributes(
    owner: Any, entries: Mapping[str, Any], config: GPT2Config, undo: contextlib.ExitStack
) -> None:
    set_, delete = functools.partial(setattr, owner), functools.partial(delattr, owner)
    _resize(entries, config, undo, vars(owner), set_, delete)


def _resize(
    entries: Mapping[Any, Any],
    config: GPT2Config,
    undo: contextlib.ExitStack,
    owned: Mapping[Any, Any],
    write: Callable[[str, Any], None],
    delete: Callable[[str], None],
) -> None:
    """Write the checkpoint's value for each plain whole number whose name is that of a size.

    Args:
        entries: the values by name, inherited ones included.
        undo: restores them when it is closed.
        owned: those that are not inherited.
        write, delete: set and remove one of the owner's.
    """
    numbers = {n: v for n, v in entries.items() if type(v) is int and isinstance(n, str)}
    for name, old in numbers.items():
        role = role_of(name, among=numbers)
        if role in SIZES:
            own = name in owned
            with contextlib.suppress(AttributeError):  # frozen
                write(name, value_of(role, config))
                undo.callback(*((write, name, old) if own else (delete, name)))


def _entries(value: Any) -> dict[str, Any]:
    return {n: getattr(value, n) for n in {**vars(type(value)), **vars(value)} if n[0] != "_"}


def _is_namespace(value: Any) -> bool:
    """A config class or an instance of one."""
    cls = value if isinstance(value, type) else type(value)
    named = cls.__name__.lower().endswith((*CONFIG_CLASS, "namespace"))
    return named and not issubclass(cls, nn.Module) and hasattr(value, "__dict__")


def _modules(cls: type) -> list[ModuleType]:
    """The class's module, and those of its folder that it takes something from."""
    first = sys.modules.get(cls.__module__)
    if first is None or not getattr(first, "__file__", None):
        return []
    folder = Path(str(first.__file__)).parent
    found = [first]
    for module in found:  # grows
        for value in list(vars(module).values()):
            name = value.__name__ if isinstance(value, ModuleType) else None
            other = sys.modules.get(name or str(getattr(value, "__module__", None)))
            path = Path(str(getattr(other, "__file__", None) or "/"))
            near = folder in path.parents and "site-packages" not in path.parts
            if other is not None and near and other not in found:
                found.append(other)
    return found


def _used(module: ModuleType) -> set[str]:
    """The global names and attributes that the functions and classes of a module use."""
    names: set[str] = set()
    for value in vars(module).values():
        if isinstance(value, FunctionType) and not is_foreign(value):
            names |= _names(value.__code__)
        elif isinstance(value, type) and not is_foreign(value):
            for function in functions(value):
                names |= _names(function.__code__)
    return names


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
