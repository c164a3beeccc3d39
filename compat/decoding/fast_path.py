"""The choice of a decoder: the fast path for unmodified models, else the model's own `forward`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compat import layers
from compat.config import GPT2Config
from compat.decoding.decoder import Decoder, HasDecoder
from compat.decoding.matrices import Blas
from compat.decoding.native import transformer_class
from compat.decoding.plain import PlainDecoder
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Transformer
from compat.dialects import DIALECTS, Model, conv1d, dialect_of, linear
from compat.errors import GenerationError
from compat.name_map import all_parameters
from compat.ops import Transpose

DEVICES = ("cpu", "cuda")  # on which the fast path is faster than the model's own forward


def decoder_of(model: Model | HasDecoder) -> Decoder:
    """Return a decoder for a model: its own, the fast path, or one that calls its `forward`.

    An unmodified model of a dialect gets the fast path, which uses the model's own tensors without
    packing or copying them.

    Raises:
        GenerationError: the argument has neither a decoder nor compat's config, or the model is in
            training mode.
    """
    if isinstance(model, HasDecoder):
        return model.decoder()
    if not isinstance(model, nn.Module) or not isinstance(
        getattr(model, "config", None), GPT2Config
    ):
        raise GenerationError(
            f"cannot generate with a {type(model).__name__}, but only with a model from "
            "load_pretrained or an Engine. Build Engine(model, name_map=…, config=…) for a module "
            "of your own."
        )
    kinds = {(tensor.dtype, tensor.device) for tensor in model.parameters()}
    is_fast = len(kinds) == 1 and kinds.pop()[1].type in DEVICES
    if is_fast and is_unmodified(model):
        return StaticDecoder(transformer_of(model))
    return PlainDecoder(model)


@torch.no_grad()
def transformer_of(model: Model) -> Transformer:
    """Build a `Transformer` on views of an unmodified model's weights.

    It is rebuilt for every text, which is cheap, so that it always uses the current weights.
    """
    config, dialect = model.config, dialect_of(model)
    assert dialect is not None  # unmodified models are of a dialect
    rows = {row.hf: row for row in dialect.name_map.expand(config.n_layer)}
    parameters = all_parameters(model)

    def read(name: str) -> list[Tensor]:
        row = rows[name]
        tensors = [parameters[ours].detach() for ours in row.ours if ours in parameters]
        transposed = isinstance(row.op, Transpose) or getattr(row.op, "transpose", False)
        return [tensor.t() for tensor in tensors] if transposed else tensors

    (wte,), (wpe,) = read("wte.weight"), read("wpe.weight")
    kind = transformer_class(Blas, wte.device)
    return kind(config, (wte, wpe), read, Blas, wte.dtype)


# Detection of modified models


def is_unmodified(model: nn.Module) -> bool:
    """Return whether a model differs from a freshly built one in the values of its parameters only.

    The fresh model is built from `model.config`. The comparison covers the modules, their types,
    order and attributes, hooks, buffers, and the names, shapes and ties of parameters. A model also
    counts as modified if code of compat or torch was patched, if its tensors are of a subclass of
    Tensor, or under autocast or a mode that intercepts torch's functions.
    """
    dialect = dialect_of(model)
    return (
        dialect is not None
        and isinstance(config := getattr(model, "config", None), GPT2Config)
        and not _is_intercepted()
        and not _is_patched()
        and (fresh := _freshly_built(dialect.name, config)) is not None
        and _equal_modules(model, fresh)
        and _equal_parameters(model, fresh)
    )


def _is_intercepted() -> bool:
    """Return whether a mode, autocast or a global hook changes what functions or modules do."""
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*modes, *_get_current_dispatch_mode_stack()]
    return (
        any(type(mode) is not DeviceContext for mode in modes)
        or any(map(torch.is_autocast_enabled, DEVICES))
        or any(
            value
            for name, value in vars(torch_module).items()
            if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
        )
    )


@lru_cache(maxsize=8)
def _freshly_built(dialect: str, config: GPT2Config) -> Model | None:
    """Build a model on the meta device; None if no model can be built from the config."""
    try:
        with torch.device("meta"):
            return DIALECTS[dialect].model_class(config).eval()
    except Exception:  # any type: a changed config is not checked again
        return None


def _equal_modules(module: nn.Module | None, fresh: nn.Module | None) -> bool:
    """Return whether two modules and their submodules are equal, apart from their parameters."""
    if module is None or fresh is None or type(module) is not type(fresh):
        return False
    ours, theirs = vars(module), vars(fresh)
    return (
        ours.keys() == theirs.keys()
        and all(list(ours[name]) == list(theirs[name]) for name in _REGISTERED)
        and all(
            type(ours[name]) is type(value) and bool(ours[name] == value)
            for name, value in theirs.items()
            if name not in _REGISTERED
        )
        and all(map(_equal_buffers, module._buffers.values(), fresh._buffers.values()))
        and all(map(_equal_modules, module._modules.values(), fresh._modules.values()))
    )


_REGISTERED = ("_modules", "_parameters", "_buffers")


def _equal_buffers(buffer: Tensor | None, fresh: Tensor | None) -> bool:
    """Return whether two buffers are equal. Buffers on the meta device never are."""
    if buffer is None or fresh is None:
        return buffer is fresh
    comparable = type(buffer) is type(fresh) is Tensor and not fresh.is_meta
    return comparable and buffer.device == fresh.device and torch.equal(buffer, fresh)


def _equal_parameters(model: nn.Module, fresh: nn.Module) -> bool:
    """Return whether parameters have the same shapes and ties, and none is of a subclass."""
    ours, theirs = all_parameters(model), all_parameters(fresh)
    return (
        ours.keys() == theirs.keys()
        and _ties(ours) == _ties(theirs)
        and all(
            type(p) is nn.Parameter
            and p.layout == torch.strided
            and p.is_floating_point()
            and p.shape == theirs[name].shape
            for name, p in ours.items()
        )
    )


def _ties(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return for each parameter the first of its names."""
    first: dict[int, str] = {}
    return [first.setdefault(id(p), name) for name, p in parameters.items()]


