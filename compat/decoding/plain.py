"""The readable blocks, one id after another."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor

from compat.decoding.decoder import Rehearse, left_pad
from compat.decoding.not_finite import first_not_finite, n_blocks, why_not_finite
from compat.dialects import Model
from compat.errors import GenerationError
from compat.layers import KVCache


class PlainDecoder:
    """The readable blocks as they are, with their key/value cache and left padding.

    A model whose blocks do not fill the cache, such as one with a part that computes without it,
    computes all positions anew for every id.

    Args:
        model: a dialect's model in eval mode, modified or not.
        use_cache: False computes all positions anew for every id.

    Raises:
        GenerationError: the model is in training mode.
    """

    def __init__(self, model: Model, use_cache: bool = True) -> None:
        if model.training:
            raise GenerationError(
                "the model is in training mode, with dropout on; call model.eval() first"
            )
        self.model, self.config = model, model.config
        self.ids_alone = not _takes_cache(model)
        self.use_cache = use_cache and not self.ids_alone

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], rehearse: Rehearse | None = None) -> Tensor:
        ids, mask = left_pad(prompts)
        device = next(self.model.parameters()).device
        self._ids = ids.to(device)  # without a cache every id is read again
        self._mask = None if mask.all() else mask.to(device)
        blocks = n_blocks(self.model) if self.use_cache else 0
        self._cache = [KVCache(self.config.n_positions) for _ in range(blocks)]
        logits = self._read(self._ids)
        if any(layer.length != self._ids.shape[1] for layer in self._cache):
            self._cache = []
            logits = self._read(self._ids)
        return logits

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        new = ids[:, None]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=1)
        if self._cache:
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
        for layer in self._cache:
            layer.keep(rows, padding)

    def why_not_finite(self, context: Sequence[int]) -> str:
        """As in `Decoder`, by tap."""
        some = next(self.model.parameters())
        ids = torch.tensor([context], device=some.device)
        return why_not_finite(first_not_finite(self.model, ids), some.dtype, context)

    def _read(self, ids: Tensor) -> Tensor:
        if self.ids_alone:
            if self._mask is not None:
                raise GenerationError(
                    f"{type(self.model).__name__}.forward was replaced by one that takes no "
                    "attention_mask; give prompts of one length, or one at a time"
                )
            return self.model(ids)[:, -1].float()  # type: ignore[no-any-return]
        logits: Tensor = self.model(
            ids, self._cache or None, self._mask, logits_to_keep=1
        )  # (B, 1, V)
        return logits[:, -1].float()


def _takes_cache(model: Model) -> bool:
    """Whether `forward` can be called as the dialects': a replaced one may take ids alone."""
    try:
        signature(model.forward).bind(None, None, None, logits_to_keep=1)
    except TypeError:
        return False
    return True


class PlainBlocks:
    """A model whose readable blocks are to run as they are, where a faster decoder could."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def decoder(self) -> PlainDecoder:
        """The blocks, with a cache of their own."""
        return PlainDecoder(self.model)
