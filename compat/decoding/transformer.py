"""The engine's forward pass: GPT-2 on packed weights with a preallocated KV cache.

Axes: B batch, T tokens of a pass, S positions up to the last of them, N positions of the model,
C channels, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from compat.checkpoint.checks import all_finite
from compat.checkpoint.files import private_memory
from compat.checkpoint.packed import Quantized
from compat.config import GPT2Config
from compat.decoding.matrices import Pack, packed
from compat.decoding.not_finite import first_not_finite, not_finite_message
from compat.layers import activation
from compat.tap import Tap, expand_taps
from compat.threads import two_threads

# Returns the tensors `[in, out]` for a Hugging Face name: one, three if the model has separate
# tensors for q, k and v, or none for a bias that the model lacks. A matrix may be quantized.
Read = Callable[[str], list[Any]]

TAPS = (
    Tap("embed", "h.0", at="input"),
    Tap("h.{i}.ln_1", "h.{i}.ln_1"),
    Tap("h.{i}.q", "h.{i}.c_attn", part=0),
    Tap("h.{i}.k", "h.{i}.c_attn", part=1),
    Tap("h.{i}.v", "h.{i}.c_attn", part=2),
    Tap("h.{i}.heads", "h.{i}.attn_proj", at="input"),
    Tap("h.{i}.attn", "h.{i}.attn_proj"),
    Tap("h.{i}.resid_mid", "h.{i}.ln_2", at="input"),
    Tap("h.{i}.ln_2", "h.{i}.ln_2"),
    Tap("h.{i}.fc", "h.{i}.c_fc"),
    Tap("h.{i}.act", "h.{i}.act"),
    Tap("h.{i}.mlp", "h.{i}.mlp_proj"),
    Tap("h.{i}.out", "h.{i}"),
    Tap("ln_f", "ln_f"),
    Tap("logits", "lm_head"),
)


class Cache:
    """The keys and values of every layer, preallocated for all positions and written in place.

    Attributes:
        kv: the keys and values (L, 2, B, H, N, D).
    """

    def __init__(self, config: GPT2Config, batch: int, like: Tensor) -> None:
        L, N, H = config.n_layer, config.n_positions, config.n_head
        shape = (L, 2, batch, H, N, config.d_head)
        if like.is_cpu:  # zeros that take no memory until they are written to
            self.memory = private_memory(prod(shape) * like.itemsize)
            self.kv = torch.frombuffer(self.memory, dtype=like.dtype).view(shape)
        else:
            self.kv = like.new_zeros(shape)

    def keep(self, rows: Tensor, length: int) -> None:
        """Keep only these rows of the batch, with their first `length` positions."""
        B = len(rows)
        self.kv[:, :, :B, :, :length] = self.kv[:, :, rows, :, :length]
        self.kv = self.kv[:, :, :B]


class Norm(nn.Module):
    """Layer normalization: (…, C) → (…, C)."""

    def __init__(self, eps: float, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = eps, weight, bias

    @classmethod
    def of(cls, config: GPT2Config, read: Read, name: str) -> Norm:
        """Return the norm of this name, whose parameters `read` returns."""
        return cls(config.layer_norm_epsilon, *read(f"{name}.weight"), *read(f"{name}.bias"))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Block(nn.Module):
    """One pre-norm layer: hidden states (B·T, C) → (B·T, C)."""

    def __init__(
        self,
        config: GPT2Config,
        layer_idx: int,
        norm: Callable[[str], nn.Module],
        matrix: Callable[[str], nn.Module],
    ) -> None:
        super().__init__()
        name = f"h.{layer_idx}"
        self.n_head, self.scale = config.n_head, config.attention_scale(layer_idx)
        self.ln_1, self.ln_2 = norm(f"{name}.ln_1"), norm(f"{name}.ln_2")
        self.c_attn = matrix(f"{name}.attn.c_attn")
        self.attn_proj = matrix(f"{name}.attn.c_proj")
        self.c_fc = matrix(f"{name}.mlp.c_fc")
        act = config.activation_function
        # The tanh GELU as torch's fused kernel, which is faster.
        self.act = activation("gelu_pytorch_tanh" if act == "gelu_new" else act)
        self.mlp_proj = matrix(f"{name}.mlp.c_proj")

    def forward(
        self, x: Tensor, into: Tensor, index: Any, seen: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Add the outputs of attention and MLP to x in place.

        Args:
            x: the residual stream (B·T, C).
            into: the part of the cache to which the new keys and values (2, B, H, T, D) are
                written, at `index`.
            index: the indices of the new positions in `into`, or `...`.
            seen: the keys and values (2, B, H, S, D) to which the tokens may attend, including the
                new ones.
            mask: (T, S) or (B, 1, 1, S), True where a token may attend, or numbers that are added
                to the scores. If it is None, either T is 1, or all positions are new and attention
                is causal.
        """
        M, B = len(x), into.shape[1]
        qkv = self.c_attn(self.ln_1(x)).to(into.dtype)  # (B·T, 3C)
        qkv = qkv.view(B, M // B, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        into[index] = qkv[1:]
        keys, values = seen.unbind(0)  # (B, H, S, D)
        context = F.scaled_dot_product_attention(
            qkv[0], keys, values, attn_mask=mask, is_causal=M > B and mask is None, scale=self.scale
        )  # (B, H, T, D)
        x = x + self.attn_proj(context.transpose(1, 2).reshape(M, -1).to(x.dtype))
        out: Tensor = x + self.mlp_proj(self.act(self.c_fc(self.ln_2(x))))
        return out


class Transformer(nn.Module):
    """GPT-2 on packed weights.

    Args:
        config: the config of the checkpoint.
        embedding: the token embedding (V, C) and position embedding (N, C), which several models
            may share. The cache has their data type, and all tensors are on their device.
        read: returns the other weights by name; none for a head that is the embedding.
        pack: packs a weight and a bias into a matrix product.
        dtype: the data type of the activations.
        in_order: read one weight at a time in the order of the layers, as the ranks of a divided
            model must. Otherwise, two threads read and pack weights.
    """

    prefill_chunk = 256  # positions of a prompt that are read at once

    def __init__(
        self,
        config: GPT2Config,
        embedding: tuple[Tensor, Tensor],
        read: Read,
        pack: Pack,
        dtype: torch.dtype,
        in_order: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.wte, self.wpe = embedding
        self.device = self.wte.device
        # torch's fused attention hides NaN in queries and keys; the unfused one propagates it.
        self.attention: Callable[[], AbstractContextManager[Any]] = nullcontext

        def cast(name: str) -> list[Any]:
            return [tensor.to(dtype) for tensor in read(name)]

        def matrix(name: str) -> nn.Module:
            weights, biases = cast(f"{name}.weight"), cast(f"{name}.bias")
            floats = [tensor for tensor in (*weights, *biases) if isinstance(tensor, Tensor)]
            if name.endswith("c_attn") and not all(map(all_finite, floats)):
                self.attention = partial(sdpa_kernel, SDPBackend.MATH)
            return packed(pack, weights, biases)

        def packed_head() -> nn.Module:
            [head] = cast("lm_head.weight") or [self.wte.to(dtype)]
            return packed(pack, [head if isinstance(head, Quantized) else head.t()], [])

        @torch.no_grad()  # which holds in one thread only
        def made(part: Callable[[], nn.Module]) -> nn.Module:
            return part()

        norm = partial(Norm.of, config, cast)
        # The head is packed first, because it needs the most memory while it is packed.
        parts: list[Callable[[], nn.Module]] = [packed_head]
        parts += [partial(Block, config, i, norm, matrix) for i in range(config.n_layer)]
        if in_order:
            self.lm_head, *blocks = map(made, parts)
        else:  # first-touch page faults take most of the time; two threads halve it
            with two_threads() as pool:
                self.lm_head, *blocks = pool.map(made, parts)
        self.h = nn.ModuleList(blocks)
        self.ln_f = norm("ln_f")
        N = config.n_positions
        self.causal = torch.ones(N, N, dtype=torch.bool, device=self.device).tril()
        self.eval()

    def new_cache(self, batch: int) -> Cache:
        """Return an empty cache for `batch` sequences."""
        return Cache(self.config, batch, self.wte)

    def forward(self, tokens: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
        """Return hidden states (B, T, C), and write the keys and values of the tokens to the cache.

        Args:
            tokens: the token ids (B, T).
            kv: the cache of the positions before `start`, see `Cache.kv`.
            start: the position of the first token; positions (B,) with T = 1 for sequences of
                different lengths, all of them below the positions of `kv`.
        """
        B, T = tokens.shape
        into: Any = kv
        mask = None
        if isinstance(start, int):
            positions: Any = slice(start, start + T)
            S = start + T
            index: Any = (..., positions, slice(None))
            if T > 1 and start:
                mask = self.causal[positions, :S]
            into, index = kv[index].unbind(0), ...  # one slice instead of one for each layer
        else:
            S, positions = kv.shape[-2], start[:, None]
            rows = torch.arange(B, device=self.device)[:, None, None]
            heads = torch.arange(self.config.n_head, device=self.device)[:, None]
            index = (slice(None), rows, heads, positions[:, None])
            mask = self.causal[start, :S][:, None, None]  # (B, 1, 1, S)
        seen = kv[..., :S, :].unbind(0)
        x = self._embed(tokens, positions)
        with self.attention():
            for i, block in enumerate(self.h):
                x = block(x, into[i], index, seen[i], mask)
        return x.view(B, T, -1)

    def read(self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, C) of whole sequences without keeping their keys and values.

        Args:
            tokens, positions: the token ids and their positions (B, T).
            mask: True where a token may attend, (B, 1, T, T); causal by default.
        """
        (B, T), c = tokens.shape, self.config
        kv = self.wte.new_empty(2, B, c.n_head, T, c.d_head)  # of one layer after the other
        x = self._embed(tokens, positions)
        with self.attention():
            for block in self.h:
                x = block(x, kv, ..., kv, mask)
        return x.view(B, T, -1)

    def _embed(self, tokens: Tensor, positions: Any) -> Tensor:
        """(B, T) → (B·T, C)."""
        return (self.wte[tokens].to(self.dtype) + self.wpe[positions]).flatten(0, 1)

    def prefill(self, rows: Sequence[Sequence[int]], cache: Cache) -> Tensor:
        """Return hidden states (B, T, C) of equally long prompts, read in chunks to save memory."""
        size = self.prefill_chunk
        chunks = torch.split(torch.tensor(rows, device=self.device), size, dim=1)
        return torch.cat([self(ids, cache.kv, n * size) for n, ids in enumerate(chunks)], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits (…, V) from hidden states (…, C)."""
        x = self.ln_f(hidden).reshape(-1, hidden.shape[-1])
        logits: Tensor = self.lm_head(x).float()
        return logits.view(*hidden.shape[:-1], -1)

    def next_logits(self, tokens: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        """Decode step: return float32 logits (B, V) of the token after each of `tokens` (B,)."""
        kv = cache.kv if isinstance(start, int) else cache.kv[..., : int(start.max()) + 1, :]
        return self.logits(self(tokens[:, None], kv, start)[:, 0])

    def why_not_finite(self, context: Sequence[int]) -> str:
        """Return the error message for non-finite logits after a context."""

        def run() -> Tensor:  # by the modules, in one pass, whatever a subclass does
            ids, cache = torch.tensor([context], device=self.device), self.new_cache(1)
            hidden = Transformer.forward(self, ids, cache.kv, 0)
            return Transformer.logits(self, hidden)

        found = first_not_finite(self, expand_taps(TAPS, self.config.n_layer), run)
        return not_finite_message(found, self.dtype, len(context))
