"""The `conv1d` dialect: OpenAI's names, fused q, k and v, and weights stored as `[in, out]`.

The operations and their order are those of `transformers`' eager GPT-2 (`modeling_gpt2.py`), so
that the results are bit-identical.

Axes: B batch, T tokens, S tokens with the cached past, C channels, H heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compat.config import GPT2Config
from compat.layers import (
    KVCache,
    activation,
    attention_scores,
    check_ids,
    initialized,
    position_ids,
    takes_config,
)
from compat.name_map import NameMap, Row
from compat.ops import Same
from compat.tap import Tap


class Conv1D(nn.Module):
    """A linear layer whose weight is stored as `[nx, nf]`: (…, nx) → (…, nf).

    Args:
        nf: number of output features.
        nx: number of input features.
        bias: False leaves the bias out.
    """

    def __init__(self, nf: int, nx: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = nx, nf  # as of nn.Linear, for PEFT
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
    """Expand to 4C, apply the activation, project back to C: (B, T, C) → (B, T, C)."""

    @takes_config
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.d_inner, config.n_embd)
        self.act = activation(config.activation_function)
        self.c_proj = initialized(Conv1D(config.n_embd, config.d_inner), config.n_layer)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.c_fc(x))  # (B, T, 4C)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class MultiHeadAttention(nn.Module):
    """Causal self-attention, softmax(q·kᵀ/√D)·v for every head: (B, T, C) → (B, T, C).

    One fused projection computes q, k and v. Source: Vaswani et al. 2017, §3.2.
    """

    @takes_config
    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        self.scale = config.attention_scale(layer_idx)  # 1/√D
        self.upcast = config.reorder_and_upcast_attn
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd, bias=config.qkv_bias)
        self.c_proj = initialized(Conv1D(config.n_embd, config.n_embd), config.n_layer)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, self.d_head)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D) each
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)

        scores = self.scores(q, k)  # q·kᵀ/√D, (B, H, T, S)
        S = scores.shape[-1]
        # True where a key is later than the query.
        masked = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        if attention_mask is not None:
            masked = masked | ~attention_mask[:, None, None, :].bool()  # (B, 1, T, S)
        # The lowest finite number: −∞ would turn the rows of padding tokens into NaN.
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)

        probs = self.attn_dropout(scores.softmax(dim=-1).to(v.dtype))
        context = (probs @ v).transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.resid_dropout(self.c_proj(context))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scaled dot products: (B, H, T, D) and (B, H, S, D) → (B, H, T, S)."""
        return attention_scores(q, k, self.scale, self.upcast)


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed-forward(norm(x)), (B, T, C) each."""

    @takes_config
    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__()
        C, eps, bias = config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias
        self.ln_1 = nn.LayerNorm(C, eps, bias=bias)
        self.attn = MultiHeadAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(C, eps, bias=bias)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, attention_mask)
        return x + self.mlp(self.ln_2(x))


class GPTModel(nn.Module):
    """GPT-2 with its language-model head: token ids (B, T) → logits (B, T, V)."""

    @takes_config
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = initialized(nn.Embedding(config.vocab_size, config.n_embd))
        self.wpe = initialized(nn.Embedding(config.n_positions, config.n_embd))
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(TransformerBlock(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(
            config.n_embd, config.layer_norm_epsilon, bias=config.layer_norm_bias
        )
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
        """Return logits (B, T, V) of token ids (B, T).

        Args:
            input_ids: (B, T).
            cache: one KVCache for each layer; the ids follow the cached ones.
            attention_mask: (B, S), 0 at padding, for the cached past too.
            logits_to_keep: compute the logits of this many last positions; 0 computes all.
        """
        check_ids(input_ids, cache, attention_mask, self.wte, self.wpe)
        positions = position_ids(input_ids, cache, attention_mask)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))  # (B, T, C)
        for i, block in enumerate(self.h):
            x = block(x, cache[i] if cache else None, attention_mask)
        x = self.ln_f(x)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        return self.lm_head(x)  # (B, T, V)


# The layout is Hugging Face's own, so that every tensor keeps its name.
NAMES = (
    "wte.weight",
    "wpe.weight",
    *(
        f"h.{{i}}.{layer}.{kind}"
        for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        for kind in ("weight", "bias")
    ),
    "ln_f.weight",
    "ln_f.bias",
    "lm_head.weight",
)
NAME_MAP = NameMap(tuple(Row(name, (name,), Same()) for name in NAMES))

TAPS = (
    Tap("embed", "h.0", at="input"),
    Tap("h.{i}.ln_1", "h.{i}.ln_1"),
    Tap("h.{i}.q", "h.{i}.attn.c_attn", part=0),
    Tap("h.{i}.k", "h.{i}.attn.c_attn", part=1),
    Tap("h.{i}.v", "h.{i}.attn.c_attn", part=2),
    Tap("h.{i}.probs", "h.{i}.attn.attn_dropout"),
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
