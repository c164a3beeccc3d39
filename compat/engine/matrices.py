"""Ways to multiply by a matrix that never changes, of which the machine's fastest is taken.

Each packs a weight `[in, out]` and a bias `[out]` once, and then maps (M, in) → (M, out). Some use
operators that torch does not document; those may go, and are taken only where they work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Matrix(Protocol):
    """A packed weight with its bias: (M, in) → (M, out)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x · weight + bias."""


Pack = Callable[[Tensor, Tensor | None], Matrix]


class Blas:
    """torch's matrix product on the `[in, out]` layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)


class Linear:
    """torch's `F.linear` on the `[out, in]` layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.t().contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnn:
    """oneDNN on a weight in its own blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.mkldnn
        self.weight = ops._reorder_linear_weight(weight.t().contiguous(), None)
        self.bias, self.multiply = bias, ops._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self.multiply(x, self.weight, self.bias, "none", [], "")
        return product


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [in, out] in whole numbers −127 … 127 (out, in), and the step of each row (out,)."""
    rows = weight.t().float()
    step = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / step[:, None]).round().to(torch.int8).contiguous(), step


class Int8:
    """8-bit weights, made wide for every product: slow, but of documented operators only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.whole, self.step = quantized(weight)
        self.bias = torch.zeros_like(self.step) if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.whole.to(x.dtype)).float()
        return torch.addcmul(self.bias, product, self.step).to(x.dtype)


class Int8WeightOnly:
    """8-bit weights by bfloat16 activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.aten
        self.whole, step = quantized(weight)
        self.ones = torch.ones_like(step, dtype=torch.bfloat16)
        self.step, self.multiply = step, ops._weight_int8pack_mm
        self.bias = torch.zeros_like(step) if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        product = self.multiply(x.bfloat16(), self.whole, self.ones).float()
        return torch.addcmul(self.bias, product, self.step).to(x.dtype)


def int8_weight_only(weight: Tensor, bias: Tensor | None) -> Matrix:
    """torch's kernel reads inputs in blocks of 32, and beyond the end of those that have fewer."""
    return (Int8 if weight.shape[0] % 32 else Int8WeightOnly)(weight, bias)


class Int8Both:
    """8-bit weights by 8-bit activations, with a step for each row of them: for drafts."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.onednn
        whole, self.step = quantized(weight)
        self.weight = ops.qlinear_prepack(whole, None)
        self.zeros = torch.zeros(len(self.step), dtype=torch.int32)
        self.bias = torch.zeros_like(self.step) if bias is None else bias.float()
        self.multiply = ops.qlinear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        step = (x.abs().amax(dim=1, keepdim=True).float() / 127).clamp(min=1e-30)
        whole = (x / step).round().to(torch.int8)
        product = self.multiply(
            whole, 1.0, 0, self.weight, self.step, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return torch.addcmul(self.bias, product, step).to(x.dtype)
