"""Everything by hand: Linear, Embedding, rsqrt norm, exp/sum softmax, GELU with its constants."""

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * 0.02)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Embedding(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.table = nn.Parameter(torch.randn(n, dim) * 0.02)

    def forward(self, ids):
        return self.table[ids]


class Norm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        m = x.mean(dim=-1, keepdim=True)
        variance = torch.mean((x - m) ** 2, dim=-1, keepdim=True)
        return (x - m) * torch.rsqrt(variance + self.eps) * self.gain + self.shift


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def softmax(x):
    e = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return e / e.sum(dim=-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = Linear(dim, dim)
        self.to_k = Linear(dim, dim)
        self.to_v = Linear(dim, dim)
        self.to_out = Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        D = C // self.heads
        q = self.to_q(x).reshape(B, T, self.heads, D).permute(0, 2, 1, 3)
        k = self.to_k(x).reshape(B, T, self.heads, D).permute(0, 2, 3, 1)
        v = self.to_v(x).reshape(B, T, self.heads, D).permute(0, 2, 1, 3)
        scores = (q @ k) / D**0.5
        visible = torch.ones(T, T, device=x.device).tril()
        scores = scores.masked_fill(visible == 0, float("-inf"))
        out = softmax(scores) @ v
        out = out.permute(0, 2, 1, 3).reshape(B, T, C)
        return self.to_out(out)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = Linear(dim, 4 * dim)
        self.down = Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm_a = Norm(dim)
        self.attention = Attention(dim, heads)
        self.norm_b = Norm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x):
        x = x + self.attention(self.norm_a(x))
        x = x + self.feed_forward(self.norm_b(x))
        return x


class GPT2FromScratch(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, block_size):
        super().__init__()
        self.tokens = Embedding(vocab_size, n_embd)
        self.places = Embedding(block_size, n_embd)
        self.layers = nn.ModuleList([Layer(n_embd, n_head) for _ in range(n_layer)])
        self.norm = Norm(n_embd)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.table.transpose(0, 1)
