"""Generation of token ids: all at once, or one position at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compat.decoding import Decoder, HasDecoder, PlainBlocks, PlainDecoder, decoder_of
from compat.dialects import Model
from compat.errors import GenerationError, described, short_repr
from compat.generation.checks import check_room, check_token_ids
from compat.generation.decode_loop import decode_loop
from compat.generation.sampling import Sampling, SamplingOptions
from compat.layers import as_ids, id_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GenerateOptions(SamplingOptions, total=False):
    """The optional arguments of `generate`, `stream` and the methods of `Engine`."""

    generator: torch.Generator | None
    stop_ids: Collection[int] | None
    attention_mask: Tensor | None
    use_cache: bool


def generate(
    model: Model | HasDecoder,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **options: Unpack[GenerateOptions],
) -> Tensor:
    """Continue token ids (B, T) by up to `max_new_tokens`: ids (B, T + new), the prompt included.

    Args:
        model: a dialect's model in eval mode. It uses the fast path if it is unmodified, and its
            own `forward` otherwise. Alternatively `PlainBlocks` of a model, or an `Engine`.
        input_ids: (B, T), as a tensor, a NumPy array or lists. For prompts of different lengths
            pass the ids and the mask of `left_pad`.
        max_new_tokens: upper limit of new tokens. There are fewer if every row meets a stop id.
        temperature, top_k, top_p, min_p, repetition_penalty, suppress_tokens: as in `Sampling`.
            The default samples from the model's own distribution; temperature 0 is greedy.
        generator: random number generator for all rows; None is torch's global generator.
        stop_ids: token ids that end a row, which is then filled with the padding id. None means the
            config's `eos_token_id`; () never stops.
        attention_mask: (B, T), 0 at left padding.
        use_cache: False computes all positions again for every token. A modified model needs that
            if one of its modules looks at several positions without using the KV cache.

    Raises:
        GenerationError: the request cannot be met, for example because it exceeds `n_positions`, or
            the logits are non-finite.
    """
    prompt = id_tensor(input_ids)
    steps = stream(model, prompt, max_new_tokens=max_new_tokens, **options)
    return torch.cat([prompt, *(ids[:, None] for ids in steps)], dim=1)


def stream(
    model: Model | HasDecoder,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    generator: torch.Generator | None = None,
    stop_ids: Collection[int] | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[Tensor]:
    """Yield the ids (B,) of one position after another; arguments and errors as in `generate`."""
    settings = Sampling(**sampling)
    if not isinstance(use_cache, bool):
        raise GenerationError(f"use_cache is {described(use_cache)}, but must be True or False")
    decoder = decoder_of(model) if use_cache else _without_cache(model)
    ids = as_ids(input_ids, decoder.config.vocab_size)
    check_room(ids.shape[1], max_new_tokens, decoder.config.n_positions)
    _check_mask(attention_mask, ids)
    if not isinstance(generator, torch.Generator | None):
        raise GenerationError(
            f"generator is {short_repr(generator)}, but must be a torch.Generator. Pass, for "
            "example, torch.Generator().manual_seed(0)."
        )
    stop = check_token_ids("stop_ids", decoder.config.stop_ids if stop_ids is None else stop_ids)
    prompts: list[list[int]] = ids.tolist()
    if attention_mask is not None:
        pairs = zip(ids, attention_mask.bool(), strict=True)
        prompts = [row[mask].tolist() for row, mask in pairs]
    return islice(_steps(decoder, prompts, settings, generator, stop, ids.device), max_new_tokens)


def _without_cache(model: Model | HasDecoder) -> Decoder:
    if isinstance(model, PlainBlocks):
        model = model.model
    if isinstance(model, HasDecoder):
        raise GenerationError(
            f"use_cache=False is for a dialect's model, but the model is a {type(model).__name__}. "
            "Pass a model from load_pretrained."
        )
    return PlainDecoder(model, use_cache=False)


def _steps(
    decoder: Decoder,
    contexts: list[list[int]],
    sampling: Sampling,
    generator: torch.Generator | None,
    stop_ids: tuple[int, ...],
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield the ids (B,) of every step, with the padding id in the rows that have ended."""
    B, padding = len(contexts), decoder.config.pad_token_id
    if padding is None:
        padding = stop_ids[0] if stop_ids else 0

    def choose(logits: Tensor, live: list[int]) -> Tensor:
        scores = sampling.scores(logits, [contexts[i] for i in live])
        if len(live) == B or sampling.temperature == 0:
            return sampling.draw(scores, generator)
        # As in transformers, rows that have ended continue to draw, and their tokens are discarded:
        # otherwise the other rows would draw different tokens.
        every = scores.new_zeros(B, scores.shape[1])
        every[live] = scores
        return sampling.draw(every, generator)[live]

    steps = decode_loop(
        decoder,
        contexts,
        choose,
        ends=lambda _, token_id: token_id in stop_ids,
        preview_sampling=lambda: sampling.preview(generator),
    )
    for found in steps:
        yield torch.tensor([found.get(i, padding) for i in range(B)], device=device)


def _check_mask(attention_mask: object, ids: Tensor) -> None:
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise GenerationError(
            f"attention_mask is a {type(attention_mask).__name__}, but must be a tensor of shape "
            f"{list(ids.shape)}. Pass the mask that left_pad returns."
        )
    if attention_mask.shape != ids.shape or not attention_mask[:, -1].all():
        raise GenerationError(
            f"attention_mask has shape {list(attention_mask.shape)} or zeros at the end, but must "
            f"have shape {list(ids.shape)} and the padding on the left. Pass the mask that "
            "left_pad returns."
        )
