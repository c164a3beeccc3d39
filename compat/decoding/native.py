"""The decode step in one call of compiled C: embedding, all layers and logits of a few tokens.

`native.c` computes what `Transformer` computes, on the same weights and the same cache. Prompts and
large batches run on torch's attention, and on torch's products or those of `native.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.checkpoint.packed import Quantized
from compat.decoding.matrices import Int8, Linear, Pack
from compat.decoding.native_library import NativeError, library
from compat.decoding.native_model import NativeActivation, NativeModel, Unsupported, native_product
from compat.decoding.transformer import Cache, Transformer

FEW_ROWS = 16  # as FEW in native.c
MANY_ROWS = 64  # of a pass whose products are native.c's, too; more are faster on torch's attention


class NativeLinear(Linear):
    """A weight `[out, in]` that both the native decode step and `F.linear` read."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        _check_available(weight)
        super().__init__(weight, bias)


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


class _Products(nn.Module):
    """A product of `native.c`, and of the class beside this one for what it does not support."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None) -> None:
        if not library().has_panels():
            raise NativeError("native.c multiplies many rows with AVX-512 VNNI only")
        super().__init__(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return native_product(x, self)
        except Unsupported:
            found: Tensor = super().forward(x)
            return found


class NativeProducts(_Products, NativeLinear):
    """As `NativeLinear`, but `native.c` multiplies prompts and large batches of float32, too."""


class NativeInt8Products(_Products, NativeInt8Bfloat16):
    """As `NativeInt8`, but `native.c` multiplies prompts and large batches, too, in 8 bits."""


def _check_available(weight: Tensor | Quantized) -> None:
    library()
    if not weight.is_cpu:
        raise NativeError("the weight is not on the CPU")


NATIVE: tuple[Pack, ...] = (
    NativeLinear, NativeProducts, NativeInt8, NativeInt8Bfloat16, NativeInt8Products
)  # fmt: skip


def transformer_class(pack: Pack) -> type[Transformer]:
    """The transformer that makes the best of weights packed this way."""
    return NativeTransformer if pack in NATIVE else Transformer


class NativeTransformer(Transformer):
    """A transformer whose passes of up to `max_rows` tokens run in `native.c`.

    The hidden states of these passes are float32 in every precision.
    """

    native: NativeModel | None = None  # of the last text

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.h:
            block.act = NativeActivation(block.get_submodule("act"))
        self.max_rows = MANY_ROWS if isinstance(self.lm_head, _Products) else FEW_ROWS

    def new_cache(self, batch: int) -> Cache:
        self.native = None  # what was replaced in the transformer counts from the next text on
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
        """What `run` computes; None if it is for torch, which raises the errors of wrong input."""
        if not 0 < rows <= self.max_rows:
            return None
        try:
            native = self.native = self.native or NativeModel(self)
            return run(native)
        except Unsupported:
            return None
