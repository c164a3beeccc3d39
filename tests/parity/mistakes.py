"""Common mistakes in implementations of GPT-2, each made in layer 1 of a `linear` model.

Every entry breaks a loaded model and states the tap at which the parity check must find it first.
The numbers in the comments refer to the list of common mistakes in the field notes. Mistakes in
attention are in a module of their own, whose import adds them to `MISTAKES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.dialects import linear
from tests.parity.breaking import MISTAKES, block, mistake, patch_block
from tests.parity.mistakes_in_attention import patch_attention

__all__ = ["MISTAKES", "block", "patch_attention", "patch_block"]


def patch_norm(norm: nn.Module, formula: Callable[[Tensor, nn.Module], Tensor]) -> None:
    norm.forward = lambda x: formula(x, norm)


def affine(normed: Tensor, norm: nn.Module) -> Tensor:
    return normed * norm.scale + norm.shift


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
