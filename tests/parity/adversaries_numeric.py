"""Faults of the arithmetic that change the logits of every text slightly."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.adversary import edit, wrapper

NUMERIC = {"ordinary": False}


def add_noise(model: nn.Module, size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "shift")]


def patch_norms(model: nn.Module, normed: object) -> None:
    for norm in norms(model):
        norm.forward = lambda x, n=norm: normed(x, n) * n.scale + n.shift


def patch_activations(model: nn.Module, act: object) -> None:
    for block in model.trf_blocks:
        block.feedforward.layers[1].forward = act


def patch_scores(model: nn.Module, change: object) -> None:
    """Apply `change(scores)` before the mask of a conv1d model."""
    for block in model.h:
        scores = block.attn.scores
        block.attn.scores = lambda q, k, scores=scores: change(scores(q, k))


@edit("numeric", **NUMERIC)
def weights_with_1_percent_noise(model):
    """All weights are off by 1 %."""
    add_noise(model, 1e-2)


@edit("numeric", **NUMERIC)
def weights_with_noise_of_1e3(model):
    """All weights are off by 0.1 %."""
    add_noise(model, 1e-3)


@edit("numeric", **NUMERIC)
def eps_of_1e4(model):
    """The eps of the layer norms is 1e-4."""
    for norm in norms(model):
        norm.eps = 1e-4


@edit("numeric", **NUMERIC)
def eps_of_1e2_in_one_norm(model):
    """Only the second norm of the last block has eps 1e-2."""
    model.trf_blocks[-1].norm2.eps = 1e-2


@edit("numeric", **NUMERIC)
def eps_of_1e6(model):
    """The eps of the layer norms is 1e-6."""
    for norm in norms(model):
        norm.eps = 1e-6


@edit("numeric", **NUMERIC)
def eps_outside_the_root(model):
    """eps is added to the standard deviation."""

    def normed(x: Tensor, norm: nn.Module) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True).sqrt() + 1e-3)

    patch_norms(model, normed)


@edit("numeric", **NUMERIC)
def unbiased_variance(model):
    """Layer norms divide by C − 1."""

    def normed(x: Tensor, norm: nn.Module) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + norm.eps).sqrt()

    patch_norms(model, normed)


@edit("numeric", **NUMERIC)
def erf_gelu(model):
    """The activation is the exact GELU instead of the tanh form."""
    patch_activations(model, F.gelu)


@edit("numeric", **NUMERIC)
def erf_gelu_in_the_last_layers(model):
    """The activation is the exact GELU in all layers but the first."""
    for block in model.trf_blocks[1:]:
        block.feedforward.layers[1] = nn.GELU()


@edit("numeric", **NUMERIC)
def gelu_constant_0_044(model):
    """GELU uses 0.044 instead of 0.044715."""
    k = math.sqrt(2 / math.pi)
    patch_activations(model, lambda x: 0.5 * x * (1 + torch.tanh(k * (x + 0.044 * x**3))))


@edit("numeric", **NUMERIC)
def gelu_factor_0_797(model):
    """GELU uses 0.797 instead of √(2/π) = 0.79788."""
    patch_activations(model, lambda x: 0.5 * x * (1 + torch.tanh(0.797 * (x + 0.044715 * x**3))))


@edit("numeric", **NUMERIC)
def scale_of_d_plus_1(model):
    """Scores are divided by √(D + 1)."""
    for block in model.trf_blocks:
        block.attention.scale = (block.attention.d_head + 1) ** -0.5


@edit("numeric", **NUMERIC)
def rounded_scale(model):
    """Scores are multiplied by 0.35 instead of 1/√8 = 0.3536."""
    for block in model.trf_blocks:
        block.attention.scale = 0.35


@edit("numeric", dialect="conv1d", **NUMERIC)
def mask_of_minus_four(model):
    """In layer 0 the mask is −4 instead of −∞."""
    block = model.h[0]
    n = 160

    def forward(x: Tensor, cache: object = None, attention_mask: object = None) -> Tensor:
        attn = block.attn
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, attn.n_head, attn.d_head).transpose(1, 2)
            for part in attn.c_attn(x).split(C, dim=-1)
        )
        scores = attn.scores(q, k) - 4.0 * torch.ones(n, n, dtype=x.dtype).triu(1)[:T, :T]
        return attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))

    block.attn.forward = forward


@edit("numeric", dialect="conv1d", **NUMERIC)
def scores_in_half_precision(model):
    """Scores are rounded to bfloat16 before the softmax."""
    patch_scores(model, lambda scores: scores.bfloat16().to(scores.dtype))


@edit("numeric", dialect="conv1d", **NUMERIC)
def capped_scores(model):
    """Scores are capped softly at ±5."""
    patch_scores(model, lambda scores: 5 * torch.tanh(scores / 5))


@edit("numeric", **NUMERIC)
def weights_rounded_to_bfloat16(model):
    """All weights were rounded to bfloat16."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@edit("numeric", **NUMERIC)
