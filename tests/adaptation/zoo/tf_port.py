"""A port of the TensorFlow code: Conv1D [in, out] with addmm, w and b mask, g/b norm, past."""

import math

import torch
from torch import nn


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Norm(nn.Module):
    def __init__(self, nx, e=1e-5):
        super().__init__()
        self.g = nn.Parameter(torch.ones(nx))
        self.b = nn.Parameter(torch.zeros(nx))
        self.e = e

    def forward(self, x):
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.e)
        return self.g * x + self.b


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.w = nn.Parameter(0.02 * torch.randn(nx, nf))
        self.b = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.b, x.view(-1, x.size(-1)), self.w).view(*out)


class Attention(nn.Module):
    def __init__(self, nx, n_ctx, n_head, scale=True):
        super().__init__()
        self.register_buffer("b", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx))
        self.n_head = n_head
        self.n_state = nx
        self.scale = scale
        self.c_attn = Conv1D(nx * 3, nx)
        self.c_proj = Conv1D(nx, nx)

    def _attn(self, q, k, v):
        w = torch.matmul(q, k)
        if self.scale:
            w = w / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        b = self.b[:, :, ns - nd : ns, :ns]
        w = w * b - 1e4 * (1 - b)
        w = nn.functional.softmax(w, dim=-1)
        return torch.matmul(w, v)

    def split_heads(self, x, k=False):
        x = x.view(*x.size()[:-1], self.n_head, x.size(-1) // self.n_head)
        return x.permute(0, 2, 3, 1) if k else x.permute(0, 2, 1, 3)

    def merge_heads(self, x):
        x = x.permute(0, 2, 1, 3).contiguous()
        return x.view(*x.size()[:-2], x.size(-2) * x.size(-1))

    def forward(self, x, layer_past=None):
        query, key, value = self.c_attn(x).split(self.n_state, dim=2)
        query = self.split_heads(query)
        key = self.split_heads(key, k=True)
        value = self.split_heads(value)
        if layer_past is not None:
            key = torch.cat((layer_past[0].transpose(-2, -1), key), dim=-1)
            value = torch.cat((layer_past[1], value), dim=-2)
        present = torch.stack((key.transpose(-2, -1), value))
        a = self._attn(query, key, value)
        return self.c_proj(self.merge_heads(a)), present


class MLP(nn.Module):
    def __init__(self, n_state, nx):
        super().__init__()
        self.c_fc = Conv1D(n_state, nx)
        self.c_proj = Conv1D(nx, n_state)

    def forward(self, x):
        return self.c_proj(gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, nx, n_ctx, n_head):
        super().__init__()
        self.ln_1 = Norm(nx)
        self.attn = Attention(nx, n_ctx, n_head)
        self.ln_2 = Norm(nx)
        self.mlp = MLP(4 * nx, nx)

    def forward(self, x, layer_past=None):
        a, present = self.attn(self.ln_1(x), layer_past=layer_past)
        x = x + a
        m = self.mlp(self.ln_2(x))
        x = x + m
        return x, present


class GPT2(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_embd, n_layer, n_head):
        super().__init__()
        self.wte = nn.Embedding(n_vocab, n_embd)
        self.wpe = nn.Embedding(n_ctx, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_ctx, n_head) for _ in range(n_layer)])
        self.ln_f = Norm(n_embd)

    def forward(self, input_ids, past=None):
        past_length = 0 if past is None else past[0][0].size(-2)
        pasts = [None] * len(self.h) if past is None else past
        position_ids = torch.arange(
            past_length, past_length + input_ids.size(-1), device=input_ids.device
        )
        position_ids = position_ids.unsqueeze(0).expand_as(input_ids)
        h = self.wte(input_ids) + self.wpe(position_ids)
        presents = []
        for block, layer_past in zip(self.h, pasts, strict=True):
            h, present = block(h, layer_past)
            presents.append(present)
        h = self.ln_f(h)
        logits = nn.functional.linear(h, self.wte.weight)
        return logits, presents
