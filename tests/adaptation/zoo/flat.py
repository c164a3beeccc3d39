"""One flat class: a ModuleList per kind of layer and a forward that spells everything out."""

import torch
import torch.nn.functional as F
from torch import nn


class FlatGPT(nn.Module):
    def __init__(self, vocab_size=50257, d=768, n_heads=12, n_layers=12, max_t=1024, p=0.1):
        super().__init__()
        self.d, self.n_heads, self.n_layers = d, n_heads, n_layers
        self.token = nn.Embedding(vocab_size, d)
        self.position = nn.Embedding(max_t, d)
        self.norm1 = nn.ModuleList([nn.LayerNorm(d) for _ in range(n_layers)])
        self.wq = nn.ModuleList([nn.Linear(d, d) for _ in range(n_layers)])
        self.wk = nn.ModuleList([nn.Linear(d, d) for _ in range(n_layers)])
        self.wv = nn.ModuleList([nn.Linear(d, d) for _ in range(n_layers)])
        self.wo = nn.ModuleList([nn.Linear(d, d) for _ in range(n_layers)])
        self.norm2 = nn.ModuleList([nn.LayerNorm(d) for _ in range(n_layers)])
        self.w1 = nn.ModuleList([nn.Linear(d, 4 * d) for _ in range(n_layers)])
        self.w2 = nn.ModuleList([nn.Linear(4 * d, d) for _ in range(n_layers)])
        self.norm_out = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab_size, bias=False)
        self.dropout = nn.Dropout(p)

    def heads(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.n_heads, -1).transpose(1, 2)

    def forward(self, tokens):
        b, t = tokens.shape
        x = self.token(tokens) + self.position(torch.arange(t, device=tokens.device))
        x = self.dropout(x)
        for i in range(self.n_layers):
            y = self.norm1[i](x)
            q, k, v = (
                self.heads(self.wq[i](y)),
                self.heads(self.wk[i](y)),
                self.heads(self.wv[i](y)),
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = self.wo[i](y.transpose(1, 2).reshape(b, t, self.d))
            x = x + self.dropout(y)
            y = self.norm2[i](x)
            y = self.w2[i](F.gelu(self.w1[i](y), approximate="tanh"))
            x = x + self.dropout(y)
        return self.head(self.norm_out(x))
