"""The `linear` dialect of the notebooks: formulas written out, nn.Linear, separate q, k and v.

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
from compat.ops import Same, Split, Transpose
from compat.tap import Tap


class LayerNorm(nn.Module):
    """Normalize the channels to mean 0 and variance 1, then scale and shift: (…, C) → (…, C).

    `bias=False` drops the shift. Source: Ba et al. 2016, eq. 4.
    """

    def __init__(self, n_embd: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(n_embd))
        self.shift = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # Half precision is too coarse for sums; such an x is normalized in float32.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(dim=-1, keepdim=True)
        var = centred.pow(2).mean(dim=-1, keepdim=True)  # (…, 1), over C and not over C − 1
        out = centred / torch.sqrt(var + self.eps) * self.scale
        if self.shift is not None:
            out = out + self.shift
        return out.to(x.dtype)


class FeedForward(nn.Module):
    """Expand to 4C, apply the activation, project back to C: (B, T, C) → (B, T, C)."""

    @takes_config
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            initialized(nn.Linear(config.n_embd, config.d_inner)),  # (B, T, 4C)
            activation(config.activation_function),
            initialized(nn.Linear(config.d_inner, config.n_embd), config.n_layer),  # (B, T, C)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class MultiHeadAttention(nn.Module):
    """Causal self-attention, softmax(q·kᵀ/√D)·v for every head: (B, T, C) → (B, T, C).

    Source: Vaswani et al. 2017, §3.2.
    """

    @takes_config
    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__()
        C = config.n_embd
        self.n_head, self.d_head = config.n_head, config.d_head
        self.scale = config.attention_scale(layer_idx)  # 1/√D
        self.upcast = config.reorder_and_upcast_attn
        self.W_query = initialized(nn.Linear(C, C, bias=config.qkv_bias))
        self.W_key = initialized(nn.Linear(C, C, bias=config.qkv_bias))
        self.W_value = initialized(nn.Linear(C, C, bias=config.qkv_bias))
        self.out_proj = initialized(nn.Linear(C, C), config.n_layer)
        self.dropout = nn.Dropout(config.attn_pdrop)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        B, T, C = x.shape
        q = self.W_query(x).view(B, T, self.n_head, self.d_head).transpose(1, 2)  # (B, H, T, D)
        k = self.W_key(x).view(B, T, self.n_head, self.d_head).transpose(1, 2)
        v = self.W_value(x).view(B, T, self.n_head, self.d_head).transpose(1, 2)
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

        probs = self.dropout(scores.softmax(dim=-1).to(v.dtype))
        context = (probs @ v).transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.out_proj(context)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scaled dot products: (B, H, T, D) and (B, H, S, D) → (B, H, T, S)."""
        return attention_scores(q, k, self.scale, self.upcast)


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed-forward(norm(x)), (B, T, C) each."""

    @takes_config
    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config, layer_idx)
        self.feedforward = FeedForward(config)
        self.norm1 = LayerNorm(config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias)
        self.norm2 = LayerNorm(config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias)
        self.drop_shortcut = nn.Dropout(config.resid_pdrop)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.drop_shortcut(self.attention(self.norm1(x), cache, attention_mask))
        return x + self.drop_shortcut(self.feedforward(self.norm2(x)))


class GPTModel(nn.Module):
    """GPT-2 with its language-model head: token ids (B, T) → logits (B, T, V)."""

    @takes_config
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = initialized(nn.Embedding(config.vocab_size, config.n_embd))
        self.pos_emb = initialized(nn.Embedding(config.n_positions, config.n_embd))
        self.drop_emb = nn.Dropout(config.embd_pdrop)
        self.trf_blocks = nn.ModuleList(TransformerBlock(config, i) for i in range(config.n_layer))
        self.final_norm = LayerNorm(
            config.n_embd, config.layer_norm_epsilon, config.layer_norm_bias
        )
        self.out_head = initialized(nn.Linear(config.n_embd, config.vocab_size, bias=False))
        if config.tie_word_embeddings:
            self.out_head.weight = self.tok_emb.weight

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
        check_ids(input_ids, cache, attention_mask, self.tok_emb, self.pos_emb)
        positions = position_ids(input_ids, cache, attention_mask)
        x = self.drop_emb(self.tok_emb(input_ids) + self.pos_emb(positions))  # (B, T, C)
        for i, block in enumerate(self.trf_blocks):
            x = block(x, cache[i] if cache else None, attention_mask)
        x = self.final_norm(x)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        return self.out_head(x)  # (B, T, V)


def _qkv(kind: str) -> tuple[str, ...]:
    """Return the names of the parameters that one tensor of Hugging Face's holds side by side."""
    return tuple(f"trf_blocks.{{i}}.attention.W_{x}.{kind}" for x in ("query", "key", "value"))


