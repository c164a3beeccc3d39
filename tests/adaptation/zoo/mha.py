"""nn.MultiheadAttention, batch first, boolean attn_mask made on the fly, dropout p everywhere."""

import torch
import torch.nn.functional as F
from torch import nn


class DecoderBlock(nn.Module):
    def __init__(self, n_embd, n_head, dropout=0.1):
        super().__init__()
        self.ln_attn = nn.LayerNorm(n_embd)
        self.mha = nn.MultiheadAttention(n_embd, n_head, dropout=dropout, batch_first=True)
        self.ln_mlp = nn.LayerNorm(n_embd)
        self.fc_in = nn.Linear(n_embd, 4 * n_embd)
        self.fc_out = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def mlp(self, x):
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))

    def forward(self, x, mask):
        normed = self.ln_attn(x)
        attended, _ = self.mha(normed, normed, normed, attn_mask=mask, need_weights=False)
        x = x + self.dropout(attended)
        x = x + self.dropout(self.mlp(self.ln_mlp(x)))
        return x


class MiniGPT(nn.Module):
    def __init__(self, vocab_size, max_len, n_embd, n_head, n_layer):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, n_embd)
        self.pos = nn.Embedding(max_len, n_embd)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([DecoderBlock(n_embd, n_head) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        t = ids.size(1)
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=ids.device), diagonal=1)
        x = self.drop(self.tok(ids) + self.pos(torch.arange(t, device=ids.device)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln(x))
