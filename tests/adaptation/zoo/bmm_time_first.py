"""fairseq-like: time first, q scaled in the projection's output, bmm on (B*H, T, D)."""

import torch
import torch.nn.functional as F
from torch import nn


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, attn_mask):
        tgt_len, bsz, _ = x.size()
        q = self.q_proj(x) * self.scaling
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        attn_weights = attn_weights + attn_mask.unsqueeze(0)
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(attn)


class DecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.self_attn = MultiheadAttention(embed_dim, num_heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, 4 * embed_dim)
        self.fc2 = nn.Linear(4 * embed_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, attn_mask):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = self.self_attn(x, attn_mask)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x

        residual = x
        x = self.final_layer_norm(x)
        x = F.gelu(self.fc1(x), approximate="tanh")
        x = self.fc2(x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x
        return x


class TransformerDecoder(nn.Module):
    def __init__(self, num_tokens, max_positions, embed_dim, num_heads, num_layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(num_tokens, embed_dim)
        self.embed_positions = nn.Embedding(max_positions, embed_dim)
        self.layers = nn.ModuleList([DecoderLayer(embed_dim, num_heads) for _ in range(num_layers)])
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.output_projection = nn.Linear(embed_dim, num_tokens, bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def buffered_future_mask(self, dim, device):
        return torch.triu(torch.full((dim, dim), float("-inf"), device=device), 1)

    def forward(self, prev_output_tokens):
        length = prev_output_tokens.size(1)
        positions = torch.arange(length, device=prev_output_tokens.device)
        x = self.embed_tokens(prev_output_tokens) + self.embed_positions(positions)
        x = x.transpose(0, 1)
        mask = self.buffered_future_mask(length, x.device)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.layer_norm(x)
        x = x.transpose(0, 1)
        return self.output_projection(x)
