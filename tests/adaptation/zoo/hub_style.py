"""transformers-like: q_proj/k_proj/v_proj/out_proj, a body and a head class, an output class."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn


@dataclass
class CausalLMOutput:
    logits: torch.Tensor
    loss: Optional[torch.Tensor] = None  # noqa: UP045


class GPTConfig:
    def __init__(
        self,
        vocab_size=50257,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.1,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.hidden_dropout_prob = hidden_dropout_prob


class GPTAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def _shape(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query = self._shape(self.q_proj(hidden_states))
        key = self._shape(self.k_proj(hidden_states))
        value = self._shape(self.v_proj(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2)).div(self.head_dim**0.5)
        scores = scores + attention_mask
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous()
        context = context.view(*context.shape[:2], self.num_heads * self.head_dim)
        return self.out_proj(context)


class GPTLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = GPTAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.activation = nn.GELU(approximate="tanh")
        self.output = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, attention_mask):
        residual = hidden_states
        hidden_states = self.layernorm_before(hidden_states)
        hidden_states = self.attention(hidden_states, attention_mask)
        hidden_states = residual + self.dropout(hidden_states)

        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.output(self.activation(self.intermediate(hidden_states)))
        hidden_states = residual + self.dropout(hidden_states)
        return hidden_states


class GPTBody(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.register_buffer(
            "position_ids",
            torch.arange(config.max_position_embeddings).expand((1, -1)),
            persistent=False,
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layer = nn.ModuleList([GPTLayer(config) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def causal_mask(self, length, dtype, device):
        mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=device)
        cond = torch.arange(length, device=device)
        mask = mask.masked_fill(cond < (cond + 1).view(length, 1), 0)
        return mask[None, None, :, :]

    def forward(self, input_ids):
        length = input_ids.shape[1]
        inputs_embeds = self.word_embeddings(input_ids)
        position_embeds = self.position_embeddings(self.position_ids[:, :length])
        hidden_states = self.dropout(inputs_embeds + position_embeds)
        mask = self.causal_mask(length, hidden_states.dtype, hidden_states.device)
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
        return self.final_layernorm(hidden_states)


class GPTForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = GPTBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        hidden_states = self.model(input_ids)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            shifted = logits[:, :-1].reshape(-1, logits.size(-1))
            loss = nn.functional.cross_entropy(shifted, labels[:, 1:].reshape(-1))
        return CausalLMOutput(logits=logits, loss=loss)
