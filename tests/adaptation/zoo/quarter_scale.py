"""Whisper-like: D**-0.25 on q and on k, bare position table, a dataclass as the output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Dimensions:
    n_vocab: int
    n_ctx: int
    n_state: int
    n_head: int
    n_layer: int


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n_batch, n_ctx, n_state = x.shape
        scale = (n_state // self.n_head) ** -0.25
        q = self.query(x).view(n_batch, n_ctx, self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = self.key(x).view(n_batch, n_ctx, self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = self.value(x).view(n_batch, n_ctx, self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k + mask[:n_ctx, :n_ctx]
        w = F.softmax(qk, dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.mlp_in = nn.Linear(n_state, n_state * 4)
        self.act = act
        self.mlp_out = nn.Linear(n_state * 4, n_state)
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask)
        return x + self.mlp_out(self.act(self.mlp_in(self.mlp_ln(x))))


class TextDecoder(nn.Module):
    def __init__(self, dims: Dimensions):
        super().__init__()
        self.token_embedding = nn.Embedding(dims.n_vocab, dims.n_state)
        self.positional_embedding = nn.Parameter(torch.empty(dims.n_ctx, dims.n_state).normal_())
        self.blocks = nn.ModuleList(
            ResidualAttentionBlock(
                dims.n_state, dims.n_head, lambda x: F.gelu(x, approximate="tanh")
            )
            for _ in range(dims.n_layer)
        )
        self.ln = nn.LayerNorm(dims.n_state)
        mask = torch.empty(dims.n_ctx, dims.n_ctx).fill_(-float("inf")).triu_(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Output:
        x = self.token_embedding(x) + self.positional_embedding[: x.shape[-1]]
        for block in self.blocks:
            x = block(x, self.mask)
        x = self.ln(x)
        logits = x @ torch.transpose(self.token_embedding.weight, 0, 1)
        return Output(logits=logits, hidden=x)
