"""The decoder of a model: the fast one on the model's own weights, where that is the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compat.config import GPT2Config
from compat.decoding.decoder import Decoder, HasDecoder
from compat.decoding.matrices import Blas
from compat.decoding.plain import PlainDecoder
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Embedding, Transformer
from compat.decoding.unmodified import is_unmodified
from compat.dialects import Model, dialect_of
from compat.errors import GenerationError
from compat.ops import Split, Transpose


def decoder_of(model: Model | HasDecoder) -> Decoder:
    """The model's own decoder; of a dialect's model the fast one if nothing of it was modified.

    Nothing is packed or copied: the weights are read where the model has them.

    Raises:
        GenerationError: neither a decoder nor a model with compat's config; training mode.
    """
    if isinstance(model, HasDecoder):
        return model.decoder()
    if not isinstance(model, nn.Module) or not isinstance(
        getattr(model, "config", None), GPT2Config
    ):
        raise GenerationError(
            f"cannot generate with a {type(model).__name__}; expected a model from "
            "load_pretrained or an Engine, which takes any module with its name map"
        )
    kinds = {(tensor.dtype, tensor.device.type) for tensor in model.parameters()}
    on_cpu = len(kinds) == 1 and kinds.pop()[1] == "cpu"  # the only place where it is faster
    return FastBlocks(model) if on_cpu and is_unmodified(model) else PlainDecoder(model)


class FastBlocks(StaticDecoder):
    """A dialect's model by the fast forward pass; what is at fault its blocks tell, tap by tap."""

    def __init__(self, model: Model) -> None:
        super().__init__(transformer_of(model))
        self.model = model

    def why_not_finite(self, context: Sequence[int]) -> str:
        return PlainDecoder(self.model).why_not_finite(context)


@torch.no_grad()
def transformer_of(model: Model) -> Transformer:
    """An unmodified model's weights in its own data type, all of them views of its memory.

    Building it for every text costs little, and no change of the weights can be missed.
    """
    config, dialect = model.config, dialect_of(model)
    if dialect is None:
        raise TypeError(f"{type(model).__name__} is not a dialect's model")
    rows = {row.hf: row for row in dialect.name_map.expand(config.n_layer)}
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def parts(name: str) -> list[Tensor]:
        """The tensors whose concatenation is Hugging Face's; none for a bias the model lacks."""
        row = rows[name]
        found = [parameters[ours].detach() for ours in row.ours if ours in parameters]
        transposed = isinstance(row.op, Transpose) or (
            isinstance(row.op, Split) and row.op.transpose
        )
        return [tensor.t() for tensor in found] if transposed else found

    def read(name: str) -> Tensor:
        found = parts(name)
        return found[0] if found else torch.zeros_like(read(name.removesuffix("bias") + "weight"))

    embedding = Embedding(read("wte.weight"), read("wpe.weight"))
    return Transformer(config, embedding, read, Blas, embedding.wte.dtype, parts)
