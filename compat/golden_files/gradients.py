"""The loss of a model and its gradients, at every tap and of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.checkpoint.layout import plain_name
from compat.parity.trace import Trace
from compat.tap import Tap, hook_tap


def gradients(model: nn.Module, taps: Sequence[Tap], ids: Tensor) -> Trace:
    """Run a reference forward and backward.

    Args:
        model: returns logits; its parameters have Hugging Face's names.
        taps: where gradients are recorded.
        ids: (B, T).

    Returns:
        "loss", the mean cross-entropy of ids[:, 1:] given the ids before each; and its gradients by
        the name of the tap or of the parameter.
    """
    found: Trace = {}

    def record(name: str, parts: Sequence[Tap], gradient: Tensor) -> None:
        for tap in parts:
            part = gradient if tap.part is None else gradient.chunk(3, dim=-1)[tap.part]
            found[tap.name] = part.clone()

    def observe(parts: Sequence[Tap], value: Any) -> None:
        value.register_hook(partial(record, parts[0].name, parts))

    # q, k and v are views that the model does not read, so their whole tensor is watched.
    places = {tap.name: [tap] for tap in taps if tap.part is None}
    for tap in taps:
        if tap.part is not None:
            places.setdefault(tap.module, []).append(tap)
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with torch.enable_grad(), ExitStack() as hooks:
            for parameter, _ in before:
                parameter.requires_grad_(True)
            for parts in places.values():
                whole = replace(parts[0], part=None)
                module = model.get_submodule(whole.module)
                hooks.enter_context(hook_tap(module, whole, partial(observe, parts)))
            logits = model(ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            torch.autograd.backward(loss)
        found["loss"] = loss.detach()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            found[plain_name(name)] = torch.zeros_like(parameter) if gradient is None else gradient
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
            parameter.grad = None
    return found
