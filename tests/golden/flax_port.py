"""A GPT-2 in flax, as one would port it by hand, with faults that can be enabled.

It shares no code with compat. `sow` records the taps; parameters keep flax's names and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from numpy.typing import NDArray

# Name of the fault → code that must be reported, and the first tap that the fault changes.
FAULTS = {
    "flax's eps": ("eps_value", "h.0.ln_1"),  # the default of nn.LayerNorm is 1e-6
    "no shift": ("no_ln_bias", "h.0.ln_1"),
    "rms": ("rmsnorm", "h.0.ln_1"),
    "exact gelu": ("erf_gelu", "h.0.act"),
    "silu": ("silu", "h.0.act"),
    "no scale": ("no_attn_scale", "h.0.probs"),
    "no mask": ("no_mask", "h.0.probs"),
    "softmax over queries": ("softmax_dim", "h.0.probs"),
    "heads interleaved": ("interleaved_heads", "h.0.heads"),
    "kernel transposed": ("transposed_weight", "h.0.attn"),
    "no residual": ("missing_residual", "h.0.resid_mid"),
    "positions from 1": ("pos_offset", "embed"),
}


def parameters(weights: Mapping[str, NDArray[np.float32]]) -> dict[str, Any]:
    """Return the checkpoint as flax's tree: h.0.attn.c_attn.weight is h_0/c_attn/kernel."""
    tree: dict[str, Any] = {}
    for name, array in weights.items():
        module, _, kind = name.replace("h.", "h_", 1).rpartition(".")
        module = module.replace("attn.", "").replace("mlp.c_proj", "mlp_proj").replace("mlp.", "")
        if kind == "weight":
            is_embedding = module in ("wte", "wpe")
            kind = "embedding" if is_embedding else "scale" if "ln_" in module else "kernel"
        node = tree
        for part in module.split("."):
            node = node.setdefault(part, {})
        node[kind] = array
    return {"params": tree}


def norm(module: Block | GPT2, x: jax.Array, name: str) -> jax.Array:
    if module.fault == "rms":
        bias = module.variables["params"][name]["bias"]
        return nn.RMSNorm(epsilon=1e-5, name=name)(x) + bias
    eps = 1e-6 if module.fault == "flax's eps" else 1e-5
    return nn.LayerNorm(epsilon=eps, use_bias=module.fault != "no shift", name=name)(x)


def tap(module: Block | GPT2, name: str, x: jax.Array) -> jax.Array:
    # flax does not accept the name of a submodule, such as ln_1, here.
    module.sow("taps", f"tap_{name}", x, reduce_fn=lambda _, new: new)
    return x


class Block(nn.Module):
    heads: int
    fault: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, C = x.shape
        D = C // self.heads
        normed = tap(self, "ln_1", norm(self, x, "ln_1"))
        q, k, v = jnp.split(nn.Dense(3 * C, name="c_attn")(normed), 3, -1)
        q, k, v = tap(self, "q", q), tap(self, "k", k), tap(self, "v", v)
        q, k, v = (t.reshape(B, T, self.heads, D) for t in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if self.fault != "no scale":
            scores = scores / math.sqrt(D)
        if self.fault != "no mask":
            scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
        probs = nn.softmax(scores, axis=-2 if self.fault == "softmax over queries" else -1)
        probs = tap(self, "probs", probs)
        order = "bqdh" if self.fault == "heads interleaved" else "bqhd"
        heads = tap(self, "heads", jnp.einsum(f"bhqk,bkhd->{order}", probs, v).reshape(B, T, C))
        if self.fault == "kernel transposed":
            proj = self.variables["params"]["c_proj"]
            attn = tap(self, "attn", heads @ proj["kernel"].T + proj["bias"])
        else:
            attn = tap(self, "attn", nn.Dense(C, name="c_proj")(heads))
        x = tap(self, "resid_mid", attn if self.fault == "no residual" else x + attn)
        normed = tap(self, "ln_2", norm(self, x, "ln_2"))
        fc = tap(self, "fc", nn.Dense(4 * C, name="c_fc")(normed))
        gelu = nn.silu(fc) if self.fault == "silu" else nn.gelu(fc, self.fault != "exact gelu")
        mlp = nn.Dense(C, name="mlp_proj")(tap(self, "act", gelu))
        return tap(self, "out", x + tap(self, "mlp", mlp))


class GPT2(nn.Module):
    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    fault: str = ""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        wte = nn.Embed(self.vocabulary, self.width, name="wte")
        wpe = nn.Embed(self.context, self.width, name="wpe")
        positions = jnp.arange(ids.shape[1]) + (self.fault == "positions from 1")
        x = tap(self, "embed", wte(ids) + wpe(positions))
        for i in range(self.layers):
            x = Block(self.heads, self.fault, name=f"h_{i}")(x)
        x = tap(self, "ln_f", norm(self, x, "ln_f"))
        return wte.attend(x)


def forward(
    weights: Mapping[str, NDArray[np.float32]],
    ids: NDArray[np.int64],
    layers: int,
    heads: int,
    fault: str = "",
) -> dict[str, jax.Array]:
    """Return all taps of the model for ids (B, T) as JAX arrays."""
    vocabulary, width = weights["wte.weight"].shape
    model = GPT2(vocabulary, len(weights["wpe.weight"]), width, layers, heads, fault)
    logits, state = model.apply(parameters(weights), jnp.asarray(ids), mutable=["taps"])
    found: dict[str, jax.Array] = {"logits": logits}
    for name, value in state["taps"].items():
        if isinstance(value, Mapping):
            layer = name.replace("h_", "h.")
            found |= {f"{layer}.{tap[4:]}": array for tap, array in value.items()}
        else:
            found[name[4:]] = value
    return found
