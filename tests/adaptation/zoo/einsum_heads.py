"""einsum 'bthd,bshd->bhts' on separate Linears, a position buffer, softmax in the block's file."""

from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass(frozen=True)
class Config:
    vocab: int = 50257
    context: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.1

    @property
    def head_width(self):
        return self.width // self.heads


class SelfAttention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.q = nn.Linear(cfg.width, cfg.width)
        self.k = nn.Linear(cfg.width, cfg.width)
        self.v = nn.Linear(cfg.width, cfg.width)
        self.o = nn.Linear(cfg.width, cfg.width)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.cfg.heads, self.cfg.head_width)
        k = self.k(x).view(b, t, self.cfg.heads, self.cfg.head_width)
        v = self.v(x).view(b, t, self.cfg.heads, self.cfg.head_width)
        logits = torch.einsum("bthd,bshd->bhts", q, k) * self.cfg.head_width**-0.5
        steps = torch.arange(t, device=x.device)
        future = steps[None, :] > steps[:, None]
        logits = logits.masked_fill(future, -torch.inf)
        weights = self.dropout(torch.softmax(logits, dim=-1))
        mixed = torch.einsum("bhts,bshd->bthd", weights, v)
        return self.o(mixed.reshape(b, t, self.cfg.width))


class Block(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.norm_att = nn.LayerNorm(cfg.width)
        self.att = SelfAttention(cfg)
        self.norm_mlp = nn.LayerNorm(cfg.width)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, 4 * cfg.width),
            nn.GELU("tanh"),
            nn.Linear(4 * cfg.width, cfg.width),
        )
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x):
        h = x + self.dropout(self.att(self.norm_att(x)))
        return h + self.dropout(self.mlp(self.norm_mlp(h)))


class Transformer(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.width)
        self.positions = nn.Embedding(cfg.context, cfg.width)
        self.register_buffer("position_ids", torch.arange(cfg.context)[None])
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.unembed = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.tokens(ids) + self.positions(self.position_ids[:, :t])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))
