"""A GPT-2 in plain NumPy, as one would port it by hand, with faults that can be enabled.

It shares no code with compat. Weights are the checkpoint's arrays, by Hugging Face's names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

# Name of the fault → code that must be reported, and the first tap that the fault changes.
FAULTS = {
    "erf": ("erf_gelu", "h.0.act"),
    "quick": ("other_activation", "h.0.act"),
    "relu": ("relu", "h.0.act"),
    "silu": ("silu", "h.0.act"),
    "eps": ("eps_value", "h.0.ln_1"),
    "odd eps": ("eps_value", "h.0.ln_1"),
    "unbiased": ("unbiased_var", "h.0.ln_1"),
    "eps outside": ("eps_outside_sqrt", "h.0.ln_1"),
    "rms": ("rmsnorm", "h.0.ln_1"),
    "no shift": ("no_ln_bias", "h.0.ln_1"),
    "no ln_2": ("missing_ln", "h.0.ln_2"),
    "swapped norms": ("swapped_ln", "h.0.ln_1"),
    "no ln_f": ("no_final_ln", "ln_f"),
    "no scale": ("no_attn_scale", "h.0.probs"),
    "scale by width": ("scale_by_d_model", "h.0.probs"),
    "smaller scale": ("wrong_scale", "h.0.probs"),
    "no mask": ("no_mask", "h.0.probs"),
    "mask sees one more": ("mask_off", "h.0.probs"),
    "mask with zeros": ("mask_value", "h.0.probs"),
    "window": ("sliding_window", "h.0.probs"),
    "mask after softmax": ("mask_after_softmax", "h.0.probs"),
    "softmax over queries": ("softmax_dim", "h.0.probs"),
    "not merged": ("no_head_merge_transpose", "h.0.heads"),
    "not split": ("no_head_split_transpose", "h.0.probs"),
    "keys and values": ("kv_swapped", "h.0.k"),
    "queries and keys": ("qk_swapped", "h.0.q"),
    "by head": ("head_interleaved_qkv", "h.0.q"),
    "no qkv bias": ("no_qkv_bias", "h.0.q"),
    "c_proj transposed": ("transposed_weight", "h.0.attn"),
    "no c_proj bias": ("no_proj_bias", "h.0.attn"),
    "no c_fc bias": ("no_mlp_bias", "h.0.fc"),
    "no residual": ("missing_residual", "h.0.resid_mid"),
    "no mlp residual": ("missing_residual", "h.0.out"),
    "residual from norm": ("residual_from_norm", "h.0.resid_mid"),
    "in place": ("doubled_residual", "h.0.resid_mid"),
    "parallel": ("parallel_block", "h.0.ln_2"),
    "post-norm": ("post_ln", "h.0.resid_mid"),
    "offset": ("pos_offset", "embed"),
    "no positions": ("no_pos", "embed"),
    "positions across rows": ("positions_across_rows", "embed"),
    "scaled tokens": ("scaled_embedding", "embed"),
    "sinusoids": ("sinusoidal_pos", "embed"),
    "shifted ids": ("time_shift", "embed"),
    "rotary": ("rope", "h.0.q"),
    "qk norm": ("qk_norm", "h.0.q"),
    "softmax of logits": ("softmax_output", "logits"),
    "temperature": ("scaled_logits", "logits"),
    "soft cap": ("changed_logits", "logits"),
    "tf32": ("low_precision", "h.0.q"),
    "ln_f as out": ("wrong_tap", "h.2.out"),
    "scaled query": ("scaled_tap", "h.0.q"),
    "typing error": ("gelu_constants", "h.0.act"),
    "1 + weight": ("norm_parameters", "h.0.ln_1"),
    "last weights": ("other_block", "h.0.ln_1"),
    "ln_f twice": ("extra_ln", "ln_f"),
    "padding": ("padding_mask", "h.0.probs"),
    "alibi": ("position_bias", "h.0.probs"),
    "softmax plus one": ("other_softmax", "h.0.probs"),
    "scale by layer": ("inverse_layer_scale", "h.1.probs"),
    "interleaved": ("interleaved_heads", "h.0.heads"),
    "shared keys": ("grouped_query_attention", "h.0.probs"),
    "heads reversed": ("head_order", "h.0.heads"),
    "half a branch": ("residual_weights", "h.0.out"),
    "biased head": ("other_bias", "logits"),
    "dropout": ("dropout_always_on", "h.0.mlp"),
    "scaled stream": ("extra_factor", "h.0.resid_mid"),
    "int8": ("quantized_weights", "h.0.fc"),
    "position 0": ("position_ids", "embed"),
    "ids from 1": ("other_ids", "embed"),
    "head reshaped": ("transposed_head", "logits"),
    "late logits": ("time_shift", "logits"),
    "centred embedding": ("processed_weights", "embed"),
    "head 1 ablated": ("zeroed", "h.0.heads"),
    "columns read by head": ("head_interleaved_qkv", "h.0.probs"),
}


def erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float32])(x)


def activation(x: Array, fault: str) -> Array:
    if fault == "erf":
        return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(np.float32)
    if fault in ("quick", "silu"):
        return x / (1 + np.exp(-x * np.float32(1.702 if fault == "quick" else 1)))
    if fault == "relu":
        return np.maximum(x, 0)
    cubic = np.float32(0.04471 if fault == "typing error" else 0.044715)
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + cubic * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def layer_norm(x: Array, weight: Array, bias: Array, fault: str) -> Array:
    centred = x if fault == "rms" else x - x.mean(-1, keepdims=True)
    C = x.shape[-1]
    var = (centred * centred).sum(-1, keepdims=True) / (C - 1 if fault == "unbiased" else C)
    eps = np.float32({"eps": 1e-6, "odd eps": 3e-4}.get(fault, 1e-5))
    root = np.sqrt(var) + eps if fault == "eps outside" else np.sqrt(var + eps)
    y = centred / root * (1 + weight if fault == "1 + weight" else weight)
    return y if fault == "no shift" else y + bias


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rotate(x: Array) -> Array:
    """Apply rotary positions to heads (B, H, T, D)."""
    T, D = x.shape[2:]
    rates = 10000.0 ** (-np.arange(0, D, 2) / D)
    angles = np.arange(T)[:, None] * rates
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def tf32(x: Array) -> Array:
    """Round the mantissa to 10 bits, as a tensor core reads it."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def embed(w: Mapping[str, Array], ids: NDArray[np.int64], fault: str) -> Array:
    B, T = ids.shape
    tokens, C = w["wte.weight"][ids], w["wte.weight"].shape[1]
    if fault == "ids from 1":
        tokens = w["wte.weight"][ids - 1]
    positions = w["wpe.weight"][np.arange(T) + (fault == "offset")]
    if fault == "position 0":
        positions = w["wpe.weight"][:1]
    if fault == "no positions":
        return tokens
    if fault == "scaled tokens":
        tokens = tokens * np.float32(math.sqrt(C))
    if fault == "shifted ids":
        tokens = np.roll(tokens, 1, axis=1)
    if fault == "positions across rows":
        positions = w["wpe.weight"][np.arange(B * T).reshape(B, T)]
    if fault == "sinusoids":
        angles = np.arange(T)[:, None] / 10000 ** (np.arange(0, C, 2) / C)
        positions = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(T, C)
    x = tokens + positions
    if fault == "centred embedding":
        x = x - x.mean(-1, keepdims=True)
    return x.astype(np.float32)


