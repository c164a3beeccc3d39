"""Not a GPT-2: an MLP language model on the embeddings of the last few tokens."""

import torch
import torch.nn.functional as F
from torch import nn


class NeuralProbabilisticLM(nn.Module):
    def __init__(self, vocab_size, n_embd, window=3):
        super().__init__()
        self.window = window
        self.wte = nn.Embedding(vocab_size + 1, n_embd)
        self.blank = vocab_size
        self.mlp = nn.Sequential(
            nn.Linear(window * n_embd, 4 * n_embd), nn.Tanh(), nn.Linear(4 * n_embd, vocab_size)
        )

    def forward(self, idx):
        embeddings = []
        for back in range(self.window):
            shifted = F.pad(idx, (back, 0), value=self.blank)[:, : idx.shape[1]]
            embeddings.append(self.wte(shifted))
        return self.mlp(torch.cat(embeddings, dim=-1))
