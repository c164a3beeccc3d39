"""A ModuleList of nn.TransformerEncoderLayer on (T, B, C) with a float mask buffer."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, *, vocab, width, heads, layers, context):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, width)
        self.positional_embedding = nn.Parameter(torch.zeros(context, width))
        self.resblocks = nn.ModuleList()
        for _ in range(layers):
            self.resblocks.append(
                nn.TransformerEncoderLayer(
                    width,
                    heads,
                    width * 4,
                    dropout=0.1,
                    activation=nn.GELU(approximate="tanh"),
                    norm_first=True,
                )
            )
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, vocab))
        mask = torch.full((context, context), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, text):
        length = text.shape[1]
        x = self.token_embedding(text) + self.positional_embedding[:length]
        x = x.permute(1, 0, 2)
        for resblock in self.resblocks:
            x = resblock(x, src_mask=self.attn_mask[:length, :length])
        x = x.permute(1, 0, 2)
        return self.ln_final(x) @ self.text_projection
