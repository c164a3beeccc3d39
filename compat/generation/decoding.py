"""What computes the logits, one id after another, and the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from compat.config import GPT2Config
from compat.dialects import Model
from compat.errors import GenerationError
from compat.generation.not_finite import first_not_finite, why_not_finite
from compat.generation.sampling import NotFiniteError
from compat.layers import KVCache


class Decoder(Protocol):
    """A batch of sequences that grows by an id each at a time; its state is the cache."""

    @property
    def config(self) -> GPT2Config:
        """Of the model."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin a new batch: float32 logits (B, V) of the id after each prompt, of any lengths."""

    def step(self, ids: Tensor) -> Tensor:
        """Add an id to each sequence, (B,): float32 logits (B, V) of the id after it."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch alone, in this order."""

    def why_not_finite(self, context: Sequence[int]) -> str:
        """Where the first value comes up that is not finite, in words."""


@runtime_checkable
class HasDecoder(Protocol):
    """A model with a way of its own to decode."""

    def decoder(self) -> Decoder:
        """A decoder with a batch of its own."""


class PlainDecoder:
    """The readable blocks as they are, with their key/value cache and left padding.

    Args:
        model: a dialect's model in eval mode.
        use_cache: False computes all positions anew for every id.

    Raises:
        GenerationError: the model is in training mode.
    """

    def __init__(self, model: Model, use_cache: bool = True) -> None:
        if model.training:
            raise GenerationError(
                "the model is in training mode, with dropout on; call model.eval() first"
            )
        self.model, self.config, self.use_cache = model, model.config, use_cache

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        ids, mask = left_pad(prompts)
        device = next(self.model.parameters()).device
        self._ids = ids.to(device)  # without a cache every id is read again
        self._mask = None if mask.all() else mask.to(device)
        self._cache = (
            [KVCache(self.config.n_positions) for _ in range(self.config.n_layer)]
            if self.use_cache
            else None
        )
        return self._read(self._ids)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        new = ids[:, None]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=1)
        if self._cache is not None:
            return self._read(new)
        self._ids = torch.cat([self._ids, new], dim=1)
        return self._read(self._ids)

    def keep(self, rows: Tensor) -> None:
        """As in `Decoder`; columns that were the padding of longer sequences go with them."""
        padding = 0
        if self._mask is not None:
            mask = self._mask[rows]
            padding = int(mask.any(dim=0).int().argmax())
            self._mask = None if mask[:, padding:].all() else mask[:, padding:]
        self._ids = self._ids[rows, padding:]
        for layer in self._cache or ():
            layer.keep(rows, padding)

    def why_not_finite(self, context: Sequence[int]) -> str:
        """As in `Decoder`, by tap."""
        some = next(self.model.parameters())
        ids = torch.tensor([context], device=some.device)
        return why_not_finite(first_not_finite(self.model, ids), some.dtype, context)

    def _read(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, self._cache, self._mask, logits_to_keep=1)  # (B, 1, V)
        return logits[:, -1].float()


def decoder_of(model: Model | HasDecoder) -> Decoder:
    """The model's own decoder, or the plain one where it is a dialect's model."""
    return model.decoder() if isinstance(model, HasDecoder) else PlainDecoder(model)


def rounds(
    decoder: Decoder,
    contexts: list[list[int]],
    choose: Callable[[Tensor, list[int]], Tensor],
    ends: Callable[[int, int], bool],
) -> Iterator[dict[int, int]]:
    """The new id of every running sequence, {index: id}, round after round until all have ended.

    Args:
        decoder: starts on the contexts; a sequence that has ended leaves its batch.
        contexts: the ids of each sequence; they grow by the new ones.
        choose: from logits (B, V) and the indices of their B sequences to new ids (B,).
        ends: whether a sequence, by its index, ends with this id; asked after the id was yielded.

    Raises:
        GenerationError: logits that are not finite; it names the first layer with such values.
    """
    live = list(range(len(contexts)))
    logits = decoder.start(contexts)
    while True:
        try:
            ids = choose(logits, live)
        except NotFiniteError:
            row = int(torch.isfinite(logits).all(dim=1).int().argmin())
            raise NotFiniteError(decoder.why_not_finite(contexts[live[row]])) from None
        found = dict(zip(live, ids.tolist(), strict=True))
        for i, token_id in found.items():
            contexts[i].append(token_id)
        yield found
        going = [row for row, (i, token_id) in enumerate(found.items()) if not ends(i, token_id)]
        if not going:
            return
        if len(going) < len(live):
            rows = torch.tensor(going, device=ids.device)
            decoder.keep(rows)
            live, ids = [live[row] for row in going], ids[rows]
        logits = decoder.step(ids)


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
