"""GPT-2 in float64 NumPy, with no operation of torch or transformers in its arithmetic.

The reference runs in the user's process, where torch functions and modules may have been replaced.
This is a second implementation that such a replacement does not reach. It reads the weights from
the checkpoint, layer by layer, so that its memory does not grow with the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS, block_shapes
from compat.config import GPT2Config

Array = NDArray[np.float64]
ROWS = 4096  # of the embedding, at once in float64
QUERIES = 256  # positions whose attention is computed at once

_ERF = np.frompyfunc(math.erf, 1, 1)  # NumPy has none


def _gelu_tanh(x: Array) -> Array:
    inner = 0.044715 * x * x  # in place from here: this is the largest array
    inner += 1.0
    inner *= x
    inner *= (2.0 / np.pi) ** 0.5
    np.tanh(inner, out=inner)
    inner += 1.0
    inner *= x
    inner *= 0.5
    return inner


def _gelu(x: Array) -> Array:
    erf: Array = _ERF(x * 0.5**0.5).astype(np.float64)
    return x * 0.5 * (1.0 + erf)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # without overflow


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _quick_gelu(x: Array) -> Array:
    return x * _sigmoid(1.702 * x)


def _tanh(x: Array) -> Array:
    return np.tanh(x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": _gelu,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "silu": _silu,
    "swish": _silu,
    "tanh": _tanh,
}


def projected_logits(
    checkpoint: Checkpoint, dtype: torch.dtype, batches: Sequence[Tensor], directions: Array
) -> list[Array]:
    """The logits times `directions`, (B, T, K) for ids (B, T), for each of the batches.

    The product with the head's weight is taken first, which makes the head cheap at any T.

    Args:
        checkpoint: the weights; each is read once, however many batches there are.
        dtype: the data type that the weights are rounded to before they are used.
        batches: ids, (B, T) each, T up to `n_positions`.
        directions: (V, K).
    """
    head, hidden = _head_and_hidden(checkpoint, dtype, batches)
    projection = np.zeros((checkpoint.config.n_embd, directions.shape[1]))
    for start in range(0, len(head), ROWS):  # float64 copies of a few rows at a time
        rows = slice(start, start + ROWS)
        projection += _rounded(head[rows], dtype).T @ directions[rows]
    return [x @ projection for x in hidden]


def logits(checkpoint: Checkpoint, dtype: torch.dtype, ids: Tensor) -> Array:
    """Logits (B, T, V) of ids (B, T), the weights rounded to `dtype` before they are used."""
    head, [hidden] = _head_and_hidden(checkpoint, dtype, [ids])
    found = np.empty((*hidden.shape[:2], len(head)))
    for start in range(0, len(head), ROWS):
        rows = slice(start, start + ROWS)
        found[..., rows] = hidden @ _rounded(head[rows], dtype).T
    return found


def _head_and_hidden(
    checkpoint: Checkpoint, dtype: torch.dtype, batches: Sequence[Tensor]
) -> tuple[Array, list[Array]]:
    """The head's weight (V, C) as stored, and for each batch what it multiplies: (B, T, C)."""
    config = checkpoint.config
    # Values were searched for NaN when the models were loaded; mapped pages need no copy.
    checkpoint = replace(checkpoint, check_finite=False, mmap=checkpoint.can_be_mapped)

    def read(name: str) -> Array:
        return to_float64(checkpoint.read(name), dtype)

    ids = [_values(batch) for batch in batches]
    tokens, positions = _values(checkpoint.read(EMBEDDING)), read(POSITIONS)
    hidden = [_rounded(tokens[i], dtype) + positions[: i.shape[1]] for i in ids]
    for layer in range(config.n_layer):
        weights = {name: read(f"h.{layer}.{name}") for name in block_shapes(config)}
        hidden = [_block(x, weights, config, layer) for x in hidden]
    head = tokens if config.tie_word_embeddings else _values(checkpoint.read(HEAD))
    weight, bias = read("ln_f.weight"), read("ln_f.bias")
    epsilon = config.layer_norm_epsilon
    return head, [_layer_norm(x, weight, bias, epsilon) for x in hidden]


def to_float64(tensor: Tensor, dtype: torch.dtype) -> Array:
    """A tensor's values, rounded to `dtype`, in float64."""
    return _rounded(_values(tensor), dtype)


def _block(x: Array, weights: Mapping[str, Array], config: GPT2Config, layer: int) -> Array:
    """One pre-norm block: (B, T, C) to (B, T, C)."""

    def norm(x: Array, name: str) -> Array:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return _layer_norm(x, weight, bias, config.layer_norm_epsilon)

    def linear(x: Array, name: str) -> Array:
        y: Array = x @ weights[f"{name}.weight"]
        y += weights[f"{name}.bias"]
        return y

    qkv = linear(norm(x, "ln_1"), "attn.c_attn")
    heads = _attention(qkv, config.n_head, config.attention_scale(layer))
    x = x + linear(heads, "attn.c_proj")
    act = ACTIVATIONS[config.activation_function]
    return x + linear(act(linear(norm(x, "ln_2"), "mlp.c_fc")), "mlp.c_proj")


def _attention(qkv: Array, n_head: int, scale: float) -> Array:
    """Causal attention of all heads, (B, T, 3C) to (B, T, C)."""
    q, k, v = np.split(qkv, 3, axis=-1)
    B, T, C = q.shape
    D = C // n_head
    out = np.empty_like(q)
    # A head and some of its queries at a time, with the keys that these may see.
    for b, head, start in product(range(B), range(n_head), range(0, T, QUERIES)):
        columns, end = slice(head * D, (head + 1) * D), min(start + QUERIES, T)
        scores = q[b, start:end, columns] @ k[b, :end, columns].T
        scores *= scale
        scores[:, start:] += np.triu(np.full((end - start, end - start), -np.inf), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        sums = weights.sum(axis=-1, keepdims=True)
        out[b, start:end, columns] = weights @ v[b, :end, columns] / sums
    return out


def _layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    y: Array = x - x.mean(axis=-1, keepdims=True)
    y /= ((y * y).mean(axis=-1, keepdims=True) + epsilon) ** 0.5
    y *= weight
    y += bias
    return y


def _values(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory; float32 for bfloat16, which NumPy does not have."""
    tensor = tensor.detach()
    if tensor.dtype != torch.bfloat16:
        values: NDArray[Any] = tensor.numpy()
        return values
    bits = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def _rounded(values: NDArray[Any], dtype: torch.dtype) -> Array:
    """Values of any float type rounded to `dtype`, in float64."""
    if dtype == torch.bfloat16:
        bits = values.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)  # to nearest even
        values = bits.view(np.float32)
    elif dtype != torch.float64:
        narrow = np.float16 if dtype == torch.float16 else np.float32
        values = values.astype(narrow, copy=False)
    return values.astype(np.float64)
