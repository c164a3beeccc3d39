"""Nested lists and wrappers: Residual(PreNorm(fn)), to_qkv without a module per projection."""

import torch
import torch.nn.functional as F
from torch import nn


class GELU(nn.Module):
    def forward(self, x):
        return F.gelu(x, approximate="tanh")


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x) + x


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        n = x.shape[1]
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        mask = torch.ones((n, n), device=x.device).triu_(1).bool()
        dots.masked_fill_(mask, -torch.finfo(dots.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", self.attend(dots), v)
        return self.to_out(out.transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    def __init__(self, dim, depth, heads, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            feed_forward = nn.Sequential(
                nn.Linear(dim, dim * 4), GELU(), nn.Linear(dim * 4, dim), nn.Dropout(dropout)
            )
            self.layers.append(
                nn.ModuleList(
                    [
                        Residual(PreNorm(dim, Attention(dim, heads, dropout))),
                        Residual(PreNorm(dim, feed_forward)),
                    ]
                )
            )

    def forward(self, x):
        for attn, ff in self.layers:
            x = ff(attn(x))
        return x


class Autoregressive(nn.Module):
    def __init__(self, *, num_tokens, dim, depth, heads, max_seq_len):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.transformer = Transformer(dim, depth, heads)
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, x):
        pos = self.pos_emb(torch.arange(x.shape[1], device=x.device))
        x = self.token_emb(x) + pos[None]
        x = self.transformer(x)
        return self.to_logits(x)
