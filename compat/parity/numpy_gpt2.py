"""GPT-2 in float64 NumPy, with no operation of torch or transformers in its arithmetic.

The reference runs in the user's process, where functions and modules of torch may have been
replaced. This second implementation does not use them. It reads the weights from the checkpoint
layer by layer, so that its memory does not grow with the depth.

Source of the formulas: `transformers/models/gpt2/modeling_gpt2.py` and `activations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
ROWS = 4096  # rows of the head's weight that are converted to float64 at once
QUERIES = 256  # positions whose attention is computed at once

_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has none


def _gelu_tanh(x: Array) -> Array:
    inner = 0.044715 * x * x  # in place from here on, since this is the largest array
    inner += 1.0
    inner *= x
    inner *= (2.0 / np.pi) ** 0.5
    np.tanh(inner, out=inner)
    inner += 1.0
    inner *= x
    inner *= 0.5
    return inner


def _gelu(x: Array) -> Array:
    erf: Array = _erf(x * 0.5**0.5).astype(np.float64)
    return x * 0.5 * (1.0 + erf)


def _silu(x: Array, slope: float = 1.0) -> Array:
    return x * 0.5 * (1.0 + np.tanh(0.5 * slope * x))  # the sigmoid by tanh cannot overflow


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": _gelu,
    "quick_gelu": lambda x: _silu(x, slope=1.702),
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": _silu,
    "swish": _silu,
    "tanh": np.tanh,
}


def logits(checkpoint: Checkpoint, dtype: torch.dtype, ids: Tensor) -> Array:
    """Return the logits (B, T, V) of ids (B, T).

    Args:
        checkpoint: the weights.
        dtype: the data type to which the weights are rounded before they are used.
        ids: (B, T), T up to `n_positions`.
    """
    config = checkpoint.config
    checkpoint = checkpoint.checked_before()  # when the models were loaded

    def read(name: str) -> Array:
        return _rounded(_values(checkpoint.read(name)), dtype)

    tokens, positions = _values(checkpoint.read(EMBEDDING)), read(POSITIONS)
    x = _rounded(tokens[_values(ids)], dtype) + positions[: ids.shape[1]]
    for layer in range(config.n_layer):
        weights = {name: read(f"h.{layer}.{name}") for name in block_shapes(config)}
        x = _block(x, weights, config, layer)
    x = _layer_norm(x, read("ln_f.weight"), read("ln_f.bias"), config.layer_norm_epsilon)
    head = tokens if config.tie_word_embeddings else _values(checkpoint.read(HEAD))
    found = np.empty((*x.shape[:2], len(head)))
    for rows in _slices(len(head), ROWS):
        found[..., rows] = _product(x, _rounded(head[rows], dtype).T)
    return found


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _block(x: Array, weights: Mapping[str, Array], config: GPT2Config, layer: int) -> Array:
    """Compute one pre-norm block, (B, T, C) to (B, T, C)."""

    def norm(x: Array, name: str) -> Array:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return _layer_norm(x, weight, bias, config.layer_norm_epsilon)

    def linear(x: Array, name: str) -> Array:
        y = _product(x, weights[f"{name}.weight"])
        y += weights[f"{name}.bias"]
        return y

    qkv = linear(norm(x, "ln_1"), "attn.c_attn")
    heads = _attention(qkv, config.n_head, config.attention_scale(layer))
    x = x + linear(heads, "attn.c_proj")
    act = ACTIVATIONS[config.activation_function]
    return x + linear(act(linear(norm(x, "ln_2"), "mlp.c_fc")), "mlp.c_proj")


def _product(x: Array, weight: Array) -> Array:
    """Compute (B, T, C) @ (C, N) as one matrix product, and not one for each row of the batch."""
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)


def _attention(qkv: Array, n_head: int, scale: float) -> Array:
    """Compute causal attention of all heads, (B, T, 3C) to (B, T, C)."""
    q, k, v = np.split(qkv, 3, axis=-1)
    B, T, C = q.shape
    D = C // n_head
    out = np.empty_like(q)
    # One head and some of its queries at a time, with the keys that they attend to.
    for b, head, queries in product(range(B), _slices(C, D), _slices(T, QUERIES)):
        keys, n = slice(0, queries.stop), queries.stop - queries.start
        scores = q[b, queries, head] @ k[b, keys, head].T
        scores *= scale
        scores[:, queries] += np.triu(np.full((n, n), -np.inf), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        sums = weights.sum(axis=-1, keepdims=True)
        out[b, queries, head] = weights @ v[b, keys, head] / sums
    return out


def _layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    y: Array = x - x.mean(axis=-1, keepdims=True)
    y /= ((y * y).mean(axis=-1, keepdims=True) + epsilon) ** 0.5
    y *= weight
    y += bias
    return y


def _values(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's memory as an array, or a float32 copy for bfloat16, which NumPy lacks."""
    tensor = tensor.detach()
    if tensor.dtype != torch.bfloat16:
        values: NDArray[Any] = tensor.numpy()
        return values
    bits = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def _rounded(values: NDArray[Any], dtype: torch.dtype) -> Array:
    """Return values of any float type in float64, rounded to `dtype` before."""
    if dtype == torch.bfloat16:
        bits = values.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)  # to nearest even
        values = bits.view(np.float32)
    elif dtype != torch.float64:
        narrow = np.float16 if dtype == torch.float16 else np.float32
        values = values.astype(narrow, copy=False)
    return values.astype(np.float64)
