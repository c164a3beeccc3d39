"""Common mistakes in implementations of GPT-2, each made in layer 1 of a `linear` model.

Every entry breaks a loaded model and states the tap at which the parity check must find it first.
The numbers in the comments refer to the list of common mistakes in the field notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.dialects import linear

Mistake = Callable[[linear.GPTModel], None]
MISTAKES: dict[str, tuple[str, Mistake]] = {}


def mistake(first_tap: str) -> Callable[[Mistake], Mistake]:
    """Register a mistake with the tap at which the parity check must find it."""

    def register(do: Mistake) -> Mistake:
        MISTAKES[do.__name__] = (first_tap, do)
        return do

    return register


def block(model: linear.GPTModel) -> linear.TransformerBlock:
    """Return the block of layer 1, which is neither the first nor the last one."""
    return model.trf_blocks[1]  # type: ignore[return-value]


def patch_block(model: linear.GPTModel, formula: Callable[[Tensor, nn.Module], Tensor]) -> None:
    b = block(model)
    b.forward = lambda x, cache=None, attention_mask=None: formula(x, b)


def patch_norm(norm: nn.Module, formula: Callable[[Tensor, nn.Module], Tensor]) -> None:
    norm.forward = lambda x: formula(x, norm)


def affine(normed: Tensor, norm: nn.Module) -> Tensor:
    return normed * norm.scale + norm.shift


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


# Attention

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


# The other parts

# 2, 20: activations


@mistake("h.1.act")
def erf_gelu(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[1] = nn.GELU()


@mistake("h.1.act")
def relu(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[1] = nn.ReLU()


@mistake("h.1.act")
def sigmoid_gelu(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[1].forward = lambda x: x * torch.sigmoid(1.702 * x)


@mistake("h.1.act")
def rounded_gelu_constant(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[1].forward = lambda x: (
        0.5 * x * (1 + torch.tanh(0.7978 * (x + 0.044715 * x**3)))
    )


# 7: the head


@mistake("logits")
def head_initialised_at_random(model: linear.GPTModel) -> None:
    model.out_head.weight = nn.Parameter(torch.randn_like(model.out_head.weight))


# 8: dropout


@mistake("embed")
def left_in_training_mode(model: linear.GPTModel) -> None:
    model.train()


# 9, 20: positions


@mistake("embed")
def positions_off_by_one(model: linear.GPTModel) -> None:
    model.pos_emb.weight.data = model.pos_emb.weight.data.roll(1, dims=0)


@mistake("embed")
def positions_dropped(model: linear.GPTModel) -> None:
    model.pos_emb.weight.data.zero_()


@mistake("embed")
def sinusoidal_positions(model: linear.GPTModel) -> None:
    n, C = model.pos_emb.weight.shape
    angles = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, C, 2) / C)
    model.pos_emb.weight.data = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


@mistake("embed")
def embedding_scaled(model: linear.GPTModel) -> None:
    model.tok_emb.forward = lambda ids: F.embedding(ids, model.tok_emb.weight) * math.sqrt(24)


# 12: biases


@mistake("h.1.fc")
def feed_forward_bias_dropped(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[0].bias = None


@mistake("h.1.mlp")
def feed_forward_output_bias_dropped(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[2].bias = None


# 14, 17: norms


@mistake("h.1.ln_1")
def unbiased_variance(model: linear.GPTModel) -> None:
    patch_norm(
        block(model).norm1,
        lambda x, n: affine(
            (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + n.eps), n
        ),
    )


@mistake("h.1.ln_2")
def eps_outside_the_root(model: linear.GPTModel) -> None:
    patch_norm(
        block(model).norm2,
        lambda x, n: affine((x - x.mean(-1, True)) / (x.std(-1, False, keepdim=True) + n.eps), n),
    )


@mistake("h.0.ln_1")
def eps_1e_6(model: linear.GPTModel) -> None:
    model.trf_blocks[0].norm1.eps = 1e-6


@mistake("h.0.ln_1")
def eps_1e_12(model: linear.GPTModel) -> None:
    model.trf_blocks[0].norm1.eps = 1e-12


@mistake("h.1.ln_1")
def norm_without_shift(model: linear.GPTModel) -> None:
    block(model).norm1.shift = None


@mistake("h.1.ln_2")
def norm_without_scale(model: linear.GPTModel) -> None:
    block(model).norm2.scale.data.fill_(1)


@mistake("h.1.ln_1")
def rms_norm(model: linear.GPTModel) -> None:
    patch_norm(
        block(model).norm1,
        lambda x, n: affine(x / torch.sqrt(x.pow(2).mean(-1, True) + n.eps), n),
    )


@mistake("h.1.ln_1")
def norms_swapped(model: linear.GPTModel) -> None:
    b = block(model)
    b.norm1, b.norm2 = b.norm2, b.norm1


@mistake("h.1.ln_2")
def second_norm_missing(model: linear.GPTModel) -> None:
    block(model).norm2 = nn.Identity()


@mistake("ln_f")
def final_norm_missing(model: linear.GPTModel) -> None:
    model.final_norm = nn.Identity()


@mistake("h.1.ln_1")
def post_norm(model: linear.GPTModel) -> None:
    def formula(x: Tensor, b: nn.Module) -> Tensor:
        x = b.norm1(x + b.attention(x))
        return b.norm2(x + b.feedforward(x))

    patch_block(model, formula)


# 17: the residual stream


@mistake("h.1.resid_mid")
def attention_shortcut_missing(model: linear.GPTModel) -> None:
    def formula(x: Tensor, b: nn.Module) -> Tensor:
        x = b.attention(b.norm1(x))
        return x + b.feedforward(b.norm2(x))

    patch_block(model, formula)


@mistake("h.1.out")
def feed_forward_shortcut_missing(model: linear.GPTModel) -> None:
    def formula(x: Tensor, b: nn.Module) -> Tensor:
        x = x + b.attention(b.norm1(x))
        return b.feedforward(b.norm2(x))

    patch_block(model, formula)


@mistake("h.1.out")
def residual_read_after_the_norm(model: linear.GPTModel) -> None:
    def formula(x: Tensor, b: nn.Module) -> Tensor:
        x = b.norm2(x + b.attention(b.norm1(x)))
        return x + b.feedforward(x)

    patch_block(model, formula)


@mistake("h.1.resid_mid")
def parallel_block(model: linear.GPTModel) -> None:
    patch_block(model, lambda x, b: x + b.attention(b.norm1(x)) + b.feedforward(b.norm2(x)))


@mistake("h.1.ln_1")
def layers_in_the_wrong_order(model: linear.GPTModel) -> None:
    blocks = model.trf_blocks
    blocks[1], blocks[2] = blocks[2], blocks[1]


# Precision: small errors that are not rounding errors of float32


@mistake("h.1.fc")
def one_weight_rounded_to_bfloat16(model: linear.GPTModel) -> None:
    weight = block(model).feedforward.layers[0].weight.data
    weight[:] = weight.bfloat16()


@mistake("h.1.probs")
def softmax_in_half_precision(model: linear.GPTModel) -> None:
    patch_attention(
        model,
        weigh=lambda s, hidden: s.masked_fill(hidden, -math.inf).half().softmax(dim=-1).float(),
    )
