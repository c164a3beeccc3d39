"""Traces: run a model once and keep its hidden states at the taps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from compat.errors import CompatError, ParityError, listed
from compat.taps import Tap, hook_tap
from compat.user_code import raised

Trace = dict[str, Tensor]


@torch.no_grad()
def trace(
    model: nn.Module,
    taps: Sequence[Tap],
    input_ids: Tensor,
    forced: Mapping[str, Tensor] | None = None,
) -> Trace:
    """Run `model(input_ids)` once and return a copy of the hidden state at every tap.

    With `forced`, each tap is recorded as the model computes it and then replaced by the forced
    value, so that every piece works on given inputs: the trace holds the pieces' local results.

    Args:
        model: called with ids (B, T); its mode is left as it is.
        taps: written out for every layer.
        input_ids: (B, T).
        forced: values for some or all taps, by name.

    Raises:
        ParityError: a tap's module does not exist, or never ran; the model raised an error.
    """
    recorded: Trace = {}
    modules = dict(model.named_modules())
    if strange := [tap.module for tap in taps if tap.module not in modules]:
        raise ParityError(f"{type(model).__name__} has no module {strange[0]!r}, which a tap names")
    with ExitStack() as hooks:
        for tap in taps:
            value = None if forced is None else forced.get(tap.name)
            hooks.enter_context(_hook(modules[tap.module], tap, recorded, value))
        _run(model, input_ids)
    if silent := [tap.name for tap in taps if tap.name not in recorded]:
        raise ParityError(f"{type(model).__name__} never came by its taps {listed(silent)}")
    return {tap.name: recorded[tap.name] for tap in taps}


class _Reached(Exception):
    """The tap was recorded; what follows it is not wanted."""


@torch.no_grad()
def trace_one(model: nn.Module, tap: Tap, input_ids: Tensor) -> Tensor:
    """The hidden state at one tap, for which the model runs only as far as it has to.

    Raises:
        ParityError: the tap's module does not exist, or never ran; the model raised an error.
    """
    recorded: Trace = {}

    def stop(*_: Any) -> None:
        raise _Reached

    module = dict(model.named_modules()).get(tap.module)
    if module is None:
        raise ParityError(f"{type(model).__name__} has no module {tap.module!r}, which a tap names")
    with ExitStack() as hooks, suppress(_Reached):
        hooks.enter_context(_hook(module, tap, recorded, None))
        register = (
            module.register_forward_pre_hook if tap.at == "input" else module.register_forward_hook
        )
        hooks.enter_context(register(stop))
        _run(model, input_ids)
    if tap.name not in recorded:
        raise ParityError(f"{type(model).__name__} never executed the module of tap {tap.name}")
    return recorded[tap.name]


def _run(model: nn.Module, input_ids: Tensor) -> None:
    try:
        model(input_ids)
    except (KeyboardInterrupt, CompatError, _Reached):
        raise
    except BaseException as error:  # exit() in the user's code too
        shape = list(input_ids.shape)
        raise ParityError(f"on ids of shape {shape}, {raised(error)}") from error


def _hook(module: nn.Module, tap: Tap, recorded: Trace, forced: Tensor | None) -> Any:
    """Record a copy of one tap when its module runs, and replace it with `forced`."""

    def record(value: Tensor) -> None:
        recorded[tap.name] = value.detach().clone()

    return hook_tap(module, tap, record, forced)
