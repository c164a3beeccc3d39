"""One fused Linear whose thirds are value, key, query; other config names; head x @ E.T."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class ModelArgs:
    d_model: int
    n_heads: int
    depth: int
    max_seq_len: int
    n_tokens: int
    p_drop: float = 0.1


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads = args.n_heads
        self.d_head = args.d_model // args.n_heads
        self.vkq = nn.Linear(args.d_model, 3 * args.d_model)
        self.out = nn.Linear(args.d_model, args.d_model)
        self.drop = nn.Dropout(args.p_drop)

    def heads(self, t):
        return t.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)

    def forward(self, x):
        seq_len = x.shape[1]
        value, key, query = map(self.heads, self.vkq(x).chunk(3, dim=-1))
        scores = query @ key.mT / math.sqrt(self.d_head)
        mask = torch.triu(torch.full((seq_len, seq_len), float("-inf"), device=x.device), 1)
        scores = scores + mask
        weights = self.drop(scores.softmax(dim=-1))
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attn_norm = nn.LayerNorm(args.d_model, eps=1e-5)
        self.attn = Attention(args)
        self.mlp_norm = nn.LayerNorm(args.d_model, eps=1e-5)
        self.up = nn.Linear(args.d_model, 4 * args.d_model)
        self.act = nn.GELU("tanh")
        self.down = nn.Linear(4 * args.d_model, args.d_model)
        self.drop = nn.Dropout(args.p_drop)

    def forward(self, x):
        x = x + self.drop(self.attn(self.attn_norm(x)))
        x = x + self.drop(self.down(self.act(self.up(self.mlp_norm(x)))))
        return x


class LanguageModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed = nn.Embedding(args.n_tokens, args.d_model)
        self.pos_embed = nn.Embedding(args.max_seq_len, args.d_model)
        self.drop = nn.Dropout(args.p_drop)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.depth))
        self.norm = nn.LayerNorm(args.d_model, eps=1e-5)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.pos_embed(positions))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T
