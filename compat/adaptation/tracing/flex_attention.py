"""`flex_attention` in plain operations, which can be traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

MODULE = "torch.nn.attention.flex_attention"


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """Compute `flex_attention` without its kernel, if the user's code has imported it."""
    module = sys.modules.get(MODULE)
    if module is None:
        yield
        return
    plain: dict[str, Any] = {
        "flex_attention_hop": _attend,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # else the function is compiled
        "_validate_device": lambda *_: None,  # the kernel has no backward pass on the CPU
    }
    with patch.multiple(module, **plain):
        yield


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and each query's logarithm of the sum of exp(score) and largest score.

    `score_mod` and the mask's function, the last entry of `block_mask`, get all indices at once.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    places = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    visible = block_mask[-1](*places)
    scores = torch.where(visible, score_mod(scores, *places), -torch.inf)
    probs = scores.softmax(-1)
    if not visible.any(-1).all():  # a query that sees no key has the result 0
        probs = torch.where(visible.any(-1, keepdim=True), probs, 0.0)
    return probs @ v, scores.logsumexp(-1), scores.amax(-1)
