"""A project of compatible and incompatible models for tests of `adapt`."""

from __future__ import annotations

import json
from pathlib import Path

GPT = '''"""A hand-written GPT-2."""

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"layers": 3, "heads": 4, "width": 24, "vocab": 97, "context": 32}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(C, dim=-1)
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class MyGPT(nn.Module):
    def __init__(self, vocab, context, width, heads, layers):
        super().__init__()
        print("built")
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        print("called")
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T
'''
TANH, ERF = 'F.gelu(self.up(self.norm_2(x)), approximate="tanh")', "F.gelu(self.up(self.norm_2(x)))"
CONFIGURED = f"""{GPT}

SMALL = {{**CONFIG, "heads": 2}}


class Configured(MyGPT):
    def __init__(self, cfg):
        super().__init__(**cfg)
"""
NO_GPT = """
from torch import nn


class MyGPT(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.mix = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        return self.mix(self.tokens(ids))[0] @ self.tokens.weight.T
"""


def write_project(folder: Path) -> None:
    """Write the project's files, most of which define a class MyGPT."""
    erf = GPT.replace(TANH, ERF)
    assert erf != GPT
    files = {
        "right.py": GPT,
        "erf.py": erf,
        "biasless.py": GPT.replace("3 * width)", "3 * width, bias=False)"),
        "configured.py": CONFIGURED,
        "other.py": NO_GPT,
        "broken.py": "class MyGPT(:\n    pass\n",
        "deeper/erf.py": erf,
        "notebook.ipynb": notebook("!pip install torch", erf, "MyGPT(**CONFIG)\n1 / 0"),
    }
    (folder / "deeper").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def notebook(*cells: str) -> str:
    """Return a notebook of code cells, as JSON."""
    found = [
        {"cell_type": "code", "source": cell, "metadata": {}, "outputs": [], "execution_count": 1}
        for cell in cells
    ]
    return json.dumps({"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def line_of(text: str, part: str) -> int:
    """Return the number of the only line that contains this text."""
    (number,) = (n for n, line in enumerate(text.splitlines(), 1) if part in line)
    return number


ERF_LINE = line_of(GPT.replace(TANH, ERF), ERF)
ERF_SOURCE = f"return x + self.down({ERF})"
