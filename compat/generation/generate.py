"""Ids that continue ids, in one call or one position at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from compat.decoding import Decoder, HasDecoder, PlainBlocks, PlainDecoder, decoder_of
from compat.dialects import Model
from compat.errors import GenerationError, described, shown
from compat.generation.checks import token_ids, whole_number
from compat.generation.rounds import rounds
from compat.generation.sampling import Sampling
from compat.layers import as_ids, id_tensor


def generate(
    model: Model | HasDecoder,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    suppress_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    stop: Collection[int] | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue ids (B, T) by up to `max_new_tokens`: ids (B, T + new), the prompt included.

    Args:
        model: a dialect's model in eval mode, which runs fast on its own weights if nothing of it
            was modified, else by its own `forward`; `PlainBlocks` of one; or anything with a
            decoder of its own.
        input_ids: (B, T), as a tensor, a NumPy array or lists; unequal prompts come from
            `left_pad`, with its mask.
        max_new_tokens: at most so many; fewer when every row has met a stop id.
        temperature, top_k, top_p, min_p, repetition_penalty, suppress_tokens: as in `Sampling`.
        generator: source of randomness for all rows; None is torch's global one.
        stop: ids after which a row ends, filled up with the padding id; None takes the config's
            `eos_token_id`, () never stops.
        attention_mask: (B, T), 0 at left padding.
        use_cache: False computes all positions anew for every token, which a modified model needs
            whose parts look at several positions without its blocks' cache.

    Raises:
        GenerationError: a request that cannot be met, such as one beyond `n_positions`.
    """
    prompt = id_tensor(input_ids)
    steps = stream(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        suppress_tokens=suppress_tokens,
        generator=generator,
        stop=stop,
        attention_mask=attention_mask,
        use_cache=use_cache,
    )
    return torch.cat([prompt, *(ids[:, None] for ids in steps)], dim=1)


def stream(
    model: Model | HasDecoder,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    suppress_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    stop: Collection[int] | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """The ids (B,) of one new position after another; arguments and errors as in `generate`."""
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, suppress_tokens)
    if not isinstance(use_cache, bool):
        raise GenerationError(f"use_cache is {described(use_cache)}; expected True or False")
    decoder = decoder_of(model) if use_cache else _without_cache(model)
    ids = as_ids(input_ids, decoder.config.vocab_size)
    check_room(ids.shape[1], max_new_tokens, decoder.config.n_positions)
    _check_mask(attention_mask, ids)
    _check_generator(generator)
    stop_ids = token_ids("stop", decoder.config.stop_ids if stop is None else stop)
    prompts = _without_padding(ids, attention_mask)
    steps = _steps(decoder, prompts, sampling, generator, stop_ids, ids.device)
    return islice(steps, max_new_tokens)


def _without_cache(model: Model | HasDecoder) -> Decoder:
    if isinstance(model, PlainBlocks):
        model = model.model
    if isinstance(model, HasDecoder):
        raise GenerationError(
            "use_cache=False needs the readable blocks, which load_pretrained gives"
        )
    return PlainDecoder(model, use_cache=False)


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        rows: list[list[int]] = input_ids.tolist()
        return rows
    return [ids[mask].tolist() for ids, mask in zip(input_ids, attention_mask.bool(), strict=True)]


def _steps(
    decoder: Decoder,
    contexts: list[list[int]],
    sampling: Sampling,
    generator: torch.Generator | None,
    stop_ids: tuple[int, ...],
    device: torch.device,
) -> Iterator[Tensor]:
    """Every round's ids (B,), the padding id in the rows that have ended."""
    B, filler = len(contexts), decoder.config.pad_token_id
    if filler is None:
        filler = stop_ids[0] if stop_ids else 0

    def choose(logits: Tensor, live: list[int]) -> Tensor:
        scores = sampling.scores(logits, [contexts[i] for i in live])
        if len(live) == B or sampling.temperature == 0:
            return sampling.draw(scores, generator)
        # As in transformers, rows that have ended go on drawing, unseen: otherwise the draws of
        # the others would shift.
        every = scores.new_zeros(B, scores.shape[1])
        every[live] = scores
        return sampling.draw(every, generator)[live]

    def ends(_: int, token_id: int) -> bool:
        return token_id in stop_ids

    for found in rounds(decoder, contexts, choose, ends, lambda: sampling.rehearsal(generator)):
        ids = torch.full((B,), filler, device=device)
        ids[list(found)] = torch.tensor(list(found.values()), device=device)
        yield ids


def check_room(T: int, max_new_tokens: int, n_positions: int) -> None:
    """Refuse a prompt of T tokens with more new ones than the model has positions for.

    Raises:
        GenerationError: with the numbers.
    """
    whole_number("max_new_tokens", max_new_tokens, least=0)
    if T + max_new_tokens > n_positions:
        raise GenerationError(
            f"{T} prompt tokens and {max_new_tokens} new ones make {T + max_new_tokens}; "
            f"the model has {n_positions} positions; "
            f"ask for at most {max(0, n_positions - T)} new tokens or shorten the prompt"
        )


def _check_mask(attention_mask: object, ids: Tensor) -> None:
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise GenerationError(
            f"attention_mask is a {type(attention_mask).__name__}; expected a tensor of shape "
            f"{list(ids.shape)}, as from left_pad"
        )
    if attention_mask.shape != ids.shape or not attention_mask[:, -1].all():
        raise GenerationError(
            f"attention_mask has shape {list(attention_mask.shape)} or zeros at the end; expected "
            f"{list(ids.shape)} with the padding on the left, as from left_pad"
        )


def _check_generator(generator: object) -> None:
    if not isinstance(generator, torch.Generator | None):
        raise GenerationError(
            f"generator is {shown(generator)}; expected a torch.Generator, such as "
            "torch.Generator().manual_seed(0)"
        )
