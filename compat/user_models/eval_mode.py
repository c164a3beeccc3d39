"""Eval mode for a user's model, and back to the modes, weights and attributes that it had."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_OF_ALL = {*vars(nn.Module())}  # the attributes that every module has


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


class ModelState:
    """The attributes and buffers of a model's modules and classes, when this was created.

    It can be a forward pre-hook, which restores them. Tensors that a call writes into keep what was
    written.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = [
            {n: (v, [*v] if isinstance(v, list) else None) for n, v in _attributes(m).items()}
            for m in model.modules()
        ]
        classes = {cls for m in model.modules() for cls in type(m).__mro__[:-1]}
        own = [cls for cls in classes if not cls.__module__.startswith("torch.")]
        self.of_classes = [(cls, *pair) for cls in own for pair in _data(cls).items()]

    def __call__(self, model: nn.Module, *inputs: Any) -> None:
        self.restore(model)

    def __deepcopy__(self, memo: Any) -> ModelState:
        return self

    def restore(self, model: nn.Module) -> list[str]:
        """Restore what has changed, also in a copy of the model, and return the names."""
        changed: list[str] = []
        for module, before in zip(model.modules(), self.before, strict=False):
            now = _attributes(module)
            for name, (value, entries) in before.items():
                if entries is not None and len(value) != len(entries):
                    value[:] = entries
                elif now.get(name) is value:
                    continue
                owner = module._buffers if name in module._buffers else vars(module)
                owner[name] = value
                changed.append(name)
        for cls, name, value in self.of_classes:
            if vars(cls).get(name) is not value:
                setattr(cls, name, value)
                changed.append(name)
        return list(dict.fromkeys(changed))


def _data(cls: type) -> dict[str, Any]:
    """Return a class's attributes that are tensors, numbers or None, such as an empty cache."""
    kinds = (torch.Tensor, int, float, type(None))
    return {name: value for name, value in vars(cls).items()
            if isinstance(value, kinds) and not name.startswith("__")}  # fmt: skip


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _OF_ALL}
    return own | module._buffers
