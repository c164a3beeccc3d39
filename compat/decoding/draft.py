"""The draft model of speculative decoding: the same weights in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.layout import HEAD
from compat.decoding.decoder import Choose
from compat.decoding.matrices import Pack
from compat.decoding.native import transformer_class
from compat.decoding.not_finite import NotFiniteError
from compat.decoding.outliers import without_outliers
from compat.decoding.transformer import Cache, Norm, Read, Transformer

# Tokens of an engine before its draft model is packed. Packing takes as long as 10 to 30 of them,
# and the draft model then saves a quarter of the time of each.
PATIENCE = 32


class ModelDraft:
    """Draft tokens of a less exact copy of the model, which shares the model's cache.

    The following forward pass of the model overwrites its keys and values of the draft tokens. Its
    weights are packed when it is first called, because an engine that only scores texts, decodes
    batches or generates a few tokens never needs them.

    Args:
        model: the model.
        make: returns the copy, such as `in_8_bits`.
    """

    def __init__(self, model: Transformer, make: Callable[[], Transformer]) -> None:
        self.model, self.make = model, make

    def __call__(self, ids: list[int], count: int, cache: Cache, choose: Choose) -> list[int]:
        ids = list(ids)
        n = len(ids)
        while len(ids) < n + count:
            try:
                last = torch.tensor(ids[-1:], device=self.model.device)
                logits = self.transformer.next_logits(last, cache, len(ids) - 1)
                ids.append(choose(logits, ids))
            # Some int8 kernels refuse NaN. The model itself raises the more helpful error.
            except (NotFiniteError, RuntimeError):
                break
        return ids[n:]

    @cached_property
    def transformer(self) -> Transformer:
        """The copy."""
        return self.make()


@torch.no_grad()
def in_8_bits(model: Transformer, pack: Pack, read: Read | None = None) -> Transformer:
    """Return a copy of a transformer with 8-bit weights, which shares its embeddings.

    Args:
        model: the transformer.
        pack: packs 8-bit weights.
        read: reads the weights in 8 bits. By default, those of the model are quantized.
    """
    embedding = model.wte, model.wpe
    if read is None:
        read = without_outliers(model.config, embedding, weights_of(model))
    kind = transformer_class(pack, model.device)
    return kind(model.config, embedding, read, pack, torch.float32, in_order=False)


def weights_of(transformer: Transformer) -> Read:
    """Return a function that reads the weights of a transformer by Hugging Face's names."""
    modules: dict[str, Any] = {"ln_f": transformer.ln_f, "lm_head": transformer.lm_head}
    for i, block in enumerate(transformer.h):
        modules |= {
            f"h.{i}.ln_1": block.ln_1,
            f"h.{i}.attn.c_attn": block.c_attn,
            f"h.{i}.attn.c_proj": block.attn_proj,
            f"h.{i}.ln_2": block.ln_2,
            f"h.{i}.mlp.c_fc": block.c_fc,
            f"h.{i}.mlp.c_proj": block.mlp_proj,
        }

    def read(name: str) -> list[Tensor]:
        module, _, parameter = name.rpartition(".")
        parts: list[Any] = list(getattr(modules[module], "matrices", [modules[module]]))
        if parameter == "bias":
            return [part.bias for part in parts if part.bias is not None]
        if isinstance(parts[0], Norm):
            return [parts[0].weight]
        return [part.unpacked().t() if name == HEAD else part.unpacked() for part in parts]

    return read
