"""Functions on plain dictionaries of [in, out] parameters, as a NumPy port would have it."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def linear(x, w, b):
    return x @ w + b


def layer_norm(x, g, b):
    return F.layer_norm(x, g.shape, weight=g, bias=b, eps=1e-5)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def ffn(x, p):
    return linear(gelu(linear(x, p["fc_w"], p["fc_b"])), p["out_w"], p["out_b"])


def attention(q, k, v, mask):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask, dim=-1) @ v


def mha(x, p, n_head):
    qkv = torch.split(linear(x, p["attn_w"], p["attn_b"]), x.shape[-1], dim=-1)
    q, k, v = (torch.stack(t.chunk(n_head, dim=-1), dim=1) for t in qkv)
    mask = (1 - torch.tril(torch.ones(x.shape[1], x.shape[1], device=x.device))) * -1e10
    heads = attention(q, k, v, mask)
    return linear(torch.cat(heads.unbind(dim=1), dim=-1), p["proj_w"], p["proj_b"])


def transformer_block(x, p, n_head):
    x = x + mha(layer_norm(x, p["ln1_g"], p["ln1_b"]), p, n_head)
    x = x + ffn(layer_norm(x, p["ln2_g"], p["ln2_b"]), p)
    return x


def block_parameters(c):
    shapes = {
        "ln1_b": (c,),
        "attn_w": (c, 3 * c),
        "attn_b": (3 * c,),
        "proj_w": (c, c),
        "proj_b": (c,),
        "ln2_b": (c,),
        "fc_w": (c, 4 * c),
        "fc_b": (4 * c,),
        "out_w": (4 * c, c),
        "out_b": (c,),
    }
    drawn = {name: nn.Parameter(0.02 * torch.randn(shape)) for name, shape in shapes.items()}
    gains = {name: nn.Parameter(torch.ones(c)) for name in ("ln1_g", "ln2_g")}
    return nn.ParameterDict({**drawn, **gains})


class PicoGPT(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_embd, n_head, n_layer):
        super().__init__()
        self.n_head = n_head
        self.wte = nn.Parameter(0.02 * torch.randn(n_vocab, n_embd))
        self.wpe = nn.Parameter(0.01 * torch.randn(n_ctx, n_embd))
        self.params = nn.ModuleList([block_parameters(n_embd) for _ in range(n_layer)])
        self.ln_f = nn.ParameterList([torch.ones(n_embd), torch.zeros(n_embd)])

    def forward(self, inputs):
        x = self.wte[inputs] + self.wpe[torch.arange(inputs.shape[-1], device=inputs.device)]
        for p in self.params:
            x = transformer_block(x, p, self.n_head)
        return layer_norm(x, *self.ln_f) @ self.wte.T
