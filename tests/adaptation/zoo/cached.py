"""A key-value cache and a mask as optional arguments; torch.where on finfo.min; (logits, cache)."""

import torch
from torch import nn


class CachedAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.kv_proj = nn.Linear(hidden, 2 * hidden)
        self.o_proj = nn.Linear(hidden, hidden)
        self.attn_drop = nn.Dropout(0.1)

    def split(self, x):
        batch, length, hidden = x.shape
        return x.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

    def forward(self, x, cache=None, mask=None):
        k, v = self.kv_proj(x).chunk(2, dim=-1)
        q, k, v = self.split(self.q_proj(x)), self.split(k), self.split(v)
        if cache is not None:
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
        n_query, n_key = q.shape[2], k.shape[2]
        if mask is None:
            mask = torch.ones(n_query, n_key, dtype=torch.bool, device=x.device)
            mask = mask.tril(n_key - n_query)
        q = q * q.shape[-1] ** -0.5
        scores = q @ k.transpose(-1, -2)
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        weights = self.attn_drop(torch.softmax(scores, dim=-1))
        out = (weights @ v).transpose(1, 2).flatten(2)
        return self.o_proj(out), (k, v)


class CachedBlock(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=1e-05)
        self.attn = CachedAttention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden, eps=1e-05)
        self.fc = nn.Linear(hidden, hidden * 4)
        self.act = nn.GELU(approximate="tanh")
        self.proj = nn.Linear(hidden * 4, hidden)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, cache=None, mask=None):
        a, cache = self.attn(self.ln_1(x), cache, mask)
        x = x + self.drop(a)
        x = x + self.drop(self.proj(self.act(self.fc(self.ln_2(x)))))
        return x, cache


class CachedGPT(nn.Module):
    def __init__(self, vocab_size, n_ctx, hidden, heads, layers):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, hidden)
        self.wpe = nn.Embedding(n_ctx, hidden)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([CachedBlock(hidden, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(hidden, eps=1e-05)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, cache=None, mask=None):
        start = 0 if cache is None else cache[0][0].shape[2]
        position = torch.arange(start, start + idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(position)[None])
        new_cache = []
        for i, block in enumerate(self.blocks):
            x, block_cache = block(x, None if cache is None else cache[i], mask)
            new_cache.append(block_cache)
        return self.lm_head(self.ln_f(x)), new_cache
