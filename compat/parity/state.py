"""The state that a model keeps between calls: what its modules, classes and functions refer to.

No code of the user runs while the state is read: no `__repr__`, no `__eq__` and no property.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from compat.sharding import reshard
from compat.user_code import is_users, names_in

MAX_VALUES = 20_000  # objects whose contents are read
MAX_ITEMS = 1000  # items read of one container
MAX_NUMBERS = 1 << 18  # elements up to which a tensor is read; beyond, only its version is
_PRIMITIVES = (int, float, complex, str, bytes, bool, type(None), range)
# The attributes by which an object of these types refers to others.
_REFERENCES: dict[type, tuple[str, ...]] = {
    MethodType: ("__self__", "__func__"),
    BuiltinFunctionType: ("__self__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    partial: ("func", "args", "keywords"),
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


# FSDP2 keeps gathered tensors in attributes whose names begin so. Its hooks are skipped as well.
_OF_FSDP = "__composable_api_state_key_"


def state_digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of each value that a call of the model could change, by the value's name.

    The values are attributes of its modules, of their classes and of objects in them, and what
    functions of the user's code refer to: closures, default arguments and global variables.
    """
    reshard(model)
    walk = _Walk()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {
            name: v
            for name, v in vars(module).items()
            if name not in _OF_EVERY_MODULE and not name.startswith(_OF_FSDP)
        }
        hooks = [
            hook
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
        ]
        numbered = {f"hooks[{number}]": hook for number, hook in enumerate(hooks)}
        for name, value in (own | module._buffers | module._parameters | numbered).items():
            walk.add(f"{prefix}{name}", value)
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        walk.add(cls.__name__, cls)
    while walk.globals:
        name, value = walk.globals.pop()
        walk.add(f"the global variable {name}", value)
    return walk.digests


class _Walk:
    """Visits every object once and digests its contents."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.globals: list[tuple[str, Any]] = []  # functions refer to them; to be added
        self._seen: dict[int, Any] = {}  # by id; keeps the objects alive, so that no id is reused

    def add(self, name: str, value: Any) -> None:
        """Digest a value, or each attribute of a class."""
        if isinstance(value, type):
            for attribute, held in _class_attributes(value):
                self.add(f"{name}.{attribute}", held)
        elif not (isinstance(value, nn.Module) or id(value) in self._seen):
            digest = hashlib.sha1()
            for part in self._parts(value):
                digest.update(part.encode() + b"\0")
            self.digests[name] = digest.hexdigest()

    def _parts(self, value: Any) -> Iterator[str]:
        """Yield the contents of an object and of all objects inside it, as strings."""
        waiting = deque([value])
        while waiting:
            value = waiting.popleft()
            yield type(value).__name__
            if type(value) in _PRIMITIVES:
                yield repr(value)
            elif isinstance(value, Tensor):
                yield from _tensor_contents(value)
            elif isinstance(value, (nn.Module, ModuleType)) or id(value) in self._seen:
                continue
            elif len(self._seen) < MAX_VALUES:
                self._seen[id(value)] = value
                own, inner = self._contents(value)
                yield own
                waiting.extend(inner)

    def _contents(self, value: Any) -> tuple[str, list[Any]]:
        """Return what an object itself contains, as a string, and the objects inside it."""
        if isinstance(value, dict):
            items = list(islice(dict.items(value), MAX_ITEMS))
            return str(dict.__len__(value)), [part for item in items for part in item]
        if isinstance(value, (list, tuple, deque)):
            return str(len(value)), list(islice(value, MAX_ITEMS))
        if isinstance(value, (set, frozenset)):
            return str(len(value)), sorted(x for x in value if type(x) is int)[:MAX_ITEMS]
        for kind, names in _REFERENCES.items():
            if isinstance(value, kind):
                return "", [getattr(value, name) for name in names]
        if isinstance(value, FunctionType):
            return "", self._function_contents(value)
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
            return _iterator_state(value), []
        return "", _attributes(value)

    def _function_contents(self, function: FunctionType) -> list[Any]:
        """Return the closure and defaults of a user's function, and add its globals to the walk."""
        if not is_users(function.__code__.co_filename):
            return []
        scope = function.__globals__
        for name in dict.fromkeys(names_in(function.__code__)):
            if name in scope and not isinstance(scope[name], (type, ModuleType)):
                self.globals.append((name, scope[name]))
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                cells.append(None)
        return [*cells, function.__defaults__, function.__kwdefaults__, vars(function)]


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class and of its bases, where these are the user's code."""
    for base in cls.__mro__:
        methods = [value for value in vars(base).values() if isinstance(value, FunctionType)]
        if any(is_users(method.__code__.co_filename) for method in methods):
            for name, value in list(vars(base).items()):
                if not (name.startswith("__") and name not in ("__init__", "__call__")):
                    yield name, value


def _attributes(value: Any) -> list[Any]:
    """Return the `__dict__` of an object, and the values in its slots."""
    found: list[Any] = []
    with suppress(AttributeError):
        attributes = object.__getattribute__(value, "__dict__")
        found.append(dict(attributes) if isinstance(attributes, dict) else None)
    for base in type(value).__mro__:
        for slot in vars(base).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(Exception):  # the slot has no value
                    found.append(slot.__get__(value))
    return found


def _iterator_state(value: Any) -> str:
    """Return the position of a built-in iterator; empty for other objects."""
    if type(value).__name__ == "count":
        return repr(value) if type(value).__module__ == "itertools" else ""
    try:
        return str(operator.length_hint(value, -1)) if hasattr(value, "__next__") else ""
    except Exception:
        return ""


def _tensor_contents(tensor: Tensor) -> Iterator[str]:
    """Yield the shape, the data type, and the values or the version of a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        yield f"{tuple(tensor.shape)} {tensor.dtype}"
        if not tensor.is_inference():
            yield str(tensor._version) if isinstance(tensor, nn.Parameter) else ""
        readable = tensor.layout == torch.strided and tensor.device.type == "cpu"
        # FSDP2 frees the memory of tensors that it keeps.
        readable = readable and tensor.untyped_storage().nbytes() >= tensor.nbytes
        if readable and tensor.numel() <= MAX_NUMBERS and type(tensor) in (Tensor, nn.Parameter):
            # A copy, since memory shared with NumPy cannot be resized, which FSDP2 does.
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            numbers = copy.flatten().view(torch.uint8).numpy()
            yield hashlib.sha1(numbers.tobytes()).hexdigest()
        elif not tensor.is_inference():
            yield str(tensor._version)
