"""A loop over heads that slices one fused projection; the whole block in one class; list config."""

import math

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.size = size
        self.heads = heads
        self.before_attention = nn.LayerNorm(size)
        self.project_in = nn.Linear(size, size * 3)
        self.project_out = nn.Linear(size, size)
        self.before_mlp = nn.LayerNorm(size)
        self.hidden = nn.Linear(size, size * 4)
        self.back = nn.Linear(size * 4, size)

    def attention(self, x):
        n = x.shape[1]
        step = self.size // self.heads
        projected = self.project_in(x)
        q = projected[..., : self.size]
        k = projected[..., self.size : 2 * self.size]
        v = projected[..., 2 * self.size :]
        mask = torch.full((n, n), float("-inf"), device=x.device).triu(1)
        results = []
        for head in range(self.heads):
            part = slice(head * step, (head + 1) * step)
            score = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(step)
            weight = torch.softmax(score + mask, dim=2)
            results.append(weight @ v[..., part])
        return self.project_out(torch.cat(results, dim=2))

    def mlp(self, x):
        h = self.hidden(x)
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.back(h)

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        x = x + self.mlp(self.before_mlp(x))
        return x


class SimpleGPT(nn.Module):
    def __init__(self, words, size, heads, depth, length):
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.places = nn.Parameter(torch.randn(length, size) / 100)
        self.blocks = nn.ModuleList([Block(size, heads) for _ in range(depth)])
        self.last = nn.LayerNorm(size)

    def forward(self, ids):
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return torch.matmul(self.last(x), self.words.weight.t())
