"""Eval mode for a user's model, and back to the modes and the weights that its modules had."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode and without gradients, then restore each module's mode."""
    modes = {module: module.training for module in model.modules()}
    if all(_switches(module) for module in modes):
        model.eval()
    else:
        for module in modes:
            module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _switches(module: nn.Module) -> bool:
    """Return whether `train` and `eval` switch the mode, and are not the user's training loop."""
    functions = [getattr(f, "__func__", f) for f in (module.train, module.eval)]
    if functions == [nn.Module.train, nn.Module.eval]:
        return True
    train, evaluate = (inspect.signature(f).parameters for f in (module.train, module.eval))
    return list(train) in (["mode"], []) and not evaluate


def saved_weights(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def restore_weights(model: nn.Module, weights: Sequence[Tensor]) -> None:
    """Copy the values that `saved_weights` returned to the model's parameters."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
