"""Not a GPT-2: like nanochat, with QK norm, value embeddings, factors of the stream, a soft cap."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ChatConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def has_values(layer, n_layer):
    return layer % 2 == (n_layer - 1) % 2


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.n_head = config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.v = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.gate = (
            nn.Linear(12, config.n_head, bias=False) if has_values(layer, config.n_layer) else None
        )

    def forward(self, x, ve, cos, sin):
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.n_head, self.head_dim)
        k = self.k(x).view(B, T, self.n_head, self.head_dim)
        v = self.v(x).view(B, T, self.n_head, self.head_dim)
        if ve is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., :12]))
            v = v + gate.unsqueeze(-1) * ve.view(B, T, self.n_head, self.head_dim)
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos, sin):
        x = x + self.attn(norm(x), ve, cos, sin)
        return x + self.mlp(norm(x))


class Chat(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid = nn.Parameter(torch.ones(config.n_layer))
        self.x0 = nn.Parameter(torch.full((config.n_layer,), 0.1))
        self.ve = nn.ModuleDict(
            {
                str(i): nn.Embedding(config.vocab_size, config.n_embd)
                for i in range(config.n_layer)
                if has_values(i, config.n_layer)
            }
        )
        D = config.n_embd // config.n_head
        angle = torch.outer(
            torch.arange(config.block_size).float(), 10000 ** (-torch.arange(0, D, 2).float() / D)
        )
        self.register_buffer("cos", angle.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angle.sin()[None, :, None], persistent=False)

    def forward(self, idx, targets=None):
        T = idx.shape[1]
        x = norm(self.wte(idx))
        x0 = x
        for i, block in enumerate(self.h):
            x = self.resid[i] * x + self.x0[i] * x0
            ve = self.ve[str(i)](idx) if str(i) in self.ve else None
            x = block(x, ve, self.cos[:, :T], self.sin[:, :T])
        logits = self.lm_head(norm(x))
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
