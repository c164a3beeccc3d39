"""Whether a model still computes what compat's blocks compute, so that a fast pass may do it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as every_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compat import layers
from compat.config import GPT2Config
from compat.dialects import DIALECTS, Model, conv1d, dialect_of, linear


def is_unmodified(model: nn.Module) -> bool:
    """Whether a model differs from a newly built one in the values of its parameters alone.

    The new one is built from `model.config`. Compared are the modules, their types, order and
    attributes, hooks, buffers, and which parameters there are, their shapes and which are tied. Not
    unmodified is also a model whose code was patched, here or in torch, one whose tensors are of a
    subclass of torch's, and any model under autocast or a mode that intercepts torch's functions.
    """
    dialect = dialect_of(model)
    return (
        dialect is not None
        and isinstance(config := getattr(model, "config", None), GPT2Config)
        and not _is_intercepted()
        and not _is_patched()
        and (new := _newly_built(dialect.name, config)) is not None
        and _equal_modules(model, new)
        and _equal_parameters(model, new)
    )


def _is_intercepted() -> bool:
    """Whether torch's functions or the calls of modules do something else, or more, just now."""
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*modes, *_get_current_dispatch_mode_stack()]
    return (
        any(type(mode) is not DeviceContext for mode in modes)
        or torch.is_autocast_enabled("cpu")
        or any(
            value
            for name, value in vars(every_module).items()
            if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
        )
    )


@lru_cache(maxsize=8)
def _newly_built(dialect: str, config: GPT2Config) -> Model | None:
    """A model without memory for parameters; None if the config, changed meanwhile, fits none."""
    try:
        with torch.device("meta"):
            return DIALECTS[dialect].model_class(config).eval()
    except Exception:  # of any kind: nothing checks the fields of a config that was changed
        return None


def _equal_modules(part: nn.Module | None, new: nn.Module | None) -> bool:
    """Everything but the values of parameters, recursively."""
    if part is None or new is None or type(part) is not type(new):
        return False
    mine, theirs = vars(part), vars(new)
    return (
        mine.keys() == theirs.keys()
        and all(_equal_values(mine[name], theirs[name]) for name in theirs if name not in _APART)
        and list(part._modules) == list(new._modules)
        and list(part._parameters) == list(new._parameters)
        and list(part._buffers) == list(new._buffers)
        and all(map(_equal_buffers, part._buffers.values(), new._buffers.values()))
        and all(map(_equal_modules, part._modules.values(), new._modules.values()))
    )


_APART = {"_modules", "_parameters", "_buffers"}


def _equal_values(value: object, new: object) -> bool:
    return type(value) is type(new) and bool(value == new)


def _equal_buffers(buffer: Tensor | None, new: Tensor | None) -> bool:
    """A buffer on the meta device has no values to compare with."""
    if buffer is None or new is None:
        return buffer is new
    known = type(buffer) is type(new) is Tensor and not new.is_meta
    return known and buffer.device == new.device and torch.equal(buffer, new)


def _equal_parameters(model: nn.Module, new: nn.Module) -> bool:
    mine, theirs = _parameters(model), _parameters(new)
    return _ties(mine) == _ties(theirs) and all(
        p is q is None or (_is_plain(p) and p.shape == q.shape)
        for p, q in zip(mine, theirs, strict=True)
    )


def _parameters(model: nn.Module) -> list[Any]:
    """All of them, those that are tied several times, and None for one that a module lacks."""
    return [p for part in model.modules() for p in part._parameters.values()]


def _ties(parameters: list[Any]) -> list[int]:
    """For each, the place of the first that is the same."""
    places: dict[int, int] = {}
    return [places.setdefault(id(p), place) for place, p in enumerate(parameters)]


def _is_plain(parameter: object) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.layout == torch.strided
        and parameter.is_floating_point()
    )


# The code that a forward pass executes: compat's, and what that uses of torch, by name.

_FILES = (linear, conv1d, layers)
_PARTS = (nn.Linear, nn.Embedding, nn.Dropout, nn.Sequential, nn.ModuleList, nn.Parameter)
_CALLING = {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"}
_OPERATORS = {name for name in dir(operator) if name.startswith("__")}
_OPERATORS |= {name.replace("__", "__r", 1) for name in _OPERATORS} | {"__torch_function__"}


def _classes() -> set[type]:
    """Those of the blocks and of all that they are built from."""
    found = {value for file in _FILES for value in vars(file).values() if isinstance(value, type)}
    acts = {kind[0] if isinstance(kind, tuple) else kind for kind in layers.ACTIVATIONS.values()}
    bases = {base for kind in (*found, *acts, *_PARTS) for base in kind.__mro__}
    return {base for base in bases if base.__module__.split(".")[0] in ("compat", "torch")}


def _used_names(classes: set[type]) -> set[str]:
    """The names that compat's functions use, torch's modules, and torch's functions among them."""
    owners = [*_FILES, *(kind for kind in classes if kind.__module__.startswith("compat."))]
    functions = [value for owner in owners for value in vars(owner).values()]
    functions += [vars(kind).get(name) for kind in classes for name in ("forward", "_call_impl")]
    names = _looked_up(functions)
    return names | _looked_up([value for name, value in vars(F).items() if name in names])


def _looked_up(values: list[Any]) -> set[str]:
    """The names in the code of those values that are functions, in the functions inside too."""
    codes = [value.__code__ for value in values if isinstance(value, FunctionType)]
    names = set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return names


def _watched() -> list[tuple[type | ModuleType, str]]:
    """Where these names are looked up: owner and name."""
    classes = _classes()
    names = _used_names(classes) | _CALLING | _OPERATORS | {"__init__", "forward"}
    files = {sys.modules[kind.__module__] for kind in classes if issubclass(kind, nn.Module)}
    owners: list[type | ModuleType] = [torch, F, *files, *classes]
    pairs = [(owner, name) for owner in owners for name in sorted(names)]
    # torch's compiler itself wraps the initialisation of all modules, once it is imported.
    return [pair for pair in pairs if pair != (nn.Module, "__init__")]


def _code() -> Iterator[object]:
    """What they stand for now, None where the owner does not have the name itself."""
    return (vars(owner).get(name) for owner, name in _WATCHED)


def _is_foreign(owner: type | ModuleType, value: object) -> bool:
    """Whether a function of torch is not torch's: replaced before compat was imported."""
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return (
        name.split(".")[0] == "torch"
        and isinstance(value, FunctionType)
        and not value.__code__.co_filename.startswith(str(Path(torch.__file__).parent))
    )


_WATCHED = _watched()
_AT_IMPORT = list(_code())
_FOREIGN = any(
    _is_foreign(owner, value) for (owner, _), value in zip(_WATCHED, _AT_IMPORT, strict=True)
)


def _is_patched() -> bool:
    return _FOREIGN or any(map(operator.is_not, _code(), _AT_IMPORT))
