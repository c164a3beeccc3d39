"""Decoding of batches with a preallocated KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compat.decoding.decoder import PreviewSampling, check_prompts
from compat.decoding.transformer import Transformer


class StaticDecoder:
    """Decodes sequences of any lengths in one batch, padded on the right.

    Args:
        transformer: computes the logits.
        max_batch: the largest number of sequences, or None for any number.
    """

    def __init__(self, transformer: Transformer, max_batch: int | None = None) -> None:
        self.transformer, self.max_batch = transformer, max_batch
        self.config = transformer.config

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], preview_sampling: PreviewSampling | None = None
    ) -> Tensor:
        check_prompts(prompts, self.max_batch)
        self.lengths = [len(prompt) for prompt in prompts]
        T = max(self.lengths)
        padded = [[*prompt, *[0] * (T - len(prompt))] for prompt in prompts]
        self.cache = self.transformer.new_cache(len(prompts))
        hidden = self.transformer.prefill(padded, self.cache)
        last = [hidden[row, length - 1] for row, length in enumerate(self.lengths)]
        return self.transformer.logits(torch.stack(last))

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        device, lengths = self.transformer.device, self.lengths
        equal = len(set(lengths)) == 1
        start = lengths[0] if equal else torch.tensor(lengths, device=device)
        logits = self.transformer.next_logits(ids.to(device), self.cache, start)
        self.lengths = [length + 1 for length in lengths]
        return logits

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows, max(self.lengths))
        self.lengths = [self.lengths[row] for row in rows.tolist()]

    def why_not_finite(self, context: Sequence[int]) -> str:
        return self.transformer.why_not_finite(context)
