"""GPT-2 on packed weights and a static cache.

B batch, T time, S seen so far, N positions there are, C channels, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from compat.checkpoint.checks import not_finite
from compat.config import GPT2Config
from compat.decoding.matrices import Matrix, Pack
from compat.layers import activation

Read = Callable[[str], Tensor]  # Hugging Face's name of a tensor → the tensor, `[in, out]`
Place = tuple[slice | Tensor, slice, slice | Tensor]  # batch, heads, positions


class Block(NamedTuple):
    """One layer: norms as (weight, bias), projections packed."""

    ln_1: tuple[Tensor, Tensor]
    c_attn: Matrix
    attn_proj: Matrix
    ln_2: tuple[Tensor, Tensor]
    c_fc: Matrix
    mlp_proj: Matrix


class Embedding(NamedTuple):
    """The rows of ids and of positions, (V, C) and (N, C); keys and values have their data type."""

    wte: Tensor
    wpe: Tensor

    @classmethod
    def of(cls, read: Read, dtype: torch.dtype) -> Embedding:
        """Read from a checkpoint or model."""
        return cls(read("wte.weight").to(dtype), read("wpe.weight").to(dtype))


class Cache:
    """Keys and values of every layer, (L, B, H, N, D), written in place."""

    def __init__(self, config: GPT2Config, batch: int, dtype: torch.dtype) -> None:
        shape = (config.n_layer, batch, config.n_head, config.n_positions, config.d_head)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def keep(self, rows: Tensor, length: int) -> None:
        """Go on with these rows of the batch alone, of which `length` positions are in use."""
        B = len(rows)
        for tensor in (self.keys, self.values):
            tensor[:, :B, :, :length] = tensor[:, rows, :, :length]
        self.keys, self.values = self.keys[:, :B], self.values[:, :B]


class Transformer:
    """The forward pass.

    Args:
        config: of the checkpoint.
        embedding: may be shared with another one.
        read: gives the other weights, one after another.
        pack: makes a matrix of a weight and a bias.
        dtype: of the activations.
    """

    def __init__(
        self,
        config: GPT2Config,
        embedding: Embedding,
        read: Read,
        pack: Pack,
        dtype: torch.dtype,
    ) -> None:
        # torch's fast attention hides a NaN in queries and keys; its plain form shows it.
        self.attention: Callable[[], AbstractContextManager[Any]] = nullcontext

        def vector(name: str) -> Tensor:
            return read(name).to(dtype)

        def norm(name: str) -> tuple[Tensor, Tensor]:
            return vector(f"{name}.weight"), vector(f"{name}.bias")

        def matrix(name: str) -> Matrix:
            return pack(vector(f"{name}.weight"), vector(f"{name}.bias"))

        def projection(name: str) -> Matrix:
            weight, bias = vector(f"{name}.weight"), vector(f"{name}.bias")
            if not_finite(weight) or not_finite(bias):
                self.attention = partial(sdpa_kernel, SDPBackend.MATH)
            return pack(weight, bias)

        self.config, self.dtype, self.embedding = config, dtype, embedding
        self.blocks = [
            Block(
                norm(f"h.{i}.ln_1"),
                projection(f"h.{i}.attn.c_attn"),
                matrix(f"h.{i}.attn.c_proj"),
                norm(f"h.{i}.ln_2"),
                matrix(f"h.{i}.mlp.c_fc"),
                matrix(f"h.{i}.mlp.c_proj"),
            )
            for i in range(config.n_layer)
        ]
        shared = config.tie_word_embeddings and embedding.wte.dtype == dtype
        head = embedding.wte if shared else vector("lm_head.weight")
        self.ln_f, self.head = norm("ln_f"), pack(head.t(), None)
        self.act = _activation(config.activation_function)
        N = config.n_positions
        self.seen = torch.ones(N, N, dtype=torch.bool).tril()  # what each position may look at

    def new_cache(self, batch: int) -> Cache:
        """Room for so many sequences."""
        return Cache(self.config, batch, self.embedding.wte.dtype)

    def __call__(self, ids: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        """Read ids (B, T) that follow `start` cached positions: hidden states (B, T, C).

        `start` is a number, or (B,) where sequences of different lengths get one id each.
        """
        B, T = ids.shape
        wte, wpe = self.embedding
        place: Place  # in the cache, to be written
        mask = None
        if isinstance(start, int):
            place, end = (slice(None), slice(None), slice(start, start + T)), start + T
            x = wte[ids].to(self.dtype) + wpe[start:end]  # (B, T, C)
            if T > 1 and start:
                mask = self.seen[start:end, :end]
        else:
            place = (torch.arange(B)[:, None], slice(None), start[:, None])
            end = int(start.max()) + 1
            x = wte[ids].to(self.dtype) + wpe[start][:, None]
            mask = self.seen[start, :end][:, None, None]  # (B, 1, 1, S)
        with self.attention():
            for i, block in enumerate(self.blocks):
                x = x + self._attention(i, block, x, cache, place, end, mask)
                h = self._norm(x, block.ln_2).view(B * T, -1)
                x = x + block.mlp_proj(self.act(block.c_fc(h))).view_as(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (…, C) → logits (…, V) in float32."""
        h = self._norm(hidden, self.ln_f)
        return self.head(h.reshape(-1, h.shape[-1])).float().view(*h.shape[:-1], -1)

    @torch.no_grad()
    def first_not_finite(self, context: Sequence[int]) -> tuple[str, str] | None:
        """Where, reading these ids, a value first is NaN or infinite, and which of the two."""
        ids, faults = torch.tensor([context]), list[tuple[str, str]]()

        def look(name: str, value: Tensor) -> Tensor:
            if not torch.isfinite(value).all():
                faults.append((name, "NaN" if value.isnan().any() else "an infinity"))
            return value

        def watched(name: str, matrix: Matrix) -> Matrix:
            return lambda x: look(name, matrix(x))

        look("embed", self.embedding.wte[ids] + self.embedding.wpe[: len(context)])
        shadow = copy(self)
        shadow.blocks = [
            block._replace(
                c_attn=watched(f"h.{i}.c_attn", block.c_attn),
                attn_proj=watched(f"h.{i}.attn", block.attn_proj),
                c_fc=watched(f"h.{i}.fc", block.c_fc),
                mlp_proj=watched(f"h.{i}.mlp", block.mlp_proj),
            )
            for i, block in enumerate(self.blocks)
        ]
        look("logits", self.logits(shadow(ids, self.new_cache(1), 0)))
        return faults[0] if faults else None

    def _attention(
        self,
        i: int,
        block: Block,
        x: Tensor,
        cache: Cache,
        place: Place,
        end: int,
        mask: Tensor | None,
    ) -> Tensor:
        B, T, C = x.shape
        kept = self.embedding.wte.dtype
        qkv = block.c_attn(self._norm(x, block.ln_1).view(B * T, C)).to(kept)
        q, k, v = qkv.view(B, T, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        keys, values = cache.keys[i], cache.values[i]  # (B, H, N, D)
        if isinstance(place[0], Tensor):  # an index beside slices puts their axis last
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        keys[place], values[place] = k, v
        heads = F.scaled_dot_product_attention(
            q,
            keys[:, :, :end],  # (B, H, S, D)
            values[:, :, :end],
            attn_mask=mask,
            is_causal=T > 1 and mask is None,
            scale=self.config.attention_scale(i),
        )
        rows = heads.transpose(1, 2).reshape(B * T, C).to(self.dtype)
        return block.attn_proj(rows).view(B, T, C)

    def _norm(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *norm, self.config.layer_norm_epsilon)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """The tanh form by torch's one kernel, where the blocks write it out."""
    return activation("gelu_pytorch_tanh" if name == "gelu_new" else name)