def forward(
    w: Mapping[str, Array], ids: NDArray[np.int64], n_layer: int, n_head: int, fault: str = ""
) -> dict[str, Array]:
    """Return all taps of the model for ids (B, T)."""
    (B, T), C = ids.shape, w["wte.weight"].shape[1]
    D = C // n_head
    taps = {"embed": embed(w, ids, fault)}
    x = taps["embed"]

    def linear(x: Array, name: str) -> Array:
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        if fault == "c_proj transposed" and name.endswith("attn.c_proj"):
            weight = weight.T
        if (fault, name.partition("attn.")[2] or name[4:]) in {
            ("no qkv bias", "c_attn"), ("no c_proj bias", "c_proj"), ("no c_fc bias", "mlp.c_fc")
        }:  # fmt: skip
            bias = np.zeros_like(bias)
        if fault == "int8" and name.endswith("c_fc"):
            step = np.abs(weight).max() / 127
            weight = np.round(weight / step) * step
        if fault == "tf32":
            return tf32(x) @ tf32(weight) + bias
        return x @ weight + bias

    def norm(x: Array, name: str) -> Array:
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], fault)

    for i in range(n_layer):
        block = n_layer - 1 if fault == "last weights" else i
        h = f"h.{block}"
        tap = dict[str, Array]()
        first, second = ("ln_2", "ln_1") if fault == "swapped norms" else ("ln_1", "ln_2")
        tap["ln_1"] = norm(x, f"{h}.{first}")
        qkv = linear(tap["ln_1"], f"{h}.attn.c_attn")
        if fault == "by head":
            by_head = qkv.reshape(B, T, n_head, 3, D)
            q, k, v = (by_head[..., n, :].reshape(B, T, C) for n in range(3))
        else:
            q, k, v = np.split(qkv, 3, -1)
        if fault == "keys and values":
            k, v = v, k
        if fault == "queries and keys":
            q, k = k, q
        if fault == "scaled query":
            q = q / np.float32(math.sqrt(D))

        def split(t: Array) -> Array:
            if fault == "not split":
                return t.reshape(B, n_head, T, D)
            return t.reshape(B, T, n_head, D).transpose(0, 2, 1, 3)

        def merge(t: Array) -> Array:
            if fault == "not merged":
                return t.reshape(B, T, C)
            return t.transpose(0, 2, 1, 3).reshape(B, T, C)

        if fault == "rotary":
            q, k = merge(rotate(split(q))), merge(rotate(split(k)))
        if fault == "qk norm":
            q, k = (
                merge(t / np.linalg.norm(t, axis=-1, keepdims=True)) for t in map(split, (q, k))
            )
        tap["q"], tap["k"], tap["v"] = q, k, v
        if fault == "columns read by head":
            by_head = qkv.reshape(B, T, n_head, 3, D)
            q, k, v = (by_head[..., n, :].reshape(B, T, C) for n in range(3))
        scale = {"no scale": 1, "scale by width": 1 / math.sqrt(C), "scaled query": 1,
                 "smaller scale": 0.7 / math.sqrt(D)}.get(fault, 1 / math.sqrt(D))  # fmt: skip
        if fault == "scale by layer":
            scale /= i + 1
        keys = split(k)
        if fault == "shared keys":
            keys = keys[:, np.arange(n_head) // 2 * 2]
        scores = split(q) @ keys.transpose(0, 1, 3, 2) * np.float32(scale)
        if fault == "alibi":
            slopes = 2.0 ** (-8 * np.arange(1, n_head + 1) / n_head)
            distance = np.arange(T)[:, None] - np.arange(T)
            scores = scores - (slopes[:, None, None] * distance).astype(np.float32)
        hidden = np.triu(np.ones((T, T), bool), 2 if fault == "mask sees one more" else 1)
        if fault == "window":
            hidden |= np.tril(np.ones((T, T), bool), -4)
        if fault == "padding":
            hidden = np.stack([hidden, hidden | (np.arange(T) > T - 3)])[:, None]
        value = 0 if fault == "mask with zeros" else -np.inf
        if fault not in ("no mask", "mask after softmax"):
            scores = np.where(hidden, np.float32(value), scores)
        probs = softmax(scores, -2 if fault == "softmax over queries" else -1)
        if fault == "mask after softmax":
            probs = np.where(hidden, np.float32(0), probs)
        if fault == "softmax plus one":
            probs = np.exp(scores) / (1 + np.exp(scores).sum(-1, keepdims=True))
        tap["probs"] = probs
        tap["heads"] = merge(probs @ split(v))
        if fault == "heads reversed":
            tap["heads"] = merge((probs @ split(v))[:, ::-1])
        if fault == "interleaved":
            tap["heads"] = (probs @ split(v)).transpose(0, 2, 3, 1).reshape(B, T, C)
        if fault == "head 1 ablated":
            tap["heads"][..., D : 2 * D] = 0
        tap["attn"] = linear(tap["heads"], f"{h}.attn.c_proj")
        shortcut = tap["ln_1"] if fault == "residual from norm" else x
        mid = tap["attn"] if fault == "no residual" else shortcut + tap["attn"]
        if fault == "in place":
            mid = 2 * mid
        if fault == "post-norm":
            mid = norm(mid, f"{h}.ln_1")
        if fault == "scaled stream":
            mid = mid * np.float32(0.5)
        tap["resid_mid"] = mid
        if fault == "no ln_2":
            tap["ln_2"] = mid
        else:
            tap["ln_2"] = norm(x if fault == "parallel" else mid, f"{h}.{second}")
        tap["fc"] = linear(tap["ln_2"], f"{h}.mlp.c_fc")
        tap["act"] = activation(tap["fc"], fault)
        tap["mlp"] = linear(tap["act"], f"{h}.mlp.c_proj")
        if fault == "dropout":
            kept = np.random.default_rng(i).random((B, T, C)) > 0.2
            tap["mlp"] = tap["mlp"] * kept / np.float32(0.8)
        x = tap["mlp"] if fault == "no mlp residual" else mid + tap["mlp"]
        if fault == "half a branch":
            x = mid + np.float32(0.5) * tap["mlp"]
        tap["out"] = x
        taps |= {f"h.{i}.{name}": value for name, value in tap.items()}
    taps["ln_f"] = x if fault == "no ln_f" else norm(x, "ln_f")
    if fault == "ln_f twice":
        taps["ln_f"] = norm(taps["ln_f"], "ln_f")
    if fault == "ln_f as out":
        taps[f"h.{n_layer - 1}.out"] = taps["ln_f"]
    table = w["wte.weight"]
    logits = taps["ln_f"] @ (table.reshape(C, -1) if fault == "head reshaped" else table.T)
    if fault == "biased head":
        logits = logits + table[:, 0]
    if fault == "late logits":
        logits[:, 1:] = logits[:, :-1].copy()
    if fault == "softmax of logits":
        logits = softmax(logits)
    if fault == "temperature":
        logits = logits / np.float32(0.7)
    if fault == "soft cap":
        logits = np.float32(30) * np.tanh(logits / np.float32(30))
    taps["logits"] = logits
    return taps
