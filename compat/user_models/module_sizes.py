"""Sizes at module level: `n_embd = 384`, `CONFIG["emb_dim"]`, `Config.n_embd`."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from compat.config import GPT2Config
from compat.user_models.synonyms import CONFIG_CLASSES, SIZES, role_of, value_of
from compat.user_models.usage import user_modules

# All threads share a module's globals, so only one thread at a time may change them.
_LOCK = threading.RLock()
_ABSENT = object()


@contextlib.contextmanager
def resized(target: Callable[..., nn.Module], config: GPT2Config) -> Iterator[None]:
    """Run the body with the checkpoint's sizes in the globals of the target's modules.

    The globals are restored afterwards, also if the body raises. Other threads that call this
    function wait; code that reads these globals without calling it sees the changed values. Nothing
    changes for a function, which builds its model in the sizes that it chooses.
    """
    with _LOCK, contextlib.ExitStack() as undo:
        for module in user_modules(target) if isinstance(target, type) else []:
            for value in list(vars(module).values()):
                if isinstance(value, dict):
                    _resize(value, value, config, undo)
                elif _is_namespace(value):
                    members = {n: inspect.getattr_static(value, n) for n in dir(value)}
                    owner = value if isinstance(value, type) else vars(value)
                    _resize(owner, members, config, undo)
            _resize(vars(module), vars(module), config, undo)
        yield


def _resize(
    owner: dict[Any, Any] | type,
    entries: Mapping[Any, Any],
    config: GPT2Config,
    undo: contextlib.ExitStack,
) -> None:
    """Write the checkpoint's value for each integer whose name stands for a size."""
    numbers = {n: v for n, v in entries.items() if type(v) is int and isinstance(n, str)}
    for name in numbers:
        role = role_of(name, among=numbers)
        if role in SIZES:
            own = owner if isinstance(owner, dict) else vars(owner)
            undo.callback(_write, owner, name, own.get(name, _ABSENT))
            _write(owner, name, value_of(role, config))


def _write(owner: dict[Any, Any] | type, name: str, value: object) -> None:
    """Set an entry or a class attribute, or remove it if the value is _ABSENT."""
    if isinstance(owner, dict) and value is _ABSENT:
        del owner[name]
    elif isinstance(owner, dict):
        owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _is_namespace(value: Any) -> bool:
    """Whether a value is a config class or an instance of one."""
    cls = value if isinstance(value, type) else type(value)
    named = cls.__name__.lower().endswith((*CONFIG_CLASSES, "namespace"))
    return named and not issubclass(cls, nn.Module) and hasattr(value, "__dict__")
