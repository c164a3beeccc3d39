"""How the proof runs a model: the mode of PyTorch, the thread, and the form of the ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from compat.errors import ParityError
from compat.parity.inputs import IdsForm, Mode


@contextmanager
def run_mode(mode: Mode, model: nn.Module) -> Iterator[None]:
    """Run the block in a mode: without gradients except in "gradients" and "inference".

    "hooks" adds a forward hook to every module, as a profiler does. In inference mode the
    parameters are frozen, as they often are for generation.
    """
    with ExitStack() as stack:
        if mode == "hooks":
            for module in model.modules():
                stack.enter_context(module.register_forward_hook(lambda *_: None))
        if mode == "inference":
            stack.enter_context(_frozen(model))
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(mode == "gradients"))
        yield


def call_in_thread(call: Callable[[Tensor], Any], ids: Tensor) -> Any:
    """Call in another thread, where the stack holds neither a tracer nor compat's own frames.

    Of the modes of torch functions in this thread, those of compat are entered there as well.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    own = [mode for mode in modes if type(mode).__module__.startswith("compat.")]

    def enter() -> None:
        for mode in own:
            mode.__enter__()

    with ThreadPoolExecutor(1, initializer=enter) as pool:
        return pool.submit(torch.no_grad()(call), ids).result()


def in_form(ids: Tensor, form: IdsForm) -> Tensor:
    """Copy the ids to this data type and layout, never at the beginning of the storage."""
    if form == "strided":
        return ids.repeat_interleave(2, dim=1)[:, ::2]
    copy = torch.cat([ids[:1], ids])[1:]
    return copy.int() if form == "int32" else copy


def plain_values(logits: Tensor) -> Tensor:
    """Return the values as a plain tensor, since a subclass may override comparisons.

    Raises:
        ParityError: the tensor is on the meta device and has no values.
    """
    with torch._C.DisableTorchFunctionSubclass():
        values = logits.detach().as_subclass(Tensor)
        if values.device.type == "meta":
            raise ParityError("the logits are on the meta device, so they have no values")
        return values.cpu().to_dense()


def random_states() -> tuple[object, ...]:
    """Return the states of the random number generators of Python and of torch."""
    return random.getstate(), torch.random.get_rng_state().numpy().tobytes()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters, and afterwards remove tensors of inference mode that modules kept."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module, attributes, buffers in before:
            held = [*vars(module).values(), *module._buffers.values()]
            if any(map(_holds_inference_tensor, held)):
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _holds_inference_tensor(value: Any, depth: int = 4) -> bool:
    """Return whether a value is a tensor of inference mode or has one inside it."""
    if isinstance(value, Tensor):
        return value.is_inference()
    if depth == 0 or isinstance(value, (str, bytes, type, nn.Module, ModuleType)):
        return False
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = value
    elif isinstance(getattr(value, "__dict__", None), dict):
        inner = list(vars(value).values())
    return any(_holds_inference_tensor(each, depth - 1) for each in inner)
