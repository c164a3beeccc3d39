"""The original's blocks: OpenAI's names, fused qkv, Conv1D with weights stored as `[in, out]`.

Operations and their order are those of `transformers`' eager GPT-2 (`modeling_gpt2.py`), so the
results agree to the bit. B batch, T time, S time with the cached past, C channels, H heads,
D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.config import GPT2Config, as_config
from compat.layers import KVCache, activation, check_ids, initialized, position_ids
from compat.name_map import NameMap, Row
from compat.ops import Same
from compat.taps import Tap


class LayerNorm(nn.Module):
    """Layer normalisation by torch's kernel: (…, C) → (…, C); `bias=False` drops the shift."""

    def __init__(self, n_embd: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Conv1D(nn.Module):
    """A linear layer whose weight is stored as `[nx, nf]`: (…, nx) → (…, nf).

    Args:
        nf: number of output features.
        nx: number of input features.
        bias: False leaves the bias out.
    """

    def __init__(self, nf: int, nx: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf)) if bias else None
        initialized(self)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        if self.bias is None:
            out = rows @ self.weight
        else:
            out = torch.addmm(self.bias, rows, self.weight)
        return out.view(*x.shape[:-1], -1)


class FeedForward(nn.Module):
    """Widen, bend, narrow: (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPT2Config | Mapping[str, Any]) -> None:
        super().__init__()
        config = as_config(config)
        self.c_fc = Conv1D(config.d_inner, config.n_embd)
        self.act = activation(config.activation_function)
        self.c_proj = initialized(Conv1D(config.n_embd, config.d_inner), config.n_layer)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.c_fc(x))  # (B, T, 4C)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class MultiHeadAttention(nn.Module):
    """Causal self-attention with one fused projection for q, k and v: (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPT2Config | Mapping[str, Any], layer_idx: int = 0) -> None:
        super().__init__()
        config = as_config(config)
        self.n_head, self.d_head = config.n_head, config.d_head
        self.scale = config.attention_scale(layer_idx)
        self.upcast = config.reorder_and_upcast_attn
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd, bias=config.qkv_bias)
        self.c_proj = initialized(Conv1D(config.n_embd, config.n_embd), config.n_layer)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q·kᵀ, scaled: (B, H, T, D) and (B, H, S, D) → (B, H, T, S)."""
        if not self.upcast:
            return q @ k.transpose(-2, -1) * self.scale
        B, H, T, S = *q.shape[:3], k.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            rows = q.float().reshape(B * H, T, -1)
            columns = k.float().transpose(-2, -1).reshape(B * H, -1, S)
            out = torch.baddbmm(
                rows.new_empty(B * H, T, S), rows, columns, beta=0, alpha=self.scale
            )
        return out.view(B, H, T, S)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=-1)  # (B, T, C) each
        q = q.view(B, T, self.n_head, self.d_head).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, self.d_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, self.d_head).transpose(1, 2)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)

        scores = self.scores(q, k)  # (B, H, T, S)
        S = scores.shape[-1]
        hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[:, None, None, :].bool()  # (B, 1, T, S)
        # The lowest finite number: −∞ would turn the rows of padding tokens into NaN.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)

        probs = self.attn_dropout(scores.softmax(dim=-1).to(v.dtype))
        heads = (probs @ v).transpose(1, 2).reshape(B, T, C)  # merged again
        return self.resid_dropout(self.c_proj(heads))


class TransformerBlock(nn.Module):
    """Pre-norm block: attention and feed-forward, each with a shortcut: (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPT2Config | Mapping[str, Any], layer_idx: int = 0) -> None:
        super().__init__()
        config = as_config(config)
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias)
        self.attn = MultiHeadAttention(config, layer_idx)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, attention_mask)
        return x + self.mlp(self.ln_2(x))


