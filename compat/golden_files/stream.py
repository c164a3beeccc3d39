"""Hidden states and gradients of the reference, passed on while the model runs.

The model waits while each tensor is handled, so only a few of them are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint.layout import plain_name
from compat.golden_files.backward import next_token_loss
from compat.golden_files.contents import LOSS
from compat.tap import Tap, hook_taps

Record = Callable[[str, Tensor], None]
Handle = Callable[..., None]  # (name, the reference's tensor, those of the other runs)


def stream_taps(model: nn.Module, taps: Sequence[Tap], ids: Tensor, record: Record) -> None:
    """Run a model on ids (B, T) and record a copy of each hidden state when it is computed."""

    def copy(tap: Tap, value: Tensor) -> None:
        record(tap.name, value.detach().clone())

    with torch.no_grad(), hook_taps(dict(model.named_modules()), taps, copy):
        model(ids)


def stream_gradients(model: nn.Module, taps: Sequence[Tap], ids: Tensor, record: Record) -> None:
    """Run a reference forward and backward, and record every gradient when it is computed.

    Args:
        model: a model of transformers. Its parameters are set to require gradients.
        taps: the taps whose gradients are recorded.
        ids: the token ids (B, T).
        record: called with "loss" and the mean cross-entropy of the next ids, and then with the
            name of each tap or parameter and its gradient.
    """
    # The model does not read the views q, k and v, so the gradient of their fused tensor is used.
    parts: dict[Tap, list[Tap]] = {}
    for tap in taps:
        fused = tap if tap.part is None else replace(tap, name=tap.module, part=None)
        parts.setdefault(fused, []).append(tap)
    without: dict[str, Any] = {
        plain_name(name): parameter for name, parameter in model.named_parameters()
    }

    def record_tap(fused: Tap, gradient: Tensor) -> None:
        for tap in parts[fused]:
            part = gradient if tap.part is None else gradient.chunk(3, dim=-1)[tap.part]
            record(tap.name, part.clone())

    def observe(fused: Tap, value: Any) -> None:
        value.register_hook(partial(record_tap, fused))

    def record_parameter(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        del without[name]
        record(name, gradient)

    with torch.enable_grad(), hook_taps(dict(model.named_modules()), parts, observe) as hooks:
        for name, parameter in without.items():
            parameter.requires_grad_(True)
            hook = parameter.register_post_accumulate_grad_hook(partial(record_parameter, name))
            hooks.callback(hook.remove)
        loss = next_token_loss(model(ids).logits, ids)
        record(LOSS, loss.detach())
        torch.autograd.backward(loss)
    for name, parameter in without.items():
        record(name, torch.zeros_like(parameter))


def in_lockstep(runs: Iterable[Iterator[tuple[str, Tensor]]], handle: Handle) -> Record:
    """Advance other runs with the reference, which computes tensors in a slightly different order.

    Args:
        runs: the names and tensors of the other runs, which share one order and have the same
            names as the reference.
        handle: called with a name, the reference's tensor and those of the other runs.

    Returns:
        A function that records the next tensor of the reference.
    """
    steps = zip(*runs, strict=True)
    waiting: dict[str, Tensor] = {}
    waiting_others: dict[str, tuple[Tensor, ...]] = {}

    def record(name: str, tensor: Tensor) -> None:
        waiting[name] = tensor
        (other, *_), values = zip(*next(steps), strict=True)
        waiting_others[other] = values
        for each in (name, other):
            if each in waiting and each in waiting_others:
                handle(each, waiting.pop(each), *waiting_others.pop(each))

    return record
