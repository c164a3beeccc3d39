"""Ways to multiply by a matrix that never changes, of which the machine's fastest is taken.

Each packs a weight `[in, out]` and a bias `[out]` once, and then maps (M, in) → (M, out). Some use
operators that torch does not document; those may go, and are taken only where they work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.decoding.memory import private_memory


class Matrix(Protocol):
    """A packed weight with its bias: (M, in) → (M, out)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x · weight + bias."""


PIECE = 256  # rows quantized at a time, in the cache
Pack = Callable[[Tensor, Tensor | None], Matrix]


class Blas:
    """torch's matrix product on the layout that the weight has; its memory is not copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)


def side_by_side(matrices: Sequence[Matrix]) -> Matrix:
    """One that concatenates the products of several, whose weights need not be copied together."""
    if len(matrices) == 1:
        return matrices[0]
    return lambda x: torch.cat([matrix(x) for matrix in matrices], dim=1)


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
        self.weight = ops._reorder_linear_weight(weight.t(), None)
        self.bias, self.multiply = bias, ops._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self.multiply(x, self.weight, self.bias, "none", [], "")
        return product


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [in, out] in whole numbers −127 … 127 (out, in), and the step of each row (out,)."""
    step = torch.empty(weight.shape[1], device=weight.device)
    # Memory that goes back to the system when it is packed, where the allocator would keep it.
    memory = private_memory(weight.numel())
    whole = torch.frombuffer(memory, dtype=torch.int8).view(weight.shape[::-1])  # on the CPU
    least = torch.finfo(torch.float32).tiny
    for start in range(0, len(whole), PIECE):
        rows = slice(start, start + PIECE)
        columns = weight[:, rows].float()
        step[rows] = (columns.abs().amax(dim=0) / 127).clamp(min=least)
        whole[rows] = (columns / step[rows]).round_().t()
    return whole.to(weight.device), step


class Int8:
    """8-bit weights, made wide for every product: slow, but of documented operators only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.whole, self.step = quantized(weight)
        self.bias = torch.zeros_like(self.step) if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.linear(x, self.whole.to(x.dtype)), self.step)


class Int8Pairs:
    """8-bit weights by activations of 15 bits, which the product gets as two rows of 8.

    x = step · (whole + rest / 127), with one step for each row of x. While reading the weights
    takes the time, the second row costs nothing.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.onednn
        whole, self.step = quantized(weight)
        self.weight = ops.qlinear_prepack(whole, None)
        self.zeros = torch.zeros_like(self.step, dtype=torch.int32)
        self.bias = torch.zeros_like(self.step) if bias is None else bias.float()
        self.multiply = ops.qlinear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        M = len(x)
        step = x.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=1e-30)  # (M, 1)
        whole = x / step
        pairs = torch.cat([whole, whole.frac().mul_(127)])  # (2M, in)
        products = self.multiply(
            pairs.to(torch.int8), 1.0, 0, self.weight, self.step, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return torch.addcmul(self.bias, products[:M].add(products[M:], alpha=1 / 127), step)


class Int8WeightOnly:
    """8-bit weights by bfloat16 activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.aten
        self.whole, self.step = quantized(weight)
        self.ones = torch.ones_like(self.step, dtype=torch.bfloat16)
        self.bias = torch.zeros_like(self.step) if bias is None else bias.float()
        self.multiply = ops._weight_int8pack_mm

    def __call__(self, x: Tensor) -> Tensor:
        product = self.multiply(x.bfloat16(), self.whole, self.ones).float()
        return torch.addcmul(self.bias, product, self.step)


def int8_weight_only(weight: Tensor, bias: Tensor | None) -> Matrix:
    """torch's kernel reads inputs in blocks of 32, and beyond the end of those that have fewer."""
    return (Int8 if weight.shape[0] % 32 else Int8WeightOnly)(weight, bias)


def _quantized_tensor(whole: Tensor, step: Tensor) -> Tensor:
    """torch's own tensor of 8-bit weights, of which torch warns that it will be removed."""
    zeros = torch.zeros_like(step, dtype=torch.long)
    return torch._make_per_channel_quantized_tensor(whole, step.double(), zeros, 0)


def _without_warnings(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function without the warnings of the C++ code that it calls.

    Python drops those of a frame whose module has no name. The filters of `warnings` would do, too,
    but they belong to the process, and threads that change them at once leave them changed.
    """
    return FunctionType(function.__code__, {**function.__globals__, "__name__": None})


class Int8Both:
    """8-bit weights by 8-bit activations, with one step for all rows: for drafts of one row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.quantized
        tensor = _without_warnings(_quantized_tensor)(*quantized(weight))
        self.weight = ops.linear_prepack(tensor, None if bias is None else bias.float())
        self.multiply = ops.linear_dynamic

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self.multiply(x, self.weight, False)
        return product
