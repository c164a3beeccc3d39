"""Common mistakes in GPT-2's attention; see `mistakes`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.dialects import linear
from tests.parity.breaking import block, mistake


def transpose(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.t().contiguous()


def patch_attention(
    model: linear.GPTModel,
    split: Callable[[Tensor, int, int], Tensor] | None = None,
    scores: Callable[[Tensor, Tensor], Tensor] | None = None,
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
    merge: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Replace some steps of layer 1's attention."""
    a = block(model).attention
    H, D = a.n_head, a.d_head
    split = split or (lambda x, H, D: x.view(*x.shape[:2], H, D).transpose(1, 2))
    scores = scores or (lambda q, k: q @ k.transpose(-2, -1) / math.sqrt(D))
    weigh = weigh or (lambda s, hidden: s.masked_fill(hidden, -math.inf).softmax(dim=-1))
    drop = drop or (lambda probs: probs)
    merge = merge or (lambda heads: heads.transpose(1, 2).flatten(2))

    def forward(x: Tensor, cache: object = None, attention_mask: object = None) -> Tensor:
        T = x.shape[1]
        q, k, v = (split(W(x), H, D) for W in (a.W_query, a.W_key, a.W_value))
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        probs = a.dropout(weigh(scores(q, k), hidden))
        return a.out_proj(merge(drop(probs) @ v).reshape(x.shape))

    a.forward = forward


# 1: orientation; square weights pass shape checks in both


@mistake("h.1.attn")
def out_proj_not_transposed(model: linear.GPTModel) -> None:
    transpose(block(model).attention.out_proj)


@mistake("h.1.q")
def query_not_transposed(model: linear.GPTModel) -> None:
    transpose(block(model).attention.W_query)


# 3, 18: the order of the columns of q, k and v


@mistake("h.1.q")
def qkv_interleaved_by_head(model: linear.GPTModel) -> None:
    a = block(model).attention
    layers, C = (a.W_query, a.W_key, a.W_value), a.n_head * a.d_head
    for name in ("weight", "bias"):
        fused = torch.cat([getattr(layer, name).data for layer in layers])
        fused = fused.view(a.n_head, 3, a.d_head, *fused.shape[1:]).transpose(0, 1)
        for layer, part in zip(layers, fused.reshape(3, C, *fused.shape[3:]), strict=True):
            getattr(layer, name).data = part.contiguous()


@mistake("h.1.k")
def kv_swapped(model: linear.GPTModel) -> None:
    a = block(model).attention
    a.W_key, a.W_value = a.W_value, a.W_key


@mistake("h.1.q")
def qk_swapped(model: linear.GPTModel) -> None:
    a = block(model).attention
    a.W_query, a.W_key = a.W_key, a.W_query


@mistake("h.1.q")
def bias_order_differs_from_weight_order(model: linear.GPTModel) -> None:
    a = block(model).attention
    a.W_query.bias, a.W_value.bias = a.W_value.bias, a.W_query.bias


# 4: heads


@mistake("h.1.heads")
def heads_merged_without_transpose(model: linear.GPTModel) -> None:
    patch_attention(model, merge=lambda heads: heads)


@mistake("h.1.probs")
def heads_split_as_channels_by_heads(model: linear.GPTModel) -> None:
    patch_attention(model, split=lambda x, H, D: x.view(*x.shape[:2], D, H).permute(0, 3, 1, 2))


# 8: dropout


@mistake("h.1.heads")
def functional_dropout_ignores_eval(model: linear.GPTModel) -> None:
    patch_attention(model, drop=lambda probs: F.dropout(probs, 0.1))


# 9, 20: positions


@mistake("h.1.probs")
def rotary_positions(model: linear.GPTModel) -> None:
    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] / 10000 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1
        )

    D = block(model).attention.d_head
    patch_attention(
        model, scores=lambda q, k: rotated(q) @ rotated(k).transpose(-2, -1) / math.sqrt(D)
    )


# 12: biases


@mistake("h.1.q")
def qkv_bias_dropped(model: linear.GPTModel) -> None:
    for layer in (a := block(model).attention).W_query, a.W_key, a.W_value:
        layer.bias = None


@mistake("h.1.k")
def key_bias_dropped(model: linear.GPTModel) -> None:
    """The key bias cancels in the softmax, so the logits do not change."""
    block(model).attention.W_key.bias = None


@mistake("h.1.attn")
def output_bias_dropped(model: linear.GPTModel) -> None:
    block(model).attention.out_proj.bias = None


# 15: the scale


@mistake("h.1.probs")
def no_attention_scale(model: linear.GPTModel) -> None:
    block(model).attention.scale = 1.0


@mistake("h.1.probs")
def scaled_by_the_model_width(model: linear.GPTModel) -> None:
    block(model).attention.scale = 24**-0.5


# 16: the mask


@mistake("h.1.probs")
def no_mask(model: linear.GPTModel) -> None:
    patch_attention(model, weigh=lambda s, hidden: s.softmax(dim=-1))


@mistake("h.1.probs")
def mask_shows_the_next_token(model: linear.GPTModel) -> None:
    patch_attention(
        model, weigh=lambda s, hidden: s.masked_fill(hidden.triu(2), -math.inf).softmax(dim=-1)
    )


@mistake("h.1.probs")
def mask_after_softmax_without_renormalising(model: linear.GPTModel) -> None:
    patch_attention(model, weigh=lambda s, hidden: s.softmax(dim=-1).masked_fill(hidden, 0.0))


@mistake("h.1.probs")
def mask_by_multiplication_before_softmax(model: linear.GPTModel) -> None:
    patch_attention(model, weigh=lambda s, hidden: (s * ~hidden).softmax(dim=-1))


@mistake("h.1.probs")
def softmax_over_queries(model: linear.GPTModel) -> None:
    patch_attention(model, weigh=lambda s, hidden: s.masked_fill(hidden, -1e9).softmax(dim=-2))


# Precision: small errors that are not rounding errors of float32


@mistake("h.1.probs")
def softmax_in_half_precision(model: linear.GPTModel) -> None:
    patch_attention(
        model,
        weigh=lambda s, hidden: s.masked_fill(hidden, -math.inf).half().softmax(dim=-1).float(),
    )
