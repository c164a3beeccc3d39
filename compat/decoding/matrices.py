"""Packed matrix products: one module for each way to multiply by a constant weight.

Each module packs a weight `[in, out]` and a bias `[out]` once, and then maps (M, in) → (M, out).
Several of them use undocumented operators of torch. `kernels` only selects these if they work.

The tensors are plain attributes, which are faster to read than registered buffers.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.checkpoint.files import private_memory
from compat.checkpoint.packed import Outliers, Quantized
from compat.decoding.native_library import is_available, library

# Packs a weight and a bias into a module that maps x (M, in) to x · weight + bias (M, out). The
# int8 modules also accept a weight that is already quantized.
Pack = Callable[[Any, Tensor | None], nn.Module]
QUANTIZED_AT_ONCE = 256  # columns; they then stay in the processor's cache
BLOCK_OF_WEIGHTS = 1 << 25  # bytes
ALIGNMENT = 64  # bytes; a weight starts at a multiple of it
WIDE = 8192  # columns from which a product is computed in parts
COLUMNS_AT_ONCE = 1024  # columns of one such part
FEWEST = 64  # fewest inputs and outputs of a matrix that native.c quantizes in strips


_of_thread = threading.local()  # the thread's current block of memory, and how much of it is used


def empty_weight(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocate private memory for a weight on the CPU, in huge pages if the system has them.

    Every decode step reads all weights, which takes about 10% less time in huge pages. The small
    weights that a thread allocates share a block, which is freed with the last of them.
    """
    size = shape.numel() * dtype.itemsize
    block = _of_thread.block() if hasattr(_of_thread, "block") else None
    if block is None or _of_thread.used + size > len(block):
        block = private_memory(max(size, BLOCK_OF_WEIGHTS))
        with suppress(AttributeError, OSError):  # another system, or a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
        _of_thread.block, _of_thread.used = weakref.ref(block), 0
    start = _of_thread.used
    _of_thread.used += -(-size // ALIGNMENT) * ALIGNMENT
    return torch.frombuffer(block, dtype=dtype, count=shape.numel(), offset=start).view(shape)


def contiguous(weight: Tensor) -> Tensor:
    """Return the weight if it is contiguous, else a copy in memory from `empty_weight`."""
    if weight.is_contiguous() or not weight.is_cpu or not weight.numel():
        return weight.contiguous()
    return empty_weight(weight.shape, weight.dtype).copy_(weight)


def in_huge_pages(weight: Quantized) -> Quantized:
    """Return a copy of a quantized weight in memory from `empty_weight`."""
    values = empty_weight(weight.values.shape, torch.int8).copy_(weight.values)
    return weight._replace(values=values)


class Blas(nn.Module):
    """torch's matrix product on the weight in its own layout, without a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def unpacked(self) -> Tensor:
        """Return the weight [in, out]."""
        return self.weight


class Concatenated(nn.Module):
    """The concatenation of several products, such as q, k and v with separate weights."""

    def __init__(self, matrices: Sequence[nn.Module]) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(matrices)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([matrix(x) for matrix in self.matrices], dim=1)


class Linear(nn.Module):
    """`F.linear` on a weight `[out, in]`; wide float32 products are split, which is faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = contiguous(weight.t())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        n_out = len(self.weight)
        if n_out < WIDE or len(x) == 1 or not (x.is_cpu and x.dtype == torch.float32):
            return F.linear(x, self.weight, self.bias)
        product = x.new_empty(len(x), n_out)
        for start in range(0, n_out, COLUMNS_AT_ONCE):
            columns = slice(start, start + COLUMNS_AT_ONCE)
            torch.mm(x, self.weight[columns].t(), out=product[:, columns])
        return product if self.bias is None else product.add_(self.bias)

    def unpacked(self) -> Tensor:
        """Return the weight [in, out]."""
        return self.weight.t()


class OneDnn(nn.Module):
    """oneDNN's matrix product on a weight in oneDNN's own blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        ops: Any = torch.ops.mkldnn
        self.weight = ops._reorder_linear_weight(weight.t(), None)
        self.bias = bias
        self.multiply = ops._linear_pointwise

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.multiply(x, self.weight, self.bias, "none", [], "")
        return product

    def unpacked(self) -> Tensor:
        """Return the weight [in, out]."""
        weight: Tensor = self.weight.to_dense()
        return weight.t()


def quantize(weight: Tensor | Quantized, outliers: Tensor | None = None) -> Quantized:
    """Quantize a weight [in, out] symmetrically: int8 values (out, in) and scales (out,).

    Args:
        weight: the weight; one that is already quantized is returned.
        outliers: indices of the inputs whose weights stay float32.
    """
    if isinstance(weight, Quantized):
        return weight
    kept = torch.ones(weight.shape[0], device=weight.device)
    exact = None
    if outliers is not None:
        kept[outliers], exact = 0, Outliers(outliers, weight[outliers].float())
    qweight = empty_weight(weight.t().shape, torch.int8)
    scale = torch.empty(len(qweight), device=qweight.device)
    if not _quantized_by_native_c(weight, kept, qweight, scale):
        smallest = torch.finfo(torch.float32).tiny
        for start in range(0, len(qweight), QUANTIZED_AT_ONCE):
            rows = slice(start, start + QUANTIZED_AT_ONCE)
            columns = weight[:, rows].float() * kept[:, None]
            scales = (columns.abs().amax(dim=0) / 127).clamp(min=smallest)
            qweight[rows], scale[rows] = (columns / scales).round_().t(), scales
    return Quantized(qweight.to(weight.device), scale.to(weight.device), exact)


def _quantized_by_native_c(weight: Tensor, kept: Tensor, values: Tensor, scale: Tensor) -> bool:
    """Quantize a weight by `native.c`, which takes less time. Return whether it could."""
    fits = weight.is_cpu and weight.dtype == torch.float32 and min(weight.shape) >= FEWEST
    if not fits or not is_available():
        return False
    if weight.is_contiguous():
        run = library().quantize_by_inputs
    elif weight.t().is_contiguous():
        run = library().quantize_by_outputs
    else:
        return False
    run(weight.data_ptr(), kept.data_ptr(), *weight.shape, values.data_ptr(), scale.data_ptr())
    return True


class WithOutliers(nn.Module):
    """A product of 8-bit weights, except for inputs with outliers, which it multiplies in float32.

    A few channels of GPT-2 are up to thousands of times as large as the others. With their weights
    in 8 bits, rounding errors of these would be as large as all other products (Dettmers et al.
    2022, LLM.int8()).
    """

    def __init__(self, product: nn.Module, inputs: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.product, self.inputs, self.weight = product, inputs, weight

    def forward(self, x: Tensor) -> Tensor:
        others = self.product(x.index_fill(1, self.inputs, 0))
        return torch.addmm(others, x[:, self.inputs], self.weight)


def packed(pack: Pack, weights: Sequence[Any], biases: Sequence[Tensor]) -> nn.Module:
    """Pack the weights of one product, and their biases if they have any."""
    products = []
    for weight, bias in zip_longest(weights, biases):
        product = pack(weight, bias)
        if isinstance(weight, Quantized) and weight.outliers is not None:
            product = WithOutliers(product, *weight.outliers)
        products.append(product)
    return products[0] if len(products) == 1 else Concatenated(products)


def _in_8_bits(weight: Tensor | Quantized, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 values (out, in), scales (out,) and a float32 bias (out,), 0 by default."""
    qweight, scale, _ = quantize(weight)
    return qweight, scale, torch.zeros_like(scale) if bias is None else bias.float()


class Int8(nn.Module):
    """int8 weights that are converted to the type of the activations for every product.

    This is slow, but all its operators are documented.
    """

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.qweight, self.scale, self.bias = _in_8_bits(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.linear(x, self.qweight.to(x.dtype)), self.scale)


class Int8TwoTerm(nn.Module):
    """int8 weights and 15-bit activations, which are split into two int8 terms.

    x = scale · (high + low / 127), with one scale for each row of x. The kernel multiplies both
    terms as two rows. If the product is bound by memory bandwidth, the second row costs nothing.
    """

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        super().__init__()
        ops: Any = torch.ops.onednn
        qweight, self.scale, self.bias = _in_8_bits(weight, bias)
        self.qweight = ops.qlinear_prepack(qweight, None)
        self.zero_points = torch.zeros_like(self.scale, dtype=torch.int32)
        self.multiply = ops.qlinear_pointwise

    def forward(self, x: Tensor) -> Tensor:
        x_scale = x.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=1e-30)
        high = x / x_scale
        terms = torch.cat([high, high.frac().mul_(127)]).to(torch.int8)
        products = self.multiply(
            terms, 1.0, 0, self.qweight, self.scale, self.zero_points, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        M = len(x)
        return torch.addcmul(self.bias, products[:M].add(products[M:], alpha=1 / 127), x_scale)


class Int8WeightOnly(nn.Module):
    """int8 weights and bfloat16 activations."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        super().__init__()
        ops: Any = torch.ops.aten
        self.qweight, self.scale, self.bias = _in_8_bits(weight, bias)
        self.ones = torch.ones_like(self.scale, dtype=torch.bfloat16)
        self.multiply = ops._weight_int8pack_mm

    def forward(self, x: Tensor) -> Tensor:
        product = self.multiply(x.bfloat16(), self.qweight, self.ones).float()
        return torch.addcmul(self.bias, product, self.scale)


def int8_weight_only(weight: Tensor | Quantized, bias: Tensor | None) -> nn.Module:
    """Return an Int8WeightOnly, or an Int8 if the number of inputs is not a multiple of 32.

    torch's kernel reads inputs in blocks of 32, and would read past the end of a shorter block.
    """
    return (Int8 if weight.shape[0] % 32 else Int8WeightOnly)(weight, bias)


def _quantized_tensor(qweight: Tensor, scale: Tensor) -> Tensor:
    """Convert a weight to torch's quantized tensor type, which is deprecated."""
    zeros = torch.zeros_like(scale, dtype=torch.long)
    return torch._make_per_channel_quantized_tensor(qweight, scale.double(), zeros, 0)


def _without_warnings(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function so that the C++ code that it calls issues no warnings.

    Python drops the warnings of a frame whose module has no name. The filters of `warnings` belong
    to the process, and threads that change them at the same time can leave them changed.
    """
    return FunctionType(function.__code__, {**function.__globals__, "__name__": None})


class Int8DynamicActivations(nn.Module):
    """int8 weights and int8 activations with one scale for all rows, for drafts of one row."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        super().__init__()
        ops: Any = torch.ops.quantized
        tensor = _without_warnings(_quantized_tensor)(*quantize(weight)[:2])
        self.packed = ops.linear_prepack(tensor, None if bias is None else bias.float())
        self.multiply = ops.linear_dynamic

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.multiply(x, self.packed, False)
        return product
