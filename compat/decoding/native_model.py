"""A transformer as the structures of `native.c`, with every pointer checked before it is passed."""

from __future__ import annotations

from ctypes import Array, Structure, addressof, byref, c_float, c_int64, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor, nn

from compat.decoding.matrices import Int8, Linear, WithOutliers
from compat.decoding.native_library import library, usable_threads
from compat.decoding.outliers import MOST as MOST_OUTLIERS
from compat.decoding.transformer import Block, Norm, Transformer
from compat.layers import GELU, QuickGELU

ALIGNMENT = 64  # bytes; addresses in the scratch memory are multiples of it
ROWS_AT_ONCE = 512  # rows read in one call, which bounds its scratch memory

# As the enumerations of native.c.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
GELU_TANH, GELU_ERF, QUICK_GELU, RELU, SILU, TANH = range(6)


class _Matrix(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n_out", c_int64),
        ("n_in", c_int64),
        ("n_outliers", c_int64),
        ("outliers", c_void_p),
        ("outlier_weight", c_void_p),
    )


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class _Block(Structure):
    _fields_ = (
        ("ln_1", _Norm),
        ("ln_2", _Norm),
        ("c_attn", _Matrix),
        ("attn_proj", _Matrix),
        ("c_fc", _Matrix),
        ("mlp_proj", _Matrix),
        ("scale", c_float),
        ("activation", c_int64),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("n_layer", "n_head", "n_embd", "n_inner", "n_positions")),
        ("weights", c_int64),
        ("stored", c_int64),
        ("wte", c_void_p),
        ("wpe", c_void_p),
        ("h", c_void_p),
        ("ln_f", _Norm),
        ("lm_head", _Matrix),
    )


class _Batch(Structure):
    _fields_ = (
        ("n_rows", c_int64),
        ("tokens", c_void_p),
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("kv", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "kv_stride", "sequence_stride")),
    )

    def part(self, first: int, n_rows: int) -> _Batch:
        """Return these rows of the batch, which has to stay alive."""
        arrays = (
            at + first * sizeof(c_int64) for at in (self.tokens, self.sequences, self.positions)
        )
        strides = self.layer_stride, self.kv_stride, self.sequence_stride
        return _Batch(n_rows, *arrays, self.kv, *strides)


class Unsupported(Exception):
    """A transformer, or tokens for it, that native.c cannot compute."""


