"""Models whose calls depend on those before, as with a position or a KV cache that they keep."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compat.adaptation.tracing.calling import Forward, plain_kernels
from compat.user_models.eval_mode import ModelState, eval_mode


@contextmanager
def first_calls(
    model: nn.Module, state: ModelState, call: Forward, ids: Tensor
) -> Iterator[list[str]]:
    """Restore the state of a model before each call in the body, if a call depends on those before.

    Yields the names of the attributes that a call changes then, or nothing.

    Args:
        model: the user's model.
        state: its state before its first call.
        call: calls the model with ids.
        ids: (B, T).
    """

    def logits() -> Tensor | None:
        try:
            with eval_mode(model), plain_kernels():
                return call(model, ids)
        except Exception:
            return None

    changed = state.restore(model)  # by the calls with which `call` was found
    if not changed:
        logits()
        changed = state.restore(model)
    if changed:
        first, second = logits(), logits()
        state.restore(model)
        again = logits()
        state.restore(model)
        same = [first is not None and each is not None and torch.equal(first, each)
                for each in (second, again)]  # fmt: skip
        changed = changed if same == [False, True] else []
    hook = model.register_forward_pre_hook(state) if changed else None
    try:
        yield changed
    finally:
        if hook:
            hook.remove()
            state.restore(model)


def as_constructed(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose calls depend on those before, without calls before."""
    copied = copy.deepcopy(model)
    for key, hook in [*copied._forward_pre_hooks.items()]:
        if isinstance(hook, ModelState):
            hook.restore(copied)
            del copied._forward_pre_hooks[key]
    return copied