NAME_MAP = NameMap(
    (
        Row("wte.weight", ("tok_emb.weight",), Same()),
        Row("wpe.weight", ("pos_emb.weight",), Same()),
        Row("h.{i}.ln_1.weight", ("trf_blocks.{i}.norm1.scale",), Same()),
        Row("h.{i}.ln_1.bias", ("trf_blocks.{i}.norm1.shift",), Same()),
        Row("h.{i}.attn.c_attn.weight", _qkv("weight"), Split(3, transpose=True)),
        Row("h.{i}.attn.c_attn.bias", _qkv("bias"), Split(3)),
        Row("h.{i}.attn.c_proj.weight", ("trf_blocks.{i}.attention.out_proj.weight",), Transpose()),
        Row("h.{i}.attn.c_proj.bias", ("trf_blocks.{i}.attention.out_proj.bias",), Same()),
        Row("h.{i}.ln_2.weight", ("trf_blocks.{i}.norm2.scale",), Same()),
        Row("h.{i}.ln_2.bias", ("trf_blocks.{i}.norm2.shift",), Same()),
        Row("h.{i}.mlp.c_fc.weight", ("trf_blocks.{i}.feedforward.layers.0.weight",), Transpose()),
        Row("h.{i}.mlp.c_fc.bias", ("trf_blocks.{i}.feedforward.layers.0.bias",), Same()),
        Row(
            "h.{i}.mlp.c_proj.weight", ("trf_blocks.{i}.feedforward.layers.2.weight",), Transpose()
        ),
        Row("h.{i}.mlp.c_proj.bias", ("trf_blocks.{i}.feedforward.layers.2.bias",), Same()),
        Row("ln_f.weight", ("final_norm.scale",), Same()),
        Row("ln_f.bias", ("final_norm.shift",), Same()),
        Row("lm_head.weight", ("out_head.weight",), Same()),
    )
)

TAPS = (
    Tap("embed", "trf_blocks.0", at="input"),
    Tap("h.{i}.ln_1", "trf_blocks.{i}.norm1"),
    Tap("h.{i}.q", "trf_blocks.{i}.attention.W_query"),
    Tap("h.{i}.k", "trf_blocks.{i}.attention.W_key"),
    Tap("h.{i}.v", "trf_blocks.{i}.attention.W_value"),
    Tap("h.{i}.probs", "trf_blocks.{i}.attention.dropout"),
    Tap("h.{i}.heads", "trf_blocks.{i}.attention.out_proj", at="input"),
    Tap("h.{i}.attn", "trf_blocks.{i}.attention"),
    Tap("h.{i}.resid_mid", "trf_blocks.{i}.norm2", at="input"),
    Tap("h.{i}.ln_2", "trf_blocks.{i}.norm2"),
    Tap("h.{i}.fc", "trf_blocks.{i}.feedforward.layers.0"),
    Tap("h.{i}.act", "trf_blocks.{i}.feedforward.layers.1"),
    Tap("h.{i}.mlp", "trf_blocks.{i}.feedforward"),
    Tap("h.{i}.out", "trf_blocks.{i}"),
    Tap("ln_f", "final_norm"),
    Tap("logits", "out_head"),
)
