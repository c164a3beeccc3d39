"""Transformers that run in one call of compiled C, and the products that hold their weights.

`native.c` computes what `Transformer` computes, on the same weights and the same cache: passes of a
few tokens, and on some processors prompts and large batches, too. Torch runs the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.checkpoint.packed import Quantized
from compat.decoding.cuda_graphs import CudaTransformer
from compat.decoding.matrices import Int8, Linear, Pack, WithOutliers, empty_weight
from compat.decoding.native_library import NativeError, library
from compat.decoding.native_model import GELU_ERF, ROWS_AT_ONCE, TANH, NativeModel, Unsupported
from compat.decoding.transformer import Cache, Transformer

FEW_ROWS = 16  # equal to FEW in native.c
SLOW_ACTIVATIONS = {GELU_ERF, TANH}  # native.c computes their elements one by one


class NativeLinear(Linear):
    """A weight `[out, in]` that both the native decode step and `F.linear` read.

    It is always a copy in huge pages. Memory-mapped files have small ones.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        _check_available(weight)
        by_output = weight.t()
        copy = empty_weight(by_output.shape, weight.dtype).copy_(by_output)
        super().__init__(copy.t(), bias)


class NativeInt8(Int8):
    """An int8 weight that the native decode step reads; for prompts it is converted to float32."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        _check_available(weight)
        super().__init__(weight, bias)


class NativeInt8Bfloat16(NativeInt8):
    """The same, but converted to bfloat16, which holds int8 values exactly."""

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x.bfloat16(), self.qweight.bfloat16()).float()
        return torch.addcmul(self.bias, product, self.scale)


class _Prompts(nn.Module):
    """Marks products of a transformer whose prompts and large batches run in `native.c`, too."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        if not library().has_panels():
            raise NativeError("native.c multiplies many rows with AVX-512 VNNI only")
        super().__init__(weight, bias)


class NativePrompts(_Prompts, NativeLinear):
    """As `NativeLinear`, but prompts and large batches run in `native.c`, too."""


class NativeInt8Prompts(_Prompts, NativeInt8Bfloat16):
    """As `NativeInt8`, but prompts and large batches run in `native.c`, too, in 8 bits."""


def _check_available(weight: Tensor | Quantized) -> None:
    library()
    if not weight.is_cpu:
        raise NativeError("the weight is not on the CPU")


NATIVE: tuple[Pack, ...] = (
    NativeLinear, NativePrompts, NativeInt8, NativeInt8Bfloat16, NativeInt8Prompts
)  # fmt: skip


def transformer_class(pack: Pack, device: torch.device) -> type[Transformer]:
    """Return the class of transformer that is fastest with weights packed this way on a device."""
    if device.type == "cuda":
        return CudaTransformer
    return NativeTransformer if pack in NATIVE else Transformer


class NativeTransformer(Transformer):
    """A transformer whose passes of a few tokens, or all passes, run in `native.c`.

    The hidden states of these passes are float32 in every precision.
    """

    native: NativeModel | None = None  # of the last text
    prefill_chunk = ROWS_AT_ONCE

    def new_cache(self, batch: int) -> Cache:
        self.native = None  # so that the next text uses weights that were replaced since the last
        return super().new_cache(batch)

    def forward(self, tokens: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
        found = self._native(tokens.numel(), lambda native: native.hidden(tokens, kv, start))
        return super().forward(tokens, kv, start) if found is None else found

    def logits(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])
        found = self._native(len(x), lambda native: native.logits(x))
        if found is None:
            return super().logits(hidden.to(self.dtype))
        return found.view(*hidden.shape[:-1], -1)

    def next_logits(self, tokens: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        kv = cache.kv
        found = self._native(len(tokens), lambda native: native.next_logits(tokens, kv, start))
        return super().next_logits(tokens, cache, start) if found is None else found

    def _native(self, rows: int, run: Callable[[NativeModel], Tensor]) -> Tensor | None:
        """Return what `run` computes; None if it is for torch, which raises the errors."""
        head = self.lm_head
        many = isinstance(head.product if isinstance(head, WithOutliers) else head, _Prompts)
        if not rows or (rows > FEW_ROWS and not many):
            return None
        try:
            native = self.native = self.native or NativeModel(self)
            if rows > FEW_ROWS and native.activations & SLOW_ACTIVATIONS:
                return None
            return run(native)
        except Unsupported:
            return None
