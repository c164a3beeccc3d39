"""A reference that several tests share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compat.parity.reference import Reference


class SharedReference(Reference):
    """It remembers its logits; only for tests in which nobody patches torch or transformers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.remembered: dict[tuple[object, ...], tuple[Tensor, Tensor | None]] = {}

    def logits(self, ids: Tensor, exact: bool = True) -> tuple[Tensor, Tensor | None]:
        key = (*ids.shape, ids.contiguous().numpy().tobytes(), exact)
        if key not in self.remembered:
            self.remembered[key] = super().logits(ids, exact)
        return self.remembered[key]
