"""The mask multiplies the softmax, which is then renormalised; the model returns a dict."""

import torch
import torch.nn as nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads, max_len):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("tril", torch.ones(max_len, max_len).tril())

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k = k.view(b, n, self.heads, self.head_dim).transpose(1, 2)
        v = v.view(b, n, self.heads, self.head_dim).transpose(1, 2)
        attention = F.softmax(q @ k.transpose(2, 3) / self.head_dim**0.5, dim=-1)
        attention = attention * self.tril[:n, :n]
        attention = attention / attention.sum(dim=-1, keepdim=True)
        return self.out((attention @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, heads, max_len):
        super().__init__()
        self.ln_a = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, max_len)
        self.ln_b = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.contract = nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = self.attention(self.ln_a(x)) + x
        y = F.gelu(self.expand(self.ln_b(x)), approximate="tanh")
        return self.contract(y) + x


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, heads, max_len = config["dim"], config["heads"], config["max_len"]
        self.embed_tokens = nn.Embedding(config["vocab"], dim)
        self.embed_positions = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, max_len) for _ in range(config["layers"])])
        self.ln_out = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, config["vocab"], bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape)
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for block in self.blocks:
            x = block(x)
        hidden = self.ln_out(x)
        return {"logits": self.to_logits(hidden), "hidden": hidden}