# The code that a forward pass executes: compat's functions, and the functions of torch that they
# use. It counts as patched if one of them is not the same object as on import.

_FILES = (linear, conv1d, layers)
_PARTS = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Sequential, nn.ModuleList, nn.Parameter,
)  # fmt: skip
_CALLING = {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"}
_OPERATORS = {name for name in dir(operator) if name.startswith("__")}
_OPERATORS |= {name.replace("__", "__r", 1) for name in _OPERATORS} | {"__torch_function__"}


def _classes() -> set[type]:
    """Return the classes of the dialects, of their submodules, and the bases of both."""
    found = {value for file in _FILES for value in vars(file).values() if isinstance(value, type)}
    acts = {type(make()) for make in layers.ACTIVATIONS.values()}
    bases = {base for kind in (*found, *acts, *_PARTS) for base in kind.__mro__}
    return {base for base in bases if base.__module__.split(".")[0] in ("compat", "torch")}


def _used_names(classes: set[type]) -> set[str]:
    """Return the names used in compat's functions, torch's modules and the functions they call."""
    owners = [*_FILES, *(kind for kind in classes if kind.__module__.startswith("compat."))]
    functions = [value for owner in owners for value in vars(owner).values()]
    functions += [vars(kind).get(name) for kind in classes for name in ("forward", "_call_impl")]
    names = _looked_up(functions)
    return names | _looked_up([value for name, value in vars(F).items() if name in names])


def _looked_up(values: list[Any]) -> set[str]:
    """Return the names that functions and their nested functions use; other values are skipped."""
    codes = [value.__code__ for value in values if isinstance(value, FunctionType)]
    names = set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return names


def _watched() -> tuple[list[type | ModuleType], list[str]]:
    """Return classes and modules, and names that are looked up in each of them."""
    classes = _classes()
    names = _used_names(classes) | _CALLING | _OPERATORS | {"__init__", "forward"}
    files = {sys.modules[kind.__module__] for kind in classes if issubclass(kind, nn.Module)}
    return [torch, F, *files, *classes], sorted(names)


def _pairs() -> Iterator[tuple[type | ModuleType, str]]:
    """Yield each owner with each name; a list of them would make Python collect garbage."""
    # Importing torch's compiler wraps nn.Module.__init__.
    return (pair for pair in product(_OWNERS, _NAMES) if pair != (nn.Module, "__init__"))


def _code() -> Iterator[object]:
    """Yield the current object of each pair, or None if the owner itself does not define it."""
    return (vars(owner).get(name) for owner, name in _pairs())


def _is_foreign(owner: type | ModuleType, value: object) -> bool:
    """Return whether a function of torch was replaced before compat was imported."""
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return (
        name.split(".")[0] == "torch"
        and isinstance(value, FunctionType)
        and not value.__code__.co_filename.startswith(_TORCH)
    )


_TORCH = str(Path(torch.__file__).parent)
_OWNERS, _NAMES = _watched()
_AT_IMPORT = list(_code())
_FOREIGN = any(
    _is_foreign(owner, value) for (owner, _), value in zip(_pairs(), _AT_IMPORT, strict=True)
)


def _is_patched() -> bool:
    return _FOREIGN or any(map(operator.is_not, _code(), _AT_IMPORT))
