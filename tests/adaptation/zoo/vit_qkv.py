"""Vision-transformer habits: reshape (B,T,3,H,D), permute, unbind; q scaled first; pos_embed."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=True, attn_drop=0.1, proj_drop=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        causal = torch.ones(N, N, dtype=torch.bool, device=x.device).tril()
        attn = attn.masked_fill(~causal, torch.finfo(attn.dtype).min)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class Mlp(nn.Module):
    def __init__(self, dim, mlp_ratio=4.0, drop=0.1):
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class Block(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class TextTransformer(nn.Module):
    def __init__(self, vocab=50257, seq_len=1024, dim=768, depth=12, num_heads=12):
        super().__init__()
        self.token_embed = nn.Embedding(vocab, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, seq_len, dim) * 0.02)
        self.pos_drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(dim, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.token_embed.weight

    def forward_features(self, tokens):
        x = self.token_embed(tokens)
        x = self.pos_drop(x + self.pos_embed[:, : x.shape[1]])
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.head(self.forward_features(tokens))
