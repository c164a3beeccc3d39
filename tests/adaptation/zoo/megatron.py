"""Megatron-like: qkv interleaved by head, baddbmm over (B*H, T, D), logits from the embedding."""

import torch
import torch.nn.functional as F
from torch import nn


class ParallelAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, attention_dropout=0.1):
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.norm_factor = self.head_dim**0.5
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)

    def forward(self, hidden_states, attention_mask):
        b, s, _ = hidden_states.shape
        mixed = self.query_key_value(hidden_states)
        mixed = mixed.view(b, s, self.num_heads, 3 * self.head_dim)
        query, key, value = mixed.chunk(3, dim=-1)

        query = query.transpose(1, 2).reshape(b * self.num_heads, s, self.head_dim)
        key = key.permute(0, 2, 3, 1).reshape(b * self.num_heads, self.head_dim, s)
        value = value.transpose(1, 2).reshape(b * self.num_heads, s, self.head_dim)

        scores = torch.baddbmm(
            torch.zeros(b * self.num_heads, s, s, dtype=query.dtype, device=query.device),
            query,
            key,
            beta=0.0,
            alpha=1.0 / self.norm_factor,
        )
        scores = scores.view(b, self.num_heads, s, s)
        scores = scores.masked_fill(attention_mask, -10000.0)
        probs = self.attention_dropout(F.softmax(scores, dim=-1))
        context = torch.bmm(probs.view(b * self.num_heads, s, s), value)
        context = context.view(b, self.num_heads, s, self.head_dim).permute(0, 2, 1, 3)
        return self.dense(context.reshape(b, s, self.num_heads * self.head_dim))


class ParallelMLP(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, 4 * hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden_states):
        intermediate = F.gelu(self.dense_h_to_4h(hidden_states), approximate="tanh")
        return self.dense_4h_to_h(intermediate)


class TransformerLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, hidden_dropout=0.1):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.attention = ParallelAttention(hidden_size, num_attention_heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = ParallelMLP(hidden_size)
        self.hidden_dropout = nn.Dropout(hidden_dropout)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(self.input_layernorm(hidden_states), attention_mask)
        residual = hidden_states + self.hidden_dropout(attention_output)
        mlp_output = self.mlp(self.post_attention_layernorm(residual))
        return residual + self.hidden_dropout(mlp_output)


class GPTModel(nn.Module):
    def __init__(
        self,
        *,
        num_layers,
        hidden_size,
        num_attention_heads,
        max_position_embeddings,
        padded_vocab_size,
    ):
        super().__init__()
        self.word_embeddings = nn.Embedding(padded_vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.embedding_dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            [TransformerLayer(hidden_size, num_attention_heads) for _ in range(num_layers)]
        )
        self.final_layernorm = nn.LayerNorm(hidden_size)

    def forward(self, input_ids):
        s = input_ids.size(1)
        position_ids = torch.arange(s, device=input_ids.device).unsqueeze(0)
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        hidden_states = self.embedding_dropout(hidden_states)
        mask = torch.ones(s, s, device=input_ids.device).tril() < 0.5
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        hidden_states = self.final_layernorm(hidden_states)
        return F.linear(hidden_states, self.word_embeddings.weight)
