"""The lines of a user's code where hidden states leave autograd."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compat.adaptation.tracing.calling import Forward, eval_mode
from compat.adaptation.tracing.graph import SHAPE_ONLY, Place
from compat.user_code import is_users


def detached_at(model: nn.Module, call: Forward, ids: Tensor) -> list[Place]:
    """Lines that compute a value without a gradient from one with a gradient, the last one first.

    These are `x.detach()`, `x.data`, and what is computed under `torch.no_grad()`.
    """
    watch = _Watch()
    with eval_mode(model), torch.enable_grad(), watch, suppress(Exception):
        call(model, ids)
    return list(dict.fromkeys(reversed(watch.places)))


class _Watch(TorchFunctionMode):
    """Records the user's lines that call such a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        cut = any(t.requires_grad for t in given) and name not in SHAPE_ONLY
        lost = [
            t for t in tree_leaves(result)
            if isinstance(t, Tensor) and t.is_floating_point() and not t.requires_grad
        ]  # fmt: skip
        if cut and lost and (place := _users_line()) is not None:
            self.places.append(place)
        return result


def _users_line() -> Place | None:
    """The innermost line of the user's code on the stack."""
    frame = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)
