"""Traces: run a model once and record its hidden states at the taps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from compat.errors import CompatError, ParityError, listed
from compat.taps import Tap, expand_taps, hook_tap
from compat.user_code import exception_summary
from compat.validation import check_module

Trace = dict[str, Tensor]


class _AllRecorded(Exception):
    """Raised to end a forward pass once every tap was recorded."""


@torch.no_grad()
def trace(
    model: nn.Module,
    taps: Iterable[Tap],
    input_ids: Tensor,
    *,
    forced: Mapping[str, Tensor] | None = None,
    stop_early: bool = False,
) -> Trace:
    """Run `model(input_ids)` once and return a copy of the hidden state at every tap.

    Args:
        model: any module that takes ids (B, T). It runs in the mode that it is in.
        taps: where to record. A tap with `{i}` in its name is recorded in every layer.
        input_ids: token ids (B, T).
        forced: hidden states by the name of their tap. Each is recorded as the model computes it,
            and then replaced by the forced one, on which the following modules work.
        stop_early: end the forward pass once every tap was recorded.

    Returns:
        Hidden states by the name of their tap, such as (B, T, C) for "h.0.out".

    Raises:
        ConfigError: the model is not a module.
        ParityError: a tap names a module that does not exist or was not executed, or the model
            raised an exception.
    """
    check_module(model)
    modules, name = dict(model.named_modules()), type(model).__name__
    taps = _with_every_layer(taps, modules)
    if unknown := [tap for tap in taps if tap.module not in modules]:
        raise ParityError(
            f"{name} has no module {unknown[0].module!r}, which tap {unknown[0].name} names. Pass "
            "a path from model.named_modules()."
        )
    recorded: Trace = {}

    def record(tap: str, value: Tensor) -> None:
        recorded[tap] = value.detach().clone()
        if stop_early and len(recorded) == len(taps):
            raise _AllRecorded

    with ExitStack() as hooks, suppress(_AllRecorded):
        for tap in taps:
            value = None if forced is None else forced.get(tap.name)
            observe = partial(record, tap.name)
            hooks.enter_context(hook_tap(modules[tap.module], tap, observe, value))
        _run(model, input_ids)
    if missing := [tap.name for tap in taps if tap.name not in recorded]:
        raise ParityError(
            f"{name} did not execute the modules of its taps {listed(missing)}. Name modules that "
            "the forward pass calls."
        )
    return {tap.name: recorded[tap.name] for tap in taps}


def _with_every_layer(taps: Iterable[Tap], modules: Mapping[str, nn.Module]) -> list[Tap]:
    """The taps, those with `{i}` written out for every layer whose module exists."""
    taps = list(taps)
    per_layer = [tap.module for tap in taps if "{i}" in tap.name and "{i}" in tap.module]
    if not per_layer:
        return taps
    exists = (any(path.format(i=i) in modules for path in per_layer) for i in count())
    n_layer = next(i for i, found in enumerate(exists) if not found)
    return expand_taps(taps, max(n_layer, 1))


def _run(model: nn.Module, input_ids: Tensor) -> None:
    try:
        model(input_ids)
    except (KeyboardInterrupt, CompatError, _AllRecorded):
        raise
    except BaseException as error:  # such as exit() in the user's code
        raise ParityError(
            f"{exception_summary(error)}. Call the model with ids of shape "
            f"{list(input_ids.shape)} to see the whole traceback."
        ) from error
