"""The registry of mistakes, and helpers for making them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from compat.dialects import linear

Mistake = Callable[[linear.GPTModel], None]
MISTAKES: dict[str, tuple[str, Mistake]] = {}


def mistake(first_tap: str) -> Callable[[Mistake], Mistake]:
    """Register a mistake with the tap at which the parity check must find it."""

    def register(do: Mistake) -> Mistake:
        MISTAKES[do.__name__] = (first_tap, do)
        return do

    return register


def block(model: linear.GPTModel) -> linear.TransformerBlock:
    """Return the block of layer 1, which is neither the first nor the last one."""
    return model.trf_blocks[1]  # type: ignore[return-value]


def patch_block(model: linear.GPTModel, formula: Callable[[Tensor, nn.Module], Tensor]) -> None:
    b = block(model)
    b.forward = lambda x, cache=None, attention_mask=None: formula(x, b)
