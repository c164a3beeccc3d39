"""Decoding with a model's own `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor

from compat.decoding.decoder import PreviewSampling, left_pad
from compat.decoding.not_finite import first_not_finite, not_finite_message
from compat.dialects import Model, dialect_of
from compat.errors import GenerationError
from compat.layers import KVCache
from compat.sharding import ReplicatePlainTensors, same_on_every_rank
from compat.tap import expand_taps


class PlainDecoder:
    """Decodes with the `forward` of a dialect's model, its KV cache and left padding.

    If the blocks do not fill the cache, because a module was replaced by one that does not support
    it, every step recomputes all positions.

    Args:
        model: a dialect's model in eval mode, modified or not.
        use_cache: if False, every step recomputes all positions.

    Raises:
        GenerationError: the model is in training mode.
    """

    def __init__(self, model: Model, use_cache: bool = True) -> None:
        if model.training:
            raise GenerationError(
                "the model is in training mode, in which dropout is active. Call model.eval()."
            )
        self.model, self.config = model, model.config
        self.takes_ids_only = not _takes_cache(model)
        self.use_cache = use_cache and not self.takes_ids_only

    @torch.no_grad()
    def start(
        self, prompts: Sequence[Sequence[int]], preview_sampling: PreviewSampling | None = None
    ) -> Tensor:
        ids, mask = left_pad(prompts)
        device = next(self.model.parameters()).device
        self._ids = ids.to(device)  # all of them, for steps without a cache
        self._mask = None if mask.all() else mask.to(device)
        layers = _n_blocks(self.model) if self.use_cache else 0
        self._cache = [KVCache(self.config.n_positions) for _ in range(layers)]
        logits = self._forward(self._ids)
        if any(layer.length != self._ids.shape[1] for layer in self._cache):
            self._cache = []
            logits = self._forward(self._ids)
        return logits

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        if not same_on_every_rank(ids, self.model.parameters()):
            raise GenerationError(
                "the ranks of the divided model chose different tokens. Pass a generator with the "
                "same seed on every rank, or temperature=0."
            )
        ids = ids[:, None]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        if self._cache:
            return self._forward(ids)
        self._ids = torch.cat([self._ids, ids], dim=1)
        return self._forward(self._ids)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, and remove columns that are padding in all of them."""
        padding = 0
        if self._mask is not None:
            mask = self._mask[rows]
            padding = int(mask.any(dim=0).int().argmax())
            self._mask = None if mask[:, padding:].all() else mask[:, padding:]
        self._ids = self._ids[rows, padding:]
        with ReplicatePlainTensors():
            for layer in self._cache:
                layer.keep(rows, padding)

    def why_not_finite(self, context: Sequence[int]) -> str:
        parameter, dialect = next(self.model.parameters()), dialect_of(self.model)
        ids = torch.tensor([context], device=parameter.device)
        taps = expand_taps(dialect.taps, _n_blocks(self.model)) if dialect else []
        found = first_not_finite(self.model, taps, lambda: self.model(ids))
        return not_finite_message(found, parameter.dtype, len(context))

    def _forward(self, ids: Tensor) -> Tensor:
        """Return float32 logits (B, V) of the last position."""
        if not self.takes_ids_only:
            logits = self.model(ids, self._cache or None, self._mask, logits_to_keep=1)
        elif self._mask is None:
            logits = self.model(ids)
        else:
            raise GenerationError(
                f"{type(self.model).__name__}.forward was replaced by one without attention_mask, "
                "which prompts of different lengths require. Pass prompts of the same length, or "
                "one at a time."
            )
        return logits[:, -1].float()  # type: ignore[no-any-return]


def _takes_cache(model: Model) -> bool:
    """Return whether `forward` has the dialects' signature. A replacement may accept ids only."""
    try:
        signature(model.forward).bind(None, None, None, logits_to_keep=1)
    except TypeError:
        return False
    return True


def _n_blocks(model: Model) -> int:
    """Return the number of blocks, which is not the config's if blocks were removed or added."""
    dialect = dialect_of(model)
    if dialect is None:
        return model.config.n_layer
    blocks = model.get_submodule(dialect.block_path.removesuffix(".{i}"))
    return len(blocks._modules)  # children() would count a repeated block only once


class PlainBlocks:
    """A model that is always run by its own `forward`, even if the fast path supports it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def decoder(self) -> PlainDecoder:
        """Return a new decoder with its own KV cache."""
        return PlainDecoder(self.model)