class NativeModel:
    """The weights of a transformer, as native.c reads them.

    Args:
        transformer: its matrices are `Linear` or `Int8`. It may change in place later; a tensor or
            module that is replaced is not noticed.

    Raises:
        Unsupported: a module is of another type, or a tensor has another device, type or shape
            than native.c reads.
        NativeError: The library cannot be built or loaded.
    """

    def __init__(self, transformer: Transformer) -> None:
        self.library, self.config = library(), transformer.config
        self._alive: list[Any] = []  # what the pointers point to
        c = self.config
        V, C, N = c.vocab_size, c.n_embd, c.n_positions
        self.stored = transformer.wte.dtype
        if self.stored not in (torch.float32, torch.bfloat16):
            raise Unsupported(f"an embedding of {self.stored}")
        self.type = _weight(transformer.lm_head).dtype
        blocks = [self._block(block) for block in transformer.h if isinstance(block, Block)]
        if len(blocks) != c.n_layer or len(transformer.h) != c.n_layer:
            raise Unsupported(f"{len(blocks)} blocks")
        self.activations = {block.activation for block in blocks}
        layers: Array[_Block] = (_Block * c.n_layer)(*blocks)
        self._alive.append(layers)
        self.model = _Model(
            c.n_layer, c.n_head, C, c.d_inner, N, TYPES[self.type], TYPES[self.stored],
            self._pointer(transformer.wte, self.stored, V, C),
            self._pointer(transformer.wpe, self.stored, N, C),
            addressof(layers),
            self._norm(transformer.ln_f),
            self._matrix(transformer.lm_head, V, C),
        )  # fmt: skip

    def _pointer(self, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
        """Return the address of a tensor, which lives as long as this object.

        Raises:
            Unsupported: it has another type or shape, is not contiguous, or is not on the CPU.
        """
        self._alive.append(tensor)
        found = (tensor.device.type, tensor.dtype, tuple(tensor.shape), tensor.is_contiguous())
        if found != ("cpu", dtype, shape, True) or tensor.data_ptr() % dtype.itemsize:
            raise Unsupported(f"a tensor with {found} at {tensor.data_ptr():x}")
        return tensor.data_ptr()

    def _floats(self, tensor: Tensor | None, n: int) -> int | None:
        """Return the address of n float32 values, copied where they are of another type."""
        if tensor is None:
            return None
        return self._pointer(tensor.detach().float().contiguous(), torch.float32, n)

    def _norm(self, norm: Any) -> _Norm:
        if type(norm) is not Norm:
            raise Unsupported(f"a norm of type {type(norm).__name__}")
        C = self.config.n_embd
        return _Norm(self._floats(norm.weight, C), self._floats(norm.bias, C), norm.eps)

    def _matrix(self, product: Any, n_out: int, n_in: int) -> _Matrix:
        outliers: tuple[Any, ...] = 0, None, None
        if isinstance(product, WithOutliers):
            inputs, exact, product = product.inputs, product.weight, product.product
            n = len(inputs)
            if not (n <= MOST_OUTLIERS and 0 <= int(inputs.min()) and int(inputs.max()) < n_in):
                raise Unsupported(f"outliers {inputs.tolist()}")
            at = self._pointer(inputs, torch.int64, n)
            outliers = n, at, self._pointer(exact, torch.float32, n, n_out)
        weight = _weight(product)
        if weight.dtype != self.type:
            raise Unsupported(f"matrices of {self.type} and of {weight.dtype}")
        scale = self._floats(product.scale, n_out) if isinstance(product, Int8) else None
        at, bias = self._pointer(weight, self.type, n_out, n_in), self._floats(product.bias, n_out)
        return _Matrix(at, scale, bias, n_out, n_in, *outliers)

    def _block(self, block: Block) -> _Block:
        C, inner = self.config.n_embd, self.config.d_inner
        if block.n_head != self.config.n_head:
            raise Unsupported(f"{block.n_head} heads")
        return _Block(
            self._norm(block.ln_1),
            self._norm(block.ln_2),
            self._matrix(block.c_attn, 3 * C, C),
            self._matrix(block.attn_proj, C, C),
            self._matrix(block.c_fc, inner, C),
            self._matrix(block.mlp_proj, C, inner),
            block.scale,
            _activation(block.act),
        )

    def hidden(self, tokens: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
        """Return hidden states (B, T, C) of tokens (B, T), and add keys and values to the cache.

        Arguments as of `Transformer`; the kv cache is one tensor.

        Raises:
            Unsupported: a token or position beyond the model's, or a cache of another shape.
        """
        B, T = tokens.shape
        x = torch.empty(B * T, self.config.n_embd, device="cpu")
        self._decode(self._batch(tokens, kv, start), x, None)
        return x.view(B, T, -1)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (M, C) → float32 logits (M, V)."""
        x = x.float().contiguous()
        logits = torch.empty(len(x), self.config.vocab_size, device="cpu")
        self._decode(None, x, logits)
        return logits

    def next_logits(self, tokens: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
        """Do both in one call: float32 logits (B, V) of the token after each of `tokens` (B,)."""
        B = len(tokens)
        x = torch.empty(B, self.config.n_embd, device="cpu")
        logits = torch.empty(B, self.config.vocab_size, device="cpu")
        self._decode(self._batch(tokens[:, None], kv, start), x, logits)
        return logits

    def _batch(self, tokens: Tensor, kv: Tensor, start: int | Tensor) -> _Batch:
        c, (B, T) = self.config, tokens.shape
        L, H, N, D = c.n_layer, c.n_head, c.n_positions, c.d_head
        starts = [start] * B if isinstance(start, int) else start.tolist()
        ids, positions = tokens.flatten().tolist(), [at + t for at in starts for t in range(T)]
        if not (0 <= min(ids) and max(ids) < c.vocab_size):
            raise Unsupported(f"ids {ids}")
        if len(starts) != B or not (0 <= min(positions) and max(positions) < N):
            raise Unsupported(f"positions {positions}")
        shape, strides = tuple(kv.shape), kv.stride()
        if shape[:2] + shape[3:] != (L, 2, H, N, D) or shape[2] < B:
            raise Unsupported(f"a cache of shape {shape}")
        if kv.device.type != "cpu" or kv.dtype != self.stored or strides[3:] != (N * D, D, 1):
            raise Unsupported(f"a cache of {kv.dtype} on {kv.device} with strides {strides}")
        rows = c_int64 * (B * T)
        arrays = rows(*ids), rows(*(row for row in range(B) for _ in range(T))), rows(*positions)
        batch = _Batch(B * T, *map(addressof, arrays), kv.data_ptr(), *strides[:3])
        batch.alive = arrays, kv
        return batch

    def _decode(self, batch: _Batch | None, x: Tensor, logits: Tensor | None) -> None:
        """Call native.c, which releases Python's lock. x: hidden states (M, C), read or written."""
        M, threads = len(x), usable_threads(torch.get_num_threads())
        at_once = -(-M // -(-M // ROWS_AT_ONCE))  # in equal parts
        size = self.library.scratch_size(byref(self.model), at_once, threads)
        # The name keeps the memory until the calls below return.
        scratch = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu")
        start = scratch.data_ptr() + -scratch.data_ptr() % ALIGNMENT
        for first in range(0, M, at_once):
            n = min(at_once, M - first)
            self.library.decode(
                byref(self.model), None if batch is None else byref(batch.part(first, n)), n,
                x[first].data_ptr(), None if logits is None else logits[first].data_ptr(), start,
                threads,
            )  # fmt: skip


def _weight(product: Any) -> Tensor:
    """Return the weight `[out, in]` of a product, which stays where it is."""
    if isinstance(product, WithOutliers):
        return _weight(product.product)
    if isinstance(product, Linear):
        return product.weight
    if isinstance(product, Int8):
        return product.qweight
    raise Unsupported(f"a product of type {type(product).__name__}")


def _activation(module: nn.Module) -> int:
    kinds = {QuickGELU: QUICK_GELU, nn.ReLU: RELU, nn.SiLU: SILU, nn.Tanh: TANH, GELU: GELU_TANH}
    if isinstance(module, nn.GELU):
        return GELU_TANH if module.approximate == "tanh" else GELU_ERF
    if type(module) not in kinds:
        raise Unsupported(f"an activation of type {type(module).__name__}")
    return kinds[type(module)]
