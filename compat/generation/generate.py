"""Generation with a key/value cache, in one call or token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from compat.dialects import Model
from compat.errors import GenerationError
from compat.generation.sampling import check_settings, next_ids
from compat.layers import KVCache, fault_in_ids


def generate(
    model: Model,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    suppress_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    stop: Collection[int] | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue ids (B, T) by up to `max_new_tokens`: ids (B, T + new), the prompt included.

    Args:
        model: a dialect's model in eval mode.
        input_ids: (B, T); unequal prompts come from `left_pad`, with its mask.
        max_new_tokens: at most so many; fewer when every row has met a stop id.
        temperature: 0 is greedy, below 1 sharper, above 1 flatter.
        top_k: draw from the k likeliest ids only.
        top_p: draw from the smallest set of likeliest ids whose probabilities reach p.
        suppress_tokens: ids never to be chosen, such as those of a padded vocabulary.
        generator: source of randomness; None is torch's global one.
        stop: ids after which a row ends, filled up with the padding id; None takes the config's
            `eos_token_id`, () never stops.
        attention_mask: (B, T), 0 at left padding.
        use_cache: False computes all positions anew for every token.

    Raises:
        GenerationError: a request that cannot be met, such as one beyond `n_positions`.
    """
    steps = stream(
        model,
        input_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        suppress_tokens=suppress_tokens,
        generator=generator,
        stop=stop,
        attention_mask=attention_mask,
        use_cache=use_cache,
    )
    return torch.cat([input_ids, *(ids[:, None] for ids in steps)], dim=1)


def stream(
    model: Model,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    suppress_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    stop: Collection[int] | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """The ids (B,) of one new position after another; arguments and errors as in `generate`."""
    check_settings(temperature, top_k, top_p)
    _check_request(model, input_ids, max_new_tokens, attention_mask)
    choose = partial(
        next_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        suppress_tokens=suppress_tokens,
        generator=generator,
    )
    stop_ids = tuple(model.config.stop_ids if stop is None else stop)
    return _steps(model, input_ids, max_new_tokens, choose, stop_ids, attention_mask, use_cache)


@torch.no_grad()
def _steps(
    model: Model,
    context: Tensor,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    stop_ids: tuple[int, ...],
    attention_mask: Tensor | None,
    use_cache: bool,
) -> Iterator[Tensor]:
    """The loop; `context` is what the model reads next: all ids, then with a cache the newest."""
    B, T = context.shape
    stops = torch.tensor(stop_ids, dtype=torch.long, device=context.device)
    filler = model.config.pad_token_id
    if filler is None:
        filler = stop_ids[0] if stop_ids else 0
    cache = (
        [KVCache(T + max_new_tokens) for _ in range(model.config.n_layer)] if use_cache else None
    )
    running = torch.ones(B, dtype=torch.bool, device=context.device)
    for _ in range(max_new_tokens):
        logits = model(context, cache, attention_mask, logits_to_keep=1)[:, -1]  # (B, V)
        ids = torch.where(running, choose(logits), filler)
        yield ids
        running = running & ~torch.isin(ids, stops)
        if not running.any():
            return
        context = ids[:, None] if use_cache else torch.cat([context, ids[:, None]], dim=1)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(B, 1)], dim=1)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Unequal prompts as one batch: ids (B, T) and attention mask (B, T), 0 at the padding.

    Raises:
        GenerationError: no prompt, or an empty one.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise GenerationError("a prompt is empty; start from the end-of-text id instead")
    T = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (T - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _check_request(
    model: Model, input_ids: Tensor, max_new_tokens: int, attention_mask: Tensor | None
) -> None:
    config = model.config
    if model.training:
        raise GenerationError(
            "the model is in training mode, with dropout on; call model.eval() first"
        )
    if fault := fault_in_ids(input_ids, config.vocab_size):
        raise GenerationError(fault)
    if max_new_tokens < 0:
        raise GenerationError(f"max_new_tokens is {max_new_tokens}; expected 0 or more")
    T = input_ids.shape[1]
    if T + max_new_tokens > config.n_positions:
        raise GenerationError(
            f"{T} prompt tokens and {max_new_tokens} new ones make {T + max_new_tokens}; "
            f"the model has {config.n_positions} positions; "
            f"ask for at most {max(0, config.n_positions - T)} new tokens or shorten the prompt"
        )
    if attention_mask is not None and (
        attention_mask.shape != input_ids.shape or not attention_mask[:, -1].all()
    ):
        raise GenerationError(
            f"attention_mask has shape {list(attention_mask.shape)} or zeros at the end; expected "
            f"{list(input_ids.shape)} with the padding on the left, as from left_pad"
        )
