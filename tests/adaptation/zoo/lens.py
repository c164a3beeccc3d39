"""TransformerLens-like: einsum over W_Q[head, C, D], bare W_E, W_pos, W_U and b_U, torch.where."""

import math
from dataclasses import dataclass

import torch
from torch import einsum, nn


@dataclass
class LensConfig:
    d_model: int = 768
    d_head: int = 64
    d_mlp: int = 3072
    n_heads: int = 12
    n_layers: int = 12
    n_ctx: int = 1024
    d_vocab: int = 50257
    ln_eps: float = 1e-5
    init_range: float = 0.02


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class LayerNorm(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.w = nn.Parameter(torch.ones(cfg.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, residual):
        residual = residual - residual.mean(-1, keepdim=True)
        scale = (residual.pow(2).mean(-1, keepdim=True) + self.cfg.ln_eps).sqrt()
        return residual / scale * self.w + self.b


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        h, c, d = cfg.n_heads, cfg.d_model, cfg.d_head
        self.W_Q = nn.Parameter(cfg.init_range * torch.randn(h, c, d))
        self.b_Q = nn.Parameter(torch.zeros(h, d))
        self.W_K = nn.Parameter(cfg.init_range * torch.randn(h, c, d))
        self.b_K = nn.Parameter(torch.zeros(h, d))
        self.W_V = nn.Parameter(cfg.init_range * torch.randn(h, c, d))
        self.b_V = nn.Parameter(torch.zeros(h, d))
        self.W_O = nn.Parameter(cfg.init_range * torch.randn(h, d, c))
        self.b_O = nn.Parameter(torch.zeros(c))
        self.register_buffer("IGNORE", torch.tensor(-1e5))

    def forward(self, x):
        q = einsum("bpc,hcd->bphd", x, self.W_Q) + self.b_Q
        k = einsum("bpc,hcd->bphd", x, self.W_K) + self.b_K
        v = einsum("bpc,hcd->bphd", x, self.W_V) + self.b_V
        scores = einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.cfg.d_head)
        pattern = self.apply_causal_mask(scores).softmax(-1)
        z = einsum("bkhd,bhqk->bqhd", v, pattern)
        return einsum("bqhd,hdc->bqc", z, self.W_O) + self.b_O

    def apply_causal_mask(self, scores):
        keep = torch.ones(scores.size(-2), scores.size(-1), device=scores.device).tril().bool()
        return torch.where(keep, scores, self.IGNORE)


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.W_in = nn.Parameter(cfg.init_range * torch.randn(cfg.d_model, cfg.d_mlp))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_mlp))
        self.W_out = nn.Parameter(cfg.init_range * torch.randn(cfg.d_mlp, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, x):
        pre = einsum("bpc,cm->bpm", x, self.W_in) + self.b_in
        post = gelu_new(pre)
        return einsum("bpm,mc->bpc", post, self.W_out) + self.b_out


class TransformerBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ln1 = LayerNorm(cfg)
        self.attn = Attention(cfg)
        self.ln2 = LayerNorm(cfg)
        self.mlp = MLP(cfg)

    def forward(self, resid_pre):
        resid_mid = resid_pre + self.attn(self.ln1(resid_pre))
        resid_post = resid_mid + self.mlp(self.ln2(resid_mid))
        return resid_post


class Embed(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.W_E = nn.Parameter(cfg.init_range * torch.randn(cfg.d_vocab, cfg.d_model))

    def forward(self, tokens):
        return self.W_E[tokens]


class PosEmbed(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.W_pos = nn.Parameter(cfg.init_range * torch.randn(cfg.n_ctx, cfg.d_model))

    def forward(self, tokens):
        batch, position = tokens.shape
        return self.W_pos[:position].expand(batch, position, -1)


class Unembed(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.W_U = nn.Parameter(cfg.init_range * torch.randn(cfg.d_model, cfg.d_vocab))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab))

    def forward(self, x):
        return einsum("bpc,cv->bpv", x, self.W_U) + self.b_U


class DemoTransformer(nn.Module):
    def __init__(self, cfg: LensConfig):
        super().__init__()
        self.cfg = cfg
        self.embed = Embed(cfg)
        self.pos_embed = PosEmbed(cfg)
        self.blocks = nn.ModuleList([TransformerBlock(cfg) for _ in range(cfg.n_layers)])
        self.ln_final = LayerNorm(cfg)
        self.unembed = Unembed(cfg)

    def forward(self, tokens):
        residual = self.embed(tokens) + self.pos_embed(tokens)
        for block in self.blocks:
            residual = block(residual)
        return self.unembed(self.ln_final(residual))