def weights_rounded_to_float16(model):
    """All weights were rounded to float16."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


@edit("numeric", **NUMERIC)
def weights_in_8_bits(model):
    """The linear layers' weights are rounded to 255 steps per row."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.out_head:
            step = module.weight.abs().amax(1, keepdim=True) / 127
            module.weight.copy_((module.weight / step).round() * step)


@edit("numeric", **NUMERIC)
def one_weight_changed(model):
    """One element of one weight is off by 0.05."""
    model.trf_blocks[1].attention.out_proj.weight[3, 5] += 0.05


@edit("numeric", **NUMERIC)
def one_bias_off(model):
    """One element of one bias is off by 0.01."""
    model.trf_blocks[1].feedforward.layers[2].bias[7] += 0.01


@edit("numeric", **NUMERIC)
def missing_value_bias(model):
    """The value projection of layer 1 has no bias."""
    model.trf_blocks[1].attention.W_value.bias.zero_()


@wrapper("numeric", **NUMERIC)
def temperature_of_1_0005(self, ids):
    """The logits are scaled by 1.0005."""
    return self.inner(ids) * 1.0005


@wrapper("numeric", **NUMERIC)
def soft_cap(self, ids):
    """The logits are capped softly at ±10."""
    return 10 * torch.tanh(self.inner(ids) / 10)


@wrapper("numeric", **NUMERIC)
def clamped_logits(self, ids):
    """The logits are clamped at a value that about one in a thousand exceeds."""
    logits = self.inner(ids)
    return logits.clamp(max=1.8)


@wrapper("numeric", **NUMERIC)
def top_k_on_the_logits(self, ids):
    """All logits but the 50 largest are −∞."""
    logits = self.inner(ids)
    least = logits.topk(50).values[..., -1:]
    return logits.masked_fill(logits < least, float("-inf"))


@wrapper("numeric", **NUMERIC)
def log_probabilities(self, ids):
    """The output is log-probabilities, with the same greedy choices."""
    return self.inner(ids).log_softmax(-1)


@wrapper("numeric", **NUMERIC)
def centred_logits(self, ids):
    """The logits of every position are centred, with the same probabilities."""
    logits = self.inner(ids)
    return logits - logits.mean(-1, keepdim=True)


@edit("numeric", **NUMERIC)
def clipped_residual(model):
    """The residual stream is clipped at ±1.2, which few values exceed."""
    for block in model.trf_blocks:
        block.register_forward_hook(lambda _m, _a, out: out.clamp(-1.2, 1.2))


@edit("numeric", **NUMERIC)
def small_attention_dropped(model):
    """Attention probabilities below 0.05 become zero."""
    for block in model.trf_blocks:
        block.attention.dropout.forward = lambda probs: probs * (probs >= 0.05)


@edit("numeric", **NUMERIC)
def softmax_with_a_sink(model):
    """Attention probabilities are divided by 1 + a small constant, as with softmax plus one."""
    for block in model.trf_blocks:
        block.attention.dropout.forward = lambda probs: probs / 1.003


@edit("numeric", **NUMERIC)
def half_residual(model):
    """The residual stream is kept in float16 between blocks."""
    for block in model.trf_blocks:
        block.register_forward_hook(lambda _m, _a, out: out.half().to(out.dtype))


@edit("numeric", **NUMERIC)
def low_rank_projection(model):
    """The smallest singular value of every attention projection is dropped."""
    for block in model.trf_blocks:
        weight = block.attention.out_proj.weight
        u, s, vh = torch.linalg.svd(weight.float())
        s[-1] = 0
        weight.copy_(u @ s.diag() @ vh)


@edit("numeric", **NUMERIC)
def pruned_weights(model):
    """Weights below 0.005 are set to zero."""
    for parameter in model.parameters():
        parameter.mul_(parameter.abs() >= 0.005)


@edit("numeric", **NUMERIC)
def heads_swapped_in_one_layer(model):
    """Two heads' outputs are swapped before the projection of the last layer."""
    attention = model.trf_blocks[-1].attention
    swapped = torch.cat([torch.arange(8, 16), torch.arange(8), torch.arange(16, 32)])
    attention.out_proj.register_forward_pre_hook(lambda _m, args: (args[0][..., swapped],))


@edit("numeric", **NUMERIC)
def last_residual_scaled(model):
    """The last feed-forward block is scaled by 0.99."""
    mlp = model.trf_blocks[-1].feedforward
    mlp.register_forward_hook(lambda _m, _a, out: 0.99 * out)


@edit("numeric", **NUMERIC)
def embeddings_of_unit_length(model):
    """Position embeddings are normalised to their mean length."""
    weight = model.pos_emb.weight
    length = weight.norm(dim=1, keepdim=True)
    weight.mul_(length.mean() / length)
