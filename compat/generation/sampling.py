"""From logits to the next ids, with `transformers`' semantics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compat.errors import GenerationError


def next_ids(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    suppress_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose one id per row: logits (B, V) → ids (B,).

    Temperature, top-k, top-p, then one draw from the softmax, in float32: the order and the
    arithmetic of `transformers`, so that the same seed draws the same ids. Temperature 0 is
    greedy. Suppressed ids are never chosen.

    Raises:
        GenerationError: logits that are not finite, or not over so small a temperature.
    """
    logits = logits.float()
    scores = logits / temperature if temperature > 0 else logits
    if not torch.isfinite(scores).all():
        if torch.isfinite(logits).all():
            raise GenerationError(
                f"temperature {temperature} is too small to divide by; 0 is greedy"
            )
        raise GenerationError("the model's logits are not finite; check its weights and data type")
    if suppress_tokens:
        ids = torch.tensor(suppress_tokens, device=scores.device)
        scores = scores.index_fill(1, ids, -math.inf)
    if temperature == 0:
        return scores.argmax(dim=-1)
    if top_k is not None:
        lowest_kept = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < lowest_kept, -math.inf)
    if top_p is not None and top_p < 1:
        ascending, order = scores.sort(dim=-1)
        dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        dropped[:, -1] = False  # the likeliest id always stays
        scores = scores.masked_fill(dropped.scatter(1, order, dropped), -math.inf)
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1)


def check_settings(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse sampling settings that mean nothing.

    Raises:
        GenerationError: naming the setting, its value and what is expected.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise GenerationError(
            f"temperature is {temperature}; expected 0 (greedy) or a number above it"
        )
    if top_k is not None and top_k < 1:
        raise GenerationError(f"top_k is {top_k}; expected at least 1, or None for all ids")
    if top_p is not None and not 0 < top_p <= 1:
        raise GenerationError(f"top_p is {top_p}; expected above 0 and up to 1")
