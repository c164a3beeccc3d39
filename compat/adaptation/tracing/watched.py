"""Lines of a user's code, found by watching its calls of torch while the model runs.

These are lines where hidden states leave autograd, lines of attention that a graph, which has only
what reaches the logits, does not show, and causal masks that do not fit a KV cache.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compat.adaptation.tracing.calling import Forward
from compat.adaptation.tracing.graph import SHAPE_ONLY, Place
from compat.user_code import is_users
from compat.user_models.eval_mode import eval_mode

ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}  # besides `add_`


def detached_at(model: nn.Module, call: Forward, ids: Tensor) -> list[Place]:
    """Return lines that compute a value without a gradient from one with it, the last one first.

    These are `x.detach()`, `x.data`, and what is computed under `torch.no_grad()`.
    """
    watch = _Detached()
    with eval_mode(model), torch.enable_grad(), watch, suppress(Exception):
        call(model, ids)
    return list(dict.fromkeys(reversed(watch.places)))


def changed_in_place_at(model: nn.Module, call: Forward, ids: Tensor) -> list[Place]:
    """Return lines such as `x += y` that change a tensor with a gradient, the first one first."""
    watch = _ChangedInPlace()
    with eval_mode(model), torch.enable_grad(), watch, suppress(Exception):
        call(model, ids)
    return list(dict.fromkeys(watch.places))


def attention_at(model: nn.Module, call: Forward, ids: Tensor) -> list[Place]:
    """Return the lines that compute attention's weights, or all of it as one operation, in order.

    The weights are a softmax whose result has the length of the ids (B, T) as two of its sizes.
    """
    watch = _Attention(ids.shape[1])
    with eval_mode(model), watch, suppress(Exception):
        call(model, ids)
    return list(dict.fromkeys(watch.places))


class _Watch(TorchFunctionMode):
    """Records lines of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []


class _Attention(_Watch):
    def __init__(self, T: int) -> None:
        super().__init__()
        self.T = T

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        weights = name == "softmax" and tuple(result.shape).count(self.T) > 1
        if (weights or name in ATTENTION) and (place := _users_line()) is not None:
            self.places.append(place)
        return result


class AlignedCausalMask(_Watch):
    """Aligns the causal masks of fused attention with the last key, and records their lines.

    `is_causal=True` aligns the mask with the first key, so that the only query of a decode step
    attends to the first cached key alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            passed = {**dict(zip(names, args, strict=False)), **kwargs}
            T, S = passed["query"].shape[-2], passed["key"].shape[-2]
            if passed.get("is_causal") and T < S and (place := _users_line()) is not None:
                self.places.append(place)
                allowed = torch.ones(T, S, dtype=torch.bool, device=passed["key"].device)
                passed |= {"is_causal": False, "attn_mask": allowed.tril(S - T)}
                args, kwargs = (), passed
        return func(*args, **kwargs)


class _Detached(_Watch):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        cut = any(t.requires_grad for t in tensors) and name not in SHAPE_ONLY
        lost = [
            t for t in tree_leaves(result)
            if isinstance(t, Tensor) and t.is_floating_point() and not t.requires_grad
        ]  # fmt: skip
        if cut and lost and (place := _users_line()) is not None:
            self.places.append(place)
        return result


class _ChangedInPlace(_Watch):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name in IN_PLACE or (name.endswith("_") and not name.startswith("_"))
        if in_place and args[0].requires_grad and (place := _users_line()) is not None:
            self.places.append(place)
        return func(*args, **(kwargs or {}))


def _users_line() -> Place | None:
    """Return the innermost line of the user's code on the stack."""
    frame = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)
