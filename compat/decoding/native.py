"""The decode step in one call of compiled C: embedding, all layers and logits of a few tokens.

`native.c` computes what `Transformer` computes, on the same weights and the same cache. Prompts and
large batches run on torch's products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.checkpoint.packed import Quantized
from compat.decoding.matrices import Int8, Linear, Pack, sum_of_terms, two_terms
from compat.decoding.native_library import NativeError, library
from compat.decoding.native_model import NativeModel, Unsupported
from compat.decoding.transformer import Cache, Transformer

MAX_ROWS = 16  # tokens of a pass; more are faster on torch's products
TWO_TERM_ROWS = 64  # of activations that are multiplied in 8 bits; more are faster in bfloat16


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


class NativeInt8TwoTerm(NativeInt8Bfloat16):
    """The same, but few rows of activations are multiplied as two terms of 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > TWO_TERM_ROWS:
            return super().forward(x)
        terms, x_scale = two_terms(x)
        products = torch._int_mm(terms, self.qweight.t()).float()
        return torch.addcmul(self.bias, sum_of_terms(products), x_scale * self.scale)


def _check_available(weight: Tensor | Quantized) -> None:
    library()
    if not weight.is_cpu:
        raise NativeError("the weight is not on the CPU")


NATIVE: tuple[Pack, ...] = (NativeLinear, NativeInt8, NativeInt8Bfloat16, NativeInt8TwoTerm)


def transformer_class(pack: Pack) -> type[Transformer]:
    """The transformer that makes the best of weights packed this way."""
    return NativeTransformer if pack in NATIVE else Transformer


class NativeTransformer(Transformer):
    """A transformer whose passes of up to `MAX_ROWS` tokens run in `native.c`.

    The hidden states of these passes are float32 in every precision.
    """

    native: NativeModel | None = None  # of the last text

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
        if not 0 < rows <= MAX_ROWS:
            return None
        try:
            native = self.native = self.native or NativeModel(self)
            return run(native)
        except Unsupported:
            return None
