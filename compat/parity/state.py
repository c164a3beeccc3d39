"""What a model keeps between calls: all values that its modules, classes and functions can reach.

Nothing of the user's is called: no `__repr__`, no `__eq__`, no property.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compat.user_code import is_users

MOST_VALUES = 20_000  # that are looked at
MOST_ITEMS = 1000  # of one container
MOST_NUMBERS = 1 << 18  # of a tensor whose contents are compared; of a larger one its version is
_PLAIN = (int, float, complex, str, bytes, bool, type(None), range)
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


def state_of(model: nn.Module) -> dict[str, str]:
    """A digest of each value that calls of the model could change, by the value's name.

    These are the attributes of its modules, of their classes and of objects in them, and what the
    functions of the user's code refer to: closures, default arguments and global variables.
    """
    walk = _Walk()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name not in _INTERNAL and name != "training":
                walk.root(f"{prefix}{name}", value)
        for name, tensor in (*module._buffers.items(), *module._parameters.items()):
            walk.root(f"{prefix}{name}", tensor)
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for number, hook in enumerate(hooks):
            walk.root(f"{prefix}hooks[{number}]", hook)
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        walk.root(cls.__name__, cls)
    while walk.globals:
        name, value = walk.globals.pop()
        walk.root(f"the global variable {name}", value)
    return walk.found


class _Walk:
    """Visits every object once and writes down what it holds."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.globals: list[tuple[str, Any]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that an id is one object's

    def root(self, name: str, value: Any) -> None:
        if isinstance(value, type):
            for attribute, held in _class_attributes(value):
                self.root(f"{name}.{attribute}", held)
        elif not (isinstance(value, nn.Module) or id(value) in self._seen):
            digest = hashlib.sha1()
            for part in self._parts(value):
                digest.update(part.encode() + b"\0")
            self.found[name] = digest.hexdigest()

    def _parts(self, value: Any) -> Iterator[str]:
        """What an object holds, in strings; the objects in it follow it."""
        waiting = deque([value])
        while waiting:
            value = waiting.popleft()
            yield type(value).__name__
            if type(value) in _PLAIN:
                yield repr(value)
            elif isinstance(value, Tensor):
                yield from _of_tensor(value)
            elif isinstance(value, (nn.Module, ModuleType)) or id(value) in self._seen:
                continue
            elif len(self._seen) < MOST_VALUES:
                self._seen[id(value)] = value
                known, inner = self._inside(value)
                yield known
                waiting.extend(inner)

    def _inside(self, value: Any) -> tuple[str, list[Any]]:
        """What is known of an object itself, and the objects that it holds."""
        if isinstance(value, dict):
            items = list(islice(dict.items(value), MOST_ITEMS))
            return str(dict.__len__(value)), [part for item in items for part in item]
        if isinstance(value, (list, tuple, deque)):
            return str(len(value)), list(islice(value, MOST_ITEMS))
        if isinstance(value, (set, frozenset)):
            return str(len(value)), sorted(x for x in value if type(x) is int)[:MOST_ITEMS]
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            return "", [value.__self__, getattr(value, "__func__", None)]
        if isinstance(value, (staticmethod, classmethod)):
            return "", [value.__func__]
        if isinstance(value, property):
            return "", [value.fget]
        if isinstance(value, partial):
            return "", [value.func, value.args, value.keywords]
        if isinstance(value, FunctionType):
            return "", self._of_function(value)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return str(frame and frame.f_lasti), [dict(frame.f_locals)] if frame else []
        if isinstance(value, torch.Generator):
            return "", [value.get_state()]
        if isinstance(value, random.Random):
            return "", [value.getstate()]
        if type(value).__name__ == "_lru_cache_wrapper":
            return str(value.cache_info()), [value.__wrapped__]
        if type(value).__module__ in ("builtins", "itertools"):
            return _rest(value), []
        return "", _attributes(value)

    def _of_function(self, function: FunctionType) -> list[Any]:
        """The closure and the defaults of a user's function; its globals are looked at later."""
        if not is_users(function.__code__.co_filename):
            return []
        scope = function.__globals__
        for name in dict.fromkeys(_names(function.__code__)):
            if name in scope and not isinstance(scope[name], (type, ModuleType)):
                self.globals.append((name, scope[name]))
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                cells.append(None)
        return [*cells, function.__defaults__, function.__kwdefaults__, vars(function)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        methods = [value for value in vars(base).values() if isinstance(value, FunctionType)]
        if any(is_users(method.__code__.co_filename) for method in methods):
            for name, value in list(vars(base).items()):
                if not (name.startswith("__") and name not in ("__init__", "__call__")):
                    yield name, value


def _attributes(value: Any) -> list[Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    slots = [
        vars(base)[name].__get__(value)
        for base in type(value).__mro__
        for name in _slots(base)
        if name in vars(base) and _is_set(vars(base)[name], value)
    ]
    return [dict(attributes) if isinstance(attributes, dict) else None, *slots]


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _is_set(descriptor: Any, value: Any) -> bool:
    try:
        descriptor.__get__(value)
    except Exception:
        return False
    return True


def _rest(value: Any) -> str:
    """How far a built-in iterator has come, or nothing."""
    if type(value).__name__ == "count":
        return repr(value) if type(value).__module__ == "itertools" else ""
    try:
        return str(operator.length_hint(value, -1)) if hasattr(value, "__next__") else ""
    except Exception:
        return ""


def _of_tensor(tensor: Tensor) -> Iterator[str]:
    with torch._C.DisableTorchFunctionSubclass():
        yield f"{tuple(tensor.shape)} {tensor.dtype}"
        if not tensor.is_inference():
            yield str(tensor._version) if isinstance(tensor, nn.Parameter) else ""
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if plain and tensor.numel() <= MOST_NUMBERS and type(tensor) in (Tensor, nn.Parameter):
            numbers = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            yield hashlib.sha1(numbers.tobytes()).hexdigest()
        elif not tensor.is_inference():
            yield str(tensor._version)
