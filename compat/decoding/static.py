"""Batches on a static cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compat.config import GPT2Config
from compat.decoding.decoder import Rehearse, check_prompts
from compat.decoding.not_finite import why_not_finite
from compat.decoding.transformer import Cache, Transformer

PIECE = 256  # positions read at once


class TransformerDecoder:
    """What the decoders of a transformer share: its config, and where its values are at fault."""

    transformer: Transformer

    @property
    def config(self) -> GPT2Config:
        return self.transformer.config

    def why_not_finite(self, context: Sequence[int]) -> str:
        """Where the first value comes up that is not finite, in words."""
        found = self.transformer.first_not_finite(context)
        return why_not_finite(found, self.transformer.dtype, context)

    def read_prompts(self, rows: Sequence[Sequence[int]], cache: Cache) -> Tensor:
        """Ids (B, T), in pieces, for the memory that a pass needs: hidden states (B, T, C)."""
        ids = torch.tensor(rows, device=self.transformer.device)
        pieces = enumerate(torch.split(ids, PIECE, dim=1))
        return torch.cat([self.transformer(ids, cache, n * PIECE) for n, ids in pieces], dim=1)


class StaticDecoder(TransformerDecoder):
    """Sequences of any lengths side by side, padded on the right, where nothing looks at it.

    Args:
        transformer: computes the logits.
        max_batch: sequences at once; None for any number.
    """

    def __init__(self, transformer: Transformer, max_batch: int | None = None) -> None:
        self.transformer, self.max_batch = transformer, max_batch

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], rehearse: Rehearse | None = None) -> Tensor:
        """Logits (B, V) of the id after each prompt."""
        check_prompts(prompts, self.max_batch)
        self.lengths = [len(prompt) for prompt in prompts]
        T = max(self.lengths)
        rows = [[*prompt, *[0] * (T - len(prompt))] for prompt in prompts]
        self.cache = self.transformer.new_cache(len(prompts))
        hidden = self.read_prompts(rows, self.cache)
        last = [hidden[row, length - 1] for row, length in enumerate(self.lengths)]
        return self.transformer.logits(torch.stack(last))

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (B, V) of the id after these, (B,)."""
        alike = len(set(self.lengths)) == 1
        device = self.transformer.device
        start = self.lengths[0] if alike else torch.tensor(self.lengths, device=device)
        logits = self.transformer.next_logits(ids.to(device), self.cache, start)
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.cache.keep(rows, max(self.lengths))
        self.lengths = [self.lengths[row] for row in rows.tolist()]
