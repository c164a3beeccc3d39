"""LitGPT-like: fused qkv viewed as (B, T, H, 3, D), SDPA with an explicit mask and scale."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.head_size = n_embd // n_head
        self.attn = nn.Linear(n_embd, 3 * n_embd, bias=True)
        self.proj = nn.Linear(n_embd, n_embd, bias=True)

    def forward(self, x, mask):
        B, T, C = x.shape
        qkv = self.attn(x).view(B, T, self.n_head, 3, self.head_size)
        q, k, v = qkv.permute(0, 2, 3, 1, 4).unbind(dim=2)
        scale = 1.0 / self.head_size**0.5
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.proj(y)


class MLP(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.fc = nn.Linear(n_embd, 4 * n_embd, bias=True)
        self.proj = nn.Linear(4 * n_embd, n_embd, bias=True)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.norm_1 = nn.LayerNorm(n_embd, eps=1e-5)
        self.attn = Attn(n_embd, n_head)
        self.norm_2 = nn.LayerNorm(n_embd, eps=1e-5)
        self.mlp = MLP(n_embd)

    def forward(self, x, mask):
        x = self.attn(self.norm_1(x), mask) + x
        return self.mlp(self.norm_2(x)) + x


class LitGPT(nn.Module):
    def __init__(self, *, padded_vocab_size, block_size, n_embd, n_head, n_layer):
        super().__init__()
        self.lm_head = nn.Linear(n_embd, padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded_vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer)),
                "ln_f": nn.LayerNorm(n_embd, eps=1e-5),
            }
        )
        mask = torch.ones(block_size, block_size, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, idx):
        T = idx.size(1)
        x = self.transformer.wte(idx)
        x = x + self.transformer.wpe(torch.arange(T, device=idx.device))
        for block in self.transformer.h:
            x = block(x, self.mask[:T, :T])
        x = self.transformer.ln_f(x)
        return self.lm_head(x)
