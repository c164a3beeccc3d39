"""GPT-2 on packed weights and a static cache.

B batch, T time, S seen so far, N positions there are, C channels, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property, partial
from itertools import starmap, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from compat.checkpoint.checks import all_finite
from compat.config import GPT2Config
from compat.decoding.matrices import Matrix, Pack, side_by_side
from compat.decoding.memory import private_memory
from compat.layers import activation

Read = Callable[[str], Tensor]  # Hugging Face's name of a tensor → the tensor, `[in, out]`


class Block(NamedTuple):
    """One layer: norms as (weight, bias), projections packed."""

    ln_1: tuple[Tensor, Tensor]
    c_attn: Matrix
    attn_proj: Matrix
    ln_2: tuple[Tensor, Tensor]
    c_fc: Matrix
    mlp_proj: Matrix


class Embedding(NamedTuple):
    """The rows of ids and of positions, (V, C) and (N, C).

    Keys and values have their data type, and everything is where they are.
    """

    wte: Tensor
    wpe: Tensor

    @classmethod
    def of(cls, read: Read, dtype: torch.dtype) -> Embedding:
        """Read from a checkpoint or model."""
        return cls(read("wte.weight").to(dtype), read("wpe.weight").to(dtype))


class Cache:
    """Keys and values of every layer, (L, 2, B, H, N, D), written in place."""

    def __init__(self, config: GPT2Config, batch: int, like: Tensor) -> None:
        L, N, H = config.n_layer, config.n_positions, config.n_head
        shape = (L, 2, batch, H, N, config.d_head)
        if like.is_cpu:  # zeros that take no memory until they are written to
            self.memory = private_memory(prod(shape) * like.itemsize)
            self.both = torch.frombuffer(self.memory, dtype=like.dtype).view(shape)
        else:
            self.both = like.new_zeros(shape)

    @cached_property
    def apart(self) -> list[Tensor]:
        """Keys and values of each layer, (B, H, N, D), on the same memory, but as tensors of their
        own: the compiler copies what is written to through a view of something larger."""
        dtype, shape = self.both.dtype, self.both.shape[2:]
        count = prod(shape)
        starts = range(0, len(self.memory), count * dtype.itemsize)
        take = partial(torch.frombuffer, self.memory, dtype=dtype, count=count)
        return [take(offset=start).view(shape) for start in starts]

    def keep(self, rows: Tensor, length: int) -> None:
        """Go on with these rows of the batch alone, of which `length` positions are in use."""
        B = len(rows)
        self.both[:, :, :B, :, :length] = self.both[:, :, rows, :, :length]
        self.both = self.both[:, :, :B]


class Transformer:
    """The forward pass.

    Args:
        config: of the checkpoint.
        embedding: may be shared with another one.
        read: gives the other weights, one after another.
        pack: makes a matrix of a weight and a bias.
        dtype: of the activations.
        parts: gives the tensors whose concatenation is the fused query, key and value, where the
            model has them apart; None reads the fused one.
    """

    def __init__(
        self,
        config: GPT2Config,
        embedding: Embedding,
        read: Read,
        pack: Pack,
        dtype: torch.dtype,
        parts: Callable[[str], Sequence[Tensor]] | None = None,
    ) -> None:
        # torch's fast attention hides a NaN in queries and keys; its plain form shows it.
        self.attention: Callable[[], AbstractContextManager[Any]] = nullcontext

        def vector(name: str) -> Tensor:
            return read(name).to(dtype)

        def norm(name: str) -> tuple[Tensor, Tensor]:
            return vector(f"{name}.weight"), vector(f"{name}.bias")

        def matrix(name: str) -> Matrix:
            return pack(vector(f"{name}.weight"), vector(f"{name}.bias"))

        def qkv(name: str) -> Matrix:
            weights, biases = (
                [tensor.to(dtype) for tensor in (parts(part) if parts else [read(part)])]
                for part in (f"{name}.weight", f"{name}.bias")
            )
            if not all(map(all_finite, [*weights, *biases])):
                self.attention = partial(sdpa_kernel, SDPBackend.MATH)
            return side_by_side(list(starmap(pack, zip_longest(weights, biases))))

        self.config, self.dtype, self.embedding = config, dtype, embedding
        self.device = embedding.wte.device
        # The head, for which most memory is needed, while there is nothing else yet.
        shared = config.tie_word_embeddings and embedding.wte.dtype == dtype
        head = embedding.wte if shared else vector("lm_head.weight")
        self.head = pack(head.t(), None)
        del head
        self.blocks = [
            Block(
                norm(f"h.{i}.ln_1"),
                qkv(f"h.{i}.attn.c_attn"),
                matrix(f"h.{i}.attn.c_proj"),
                norm(f"h.{i}.ln_2"),
                matrix(f"h.{i}.mlp.c_fc"),
                matrix(f"h.{i}.mlp.c_proj"),
            )
            for i in range(config.n_layer)
        ]
        self.ln_f = norm("ln_f")
        self.scales = [config.attention_scale(i) for i in range(config.n_layer)]
        self.act = _activation(config.activation_function)
        N = config.n_positions
        # What each position may look at.
        self.seen = torch.ones(N, N, dtype=torch.bool, device=self.device).tril()

    def new_cache(self, batch: int) -> Cache:
        """Room for so many sequences."""
        return Cache(self.config, batch, self.embedding.wte)

    def __call__(self, ids: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        """Read ids (B, T) that follow `start` cached positions: hidden states (B, T, C).

        `start` is a number, or (B,) where sequences of different lengths get one id each.
        """
        T, (wte, wpe) = ids.shape[1], self.embedding
        x, mask = wte[ids].to(self.dtype), None  # (B, T, C)
        if isinstance(start, int):
            end = start + T
            x = x + wpe[start:end]
            if T > 1 and start:
                mask = self.seen[start:end, :end]
            into = cache.both[:, :, :, :, start:end].unbind(0)
        else:
            end = int(start.max()) + 1
            rows = torch.arange(len(ids), device=self.device)
            x = x + wpe[start][:, None]
            mask = self.seen[start, :end][:, None, None]  # (B, 1, 1, S)
            into = cache.both.unbind(0)
        seen = cache.both[:, :, :, :, :end].unbind(0)  # of each layer (2, B, H, S, D)
        with self.attention():
            for i, block in enumerate(self.blocks):
                h = self._norm(x, block.ln_1)
                q, new = self._heads(block.c_attn, h)
                if isinstance(start, int):
                    into[i].copy_(new)
                else:
                    into[i][:, rows, :, start] = new[:, :, :, 0].transpose(0, 1)
                x = x + self._attention(i, block.attn_proj, q, seen[i], mask)
                h = self._norm(x, block.ln_2).view(-1, x.shape[-1])
                x = x + block.mlp_proj(self.act(block.c_fc(h))).view_as(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (…, C) → logits (…, V) in float32."""
        h = self._norm(hidden, self.ln_f)
        return self.head(h.reshape(-1, h.shape[-1])).float().view(*h.shape[:-1], -1)

    def next_logits(self, ids: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        """Read one id of each sequence, (B,): logits (B, V) of the id after it."""
        return self.logits(self(ids[:, None], cache, start)[:, 0])

    @torch.no_grad()
    def first_not_finite(self, context: Sequence[int]) -> tuple[str, str] | None:
        """Where, reading these ids, a value first is NaN or infinite, and which of the two."""
        ids = torch.tensor([context], device=self.device)
        faults = list[tuple[str, str]]()

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

    def _heads(self, c_attn: Matrix, h: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, C) → queries (B, H, T, D), keys and values (2, B, H, T, D)."""
        B, T, C = h.shape
        qkv = c_attn(h.view(B * T, C)).to(self.embedding.wte.dtype)
        heads = qkv.view(B, T, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)
        return heads[0], heads[1:]

    def _attention(
        self, i: int, proj: Matrix, q: Tensor, seen: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Queries (B, H, T, D) → (B, T, C)."""
        B, _, T, _ = q.shape
        keys, values = seen.unbind(0)  # (B, H, S, D)
        heads = F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=T > 1 and mask is None,
            scale=self.scales[i],
        )
        rows = heads.transpose(1, 2).reshape(B * T, -1).to(self.dtype)
        return proj(rows).view(B, T, -1)

    def _norm(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *norm, self.config.layer_norm_epsilon)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """The tanh form by torch's one kernel, where the blocks write it out."""
    return activation("gelu_pytorch_tanh" if name == "gelu_new" else name)
