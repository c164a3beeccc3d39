"""The weights of a checkpoint in 8 bits, as an int8 engine and its packed file have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS, PROJECTIONS
from compat.checkpoint.packed import Quantized, tensors_of
from compat.decoding.matrices import quantize
from compat.decoding.outliers import inputs_with_outliers


class Int8Weights:
    """Quantizes the weights of a checkpoint when they are read, each of them once.

    Matrices have 8 bits, except for inputs with outliers. Embeddings are in bfloat16, and all other
    tensors in float32.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._read: dict[str, Tensor | Quantized] = {
            name: checkpoint.read(name).to(torch.bfloat16) for name in (EMBEDDING, POSITIONS)
        }
        embedding: Any = self._read[EMBEDDING], self._read[POSITIONS]
        self._outliers = inputs_with_outliers(
            checkpoint.config, embedding, lambda name: [checkpoint.read(name)]
        )

    def __call__(self, name: str) -> list[Any]:
        """Read a weight by its Hugging Face name, as `Transformer` does."""
        if name not in self._read:
            tied = name == HEAD and self._checkpoint.config.tie_word_embeddings
            weight = self._checkpoint.read(EMBEDDING if tied else name).to(torch.float32)
            if name.endswith((*PROJECTIONS, HEAD)):
                by_input = weight.t() if name == HEAD else weight
                self._read[name] = quantize(by_input, self._outliers.get(name))
            else:
                self._read[name] = weight.contiguous()
        return [self._read[name]]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names that they have in a packed file."""
        found: dict[str, Tensor] = {}
        for name in self._checkpoint.infos:
            found |= tensors_of(name, *self(name))
        return found
