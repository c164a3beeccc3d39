"""The readable blocks, one id after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compat.decoding.decoder import Rehearse, left_pad
from compat.decoding.not_finite import first_not_finite, why_not_finite
from compat.dialects import Model
from compat.errors import GenerationError
from compat.layers import KVCache


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
    def start(self, prompts: Sequence[Sequence[int]], rehearse: Rehearse | None = None) -> Tensor:
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


class PlainBlocks:
    """A model whose readable blocks are to run as they are, where a faster decoder could."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def decoder(self) -> PlainDecoder:
        """The blocks, with a cache of their own."""
        return PlainDecoder(self.model)
