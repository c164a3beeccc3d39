"""The decoder of a model: the fast one on the model's own weights, where that is the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from compat.decoding.decoder import Decoder, HasDecoder
from compat.decoding.matrices import Blas
from compat.decoding.plain import PlainDecoder
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Embedding, Transformer
from compat.dialects import Model, conv1d, linear
from compat.hf_tensors import hf_tensors, with_head_of


def decoder_of(model: Model | HasDecoder) -> Decoder:
    """The model's own decoder; of a dialect's model the fast one if it is as compat made it.

    Nothing is packed, and next to nothing copied: the weights are read where the model has them.
    """
    if isinstance(model, HasDecoder):
        return model.decoder()
    return FastBlocks(model) if is_as_made(model) else PlainDecoder(model)


class FastBlocks(StaticDecoder):
    """A dialect's model by the fast forward pass; what is at fault its blocks tell, tap by tap."""

    def __init__(self, model: Model) -> None:
        super().__init__(transformer_of(model))
        self.model = model

    def why_not_finite(self, context: Sequence[int]) -> str:
        return PlainDecoder(self.model).why_not_finite(context)


def is_as_made(model: Model) -> bool:
    """Whether its weights tell all: no part was replaced or is hooked, nothing is dropped out.

    Only the blocks themselves know what others do; and they alone run on accelerators.
    """
    parts, every = list(model.modules()), nn.modules.module
    kinds = {(tensor.dtype, tensor.device.type) for tensor in model.parameters()}
    return (
        not model.training
        and len(kinds) == 1
        and all(device == "cpu" for _, device in kinds)
        and all(type(part).__module__ in _MODULES for part in parts)
        and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        and not (every._global_forward_hooks or every._global_forward_pre_hooks)
        and not any("forward" in vars(part) for part in parts)
    )


_MODULES = {linear.__name__, conv1d.__name__, "compat.layers", nn.Linear.__module__}
_MODULES |= {kind.__module__ for kind in (nn.Embedding, nn.Dropout, nn.ModuleList, nn.GELU)}


@torch.no_grad()
def transformer_of(model: Model) -> Transformer:
    """Its weights, shared, in its own data type."""
    tensors = hf_tensors(model)
    dtype = next(model.parameters()).dtype
    config = with_head_of(model.config, tensors)

    def read(name: str) -> torch.Tensor:
        return tensors[name].view()

    return Transformer(config, Embedding.of(read, dtype), read, Blas, dtype)
