"""All layers' weights stacked along a first dimension of single parameters, [layer, in, out]."""

import torch
import torch.nn.functional as F
from torch import nn


class StackedGPT(nn.Module):
    def __init__(self, vocab, context, width, heads, layers):
        super().__init__()
        self.heads = heads
        self.layers = layers

        def weight(*shape):
            return nn.Parameter(torch.randn(*shape) * 0.02)

        self.embed = weight(vocab, width)
        self.places = weight(context, width)
        self.norm1_scale = nn.Parameter(torch.ones(layers, width))
        self.norm1_shift = nn.Parameter(torch.zeros(layers, width))
        self.qkv_weight = weight(layers, width, 3 * width)
        self.qkv_bias = nn.Parameter(torch.zeros(layers, 3 * width))
        self.mix_weight = weight(layers, width, width)
        self.mix_bias = nn.Parameter(torch.zeros(layers, width))
        self.norm2_scale = nn.Parameter(torch.ones(layers, width))
        self.norm2_shift = nn.Parameter(torch.zeros(layers, width))
        self.up_weight = weight(layers, width, 4 * width)
        self.up_bias = nn.Parameter(torch.zeros(layers, 4 * width))
        self.down_weight = weight(layers, 4 * width, width)
        self.down_bias = nn.Parameter(torch.zeros(layers, width))
        self.norm_scale = nn.Parameter(torch.ones(width))
        self.norm_shift = nn.Parameter(torch.zeros(width))

    def norm(self, x, scale, shift):
        return F.layer_norm(x, (x.shape[-1],), scale, shift)

    def attend(self, x, i):
        b, t, c = x.shape
        qkv = x @ self.qkv_weight[i] + self.qkv_bias[i]
        q, k, v = qkv.view(b, t, 3, self.heads, c // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return y.transpose(1, 2).reshape(b, t, c) @ self.mix_weight[i] + self.mix_bias[i]

    def think(self, x, i):
        hidden = F.gelu(x @ self.up_weight[i] + self.up_bias[i], approximate="tanh")
        return hidden @ self.down_weight[i] + self.down_bias[i]

    def forward(self, ids):
        x = F.embedding(ids, self.embed) + self.places[: ids.shape[1]]
        for i in range(self.layers):
            x = x + self.attend(self.norm(x, self.norm1_scale[i], self.norm1_shift[i]), i)
            x = x + self.think(self.norm(x, self.norm2_scale[i], self.norm2_shift[i]), i)
        return F.linear(self.norm(x, self.norm_scale, self.norm_shift), self.embed)