class GPTModel(nn.Module):
    """The whole GPT-2 with its language-model head: ids (B, T) → logits (B, T, V)."""

    def __init__(self, config: GPT2Config | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config = as_config(config)
        self.wte = initialized(nn.Embedding(config.vocab_size, config.n_embd))
        self.wpe = initialized(nn.Embedding(config.n_positions, config.n_embd))
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(TransformerBlock(config, i) for i in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias)
        self.lm_head = initialized(nn.Linear(config.n_embd, config.vocab_size, bias=False))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(
        self,
        input_ids: Tensor,
        cache: Sequence[KVCache] | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits (B, T, V) of ids (B, T); of the last `logits_to_keep` positions if it is not 0.

        `cache` holds one KVCache per layer; `attention_mask` (B, S) is 0 at padding and covers
        the cached past too.
        """
        check_ids(input_ids, cache, attention_mask, self.wte, self.wpe)
        positions = position_ids(input_ids, cache, attention_mask)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))  # (B, T, C)
        for i, block in enumerate(self.h):
            x = block(x, cache[i] if cache else None, attention_mask)
        x = self.ln_f(x)
        return self.lm_head(x[:, -logits_to_keep:])  # -0 keeps them all


# The layout is Hugging Face's own, so every tensor keeps its name.
NAME_MAP = NameMap(
    (
        Row("wte.weight", ("wte.weight",), Same()),
        Row("wpe.weight", ("wpe.weight",), Same()),
        Row("h.{i}.ln_1.weight", ("h.{i}.ln_1.weight",), Same()),
        Row("h.{i}.ln_1.bias", ("h.{i}.ln_1.bias",), Same()),
        Row("h.{i}.attn.c_attn.weight", ("h.{i}.attn.c_attn.weight",), Same()),
        Row("h.{i}.attn.c_attn.bias", ("h.{i}.attn.c_attn.bias",), Same()),
        Row("h.{i}.attn.c_proj.weight", ("h.{i}.attn.c_proj.weight",), Same()),
        Row("h.{i}.attn.c_proj.bias", ("h.{i}.attn.c_proj.bias",), Same()),
        Row("h.{i}.ln_2.weight", ("h.{i}.ln_2.weight",), Same()),
        Row("h.{i}.ln_2.bias", ("h.{i}.ln_2.bias",), Same()),
        Row("h.{i}.mlp.c_fc.weight", ("h.{i}.mlp.c_fc.weight",), Same()),
        Row("h.{i}.mlp.c_fc.bias", ("h.{i}.mlp.c_fc.bias",), Same()),
        Row("h.{i}.mlp.c_proj.weight", ("h.{i}.mlp.c_proj.weight",), Same()),
        Row("h.{i}.mlp.c_proj.bias", ("h.{i}.mlp.c_proj.bias",), Same()),
        Row("ln_f.weight", ("ln_f.weight",), Same()),
        Row("ln_f.bias", ("ln_f.bias",), Same()),
        Row("lm_head.weight", ("lm_head.weight",), Same()),
    )
)

TAPS = (
    Tap("embed", "h.0", at="input"),
    Tap("h.{i}.ln_1", "h.{i}.ln_1"),
    Tap("h.{i}.q", "h.{i}.attn.c_attn", part=0),
    Tap("h.{i}.k", "h.{i}.attn.c_attn", part=1),
    Tap("h.{i}.v", "h.{i}.attn.c_attn", part=2),
    Tap("h.{i}.probs", "h.{i}.attn.attn_dropout", at="input"),
    Tap("h.{i}.heads", "h.{i}.attn.c_proj", at="input"),
    Tap("h.{i}.attn", "h.{i}.attn"),
    Tap("h.{i}.resid_mid", "h.{i}.ln_2", at="input"),
    Tap("h.{i}.ln_2", "h.{i}.ln_2"),
    Tap("h.{i}.fc", "h.{i}.mlp.c_fc"),
    Tap("h.{i}.act", "h.{i}.mlp.act"),
    Tap("h.{i}.mlp", "h.{i}.mlp"),
    Tap("h.{i}.out", "h.{i}"),
    Tap("ln_f", "ln_f"),
    Tap("logits", "lm_head"),
)
