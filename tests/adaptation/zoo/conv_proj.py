"""nn.Conv1d with kernel size 1 for every projection, on (B, C, T), transposed back and forth."""

import torch
import torch.nn.functional as F
from torch import nn


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (B, C, T)."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        x = x.transpose(1, -1)
        x = F.layer_norm(x, (self.channels,), self.gamma, self.beta, self.eps)
        return x.transpose(1, -1)


class ConvAttention(nn.Module):
    def __init__(self, channels, n_heads, p_dropout):
        super().__init__()
        self.n_heads = n_heads
        self.k_channels = channels // n_heads
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, channels, 1)
        self.drop = nn.Dropout(p_dropout)

    def forward(self, x):
        b, d, t = x.shape
        q = self.conv_q(x).view(b, self.n_heads, self.k_channels, t).transpose(2, 3)
        k = self.conv_k(x).view(b, self.n_heads, self.k_channels, t).transpose(2, 3)
        v = self.conv_v(x).view(b, self.n_heads, self.k_channels, t).transpose(2, 3)
        scores = torch.matmul(q / self.k_channels**0.5, k.transpose(-2, -1))
        mask = torch.ones(t, t, device=x.device).tril()[None, None]
        scores = scores.masked_fill(mask == 0, -1e4)
        p_attn = self.drop(F.softmax(scores, dim=-1))
        output = torch.matmul(p_attn, v)
        output = output.transpose(2, 3).contiguous().view(b, d, t)
        return self.conv_o(output)


class ConvFFN(nn.Module):
    def __init__(self, channels, p_dropout):
        super().__init__()
        self.conv_1 = nn.Conv1d(channels, 4 * channels, 1)
        self.conv_2 = nn.Conv1d(4 * channels, channels, 1)
        self.drop = nn.Dropout(p_dropout)

    def forward(self, x):
        x = F.gelu(self.conv_1(x), approximate="tanh")
        return self.conv_2(self.drop(x))


class ConvGPT(nn.Module):
    def __init__(self, n_vocab, channels, n_heads, n_layers, max_steps, p_dropout=0.1):
        super().__init__()
        self.n_layers = n_layers
        self.emb = nn.Embedding(n_vocab, channels)
        self.pos = nn.Embedding(max_steps, channels)
        self.drop = nn.Dropout(p_dropout)
        self.attn_layers = nn.ModuleList()
        self.norm_layers_1 = nn.ModuleList()
        self.ffn_layers = nn.ModuleList()
        self.norm_layers_2 = nn.ModuleList()
        for _ in range(n_layers):
            self.attn_layers.append(ConvAttention(channels, n_heads, p_dropout))
            self.norm_layers_1.append(ChannelNorm(channels))
            self.ffn_layers.append(ConvFFN(channels, p_dropout))
            self.norm_layers_2.append(ChannelNorm(channels))
        self.last_norm = ChannelNorm(channels)
        self.proj = nn.Conv1d(channels, n_vocab, 1, bias=False)

    def forward(self, tokens):
        steps = torch.arange(tokens.size(1), device=tokens.device)
        x = self.emb(tokens) + self.pos(steps)
        x = x.transpose(1, 2)
        for i in range(self.n_layers):
            y = self.attn_layers[i](self.norm_layers_1[i](x))
            x = x + self.drop(y)
            y = self.ffn_layers[i](self.norm_layers_2[i](x))
            x = x + self.drop(y)
        x = self.last_norm(x)
        return self.proj(x).transpose(1, 2)
