"""torch's own nn.TransformerEncoder, norm first, with a causal mask and a tanh-GELU callable."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class TorchGPT(nn.Module):
    def __init__(self, ntoken, d_model, nhead, nlayers, max_len, dropout=0.1):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, d_model)
        self.pos_encoder = nn.Embedding(max_len, d_model)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            d_model,
            nhead,
            dim_feedforward=4 * d_model,
            dropout=dropout,
            activation=partial(F.gelu, approximate="tanh"),
            layer_norm_eps=1e-5,
            batch_first=True,
            norm_first=True,
        )
        self.transformer = nn.TransformerEncoder(
            layer, nlayers, norm=nn.LayerNorm(d_model), enable_nested_tensor=False
        )
        self.decoder = nn.Linear(d_model, ntoken, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, src):
        t = src.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=src.device)
        x = self.encoder(src) + self.pos_encoder(torch.arange(t, device=src.device))
        x = self.drop(x)
        x = self.transformer(x, mask=mask, is_causal=True)
        return self.decoder(x)
