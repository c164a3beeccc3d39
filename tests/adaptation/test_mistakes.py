"""Mistakes in a learner's file are reported at their lines, and the correct file is proved."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest

from compat import Adaptation, Finding, ParityError, adapt, open_checkpoint
from compat.adaptation.repair.repair import Search, Target
from compat.summary import place

pytestmark = pytest.mark.usefixtures("shared_reference")

Edits = list[tuple[str, str]]  # old and new text

GPT = """
import math
import torch
from torch import nn
import torch.nn.functional as F


class LayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift


class Attention(nn.Module):
    def __init__(self, dim, heads, context):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.W_query = nn.Linear(dim, dim)
        self.W_key = nn.Linear(dim, dim)
        self.W_value = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))

    def forward(self, x):
        B, T, C = x.shape
        keys = self.W_key(x)
        queries = self.W_query(x)
        values = self.W_value(x)
        keys = keys.view(B, T, self.heads, self.head_dim).transpose(1, 2)
        queries = queries.view(B, T, self.heads, self.head_dim).transpose(1, 2)
        values = values.view(B, T, self.heads, self.head_dim).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3) / self.head_dim ** 0.5
        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        weights = self.drop(weights)
        out = (weights @ values).transpose(1, 2).contiguous().view(B, T, C)
        return self.out_proj(out)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, dim, heads, context):
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.att = Attention(dim, heads, context)
        self.norm2 = LayerNorm(dim)
        self.ff = FeedForward(dim)

    def forward(self, x):
        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = x + shortcut
        return x


class GPT(nn.Module):
    def __init__(self, vocab_size, context_length, emb_dim, n_heads, n_layers):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, emb_dim)
        self.pos_emb = nn.Embedding(context_length, emb_dim)
        blocks = [Block(emb_dim, n_heads, context_length) for _ in range(n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = LayerNorm(emb_dim)
        self.head = nn.Linear(emb_dim, vocab_size, bias=False)

    def forward(self, ids):
        B, T = ids.shape
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(T, device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        return self.head(x)
"""
ATTENTION = "    def forward(self, x):\n        B, T, C = x.shape\n"
BLOCK = "    def forward(self, x):\n        shortcut = x\n"
LOOP = "        for block in self.blocks:\n"
HEAD = "        self.head = nn"
PREVIOUS = "torch.cat([torch.zeros_like({0}[:, :1]), {0}[:, :-1]], dim=1)"
GELU = 'F.gelu(self.up(x), approximate="tanh")'

# The edits, the code, and part of the line that the finding names.
MISTAKES: dict[str, tuple[Edits, str, str]] = {
    "a norm of the token embedding": (
        [
            (HEAD, f"        self.tok_norm = LayerNorm(emb_dim)\n{HEAD}"),
            ("self.tok_emb(ids) +", "self.tok_norm(self.tok_emb(ids)) +"),
        ],
        "extra_ln",
        "self.tok_norm(self.tok_emb(ids))",
    ),
    "vectors of length 1 after a norm": (
        [("        x = self.att(x)\n", "        x = self.att(F.normalize(x, dim=-1))\n")],
        "extra_ln",
        "F.normalize(x, dim=-1)",
    ),
    "vectors of length 1 before a norm": (
        [("        x = self.norm2(x)\n", "        x = self.norm2(F.normalize(x, dim=-1))\n")],
        "extra_ln",
        "F.normalize(x, dim=-1)",
    ),
    "hidden states of length 1 after the last norm": (
        [("return self.head(x)", "return self.head(F.normalize(x, dim=-1))")],
        "extra_ln",
        "F.normalize(x, dim=-1)",
    ),
    "batch norms": (
        [
            ("self.norm1 = LayerNorm(dim)", "self.norm1 = nn.BatchNorm1d(dim)"),
            ("self.norm1(x)", "self.norm1(x.mT).mT"),
        ],
        "other_norm",
        "nn.BatchNorm1d(dim)",
    ),
    "instance norms": (
        [
            ("self.norm2 = LayerNorm(dim)", "self.norm2 = nn.InstanceNorm1d(dim, affine=True)"),
            ("self.norm2(x)", "self.norm2(x.mT).mT"),
        ],
        "other_norm",
        "nn.InstanceNorm1d(dim, affine=True)",
    ),
    "a group norm": (
        [
            ("self.final_norm = LayerNorm(", "self.final_norm = nn.GroupNorm(2, "),
            ("self.final_norm(x)", "self.final_norm(x.mT).mT"),
        ],
        "other_norm",
        "nn.GroupNorm(2, ",
    ),
    "weights that are transposed": (
        [("(weights @ values)", "(weights.transpose(-2, -1) @ values)")],
        "other_attention",
        "weights.transpose(-2, -1) @ values",
    ),
    "the highest four weights": (
        [
            (
                "        weights = self.drop(",
                "        low = weights.topk(min(4, T), dim=-1).values[..., -1:]\n"
                "        weights = weights.masked_fill(weights < low, 0)\n"
                "        weights = weights / weights.sum(-1, keepdim=True)\n"
                "        weights = self.drop(",
            )
        ],
        "other_attention",
        "scores = ",
    ),
    "a mask that multiplies infinity by zero": (
        [
            (
                'scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))',
                'scores = scores + self.mask[:T, :T] * float("-inf")',
            )
        ],
        "nan_scores",
        'self.mask[:T, :T] * float("-inf")',
    ),
    "positive scores that are divided by their sum": (
        [
            ('float("-inf")', "0.0"),
            (
                "torch.softmax(scores, dim=-1)",
                "F.relu(scores) / (F.relu(scores).sum(-1, keepdim=True) + 1e-6)",
            ),
        ],
        "other_attention",
        "scores = ",
    ),
    "a branch that is subtracted": (
        [
            (
                "        x = self.att(x)\n        x = x + shortcut\n",
                "        x = self.att(x)\n        x = shortcut - x\n",
            )
        ],
        "residual_weights",
        "x = shortcut - x",
    ),
    "keys that are activated": (
        [("keys = self.W_key(x)", "keys = F.relu(self.W_key(x))")],
        "extra_operation",
        "keys = F.relu(self.W_key(x))",
    ),
    "values that are activated": (
        [("values = self.W_value(x)", "values = F.relu(self.W_value(x))")],
        "extra_operation",
        "values = F.relu(self.W_value(x))",
    ),
    "positions that are normalized": (
        [
            (
                "self.pos_emb(torch.arange(T, device=ids.device))",
                "F.normalize(self.pos_emb(torch.arange(T, device=ids.device)), dim=-1)",
            )
        ],
        "other_embedding",
        "F.normalize(self.pos_emb(",
    ),
    "the query alone is normalized": (
        [("queries = self.W_query(x)", "queries = F.layer_norm(self.W_query(x), (C,))")],
        "extra_operation",
        "queries = F.layer_norm(self.W_query(x), (C,))",
    ),
    "positions that are subtracted": (
        [("self.tok_emb(ids) + self.pos_emb", "self.tok_emb(ids) - self.pos_emb")],
        "scaled_embedding",
        "self.tok_emb(ids) - self.pos_emb",
    ),
    "the mean over all positions": (
        [("return self.head(x)", "return self.head(x.mean(dim=1))")],
        "pooled_positions",
        "x.mean(dim=1)",
    ),
    "positions that multiply the tokens": (
        [("self.tok_emb(ids) +", "self.tok_emb(ids) *")],
        "other_embedding",
        "self.tok_emb(ids) *",
    ),
    "positions that scale the tokens": (
        [("self.tok_emb(ids) + self.pos_emb", "self.tok_emb(ids) * 2 ** self.pos_emb")],
        "other_embedding",
        "self.tok_emb(ids) *",
    ),
    "one output less than tokens": (
        [("nn.Linear(emb_dim, vocab_size, bias=False)", "nn.Linear(emb_dim, vocab_size - 1)")],
        "vocab_mismatch",
        "vocab_size - 1",
    ),
    "the keys of the tokens before": (
        [
            (
                "        keys = keys.view(",
                f"        keys = {PREVIOUS.format('keys')}\n        keys = keys.view(",
            )
        ],
        "time_shift",
        "keys = torch.cat(",
    ),
    "attention to the tokens before": (
        [
            (
                "        x = self.att(x)\n",
                f"        x = {PREVIOUS.format('x')}\n        x = self.att(x)\n",
            )
        ],
        "time_shift",
        "x = torch.cat(",
    ),
    "attention to the tokens before, shifted before the norm": (
        [
            (
                "        x = self.norm1(x)\n",
                f"        x = {PREVIOUS.format('x')}\n        x = self.norm1(x)\n",
            )
        ],
        "time_shift",
        "x = torch.cat(",
    ),
    "an assertion that texts are short": (
        [("        B, T = ids.shape\n", "        B, T = ids.shape\n        assert T <= 20\n")],
        "refused_input",
        "assert T <= 20",
    ),
    "ids moved by a start token": (
        [
            (
                "        x = self.tok_emb(ids)",
                f"        ids = {PREVIOUS.format('ids')}\n        x = self.tok_emb(ids)",
            )
        ],
        "time_shift",
        "ids = torch.cat(",
    ),
    "a mask whose result is not used": (
        [("scores = scores.masked_fill(", "scores.masked_fill(")],
        "no_mask",
        "scores.masked_fill(",
    ),
    "eps subtracted from the standard deviation": (
        [
            (
                "        return self.scale * (x - mean) / torch.sqrt(var + 1e-5)",
                "        centred = x - mean\n        std = torch.sqrt(var)\n"
                "        return self.scale * centred / (std - 1e-5)",
            )
        ],
        "eps_outside_sqrt",
        "(std - 1e-5)",
    ),
    "a misspelled result": (
        [("return self.out_proj(out)", "ouput = self.out_proj(out)\n        return out")],
        "no_out_proj",
        "ouput = self.out_proj(",
    ),
    "masked scores of 0": ([('float("-inf")', "0.0")], "mask_value", "masked_fill("),
    "masked scores of 1e-9": ([('float("-inf")', "1e-9")], "mask_value", "masked_fill("),
    "padding hidden by its id": (
        [(LOOP, f"        x = x * (ids != 0).unsqueeze(-1)\n{LOOP}")],
        "id_condition",
        "(ids != 0)",
    ),
    "a branch on an id": (
        [(LOOP, f"        if (ids == 3).any():\n            x = x * 2\n{LOOP}")],
        "id_condition",
        "if (ids == 3)",
    ),
    "a shortcut changed in place": (
        [
            (
                "        x = self.norm1(x)\n        x = self.att(x)\n",
                "        x += self.att(self.norm1(x))\n",
            )
        ],
        "doubled_residual",
        "x = x + shortcut",
    ),
    "the input of the block added again": (
        [
            (
                "        shortcut = x\n        x = self.norm1",
                "        start = shortcut = x\n        x = self.norm1",
            ),
            (
                "        x = x + shortcut\n        return x",
                "        x = x + shortcut\n        return start + x",
            ),
        ],
        "doubled_residual",
        "return start + x",
    ),
    "the mean over the tokens": (
        [("mean = x.mean(-1,", "mean = x.mean(1,")],
        "norm_axis",
        "x.mean(1",
    ),
    "noise in eval mode": (
        [(LOOP, f"        x = x + 0.01 * torch.randn_like(x)\n{LOOP}")],
        "random_in_forward",
        "torch.randn_like",
    ),
    "uniform noise in eval mode": (
        [(LOOP, f"        x = x + 0.01 * torch.rand_like(x)\n{LOOP}")],
        "random_in_forward",
        "torch.rand_like",
    ),
    "bits that are drawn with the ids": (
        [(LOOP, f"        x = x + torch.bernoulli(torch.sigmoid(ids / 9))[..., None]\n{LOOP}")],
        "random_in_forward",
        "torch.bernoulli",
    ),
    "bits that are drawn and always one": (
        [(LOOP, f"        x = x + torch.bernoulli(torch.sigmoid(ids + 99.0))[..., None]\n{LOOP}")],
        "random_in_forward",
        "torch.bernoulli",
    ),
    "weights that change": (
        [(LOOP, f"        self.tok_emb.weight.data.mul_(1.001)\n{LOOP}")],
        "weights_changed",
        ".mul_(1.001)",
    ),
    "LoRA at the head": (
        [
            (
                HEAD,
                "        self.a = nn.Linear(emb_dim, 4)\n"
                f"        self.b = nn.Linear(4, vocab_size)\n{HEAD}",
            ),
            ("return self.head(x)", "return self.head(x) + self.b(self.a(x))"),
        ],
        "low_rank_term",
        "self.b(self.a(x))",
    ),
    "another MLP after the blocks": (
        [
            (HEAD, f"        self.extra = FeedForward(emb_dim)\n{HEAD}"),
            (
                "        x = self.final_norm(x)",
                "        x = self.extra(x)\n        x = self.final_norm(x)",
            ),
        ],
        "extra_projection",
        "x = self.extra(x)",
    ),
    "the output projection twice": (
        [("return self.out_proj(out)", "return self.out_proj(self.out_proj(out))")],
        "extra_projection",
        "self.out_proj(self.out_proj(out))",
    ),
    "GELU around the second projection": (
        [(f"self.down({GELU})", 'F.gelu(self.down(self.up(x)), approximate="tanh")')],
        "other_activation",
        "F.gelu(self.down(self.up(x))",
    ),
    "a module of GELU after the second projection": (
        [
            (
                "class FeedForward(",
                "class Gelu(nn.Module):\n    def forward(self, x):\n"
                '        return F.gelu(x, approximate="tanh")\n\n\nclass FeedForward(',
            ),
            ("self.up = nn", "self.act = Gelu()\n        self.up = nn"),
            (
                f"        return self.down({GELU})\n",
                "        x = self.down(self.up(x))\n        x = self.act(x)\n        return x\n",
            ),
        ],
        "other_activation",
        "x = self.act(x)",
    ),
    "tanh of the result of the MLP": (
        [("x = self.ff(x)", "x = torch.tanh(self.ff(x))")],
        "other_activation",
        "x = torch.tanh(self.ff(x))",
    ),
    "squared ReLU": ([(GELU, "F.relu(self.up(x)).square()")], "other_activation", "F.relu("),
    "log-softmax": (
        [("return self.head(x)", "return F.log_softmax(self.head(x), -1)")],
        "softmax_output",
        "log_softmax",
    ),
    "attention over the batch": (
        [
            (
                "self.att = Attention(dim, heads, context)",
                "self.att = nn.MultiheadAttention(dim, heads)",
            ),
            ("self.att(x)", "self.att(x, x, x, need_weights=False)[0]"),
        ],
        "batch_first",
        "nn.MultiheadAttention(dim, heads)",
    ),
    "weights that are divided after the softmax": (
        [
            (" / self.head_dim ** 0.5", ""),
            (
                "torch.softmax(scores, dim=-1)",
                "torch.softmax(scores, dim=-1) / self.head_dim ** 0.5",
            ),
        ],
        "scaled_probs",
        "weights = torch.softmax(",
    ),
    "two experts": (
        [
            (
                "        self.down = nn",
                "        self.router = nn.Linear(dim, 2)\n"
                "        self.up_2, self.down_2 = nn.Linear(dim, dim), nn.Linear(dim, dim)\n"
                "        self.down = nn",
            ),
            (
                f"        return self.down({GELU})",
                "        weights = self.router(x).softmax(-1)\n"
                f"        other = self.down_2(F.gelu(self.up_2(x)))\n"
                f"        return weights[..., :1] * self.down({GELU}) + weights[..., 1:] * other",
            ),
        ],
        "unknown_mlp",
        "self.router(x)",
    ),
    "no MLP": (
        [("        x = self.norm2(x)\n        x = self.ff(x)\n        x = x + shortcut\n", "")],
        "no_mlp",
        "x = x + shortcut",
    ),
    "one projection in the MLP": (
        [
            (f"self.down({GELU})", GELU),
            ("self.up = nn.Linear(dim, 4 * dim)", "self.up = nn.Linear(dim, dim)"),
            ("        self.down = nn.Linear(4 * dim, dim)\n", ""),
        ],
        "one_mlp_projection",
        "F.gelu(self.up(x)",
    ),
    "an MLP without an activation": (
        [(GELU, "self.up(x)")],
        "other_activation",
        "self.down(self.up(x))",
    ),
    "no blocks": (
        [(f"{LOOP}            x = block(x)\n", "")],
        "n_layer_mismatch",
        "return self.head(x)",
    ),
    "attention without a projection, a residual or an MLP": (
        [
            ("        return self.out_proj(out)", "        return out"),
            (
                "        x = x + shortcut\n        shortcut = x\n        x = self.norm2(x)\n"
                "        x = self.ff(x)\n        x = x + shortcut\n",
                "",
            ),
        ],
        "no_mlp",
        "x = self.att(x)",
    ),
    "no query projection": (
        [("queries = self.W_query(x)", "queries = x")],
        "no_qkv_projection",
        "queries =",
    ),
    "no key projection": (
        [("keys = self.W_key(x)", "keys = x")],
        "no_qkv_projection",
        "keys =",
    ),
    "no value projection, and fewer biases": (
        [
            ("values = self.W_value(x)", "values = x"),
            ("self.W_key = nn.Linear(dim, dim)", "self.W_key = nn.Linear(dim, dim, bias=False)"),
        ],
        "no_qkv_projection",
        "values =",
    ),
    "queries that are clamped": (
        [
            (
                "        scores = queries @",
                "        queries = queries.clamp(-0.1, 0.1)\n        scores = queries @",
            )
        ],
        "extra_operation",
        "queries = queries.clamp(-0.1, 0.1)",
    ),
    "a norm before the activation": (
        [
            (
                "        self.down = nn",
                "        self.norm = nn.LayerNorm(4 * dim)\n        self.down = nn",
            ),
            (GELU, 'F.gelu(self.norm(self.up(x)), approximate="tanh")'),
        ],
        "extra_ln",
        "F.gelu(self.norm(",
    ),
    "a norm after the activation": (
        [
            (
                "        self.down = nn",
                "        self.norm = nn.LayerNorm(4 * dim)\n        self.down = nn",
            ),
            (f"self.down({GELU})", f"self.down(self.norm({GELU}))"),
        ],
        "extra_ln",
        "self.down(self.norm(",
    ),
    "an activation after attention": (
        [("return self.out_proj(out)", "return F.gelu(self.out_proj(out))")],
        "extra_operation",
        "F.gelu(self.out_proj(out))",
    ),
    "a number that the next norms remove": (
        [(f"return self.down({GELU})", f"return self.down({GELU}) + 0.1")],
        "extra_operation",
        ") + 0.1",
    ),
    "other ids": (
        [("self.tok_emb(ids)", "self.tok_emb((ids + 1) % self.tok_emb.num_embeddings)")],
        "extra_operation",
        "(ids + 1) %",
    ),
    "the highest value of all positions": (
        [("return self.head(x)", "return self.head(x.max(dim=1).values)")],
        "pooled_positions",
        "x.max(dim=1)",
    ),
    "ids in reversed order": (
        [("self.tok_emb(ids)", "self.tok_emb(ids.flip(1))")],
        "time_shift",
        "ids.flip(1)",
    ),
    "half of the last hidden states": (
        [("return self.head(x)", "return self.head(x / 2)")],
        "extra_operation",
        "self.head(x / 2)",
    ),
    "hidden states of the token before": (
        [("return self.head(x)", "return self.head(x.roll(1, 1))")],
        "extra_operation",
        "self.head(x.roll(1, 1))",
    ),
    "half of the activation": (
        [(f"self.down({GELU})", f"self.down({GELU} / 2)")],
        "other_activation",
        "approximate",
    ),
    "logits of pairs of tokens": (
        [
            (
                "        self.pos_emb = nn",
                "        self.pairs = nn.Embedding(vocab_size, vocab_size)\n"
                "        self.pos_emb = nn",
            ),
            ("return self.head(x)", "return self.head(x) + self.pairs(ids)"),
        ],
        "changed_logits",
        "self.head(x) + self.pairs(ids)",
    ),
    "a gate of the MLP's result": (
        [
            (
                "        self.ff = FeedForward(dim)",
                "        self.ff, self.gate = FeedForward(dim), nn.Linear(dim, dim)",
            ),
            (
                "        x = self.norm2(x)\n",
                "        gate = self.gate(x)\n        x = self.norm2(x)\n",
            ),
            ("x = self.ff(x)", "x = self.ff(x) * gate.sigmoid()"),
        ],
        "extra_projection",
        "gate = self.gate(x)",
    ),
    "keys and values of all heads": (
        [
            ("self.W_key = nn.Linear(dim, dim)", "self.W_key = nn.Linear(dim, self.head_dim)"),
            ("self.W_value = nn.Linear(dim, dim)", "self.W_value = nn.Linear(dim, self.head_dim)"),
            ("        keys = keys.view(B, T, self.heads, self.head_dim).transpose(1, 2)\n", ""),
            ("        values = values.view(B, T, self.heads, self.head_dim).transpose(1, 2)\n", ""),
            ("queries @ keys.transpose(2, 3)", 'torch.einsum("bhid,bjd->bhij", queries, keys)'),
            ("(weights @ values)", 'torch.einsum("bhij,bjd->bhid", weights, values)'),
        ],
        "grouped_query_attention",
        "keys = self.W_key(x)",
    ),
    "values of the layer of the queries": (
        [("values = self.W_value(x)", "values = self.W_query(x)")],
        "shared_parameters",
        "values = self.W_query(x)",
    ),
    "one layer for q, k and v": (
        [
            ("values = self.W_value(x)", "values = self.W_query(x)"),
            ("keys = self.W_key(x)", "keys = self.W_query(x)"),
        ],
        "shared_parameters",
        "queries = self.W_query(x)",
    ),
    "keys of another tensor": (
        [("self.W_key(x)", "self.W_key(F.pad(x, (0, 0, 1, -1)) + x)")],
        "unknown_part",
        "self.W_key(F.pad",
    ),
    "an embedding that is added twice": (
        [("        for block in self.blocks:", "        x = x + self.tok_emb(ids)\n" + LOOP[:-1])],
        "scaled_embedding",
        "x = x + self.tok_emb(ids)",
    ),
    "half of a branch": (
        [("self.att(x)\n", "0.5 * self.att(x)\n")],
        "residual_weights",
        "x = 0.5 * self.att(x)",
    ),
    "half of a shortcut": (
        [
            (
                "        shortcut = x\n        x = self.norm1",
                "        shortcut = x * 0.5\n        x = self.norm1",
            )
        ],
        "residual_weights",
        "shortcut = x * 0.5",
    ),
    "the mean of all blocks": (
        [
            (LOOP, "        every = []\n" + LOOP),
            (
                "x = block(x)\n",
                "x = block(x)\n            every.append(x)\n        x = sum(every) / len(every)\n",
            ),
        ],
        "extra_operation",
        "x = sum(every) / len(every)",
    ),
    "positions in every block": (
        [("x = block(x)\n", "x = block(x) + self.pos_emb.weight[:T]\n")],
        "extra_operation",
        "x = block(x) + self.pos_emb.weight[:T]",
    ),
    "a convolution before q, k and v": (
        [
            (
                "        self.drop = nn",
                "        self.conv = nn.Conv1d(dim, dim, 3, groups=dim)\n        self.drop = nn",
            ),
            (
                ATTENTION,
                f"{ATTENTION}        x = F.pad(x.transpose(1, 2), (2, 0))\n"
                "        x = self.conv(x).transpose(1, 2)\n",
            ),
        ],
        "extra_operation",
        "x = F.pad(",
    ),
    "gated heads": (
        [
            (
                "        self.drop = nn",
                "        self.gate = nn.Linear(dim, dim)\n        self.drop = nn",
            ),
            ("self.out_proj(out)", "self.out_proj(out * self.gate(x).sigmoid())"),
        ],
        "extra_operation",
        "self.out_proj(out * self.gate(x).sigmoid())",
    ),
    "mixed heads": (
        [
            (
                "        self.drop = nn",
                "        self.mix = nn.Parameter(torch.rand(heads, heads))\n        self.drop = nn",
            ),
            (
                "        scores = scores.masked",
                '        scores = torch.einsum("bhij,hg->bgij", scores, self.mix)\n'
                "        scores = scores.masked",
            ),
        ],
        "extra_projection",
        "scores = torch.einsum(",
    ),
    "scores of an earlier layer": (
        [
            ("def forward(self, x):\n        B", "def forward(self, x, before):\n        B"),
            (" ** 0.5\n", " ** 0.5\n        before.append(scores)\n        scores = sum(before)\n"),
            (
                "def forward(self, x):\n        shortcut",
                "def forward(self, x, before):\n        shortcut",
            ),
            ("self.att(x)", "self.att(x, before)"),
            (LOOP, "        before = []\n" + LOOP),
            ("block(x)", "block(x, before)"),
        ],
        "changed_scores",
        "scores = sum(before)",
    ),
    "values of an earlier layer": (
        [
            ("def forward(self, x):\n        B", "def forward(self, x, before):\n        B"),
            (
                "        keys = keys.view",
                "        before.append(values)\n"
                "        values = values + before[0] if len(before) > 1 else values\n"
                "        keys = keys.view",
            ),
            (
                "def forward(self, x):\n        shortcut",
                "def forward(self, x, before):\n        shortcut",
            ),
            ("self.att(x)", "self.att(x, before)"),
            (LOOP, "        before = []\n" + LOOP),
            ("block(x)", "block(x, before)"),
        ],
        "extra_operation",
        "values = values + before[0]",
    ),
    "values without a norm": (
        [
            ("def forward(self, x):\n        B", "def forward(self, x, other):\n        B"),
            ("values = self.W_value(x)", "values = self.W_value(other)"),
            ("self.att(x)", "self.att(x, shortcut)"),
        ],
        "missing_ln",
        "values = self.W_value(other)",
    ),
    "the MLP before attention": (
        [
            (
                "x = self.norm1(x)\n        x = self.att(x)",
                "x = self.norm2(x)\n        x = self.ff( x)",
            ),
            (
                "x = self.norm2(x)\n        x = self.ff(x)",
                "x = self.norm1(x)\n        x = self.att(x)",
            ),
        ],
        "mlp_before_attention",
        "x = block(x)",
    ),
    "a projection of the embedding": (
        [
            (HEAD, f"        self.wide = nn.Linear(emb_dim, emb_dim)\n{HEAD}"),
            (LOOP, f"        x = self.wide(x)\n{LOOP}"),
        ],
        "extra_projection",
        "x = self.wide(x)",
    ),
    "vectors before the tokens": (
        [
            (HEAD, f"        self.prompt = nn.Parameter(torch.rand(1, 3, emb_dim))\n{HEAD}"),
            (LOOP, f"        x = torch.cat([self.prompt.expand(B, -1, -1), x], dim=1)\n{LOOP}"),
            ("self.final_norm(x)", "self.final_norm(x[:, 3:])"),
        ],
        "extra_tokens",
        "x = torch.cat(",
    ),
    "attention from head to head": (
        [
            (
                ".view(B, T, self.heads, self.head_dim).transpose(1, 2)",
                ".view(B, T, self.heads, -1)",
            ),
            ('        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))\n', ""),
            ("(weights @ values).transpose(1, 2).contiguous()", "(weights @ values)"),
        ],
        "no_head_split_transpose",
        "scores = queries @ keys",
    ),
    "a softmax over the heads after a finite mask": (
        [('float("-inf")', "-1e9"), ("softmax(scores, dim=-1)", "softmax(scores, dim=1)")],
        "softmax_dim",
        "torch.softmax(",
    ),
}
# Mistakes whose finding is confirmed with the model's own operations.
BY_OWN_OPERATIONS = [
    "half of a branch", "half of a shortcut", "the mean of all blocks", "positions in every block",
    "a convolution before q, k and v", "gated heads", "mixed heads", "scores of an earlier layer",
    "values of an earlier layer", "values without a norm", "attention from head to head",
    "a softmax over the heads after a finite mask", "masked scores of 1e-9",
    "a norm of the token embedding", "vectors of length 1 after a norm",
    "vectors of length 1 before a norm", "hidden states of length 1 after the last norm",
    "weights that are transposed", "the highest four weights", "a branch that is subtracted",
    "batch norms", "instance norms", "a group norm",
    "positions that are subtracted",
    "no query projection", "no key projection", "no value projection, and fewer biases",
    "values that are activated", "an activation after attention",
    "a number that the next norms remove",
    "queries that are clamped", "a norm before the activation", "a norm after the activation",
    "half of the last hidden states", "hidden states of the token before", "half of the activation",
]  # fmt: skip

# The scores of all heads of one sequence do not follow each other.
HEADS_FIRST = (
    "        queries, keys, values = (t.transpose(0, 1){0} for t in (queries, keys, values))\n"
)
EQUAL: dict[str, Edits] = {
    "no mistake": [],
    "an axis of heads before that of the sequences": [
        ("        scores = queries @", f"{HEADS_FIRST.format('')}        scores = queries @"),
        ("(weights @ values).transpose(1, 2)", "(weights @ values).permute(1, 2, 0, 3)"),
    ],
    "an axis of heads with those of the sequences inside": [
        (
            "        scores = queries @",
            f"{HEADS_FIRST.format('.reshape(-1, T, self.head_dim)')}        scores = queries @",
        ),
        ("keys.transpose(2, 3)", "keys.transpose(1, 2)"),
        (
            "(weights @ values).transpose(1, 2)",
            "(weights @ values).view(self.heads, B, T, -1).permute(1, 2, 0, 3)",
        ),
    ],
    "an empty cache for each layer": [
        ("def forward(self, ids):", "def forward(self, ids, kv_caches):"),
        (LOOP, "        for block, cache in zip(self.blocks, kv_caches, strict=True):\n"),
    ],
    "a first position": [
        ("def forward(self, ids):", "def forward(self, ids, start_pos):"),
        ("torch.arange(T,", "torch.arange(start_pos, start_pos + T,"),
    ],
    "a device that the machine lacks": [("device=ids.device", 'device="mps"')],
    "logits with another axis": [("return self.head(x)", "return self.head(x)[None]")],
    "a projection with tensordot": [
        ("self.W_key(x)", "torch.tensordot(x, self.W_key.weight, ([2], [1])) + self.W_key.bias"),
        (
            "return self.out_proj(out)",
            "w = self.out_proj.weight.view(C, self.heads, -1)\n"
            "        out = out.view(B, T, self.heads, -1)\n"
            "        return torch.tensordot(out, w, ([2, 3], [1, 2])) + self.out_proj.bias",
        ),
    ],
    "two data types": [
        ("emb_dim, vocab_size, bias=False)", "emb_dim, vocab_size, bias=False).double()"),
        ("self.head(x)", "self.head(x.double())"),
    ],
}


def with_block(body: str) -> tuple[str, str]:
    """Return the edit that makes these lines the block's `forward`."""
    unused = "    def unused(self, x):\n        shortcut = x\n"
    return BLOCK, f"    def forward(self, x):\n{body}\n\n{unused}"


DECODER = """
        layer = nn.TransformerDecoderLayer(
            emb_dim, n_heads, 4 * emb_dim, batch_first=True, norm_first=True,
            activation=lambda x: F.gelu(x, approximate="tanh"),
        )
        self.blocks = nn.TransformerDecoder(layer, n_layers)
"""
TIME_FIRST = [
    ("        self.blocks = nn.ModuleList(blocks)\n", DECODER.replace("Decoder", "Encoder")
     .replace("batch_first=True, ", "")
     .replace("n_layers)", "n_layers, enable_nested_tensor=False)")),
    ("def forward(self, ids):", "def forward(self, ids, src_mask):"),
    ("B, T = ids.shape", "T, B = ids.shape"),
    ("device=ids.device))", "device=ids.device))[:, None]"),
    (f"{LOOP}            x = block(x)\n", "        x = self.blocks(x, src_mask)\n"),
]  # fmt: skip
EQUAL["ids (T, B) and a mask"] = TIME_FIRST


def adapted(source: Path, tmp_path: Path, edits: Edits) -> Adaptation:
    """Return the result of `adapt` for the learner's file after the edits."""
    text = GPT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    file = tmp_path / "learner.py"
    file.write_text(text)
    return Target(f"{file}:GPT").adapt(open_checkpoint(source), {})


def further_lines(found: Finding) -> list[str]:
    """Return the text of the further lines that a finding names."""
    places = [place.rpartition(":") for place in found.also]
    return [linecache.getline(file, int(line)).strip() for file, _, line in places]


def only_finding(adaptation: Adaptation, code: str) -> Finding:
    """Return the only finding with this code."""
    [found] = [finding for finding in adaptation.findings if finding.code == code]
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_at_its_line(tiny: Path, tmp_path: Path, name: str) -> None:
    edits, code, line = MISTAKES[name]
    adaptation = adapted(tiny, tmp_path, edits)
    assert not adaptation
    found = only_finding(adaptation, code)
    assert found.severity == "breaks" and line in (found.source_line or "")
    consequences = {"random_parameters", "no_final_ln", "erf_gelu", "inner_dim"}
    if name == "no value projection, and fewer biases":
        consequences |= {"no_qkv_bias"}
    if name == "attention without a projection, a residual or an MLP":
        consequences |= {"no_out_proj", "missing_residual"}
    if name == "weights that are divided after the softmax":
        consequences |= {"no_attn_scale"}
    if name == "attention over the batch":
        consequences |= {"no_mask"}  # the rest is examined as with batch_first=True
    assert {f.code for f in adaptation.deviations} <= {code, *consequences}
    if name in BY_OWN_OPERATIONS:
        assert found.evidence.startswith("confirmed")


def test_a_wrong_scale_is_reported_beside_a_wrong_mask_value(tiny: Path, tmp_path: Path) -> None:
    edits = [('float("-inf")', "-0.5"), ("self.head_dim ** 0.5", "self.head_dim")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = [only_finding(adaptation, code) for code in ("mask_value", "wrong_scale")]
    assert "set to -0.5," in found[0].message
    assert all(finding.evidence.startswith("confirmed") for finding in found)
    assert len(adaptation.deviations) == 2


def test_a_token_that_attends_to_none_is_reported_as_the_cause_of_nan(
    tiny: Path, tmp_path: Path
) -> None:
    adaptation = adapted(tiny, tmp_path, [("diagonal=1", "diagonal=0")])
    found = only_finding(adaptation, "mask_off")
    assert "token 0 attends to no token, so its probabilities are NaN" in found.message
    assert [f.code for f in adaptation.deviations] == ["mask_off"]


def test_a_softmax_over_the_batch_that_computes_nan_is_one_finding(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [("torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=0)")]
    adaptation = adapted(tiny, tmp_path, edits)
    assert [f.code for f in adaptation.deviations] == ["softmax_dim"]
    assert "over the batch" in adaptation.deviations[0].message


def test_a_mean_that_is_added_to_the_embeddings_is_no_norm(tiny: Path, tmp_path: Path) -> None:
    """The positions are added beside it, so they are not called missing."""
    adaptation = adapted(
        tiny, tmp_path, [("x = self.tok_emb(ids) +", "x = self.tok_emb(ids)\n"
                          "        x = x + x.mean(1, keepdim=True) +")]
    )  # fmt: skip
    [found] = adaptation.deviations
    assert found.message.startswith("the code computes mean and add between the token embedding")
    assert (
        found.source_line
        == "x = x + x.mean(1, keepdim=True) + self.pos_emb(torch.arange(T, device=ids.device))"
    )


def test_positions_are_shown_from_the_first_that_differs(tiny: Path, tmp_path: Path) -> None:
    edits = [("torch.arange(T, device=ids.device)", "torch.arange(T, device=ids.device) % 4")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "position_ids")
    assert found.message == (
        "the tokens have the positions …, 3, 0, 1, 2, …, but GPT-2 uses …, 3, 4, 5, 6, …"
    )


def test_blocks_without_attention_are_not_called_unused(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        x = self.att(x)\n        x = x + shortcut\n",
         "        x = shortcut if self.skips else self.att(x) + shortcut\n"),
        ("self.blocks = nn.ModuleList(blocks)",
         "self.blocks = nn.ModuleList(blocks)\n"
         "        for i, block in enumerate(blocks):\n            block.skips = i == 1"),
    ]  # fmt: skip
    found = only_finding(adapted(tiny, tmp_path, edits), "n_layer_mismatch")
    assert found.message == "2 of the 3 blocks compute attention, but in GPT-2 all do"


def test_a_mask_that_multiplies_the_scores_is_reported(tiny: Path, tmp_path: Path) -> None:
    masked = "scores.masked_fill(self.mask[:T, :T].bool(), float("
    edits = [(f'{masked}"-inf"))', "scores * (1 - self.mask[:T, :T])")]
    adaptation = adapted(tiny, tmp_path, edits)
    assert [f.code for f in adaptation.deviations] == ["mask_value"]
    found = only_finding(adaptation, "mask_value")
    assert "set to 0," in found.message and "scores * (1 - " in (found.source_line or "")


# In the lower triangle are ones, for the tokens that should be seen.
ADDED_MASKS: dict[str, Edits] = {
    "a sum": [
        ("scores.masked_fill(self.mask[:T, :T].bool(), float(\"-inf\"))",
         "scores + (1 - self.mask[:T, :T])"),
    ],
    "the mask of a module": [
        ("self.att = Attention(dim, heads, context)",
         "self.att = nn.MultiheadAttention(dim, heads, batch_first=True)"),
        ("x = self.att(x)",
         "T = x.shape[1]\n        x = self.att(x, x, x, attn_mask=torch.ones(T, T).tril())[0]"),
    ],
    "the mask of a function": [
        ("        weights = torch.softmax(scores, dim=-1)\n", ""),
        ("        weights = self.drop(weights)\n", ""),
        ("(weights @ values)",
         "F.scaled_dot_product_attention(queries, keys, values, 1 - self.mask[:T, :T])"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", ADDED_MASKS)
def test_a_mask_of_ones_that_is_added_to_the_scores_is_reported_and_repaired(
    tiny: Path, tmp_path: Path, form: str
) -> None:
    adaptation = adapted(tiny, tmp_path, ADDED_MASKS[form])
    [found] = adaptation.deviations
    assert found.code == "mask_value"
    assert "adds 0 to the scores of later tokens, and 1 to all others" in found.message
    checkpoint = open_checkpoint(tiny)
    target = Target(f"{tmp_path / 'learner.py'}:GPT")
    repaired = Search(target, checkpoint, checkpoint.config, unsafe=False).run()
    assert repaired is not None and repaired.fixed == ["mask_value"]


@pytest.mark.parametrize(
    "added",
    [
        "torch.stack([x[..., 0::2] + t, x[..., 1::2] - t], dim=-1).flatten(-2)",
        "torch.cat([y + t for y in x.chunk(2, dim=-1)], dim=-1)",
        "torch.stack([y + t for y in x.unflatten(-1, (-1, 2)).unbind(-1)], dim=-1).flatten(-2)",
    ],
)
def test_fixed_positions_that_are_added_to_parts_of_the_channels_are_reported(
    tiny: Path, tmp_path: Path, added: str
) -> None:
    edits = [
        (" + self.pos_emb(torch.arange(T, device=ids.device))\n",
         f"\n        t = torch.sin(torch.arange(T))[:, None]\n        x = {added}\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert [f.code for f in adaptation.deviations] == ["sinusoidal_pos"]
    assert only_finding(adaptation, "sinusoidal_pos").evidence.startswith("confirmed")


def test_fixed_positions_that_are_added_in_place_are_reported(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (" + self.pos_emb(torch.arange(T, device=ids.device))\n",
         ".clone()\n        t = torch.sin(torch.arange(T))[:, None]\n"
         "        even = torch.arange(x.shape[-1]) % 2 == 0\n"
         "        x[..., even] += t\n        x[..., ~even] -= t\n"),
    ]  # fmt: skip
    found = only_finding(adapted(tiny, tmp_path, edits), "sinusoidal_pos")
    assert found.evidence.startswith("confirmed") and "+= t" in (found.source_line or "")


@pytest.mark.parametrize("end", ["", "tanh"])
def test_a_change_of_the_residual_sums_is_reported(tiny: Path, tmp_path: Path, end: str) -> None:
    """A change that is not a factor, such as tanh, is an operation that GPT-2 does not have."""
    line = "        x = x + shortcut\n"
    divided, other = "        x = (x + shortcut) / 2\n", "        x = torch.tanh(x + shortcut)\n"
    adaptation = adapted(tiny, tmp_path, [(line, other if end else divided)])
    [found] = adaptation.deviations
    assert found.code == ("extra_operation" if end else "residual_weights")
    assert found.evidence.startswith("confirmed")


def test_an_mlp_that_is_added_to_attention_alone_is_reported(tiny: Path, tmp_path: Path) -> None:
    edits = [
        with_block(
            "        found = self.att(self.norm1(x))\n"
            "        return self.ff(self.norm2(x + found)) + found"
        )
    ]
    [found] = adapted(tiny, tmp_path, edits).deviations
    assert found.code == "missing_residual" and found.evidence.startswith("confirmed")
    assert "added to that of attention" in found.message
    assert "self.norm2(x + found)) + found" in (found.source_line or "")


@pytest.mark.parametrize("centred", [True, False])
def test_a_norm_that_divides_by_the_l2_norm_is_reported(
    tiny: Path, tmp_path: Path, centred: bool
) -> None:
    divided = "self.scale * (x - mean) / (torch.linalg.norm(x - mean, dim=-1, keepdim=True) + 1e-5)"
    edits = [("self.scale * (x - mean) / torch.sqrt(var + 1e-5)", divided)]
    if not centred:
        edits = [(edits[0][0], divided.replace("x - mean", "x"))]
    found = {f.code: f for f in adapted(tiny, tmp_path, edits).deviations}
    assert found.keys() == {"other_norm", "eps_outside_sqrt", *(() if centred else ("rmsnorm",))}
    assert "divides by the L2 norm" in found["other_norm"].message
    assert all(each.evidence.startswith("confirmed") for each in found.values())


def test_weights_of_the_residual_sums_before_post_norms_are_reported(
    tiny: Path, tmp_path: Path
) -> None:
    """As in DeepNorm."""
    edits = [
        with_block(
            "        x = self.norm1(2.0 * x + self.att(x))\n"
            "        return self.norm2(2.0 * x + self.ff(x))"
        )
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert [f.code for f in adaptation.deviations] == ["post_ln", "residual_weights"]
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)
    [other] = further_lines(only_finding(adaptation, "residual_weights"))
    assert "self.norm2(2.0 * x" in other


@pytest.mark.parametrize(
    "added", ["x + self.att(h) + self.ff(h)", "x + self.ff(h) + self.att(h)"], ids=["att", "ff"]
)
def test_a_parallel_block_with_one_norm_is_reported(tiny: Path, tmp_path: Path, added: str) -> None:
    edits = [with_block(f"        h = self.norm1(x)\n        return {added}")]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"parallel_block", "shared_parameters"}
    assert only_finding(adaptation, "parallel_block").evidence.startswith("confirmed")


def test_a_parallel_block_with_two_norms_that_adds_the_mlp_first_is_reported(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [with_block("        return x + self.ff(self.norm2(x)) + self.att(self.norm1(x))")]
    [found] = adapted(tiny, tmp_path, edits).deviations
    assert found.code == "parallel_block" and found.evidence.startswith("confirmed")


def test_heads_that_are_repeated_once_are_no_deviation(tiny: Path, tmp_path: Path) -> None:
    line = "        scores = queries @"
    repeated = "        values = torch.repeat_interleave(values, {}, dim=1)[:, : self.heads]\n"
    once = adapted(tiny, tmp_path, [(line, f"{repeated.format(1)}{line}")])
    assert once and not once.deviations
    assert not adapted(tiny, tmp_path, [(line, f"{repeated.format(2)}{line}")])


@pytest.mark.parametrize("window", [0, 4])
def test_flex_attention_is_recognised(tiny: Path, tmp_path: Path, window: int) -> None:
    """It is traced as plain operations, together with the user's own mask function."""
    start = GPT.index("        scores = queries")
    attention = GPT[start : GPT.index("        out = (weights")]
    seen = "i >= j" if not window else f"(i >= j) & (i - j < {window})"
    edits = [
        ("class LayerNorm", "from torch.nn.attention.flex_attention import create_block_mask\n"
         "from torch.nn.attention.flex_attention import flex_attention\n\n\n"
         f"def seen(b, h, i, j):\n    return {seen}\n\n\nclass LayerNorm"),
        (attention, '        mask = create_block_mask(seen, None, None, T, T, device="cpu")\n'),
        ("(weights @ values)", "flex_attention(queries, keys, values, block_mask=mask)"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == ({"sliding_window"} if window else set())


@pytest.mark.parametrize("name", EQUAL)
def test_a_file_without_a_mistake_is_proved(tiny: Path, tmp_path: Path, name: str) -> None:
    adaptation = adapted(tiny, tmp_path, EQUAL[name])
    assert adaptation, [(f.code, f.message) for f in adaptation.findings]
    if name == "two data types":
        found = only_finding(adaptation, "mixed_types")
        assert found.severity == "limit" and "float64 (head.weight)" in found.message


def test_an_empty_group_of_heads_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    """Code for two kinds of heads can build a model that has only one of them."""
    edits = [
        ("        scores = queries", "        none = queries[:, :0] @ keys[:, :0].mT\n"
         "        none = none.softmax(-1) @ values[:, :0]\n        scores = queries"),
        ("(weights @ values)", "torch.cat([none, weights @ values], dim=1)"),
    ]  # fmt: skip
    assert adapted(tiny, tmp_path, edits)


def test_the_activation_of_an_mlp_with_three_projections_is_reported(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("        self.up", "        self.mid = nn.Linear(4 * dim, 4 * dim)\n        self.up"),
        (f"self.down({GELU})", "self.down(F.relu(self.mid(F.relu(self.up(x)))))"),
    ]
    codes = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    assert codes == {"relu", "extra_projection", "random_parameters"}


def test_the_mask_argument_of_a_model_without_a_head_is_reported(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("return self.head(x)", "return x"),
        ("def forward(self, ids)", "def forward(self, ids, mask=None)"),
        ("x = block(x)", "x = block(x, mask)"),
        ("self.att(x)", "self.att(x, mask)"),
        (BLOCK, BLOCK.replace("x)", "x, mask)")),
        (ATTENTION, ATTENTION.replace("x)", "x, mask)")),
        ("        scores = scores.masked_fill(self.mask[:T, :T].bool()",
         "        if mask is not None:\n            scores = scores.masked_fill(~mask"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"no_head"}
    assert only_finding(adaptation, "mask_argument").severity == "limit"


def test_a_table_that_is_computed_from_two_parameters_is_an_unknown_part(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("        self.pos_emb = nn", "        self.wide = nn.Parameter(torch.eye(emb_dim))\n"
         "        self.pos_emb = nn"),
        ("self.tok_emb(ids)", "F.embedding(ids, self.tok_emb.weight @ self.wide)"),
        (GELU, "F.gelu(self.up(x))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"unknown_part", "erf_gelu"}
    found = only_finding(adaptation, "unknown_part")
    assert "the token embedding is computed from 2 parameters" in found.message
    assert "F.embedding(ids" in (found.source_line or "")


NORMALIZED: Edits = [
    (
        "        scores = queries @",
        "        queries, keys = (F.normalize(x, dim=-1) for x in (queries, keys))\n"
        "        scores = queries @",
    )
]
CLAMPED: Edits = [
    ("x = self.att(x)\n        x = x + shortcut", "x = (self.att(x) + shortcut).clamp(-1, 1)")
]


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([*MISTAKES["no key projection"][0], *MISTAKES["a norm after the activation"][0]],
         {"no_qkv_projection", "extra_ln"}),
        ([*MISTAKES["batch norms"][0], *MISTAKES["ids in reversed order"][0]],
         {"other_norm", "time_shift"}),
        ([*MISTAKES["queries that are clamped"][0], *MISTAKES["half of the activation"][0]],
         {"extra_operation", "other_activation"}),
        ([*MISTAKES["a gate of the MLP's result"][0], *MISTAKES["a norm before the activation"][0]],
         {"extra_projection", "random_parameters", "extra_ln"}),
        ([("values = self.W_value(x)", "values = x"), *NORMALIZED],
         {"no_qkv_projection", "qk_norm"}),
        ([*MISTAKES["a norm before the activation"][0], *CLAMPED], {"extra_ln", "extra_operation"}),
    ],
)  # fmt: skip
def test_two_mistakes_do_not_hide_each_other(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    assert {f.code for f in adapted(tiny, tmp_path, edits).deviations} == codes


def test_the_first_token_that_sees_other_tokens_is_shown(tiny: Path, tmp_path: Path) -> None:
    """Up to token 7, windows of eight tokens hide nothing."""
    blocks = "torch.arange(context)[:, None] // 8 != torch.arange(context) // 8"
    mask = "torch.triu(torch.ones(context, context), diagonal=1)"
    adaptation = adapted(tiny, tmp_path, [(mask, f"({mask} > 0) | ({blocks})")])
    found = only_finding(adaptation, "mask_off")
    assert "token 8 attends to token 8 only, but in GPT-2 it" in found.message
    assert found.evidence.startswith("confirmed")


def test_a_factor_of_one_is_not_an_operation(tiny: Path, tmp_path: Path) -> None:
    edits = [("return self.head(x)", "return self.head(x * 1.0)"), (GELU, "F.gelu(self.up(x))")]
    assert {f.code for f in adapted(tiny, tmp_path, edits).deviations} == {"erf_gelu"}


def test_a_stream_that_is_added_to_itself_is_not_blamed_on_an_operation_in_place(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        (
            "        x = self.final_norm(x)",
            "        y = x\n        x = x + y\n        x = self.final_norm(x)",
        )
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "doubled_residual")
    assert found.message.startswith("a tensor is added to itself, but GPT-2")


def test_the_activation_of_an_mlp_with_three_projections_is_named(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("        self.down = nn", "        self.more = nn.Linear(4 * dim, 4 * dim)\n"
         "        self.down = nn"),
        (GELU, "F.relu(self.more(self.up(x)))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    found = {f.code for f in adaptation.deviations}
    assert found == {"extra_projection", "random_parameters", "relu"}
    extra = only_finding(adaptation, "extra_projection")
    assert "between the first and the last projection of the MLP" in extra.message


def test_a_low_rank_term_beside_an_adapter_is_not_a_second_projection(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("        self.drop = nn", "        self.a = nn.Parameter(torch.randn(dim, 2))\n"
         "        self.b = nn.Parameter(torch.randn(2, dim))\n        self.drop = nn"),
        ("self.W_query(x)", "self.W_query(x) + x @ self.a @ self.b * 0.5"),
        ("        self.ff = FeedForward(dim)", "        self.ff = FeedForward(dim)\n"
         "        self.into, self.back = nn.Linear(dim, 8), nn.Linear(8, dim)"),
        ("        x = x + shortcut\n        return x", "        x = x + shortcut\n"
         "        return x + self.back(F.relu(self.into(x)))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    found = {f.code for f in adaptation.deviations}
    assert found == {"extra_projection", "random_parameters", "low_rank_term"}
    assert not adaptation.unmatched


def test_an_activation_that_cannot_be_measured_breaks_parity(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.down = nn", "        self.more = nn.Linear(4 * dim, 8 * dim)\n"
         "        self.down = nn"),
        (GELU, "(lambda x, y: F.silu(x) + y)(*self.more(self.up(x)).chunk(2, -1))"),
    ]  # fmt: skip
    found = only_finding(adapted(tiny, tmp_path, edits), "other_activation")
    assert found.severity == "breaks" and "a function that compat does not know" in found.message


def test_an_mlp_inside_attentions_branch_is_not_the_blocks(tiny: Path, tmp_path: Path) -> None:
    """The block's own MLP, its norm and its residual connection are those of GPT-2."""
    edits = [
        ("        self.ff = FeedForward(dim)", "        self.ff = FeedForward(dim)\n"
         "        self.gate, self.more = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)\n"
         "        self.narrow = nn.Linear(2 * dim, dim)"),
        ("x = self.att(x)\n", "x = self.att(x)\n"
         "        x = self.narrow(F.silu(self.gate(x)) * self.more(x))\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"extra_projection", "random_parameters"}
    assert not adaptation.unmatched
    assert "3 projections run here" in only_finding(adaptation, "extra_projection").message


def test_the_parameters_of_a_low_rank_term_are_not_unused(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.down = nn", "        self.a = nn.Parameter(torch.randn(dim, 2))\n"
         "        self.b = nn.Parameter(torch.randn(2, 4 * dim))\n        self.down = nn"),
        (GELU, GELU.replace("self.up(x)", "self.up(x) + x @ self.a @ self.b * 0.5")),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.findings} <= {"low_rank_term", "train_mode", "untied_head"}
    assert only_finding(adaptation, "low_rank_term").severity == "breaks"


def test_a_method_of_another_file_imports_modules_of_the_project(
    tiny: Path, tmp_path: Path
) -> None:
    """`adapt` calls the model with its project on the import path."""
    (tmp_path / "own_scale.py").write_text("ONE = 1.0\n")
    text = (Path(__file__).parents[2] / "scripts/my_gpt.py").read_text()
    body = "    def forward(self, x: Tensor) -> Tensor:\n"
    assert body in text
    (tmp_path / "own_blocks.py").write_text(
        text.replace(body, f"{body}        from own_scale import ONE\n        x = x * ONE\n")
    )
    (tmp_path / "own_model.py").write_text(
        "from own_blocks import MyGPT\n\nclass GPT(MyGPT):\n    pass\n"
    )
    adaptation = Target(f"{tmp_path / 'own_model.py'}:GPT").adapt(open_checkpoint(tiny), {})
    assert {finding.code for finding in adaptation.deviations} == {"erf_gelu"}


def test_an_adapter_after_the_mlp_is_named(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.ff = FeedForward(dim)", "        self.ff = FeedForward(dim)\n"
         "        self.a, self.b = nn.Linear(dim, 8), nn.Linear(8, dim)"),
        ("x = self.ff(x)\n", "x = self.ff(x)\n        x = x + self.b(F.relu(self.a(x)))\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"extra_projection", "random_parameters"}
    assert not adaptation.unmatched
    assert "2 projections run here" in only_finding(adaptation, "extra_projection").message


def test_blocks_that_are_run_twice_are_named(tiny: Path, tmp_path: Path) -> None:
    loop = f"{LOOP}            x = block(x)\n"
    adaptation = adapted(tiny, tmp_path, [(loop, loop + loop)])
    assert {f.code for f in adaptation.deviations} == {"n_layer_mismatch"}
    found = only_finding(adaptation, "n_layer_mismatch")
    assert "the 3 blocks are run 6 times in all" in found.message
    assert found.source_line == "x = block(x)" and found.tap == "h.2.out"


def test_blocks_that_are_run_twice_with_a_projection_between_are_named(
    tiny: Path, tmp_path: Path
) -> None:
    loop = f"{LOOP}            x = block(x)\n"
    between = loop + "        x = x + self.between(x)\n" + loop
    norm = "        self.final_norm = LayerNorm(emb_dim)\n"
    edits = [(loop, between), (norm, f"{norm}        self.between = nn.Linear(emb_dim, emb_dim)\n")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "n_layer_mismatch")
    assert "the 3 blocks are run 6 times in all" in found.message


def test_a_block_that_is_run_on_its_own_result_is_named(tiny: Path, tmp_path: Path) -> None:
    adaptation = adapted(tiny, tmp_path, [("x = block(x)", "x = block(block(x))")])
    assert {f.code for f in adaptation.deviations} == {"n_layer_mismatch"}
    found = only_finding(adaptation, "n_layer_mismatch")
    assert "the 3 blocks are run 6 times in all" in found.message
    assert found.source_line == "x = block(block(x))" and found.tap == "h.0.out"


def test_a_mean_of_equal_values_is_not_a_doubled_residual(tiny: Path, tmp_path: Path) -> None:
    edits = [("values = self.W_value(x)", "values = self.W_value(x)\n"
              "        values = 0.5 * (values + values)")]  # fmt: skip
    assert not adapted(tiny, tmp_path, edits).deviations


def test_a_time_first_model_that_ignores_its_mask_is_reported(tiny: Path, tmp_path: Path) -> None:
    adaptation = adapted(tiny, tmp_path, [*TIME_FIRST, ("blocks(x, src_mask)", "blocks(x)")])
    assert {f.code for f in adaptation.deviations} == {"no_mask"}
    shape = only_finding(adaptation, "input_shape")
    assert "takes ids of shape (T, B), but" in shape.message
    assert shape.fix == "model(ids.T).transpose(0, 1)"


def test_a_time_first_model_that_pools_is_compared_without_the_mean(
    tiny: Path, tmp_path: Path
) -> None:
    """The mask is an argument, whose effect no logits show."""
    edits = [*TIME_FIRST, ("return self.head(x)", "return self.head(x.mean(dim=0))")]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"pooled_positions"}
    assert "takes ids of shape (T, B), but" in only_finding(adaptation, "input_shape").message


def test_the_evidence_of_a_model_that_pools_compares_all_positions(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("return self.head(x)", "return self.head(x.mean(dim=1))"),
        (GELU, "F.relu(self.up(x))"),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "relu").evidence
    error = re.search(r"to within (\S+?)[,;]", found)
    assert error and float(error[1]) < 1e-3, found


def test_a_norm_at_the_end_of_the_blocks_is_not_a_block(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.blocks = nn.ModuleList(blocks)\n",
         "        self.blocks = nn.Sequential(*blocks[:2], nn.LayerNorm(dim))\n"),
        (f"{LOOP}            x = block(x)\n", "        x = self.blocks(x)\n"),
        ("        x = self.final_norm(x)\n", ""),
    ]  # fmt: skip
    found = only_finding(adapted(tiny, tmp_path, edits), "n_layer_mismatch")
    assert found.message == "the number of layers is 2, but the checkpoint's is 3"


def test_positions_that_are_added_to_the_keys_are_not_a_bias(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.W_key = nn.Linear(dim, dim)\n", "        self.W_key = nn.Linear(dim, dim)\n"
         "        self.key_pos = nn.Embedding(context, dim)\n"),
        ("keys = self.W_key(x)", "keys = self.W_key(x) + self.key_pos.weight[:T]"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"extra_operation", "random_parameters"}
    assert only_finding(adaptation, "extra_operation").source_line == edits[1][1]
    assert not adaptation.unmatched


def test_the_lines_of_an_activation_are_those_that_build_and_call_it(
    tiny: Path, tmp_path: Path
) -> None:
    up = "        self.up = nn.Linear(dim, 4 * dim)\n"
    edits = [(up, f"{up}        self.act = nn.ReLU()\n"), (GELU, "self.act(self.up(x))")]
    found = only_finding(adapted(tiny, tmp_path, edits), "relu")
    assert found.source_line == "self.act = nn.ReLU()"
    assert further_lines(found) == ["return self.down(self.act(self.up(x)))"]


def test_the_lines_of_a_gated_mlp_are_those_of_the_product_and_the_activation(
    tiny: Path, tmp_path: Path
) -> None:
    up = "        self.up = nn.Linear(dim, 4 * dim)\n"
    edits = [
        (
            "class FeedForward(",
            "def swish(x):\n    return x * torch.sigmoid(x)\n\n\nclass FeedForward(",
        ),
        (up, f"{up}        self.gate = nn.Linear(dim, 4 * dim)\n"),
        (GELU, "swish(self.gate(x)) * self.up(x)"),
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "gated_mlp")
    assert found.source_line == "return self.down(swish(self.gate(x)) * self.up(x))"
    assert "return x * torch.sigmoid(x)" in further_lines(found)


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([("scores = scores.masked_fill", "scores.masked_fill")], {"no_mask"}),
        ([("/ self.head_dim ** 0.5", "/ C ** 0.5")], {"scale_by_d_model"}),
        ([(".transpose(1, 2).contiguous().view(B, T, C)", ".view(B, T, C)"),
          ("/ self.head_dim ** 0.5", "")], {"no_head_merge_transpose", "no_attn_scale"}),
    ],
)  # fmt: skip
def test_mistakes_beside_a_missing_transpose_are_named(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    split = (
        ".view(B, T, self.heads, self.head_dim).transpose(1, 2)",
        ".view(B, self.heads, T, self.head_dim)",
    )
    adaptation = adapted(tiny, tmp_path, [split, *edits])
    assert {f.code for f in adaptation.deviations} == {"no_head_split_transpose", *codes}


def test_the_line_that_computes_a_width_is_named(tiny: Path, tmp_path: Path) -> None:
    up = "        self.up = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n"
    narrow = "        self.hidden = int(8 * dim / 3)\n" + up.replace("4 * dim", "self.hidden")
    found = only_finding(adapted(tiny, tmp_path, [(up, narrow)]), "inner_dim")
    assert found.source_line == "self.up = nn.Linear(dim, self.hidden)"
    assert further_lines(found) == ["self.hidden = int(8 * dim / 3)"]


def test_every_line_on_the_way_to_a_rotation_is_named(tiny: Path, tmp_path: Path) -> None:
    """Attention calls a module, whose `forward` calls a method, which rotates."""
    rotary = """class Rotary(nn.Module):
    def turn(self, x):
        T, D = x.shape[-2:]
        angles = torch.arange(T)[:, None] * 100 ** -(torch.arange(0, D, 2) / D)
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    def forward(self, q, k):
        return self.turn(q), self.turn(k)


class Attention("""
    edits = [
        ("class Attention(", rotary),
        ("        self.drop = nn", "        self.rotary = Rotary()\n        self.drop = nn"),
        ("        scores = queries", "        queries, keys = self.rotary(queries, keys)\n"
         "        scores = queries"),
    ]  # fmt: skip
    lines = further_lines(only_finding(adapted(tiny, tmp_path, edits), "rope"))
    assert "return self.turn(q), self.turn(k)" in lines
    assert "queries, keys = self.rotary(queries, keys)" in lines


@pytest.mark.parametrize(("first", "second"), [(1.0, 0.0), (1.1, 0.1)])
def test_factors_of_the_stream_without_effect_are_reported(
    tiny: Path, tmp_path: Path, first: float, second: float
) -> None:
    factors = f"torch.tensor([{first}, {second}])"
    edits = [
        (HEAD, f"        self.factors = nn.Parameter({factors})\n{HEAD}"),
        (LOOP, f"        first = x\n{LOOP}"),
        ("            x = block(x)\n",
         "            x = block(self.factors[0] * x + self.factors[1] * first)\n"),
        ("torch.sqrt(var + 1e-5)", "torch.sqrt(var + 1e-3)"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    codes = {f.code for f in adaptation.deviations}
    if second:
        assert codes == {"eps_value", "extra_operation"}
    else:
        [found] = [f for f in adaptation.findings if f.code == "random_parameters"]
        assert codes == {"eps_value"} and found.severity == "info"
        assert "initial value" in found.message and found.message.endswith(
            "no effect on the logits"
        )


SMEARED = [
    ("        self.final_norm = LayerNorm(emb_dim)\n",
     "        self.final_norm = LayerNorm(emb_dim)\n"
     "        self.gate = nn.Linear(emb_dim, 1)\n"
     "        self.smear = nn.Parameter(torch.zeros(1))\n"),
    (LOOP, "        gate = self.smear * torch.sigmoid(self.gate(x[:, 1:]))\n"
     f"        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)\n{LOOP}"),
]  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
def test_a_gate_before_the_blocks_that_is_closed_has_no_effect(
    tiny: Path, tmp_path: Path, normed: bool
) -> None:
    """A part of each token's embedding is added to the next one's, as in nanochat."""
    norm = "        x = F.rms_norm(x, (x.shape[-1],))\n"
    first = "        gate = self.smear"
    edits = [*SMEARED, (first, norm + first)] if normed else SMEARED
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == ({"extra_ln"} if normed else set())
    if normed:
        assert only_finding(adaptation, "extra_ln").source_line == norm.strip()
    [found] = [f for f in adaptation.findings if f.code == "random_parameters"]
    assert found.severity == "info"
    assert "smear, gate.weight and gate.bias" in found.message
    open_gate = adapted(tiny, tmp_path, [*edits, ("torch.zeros(1)", "torch.ones(1)")])
    assert "extra_projection" in {f.code for f in open_gate.deviations}


@pytest.mark.parametrize("masked", [True, False])
def test_a_padding_id_that_no_token_has_is_reported(
    tiny: Path, tmp_path: Path, masked: bool
) -> None:
    """compat passes -1 for it."""
    masking = "        x = x.masked_fill((ids == self.pad_idx)[..., None], 0.0)\n" if masked else ""
    edits = [
        ("emb_dim, n_heads, n_layers)", "emb_dim, n_heads, n_layers, pad_idx)"),
        (HEAD, f"        self.pad_idx = pad_idx\n{HEAD}"),
        (LOOP, masking + LOOP),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation
    found = [f for f in adaptation.findings if f.code == "id_condition"]
    assert [f.severity for f in found] == ["info"] * masked
    if masked:
        assert found[0].message.startswith("the code treats the id -1 differently")
        assert found[0].source_line == masking.strip()


def test_all_comparisons_with_a_padding_id_are_named(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (LOOP, f"        x = x * (ids != 3)[..., None]\n{LOOP}"),
        ("        return self.head(x)", "        return self.head(x) * (ids != 3)[..., None]"),
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "id_condition")
    assert found.source_line == "x = x * (ids != 3)[..., None]"
    assert further_lines(found) == ["return self.head(x) * (ids != 3)[..., None]"]


def test_ids_that_only_matter_together_are_named(tiny: Path, tmp_path: Path) -> None:
    """Tokens are divided at the ids, and only two such divisions have an effect."""
    divide = "        part = ((ids == 3) | (ids == 5)).cumsum(1)\n"
    edits = [(LOOP, f"{divide}        x = x * (part < 2)[..., None]\n{LOOP}")]
    adaptation = adapted(tiny, tmp_path, [*edits, (GELU, "F.relu(self.up(x))")])
    found = only_finding(adaptation, "id_condition")
    assert "the ids 3 and 5 change the logits" in found.message


# The blocks are post-norm layers of torch's encoder, whose fused kernel is run in eval mode.
FUSED: Edits = [
    ("        self.blocks = nn.ModuleList(blocks)\n",
     DECODER.replace("Decoder", "Encoder").replace("norm_first=True", "norm_first=False")
     .replace("activation=lambda x: F.gelu(x, approximate=\"tanh\")", "activation='gelu'")),
    (f"{LOOP}            x = block(x)\n",
     "        mask = torch.full((T, T), float('-inf')).triu(1)\n"
     "        x = self.blocks(x, mask)\n"),
]  # fmt: skip


def test_fused_kernels_that_compute_other_logits_are_named(tiny: Path, tmp_path: Path) -> None:
    """The layer's own code adds the mask to the scores; its fused kernel hides all but zeros."""
    edits = [*FUSED, (".triu(1)\n", ".triu(1) + 0.1 * torch.ones(T, T).tril(-1)\n")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "fast_path")
    assert "nn.TransformerEncoderLayer" in (found.source_line or "")
    assert further_lines(found) == ["x = self.blocks(x, mask)"]
    evidence = only_finding(adaptation, "post_ln").evidence or ""
    assert float(evidence.rpartition(" ")[2]) < 1e-4  # the error of the other deviations


def test_dropout_is_no_difference_of_fused_kernels(tiny: Path, tmp_path: Path) -> None:
    edits = [*FUSED, ("self.blocks(x, mask)", "self.blocks(F.dropout(x, 0.1), mask)")]
    codes = {finding.code for finding in adapted(tiny, tmp_path, edits).deviations}
    assert codes == {"dropout_always_on", "post_ln", "erf_gelu"}


def test_equal_lists_of_all_blocks_are_one_finding(tiny: Path, tmp_path: Path) -> None:
    up = "        self.up = nn.Linear(dim, 4 * dim)\n"
    norms = f"{up}        self.norms = [nn.PReLU(init=1.0)]\n"
    edits = [(up, norms), (GELU, f"self.norms[0]({GELU})")]
    found = only_finding(adapted(tiny, tmp_path, edits), "plain_list")
    assert found.message.startswith("each of blocks.{0…2}.ff.norms is a Python list of modules")


def test_a_model_with_an_unknown_part_keeps_its_weights_and_has_the_other_findings(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("        self.pos_emb = nn", "        self.wide = nn.Parameter(torch.eye(emb_dim))\n"
         "        self.pos_emb = nn"),
        ("self.tok_emb(ids)", "F.embedding(ids, self.tok_emb.weight @ self.wide)"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, [*edits, (GELU, "F.gelu(self.up(x))")])
    assert adaptation.parity is None and len(adaptation.unmatched) == adaptation.tensors
    assert adaptation.findings[0].code == "unknown_part"
    assert "exact (erf) GELU" in only_finding(adaptation, "erf_gelu").message
    assert "does not know a part" in adaptation.why_unchecked


# Keys and values that are parameters, before those of the tokens.
MEMORY: Edits = [
    ("        self.drop = nn", "        size = (heads, 4, dim // heads)\n"
     "        self.memory = nn.Parameter(torch.randn(size))\n        self.drop = nn"),
    ("        scores = queries", "        memory = self.memory.expand(B, -1, -1, -1)\n"
     "        keys, values = (torch.cat([memory, a], dim=2) for a in (keys, values))\n"
     "        scores = queries"),
    ("self.mask[:T, :T]", "F.pad(self.mask[:T, :T], (4, 0))"),
]  # fmt: skip
OF_ATTENTION = {"c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"}
CALL_OF_ATTENTION = "        x = self.norm1(x)\n        x = self.att(x)\n        x = x + shortcut\n"


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([], set()),
        ([(GELU, "F.gelu(self.up(x))"), ("        x = self.final_norm(x)\n", ""),
          ("torch.sqrt(var + 1e-5)", "torch.sqrt(var + 1e-3)")],
         {"erf_gelu", "no_final_ln", "eps_value"}),
        ([("        x = self.ff(x)\n        x = x + shortcut\n", "        x = self.ff(x)\n"),
          ("self.tok_emb(ids) +", "self.tok_emb(ids) * 24 ** 0.5 +")],
         {"missing_residual", "scaled_embedding"}),
        ([("        scores = scores.masked_fill", "        scores.masked_fill")], {"no_mask"}),
        ([("dim=-1)\n        weights = self.drop", "dim=-2)\n        weights = self.drop")],
         {"softmax_dim", "no_mask"}),
        ([*((f"self.W_{name} = nn.Linear(dim, dim)", f"self.W_{name} = nn.Linear(dim, dim, False)")
            for name in ("query", "key", "value")),
          ("self.out_proj = nn.Linear(dim, dim)", "self.out_proj = nn.Linear(dim, dim, False)")],
         {"no_qkv_bias", "no_proj_bias"}),
        ([("self.W_query = nn.Linear(dim, dim)", "self.W_query = nn.Linear(dim, dim, bias=False)")],
         set()),  # it may be another projection
        ([("        memory = self", "        queries = F.rms_norm(queries, (6,))\n"
           "        memory = self")], {"qk_norm"}),
        ([("        out = (weights @ values)", "        out = F.rms_norm(weights @ values, (6,))")],
         set()),  # of the results of the heads
    ],
)  # fmt: skip
def test_the_rest_of_a_model_with_unknown_attention_is_mapped_and_examined(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    adaptation = adapted(tiny, tmp_path, [*MEMORY, *edits])
    assert {f.code for f in adaptation.deviations} == {"unknown_part", *codes}
    assert adaptation.parity is None and not adaptation
    assert "examined with GPT-2's attention" in adaptation.findings[0].evidence
    lost = {name for name in adaptation.unmatched if ".attn." in name}
    assert {name.partition(".attn.")[2] for name in lost} == OF_ATTENTION
    assert {*adaptation.unmatched} - lost <= {"ln_f.weight", "ln_f.bias"}
    assert all(found.file and "compat" not in found.file for found in adaptation.deviations)


@pytest.mark.parametrize(
    ("edits", "missing"),
    [
        ([("        return self.out_proj(out)", "        return shortcut + self.out_proj(out)"),
          (CALL_OF_ATTENTION, "        x = self.att(self.norm1(x), x)\n"),
          (ATTENTION, "    def forward(self, x, shortcut):\n        B, T, C = x.shape\n")],
         "attn"),
        ([("        return self.out_proj(out)", "        return self.out_proj(out), weights"),
          ("        x = self.att(x)\n", "        x, _ = self.att(x)\n")],
         "attn"),
        ([(BLOCK, "    def forward(self, x):\n        shortcut = x\n"),
          (CALL_OF_ATTENTION, "        x = self.att(x)\n"),
          ("        self.norm1 = LayerNorm(dim)\n", ""),
          ("        self.drop = nn", "        self.norm = LayerNorm(dim)\n        self.drop = nn"),
          (ATTENTION, f"{ATTENTION}        shortcut, x = x, self.norm(x)\n"),
          ("        return self.out_proj(out)", "        return shortcut + self.out_proj(out)")],
         "attn"),
    ],
)  # fmt: skip
def test_unknown_attention_may_compute_the_norm_and_the_shortcut_too(
    tiny: Path, tmp_path: Path, edits: Edits, missing: str
) -> None:
    adaptation = adapted(tiny, tmp_path, [*MEMORY, *edits])
    assert {f.code for f in adaptation.deviations} == {"unknown_part"}
    assert {name.split(".")[2] for name in adaptation.unmatched} == set(missing.split())


IN_ATTENTION = GPT[
    GPT.index("        B, T, C = x.shape\n") : GPT.index("        return self.out_pr")
]
IN_BLOCK = GPT[GPT.index("        shortcut = x\n") : GPT.index("        return x\n")]
OF_HEADS = IN_ATTENTION[IN_ATTENTION.index("        scores = ") :]
# Attention of other structures, and the line at which it first reads several tokens.
OTHER_ATTENTION = {
    "cumulative means": (
        "        out = x.cumsum(1) / torch.arange(1, T + 1)[:, None]\n",
        "x.cumsum(1)",
    ),
    "cumulative means of one projection": (
        "        values = x @ self.W_value.weight.mT + self.W_value.bias\n"
        "        out = values.cumsum(1) / torch.arange(1, T + 1)[:, None]\n",
        "values.cumsum(1)",
    ),
    "linear attention": (
        "        queries, keys = F.elu(queries) + 1, F.elu(keys) + 1\n"
        "        total = torch.einsum('bhtd,bhte->bhtde', keys, values).cumsum(2)\n"
        "        out = torch.einsum('bhtd,bhtde->bhte', queries, total)\n"
        "        out = out.transpose(1, 2).reshape(B, T, C)\n",
        ".cumsum(2)",
    ),
    "a recurrent state": (
        "        state, outs = torch.zeros(B, self.heads, self.head_dim, self.head_dim), []\n"
        "        for t in range(T):\n"
        "            state = 0.9 * state + keys[:, :, t, :, None] * values[:, :, t, None, :]\n"
        "            outs.append((queries[:, :, t, :, None] * state).sum(2))\n"
        "        out = torch.stack(outs, 1).reshape(B, T, C)\n",
        "state = 0.9 * state",
    ),
    "distances instead of products": (
        "        scores = -(queries.unsqueeze(3) - keys.unsqueeze(2)).abs().sum(-1)\n"
        "        scores = scores.masked_fill(self.mask[:T, :T].bool(), float('-inf'))\n"
        "        out = (torch.softmax(scores, -1) @ values).transpose(1, 2).reshape(B, T, C)\n",
        "queries.unsqueeze(3) - keys.unsqueeze(2)",
    ),
}


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([], set()),
        ([(GELU, "F.gelu(self.up(x))"), ("        x = self.final_norm(x)\n", ""),
          ("self.tok_emb(ids) +", "self.tok_emb(ids) * 24 ** 0.5 +")],
         {"erf_gelu", "no_final_ln", "scaled_embedding"}),
        ([("        self.norm2 = LayerNorm(dim)\n", "        self.norm2 = nn.Identity()\n")],
         {"missing_ln"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inline_in", ["block", "model"])
@pytest.mark.parametrize("structure", OTHER_ATTENTION)
def test_a_model_with_unknown_attention_in_its_blocks_or_forward_is_examined_around_it(
    tiny: Path, tmp_path: Path, structure: str, inline_in: str, edits: Edits, codes: set[str]
) -> None:
    heads, mixing = OTHER_ATTENTION[structure]
    inner = IN_ATTENTION.replace(OF_HEADS, heads).replace("self.", "self.att.")
    inner += "        x = self.att.out_proj(out)\n"
    if inline_in == "block":
        inline = [("        x = self.att(x)\n", inner)]
    else:
        block = IN_BLOCK.replace("        x = self.att(x)\n", inner).replace("self.", "block.")
        inline = [("            x = block(x)\n", indent(block, "    "))]
    adaptation = adapted(tiny, tmp_path, [*inline, *edits])
    assert {f.code for f in adaptation.deviations} == {"no_attention", *codes}
    unknown = adaptation.findings[0]
    assert unknown.line and mixing in linecache.getline(unknown.file or "", unknown.line)
    assert re.search(r"its input is computed at \S*learner.py:\d+, its result at", unknown.evidence)
    lost = {name for name in adaptation.unmatched if ".attn." in name}
    assert {name.partition(".attn.")[2] for name in lost} == OF_ATTENTION
    assert {name.split(".")[-2] for name in {*adaptation.unmatched} - lost} <= {"ln_f", "ln_2"}


def test_an_activation_in_unknown_attention_is_not_that_of_the_mlp(
    tiny: Path, tmp_path: Path
) -> None:
    heads = OTHER_ATTENTION["linear attention"][0].replace("F.elu", "F.relu")
    adaptation = adapted(tiny, tmp_path, [(OF_HEADS, heads)])
    assert {f.code for f in adaptation.deviations} == {"no_attention"}


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([], set()),
        ([("self.tok_emb(ids) +", "self.tok_emb(ids) * 24 ** 0.5 +"),
          ("/ self.head_dim ** 0.5", "/ C ** 0.5")], {"scaled_embedding", "scale_by_d_model"}),
    ],
)  # fmt: skip
def test_a_model_whose_blocks_cannot_be_mapped_is_examined_around_and_inside_them(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    """Attention of every block but the first reads other vectors beside the tokens."""
    norm = "        x = self.norm2(x)\n"
    joined = (
        f"        x = torch.cat([x, self.att.out_proj(x)], 1)[:, ::2]\n        shortcut = x\n{norm}"
    )
    adaptation = adapted(tiny, tmp_path, [(norm, joined), *edits])
    assert {f.code for f in adaptation.deviations} == {"extra_tokens", *codes}
    assert "examined with GPT-2's blocks" in adaptation.findings[0].evidence
    rows = {row.hf for row in adaptation.name_map.rows}
    assert rows == {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"}
    evidence = [f.evidence for f in adaptation.deviations if f.code in codes]
    assert all(words.startswith("confirmed, with GPT-2's") for words in evidence)


def test_a_condition_before_the_tokens_is_named(tiny: Path, tmp_path: Path) -> None:
    """The model takes it as an argument and returns logits for it too."""
    loop = f"{LOOP}            x = block(x)\n"
    edits = [
        (HEAD, f"        self.project = nn.Linear(31, emb_dim)\n{HEAD}"),
        ("    def forward(self, ids):\n", "    def forward(self, ids, image):\n"),
        (loop, f"        x = torch.cat([self.project(image)[:, None], x], dim=1)\n{loop}"),
    ]
    adaptation = adapted(tiny, tmp_path, [*edits, (GELU, "F.gelu(self.up(x))")])
    assert {f.code for f in adaptation.deviations} == {"extra_tokens", "erf_gelu"}
    assert "torch.cat([self.project" in (adaptation.findings[0].source_line or "")


def test_an_embedding_that_only_values_read_is_not_the_token_embedding(
    tiny: Path, tmp_path: Path
) -> None:
    """It is looked up before that of the tokens."""
    edits = [
        (HEAD, f"        self.values = nn.Embedding(vocab_size, emb_dim)\n{HEAD}"),
        ("        x = self.tok_emb(ids)", "        more = self.values(ids)\n"
         "        x = self.tok_emb(ids)"),
        ("            x = block(x)\n", "            x = block(x, more)\n"),
        (BLOCK, BLOCK.replace("x)", "x, more)")),
        ("        x = self.att(x)\n", "        x = self.att(x, more)\n"),
        (ATTENTION, ATTENTION.replace("x)", "x, more)")),
        ("values = self.W_value(x)", "values = self.W_value(x) + 0.5 * more"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"extra_operation", "random_parameters"}
    table = next(row for row in adaptation.name_map.rows if row.hf == "wte.weight")
    assert table.ours == ("tok_emb.weight",) and not adaptation.unmatched


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([], set()),
        ([("/ self.head_dim ** 0.5", "/ C ** 0.5"), ("        x = self.norm2(x)\n", "")],
         {"scale_by_d_model", "missing_ln"}),
        ([("        scores = scores.masked_fill", "        scores.masked_fill"),
          (GELU, "F.gelu(self.up(x))")], {"no_mask", "erf_gelu"}),
    ],
)  # fmt: skip
def test_the_first_block_of_a_model_that_cannot_be_mapped_is_examined(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    """The model reads four vectors before the tokens."""
    loop = f"{LOOP}            x = block(x)\n"
    prefix = [
        (HEAD, f"        self.prefix = nn.Parameter(torch.randn(4, emb_dim))\n{HEAD}"),
        (loop, "        x = torch.cat([self.prefix.expand(B, -1, -1), x], dim=1)\n"
         f"{loop}        x = x[:, 4:]\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, [*prefix, *edits])
    assert {f.code for f in adaptation.deviations} == {"extra_tokens", *codes}
    assert len(adaptation.unmatched) == adaptation.tensors and adaptation.parity is None
    confirmed = "confirmed, with GPT-2's other parts in place of yours: "
    own = [f for f in adaptation.deviations if f.code not in ("extra_tokens", "erf_gelu")]
    assert all(f.evidence.startswith(confirmed) and "learner.py" in (f.file or "") for f in own)


@pytest.mark.parametrize(
    ("edits", "codes"),
    [
        ([], set()),
        ([(GELU, "F.gelu(self.up(x))"), ("/ self.head_dim ** 0.5", "")],
         {"erf_gelu", "no_attn_scale"}),
    ],
)  # fmt: skip
def test_the_rest_of_a_model_with_an_unknown_head_is_mapped_and_examined(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    """The head is a mixture of two softmaxes."""
    mixture = [
        (HEAD, f"        self.to_weights = nn.Linear(emb_dim, 2)\n"
               f"        self.latent = nn.Linear(emb_dim, 2 * emb_dim)\n{HEAD}"),
        ("        return self.head(x)", "        weights = self.to_weights(x).softmax(-1)\n"
         "        one, two = torch.tanh(self.latent(x)).chunk(2, -1)\n"
         "        p = weights[..., :1] * self.head(one).softmax(-1)\n"
         "        return torch.log(p + weights[..., 1:] * self.head(two).softmax(-1))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, [*mixture, *edits])
    assert {f.code for f in adaptation.findings} == {"unknown_part", "train_mode", *codes}
    assert adaptation.findings[0].source_line == "weights = self.to_weights(x).softmax(-1)"
    assert "examined with GPT-2's head" in adaptation.findings[0].evidence
    assert not adaptation and adaptation.parity is None and not adaptation.unmatched


def test_a_head_without_projections_is_the_unknown_part(tiny: Path, tmp_path: Path) -> None:
    """Each logit is the negative distance of the hidden state from a token's vector."""
    edits = [
        ("        return self.head(x)", "        distances = (x[:, :, None] - self.head.weight)\n"
         "        return -distances.square().sum(-1)"),
        (GELU, "F.gelu(self.up(x))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.findings} == {"unknown_part", "train_mode", "erf_gelu"}
    found = adaptation.findings[0]
    assert found.source_line == "distances = (x[:, :, None] - self.head.weight)"
    assert "examined with GPT-2's head" in found.evidence
    assert only_finding(adaptation, "erf_gelu").evidence.startswith("confirmed, with GPT-2's head")
    assert not adaptation and adaptation.parity is None and not adaptation.unmatched


def test_the_only_norm_before_the_head_is_the_final_one(tiny: Path, tmp_path: Path) -> None:
    """The norm of attention is applied after the sum, and the MLP has no norm."""
    edits = [
        ("        x = self.norm1(x)\n        x = self.att(x)\n        x = x + shortcut\n",
         "        x = self.norm1(self.att(x) + shortcut)\n"),
        ("        x = self.norm2(x)\n", ""),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"post_ln", "missing_ln"}
    without = adapted(tiny, tmp_path, [*edits, ("self.final_norm(x)", "x")])
    assert {f.code for f in without.deviations} == {"post_ln", "missing_ln", "no_final_ln"}


def test_the_rest_of_a_model_with_attention_over_the_batch_is_examined(
    tiny: Path, tmp_path: Path
) -> None:
    edits, code, _ = MISTAKES["attention over the batch"]
    adaptation = adapted(tiny, tmp_path, [*edits, (GELU, "F.gelu(self.up(x))")])
    assert {f.code for f in adaptation.deviations} == {code, "no_mask", "erf_gelu"}
    assert adaptation.parity is not None and not adaptation.unmatched
    corrected = [(old, new.replace("heads)", "heads, batch_first=True)")) for old, new in edits]
    assert {f.code for f in adapted(tiny, tmp_path, corrected).deviations} == {"no_mask"}


# Attention over the first axis of the hidden states, with a mask of its length.
OVER_FIRST_AXIS: Edits = [
    ("Attention(dim, heads, context)", "nn.MultiheadAttention(dim, heads)"),
    ("        x = self.att(x)\n",
     "        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)\n"
     "        x = self.att(x, x, x, attn_mask=mask)[0]\n"),
]  # fmt: skip


def test_embeddings_are_examined_beside_attention_over_the_batch(
    tiny: Path, tmp_path: Path
) -> None:
    """The mask and the positions have the length of the batch, so no other call works."""
    edits = [
        *OVER_FIRST_AXIS,
        ("self.tok_emb(ids) + self.pos_emb(torch.arange(T, device=ids.device))",
         "3 * self.tok_emb(ids) + self.pos_emb(torch.arange(len(ids)))[:, None]"),
        ("        return self.head(x)", "        return self.head(x)[:, -1]"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    codes = {f.code for f in adaptation.deviations}
    assert codes == {"batch_first", "scaled_embedding", "position_ids"}
    assert "examined with GPT-2's blocks" in adaptation.findings[0].evidence
    assert only_finding(adaptation, "position_ids").evidence.startswith("confirmed, with GPT-2's")


def test_the_axis_of_time_is_the_second_without_positions_and_a_mask(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("Attention(dim, heads, context)", "nn.MultiheadAttention(dim, heads)"),
        ("        x = self.att(x)\n", "        x = self.att(x, x, x)[0]\n"),
        (" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
    ]
    codes = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    assert codes == {"batch_first", "no_mask", "no_pos"}


def test_attention_over_the_first_axis_is_right_for_one_sequence(
    tiny: Path, tmp_path: Path
) -> None:
    """The mask is made for the length of the first axis, so the model expects ids (T,)."""
    edits = [
        *OVER_FIRST_AXIS,
        ("        B, T = ids.shape\n", "        T = ids.shape[-1]\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation and "(T,)" in only_finding(adaptation, "input_shape").message
    relu = adapted(tiny, tmp_path, [*edits, (GELU, "F.relu(self.up(x))")])
    assert {f.code for f in relu.deviations} == {"relu"}
    unmasked = [(old, new.replace(".triu(1)", ".triu(len(x))")) for old, new in edits]
    codes = {f.code for f in adapted(tiny, tmp_path, unmasked).deviations}
    assert codes == {"batch_first", "no_mask"}


@pytest.mark.parametrize("memory", ["x", "torch.zeros_like(x)", "torch.zeros(B, 1, x.size(2))"])
def test_cross_attention_is_one_deviation(tiny: Path, tmp_path: Path, memory: str) -> None:
    """This also holds if it attends to zeros, so that only its biases have an effect."""
    edits = [
        ("        self.blocks = nn.ModuleList(blocks)\n", DECODER),
        (f"{LOOP}            x = block(x)\n",
         "        mask = nn.Transformer.generate_square_subsequent_mask(T)\n"
         f"        x = self.blocks(x, {memory}, tgt_mask=mask)\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"cross_attention"}
    found = only_finding(adaptation, "cross_attention")
    assert found.source_line and "TransformerDecoderLayer(" in found.source_line
    assert not adaptation.unmatched
    without = [
        (old, new.replace("Decoder", "Encoder").replace(f"{memory}, tgt_mask", "mask")
         .replace("n_layers)", "n_layers, enable_nested_tensor=False)"))
        for old, new in edits
    ]  # fmt: skip
    assert adapted(tiny, tmp_path, without)


def test_a_gated_mlp_after_heads_without_an_output_projection_is_recognised(
    tiny: Path, tmp_path: Path
) -> None:
    """Two projections read the sum of the residual stream and the heads, in every layer."""
    edits = [
        ("        self.out_proj = nn.Linear(dim, dim)\n", ""),
        ("return self.out_proj(out)", "return out"),
        ("        self.up =", "        self.gate = nn.Linear(dim, 4 * dim)\n        self.up ="),
        (f"self.down({GELU})", "self.down(F.silu(self.gate(x)) * self.up(x))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"no_out_proj", "gated_mlp"}


def test_an_mlp_in_the_projection_of_attention_is_a_parallel_block(
    tiny: Path, tmp_path: Path
) -> None:
    """In PaLM and GPT-J, one projection of the normalized tensor computes all inputs."""
    lines = ("shortcut = x", "x = self.norm2(x)", "x = self.ff(x)", "x = x + shortcut")
    fused = [
        ("self.W_query = nn.Linear(dim, dim)", "self.fused = nn.Linear(dim, 7 * dim)"),
        ("        self.W_key = nn.Linear(dim, dim)\n", ""),
        ("self.W_value = nn.Linear(dim, dim)", "self.down = nn.Linear(4 * dim, dim)"),
        ("        keys = self.W_key(x)\n        queries = self.W_query(x)\n", ""),
        ("values = self.W_value(x)",
         "queries, keys, values, inner = self.fused(x).split([C, C, C, 4 * C], -1)"),
        ("return self.out_proj(out)", "return self.out_proj(out) + self.down(F.gelu(inner))"),
        ("".join(f"        {line}\n" for line in lines), ""),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, fused)
    assert "inner))" in (only_finding(adaptation, "parallel_block").source_line or "")
    # One norm is in place of ln_1 and ln_2.
    found = {f.code for f in adaptation.deviations}
    assert found == {"parallel_block", "erf_gelu", "shared_parameters"}
    assert "h.0.mlp.c_proj.weight" not in adaptation.unmatched


def test_the_rest_of_a_model_with_experts_is_examined(tiny: Path, tmp_path: Path) -> None:
    edits, code, _ = MISTAKES["two experts"]
    bounded = [("        return self.head(x)", "        return self.head(x).tanh()")]
    adaptation = adapted(tiny, tmp_path, [*edits, *bounded])
    assert {f.code for f in adaptation.deviations} == {code, "erf_gelu", "changed_logits"}
    assert "F.gelu(self.up_2(x))" in (only_finding(adaptation, "erf_gelu").source_line or "")
    assert {name.split(".")[2] for name in adaptation.unmatched} == {"mlp"}


def test_experts_whose_weights_are_looked_up_are_an_unknown_mlp(tiny: Path, tmp_path: Path) -> None:
    """For each token, the rows of the chosen expert are read from one parameter of all experts."""
    edits = [
        ("        self.up = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n",
         "        self.router = nn.Linear(dim, 3, bias=False)\n"
         "        self.up = nn.Parameter(0.1 * torch.randn(3, 4 * dim, dim))\n"
         "        self.down = nn.Parameter(0.1 * torch.randn(3, dim, 4 * dim))\n"),
        (f"        return self.down({GELU})",
         "        found = torch.topk(self.router(x), k=2, dim=-1)\n"
         "        y = torch.einsum('btknc,btc->btkn', self.up[found.indices], x)\n"
         "        y = torch.einsum('btkcn,btkn->btkc', self.down[found.indices], F.relu(y))\n"
         "        return torch.einsum('btkc,btk->btc', y, found.values.softmax(-1))"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"unknown_mlp", "relu", "no_mlp_bias"}
    found = only_finding(adaptation, "unknown_mlp")
    assert found.message.startswith("1 projection runs here, as in a mixture of experts, but")


ROUTED = """class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shared, self.router = Expert(dim), nn.Linear(dim, 3)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(3)])
        self.register_buffer("preferred", torch.tensor([0.0, 0.0, -1e9]))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        chosen = (self.router(flat) + self.preferred).topk(1, dim=-1).indices[:, 0]
        out = self.shared(flat)
        routed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                routed[mask] += expert(flat[mask])
        return (out + routed).view(x.shape)


class Block"""


def test_tokens_may_be_routed_to_experts(tiny: Path, tmp_path: Path) -> None:
    """How many tokens an expert reads depends on the weights; one expert reads none."""
    start, end = GPT.index("class FeedForward"), GPT.index("class Block")
    latent = [
        ("self.W_key = nn.Linear(dim, dim)",
         "self.narrow, self.W_key = nn.Linear(dim, dim // 2), nn.Linear(dim // 2, dim)"),
        ("keys = self.W_key(x)", "keys = self.W_key(self.narrow(x))"),
    ]  # fmt: skip
    experts = [(GPT[start : end + len("class Block")], ROUTED)]
    bias = [("nn.Linear(dim, 2 * dim)", "nn.Linear(dim, 2 * dim, bias=False)"),
            ("nn.Linear(2 * dim, dim)", "nn.Linear(2 * dim, dim, bias=False)"),
            ("nn.Linear(dim, 3)", "nn.Linear(dim, 3, bias=False)")]  # fmt: skip
    glu = [("gate, self.up = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)",
            "up = nn.Linear(dim, 4 * dim)"),
           ("F.silu(self.gate(x)) * self.up(x)", "F.glu(self.up(x))")]  # fmt: skip
    for edits, more in (
        ([], set()), (glu, set()), (latent, {"latent_attention"}), (bias, {"no_mlp_bias"}),
        ([("F.silu(self.gate(x)) * self.up(x)", "F.relu(self.up(x))")], {"relu"}),
    ):  # fmt: skip
        adaptation = adapted(tiny, tmp_path, [*experts, *edits])
        found = {f.code for f in adaptation.findings} - {"train_mode", "untied_head"}
        more |= set() if "relu" in more else {"gated_mlp"}
        assert found - {"unused_parameters"} == {"unknown_mlp", *more}
        if "gated_mlp" in found:
            assert (
                f"as in {'GLU' if edits is glu else 'SwiGLU'})"
                in only_finding(adaptation, "gated_mlp").message
            )
        if "no_mlp_bias" in found:
            line = only_finding(adaptation, "no_mlp_bias").source_line or ""
            assert line.startswith("self.gate, self.up = nn.Linear")
        assert {name.split(".")[2] for name in adaptation.unmatched} <= {"mlp", "attn"}
        assert "as in a mixture of experts" in only_finding(adaptation, "unknown_mlp").message


def test_the_last_experts_are_examined_like_the_others(tiny: Path, tmp_path: Path) -> None:
    """An expert may be the first choice of no token, and a projection may follow the blocks."""
    start, end = GPT.index("class FeedForward"), GPT.index("class Block")
    chosen = ROUTED[
        ROUTED.index("        chosen = ") : ROUTED.index("        return (out + routed)")
    ]
    two_choices = """        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out, routed = 0, torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            tokens = (chosen == i).any(dim=-1).nonzero(as_tuple=True)[0]
            scale = torch.zeros(len(tokens))
            for k in range(2):
                mask = chosen[tokens, k] == i
                scale[mask] = weights[tokens[mask], k]
            routed[tokens] += scale[:, None] * expert(flat[tokens])
"""
    routed = (GPT[start : end + len("class Block")], ROUTED.replace(chosen, two_choices))
    norm = "        self.final_norm = LayerNorm(emb_dim)\n"
    after = [
        (norm, f"{norm}        self.after = Expert(emb_dim)\n"),
        ("self.final_norm(x)", "self.after(self.final_norm(x))"),
    ]
    for edits, more in (([], set()), (after, {"extra_projection"})):
        adaptation = adapted(tiny, tmp_path, [routed, *edits])
        found = {f.code for f in adaptation.deviations}
        assert found - {"random_parameters"} == {"unknown_mlp", "gated_mlp", *more}
        assert "only in" not in only_finding(adaptation, "unknown_mlp").message


HYPER_CONNECTIONS = [
    ("        shortcut = x\n        x = self.norm1(x)\n",
     "        copies = x\n        x = self.norm1((copies * self.read[0, :, None]).sum(2))\n"),
    ("        x = x + shortcut\n        shortcut = x\n        x = self.norm2(x)\n",
     "        copies = copies + x.unsqueeze(2) * self.write[0, :, None]\n"
     "        x = self.norm2((copies * self.read[1, :, None]).sum(2))\n"),
    ("        x = x + shortcut\n        return x\n",
     "        return copies + x.unsqueeze(2) * self.write[1, :, None]\n"),
    ("        self.norm1 = LayerNorm(dim)\n",
     "        self.norm1 = LayerNorm(dim)\n"
     "        self.read = nn.Parameter(torch.rand(2, 3))\n"
     "        self.write = nn.Parameter(torch.rand(2, 3))\n"),
    (LOOP, f"        x = x.unsqueeze(2).repeat(1, 1, 3, 1)\n{LOOP}"),
    ("self.final_norm(x)", "self.final_norm(x.mean(2))"),
]  # fmt: skip


@pytest.mark.parametrize("routed", [False, True])
def test_hyper_connections_are_named(tiny: Path, tmp_path: Path, routed: bool) -> None:
    start, end = GPT.index("class FeedForward"), GPT.index("class Block")
    experts = [(GPT[start : end + len("class Block")], ROUTED)] if routed else []
    adaptation = adapted(tiny, tmp_path, [*experts, *HYPER_CONNECTIONS])
    found = only_finding(adaptation, "hyper_connections")
    assert "3 copies of the hidden states, (B, T, 3, C)" in found.message
    assert found.source_line == "copies = copies + x.unsqueeze(2) * self.write[0, :, None]"
    if not routed:
        assert further_lines(found) == ["return copies + x.unsqueeze(2) * self.write[1, :, None]"]
    codes = {f.code for f in adaptation.deviations}
    assert not codes & {"missing_residual", "residual_from_norm", "unexplained"}
    assert not [f for f in adaptation.findings if f.code == "unexamined"]


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_fused_projection_before_a_module_that_projects_again_is_reported(
    tiny: Path, tmp_path: Path, post_norm: bool
) -> None:
    edits = [
        ("self.W_query = nn.Linear(dim, dim)",
         "self.qkv = nn.Linear(dim, 3 * dim)\n"
         "        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)"),
        (ATTENTION,
         "    def forward(self, x):\n        mask = self.mask[: x.shape[1], : x.shape[1]].bool()\n"
         "        return self.inner(*self.qkv(x).chunk(3, dim=-1), attn_mask=mask)[0]\n\n"
         "    def unused(self, x):\n        B, T, C = x.shape\n"),
    ]  # fmt: skip
    if post_norm:
        post = "self.norm2((y := self.norm1(x + self.att(x))) + self.ff(y))"
        edits += [(BLOCK, f"    def forward(self, x):\n        return {post}\n\n"
                   "    def unused(self, x):\n        shortcut = x\n")]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    found = {f.code for f in adaptation.deviations}
    assert found == {"latent_attention", *(["post_ln"] if post_norm else [])}
    line = only_finding(adaptation, "latent_attention").source_line or ""
    assert "self.qkv(x)" in line


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_biases_and_rotations_beside_the_norm_of_a_latent_are_found(
    tiny: Path, tmp_path: Path, bias: bool, rotated: bool
) -> None:
    expand = f"nn.Linear(9, dim, bias={bias})"
    edits = [
        ("self.W_query = nn.Linear(dim, dim)", "self.W_query = nn.Linear(dim, dim, bias=False)"),
        ("self.W_key = nn.Linear(dim, dim)",
         f"self.W_latent = nn.Linear(dim, 9, bias=False)\n        self.W_key = {expand}\n"
         "        self.norm = LayerNorm(9)"),
        ("self.W_value = nn.Linear(dim, dim)", f"self.W_value = {expand}"),
        ("        keys = self.W_key(x)\n",
         "        latent = self.norm(self.W_latent(x))\n        keys = self.W_key(latent)\n"),
        ("self.W_value(x)", "self.W_value(latent)"),
    ]  # fmt: skip
    if rotated:
        turned = (
            "        a = torch.arange(T)[:, None] / torch.arange(1, self.head_dim // 2 + 1)\n"
            "        a, b = torch.cat([a, a], -1), self.head_dim // 2\n"
            "        queries, keys = (x * a.cos() + torch.cat([-x[..., b:], x[..., :b]], -1)"
            " * a.sin() for x in (queries, keys))\n"
        )
        edits.append(("        scores = queries", f"{turned}        scores = queries"))
    found = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    others = [*([] if bias else ["no_qkv_bias"]), *(["rope"] if rotated else [])]
    assert found == {"latent_attention", *others}


@pytest.mark.parametrize("width", [9, 48])
def test_one_latent_of_q_k_and_v_with_a_norm_is_found(
    tiny: Path, tmp_path: Path, width: int
) -> None:
    edits = [
        ("self.W_query = nn.Linear(dim, dim)",
         f"self.W_latent = nn.Linear(dim, {width}, bias=False)\n"
         f"        self.norm = LayerNorm({width})\n"
         f"        self.W_query = nn.Linear({width}, dim)"),
        ("self.W_key = nn.Linear(dim, dim)", f"self.W_key = nn.Linear({width}, dim)"),
        ("self.W_value = nn.Linear(dim, dim)", f"self.W_value = nn.Linear({width}, dim)"),
        ("        keys = self.W_key(x)\n",
         "        x = self.norm(self.W_latent(x))\n        C = self.out_proj.in_features\n"
         "        keys = self.W_key(x)\n"),
        ("approximate=\"tanh\"", "approximate=\"none\""),
    ]  # fmt: skip
    found = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    assert found == {"latent_attention", "erf_gelu"}


def test_a_further_branch_before_the_mlp_is_named(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.ff = FeedForward(dim)", "        self.ff = FeedForward(dim)\n"
         "        self.a, self.b = nn.Linear(dim, 9), nn.Linear(9, dim)"),
        ("        x = x + shortcut\n        shortcut = x",
         "        x = x + shortcut\n        x = x + self.b(torch.tanh(self.a(x)))\n"
         "        shortcut = x"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "extra_projection")
    assert "torch.tanh(self.a(x))" in (found.source_line or "") and found.tap == "h.0.attn"
    assert not adaptation.unmatched


@pytest.mark.parametrize("gated", ["F.silu(a) * b", 'a * F.gelu(b, approximate="tanh")'])
def test_a_gate_from_the_same_projection_is_named(tiny: Path, tmp_path: Path, gated: str) -> None:
    edits = [
        ("nn.Linear(dim, 4 * dim)", "nn.Linear(dim, 8 * dim)"),
        (f"return self.down({GELU})", "a, b = self.up(x).chunk(2, -1)\n"
         f"        return self.down({gated})"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"gated_mlp"}  # the halves are 4·C wide
    found = only_finding(adaptation, "gated_mlp")
    assert found.tap == "h.0.act" and gated in (found.source_line or "")
    without = adapted(tiny, tmp_path, [*edits[:1], ("nn.Linear(4 * dim", "nn.Linear(8 * dim")])
    assert "gated_mlp" not in {f.code for f in without.findings}


def test_deviations_before_a_random_parameter_are_reported(tiny: Path, tmp_path: Path) -> None:
    """Half of the channels come from the previous token; the weights are changed after that."""
    shift = [
        ("keys = self.W_key(x)", f"half = {PREVIOUS.format('x')}[..., : C // 2]\n"
         "        x = torch.cat([half, x[..., C // 2 :]], -1)\n        keys = self.W_key(x)"),
    ]  # fmt: skip
    weighting = [
        ("        self.drop = nn", "        w = torch.ones(heads, context, context)\n"
         "        self.w = nn.Parameter(w)\n        self.drop = nn"),
        ("weights = self.drop(weights)", "weights = self.drop(weights) * self.w[:, :T, :T]"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, [*shift, *weighting])
    assert only_finding(adaptation, "extra_operation").tap == "h.0.q"
    assert only_finding(adaptation, "random_parameters").tap == "h.0.heads"
    alone = {f.code for f in adapted(tiny, tmp_path, weighting).findings}
    assert "random_parameters" in alone and not {"unexplained", "mask_after_softmax"} & alone


def test_the_line_that_uses_a_random_parameter_is_named_as_well(tiny: Path, tmp_path: Path) -> None:
    built, used = (
        "self.kinds = nn.Embedding(2, emb_dim)",
        "x = x + self.kinds(torch.zeros_like(ids))",
    )
    edits = [(LOOP, f"        {used}\n{LOOP}"), (HEAD, f"        {built}\n{HEAD}")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "random_parameters")
    [line] = [int(place.rpartition(":")[2]) for place in found.also]
    assert found.source_line == built and used in linecache.getline(str(found.file), line)
    assert found.message == "kinds.weight has no counterpart in GPT-2 and keeps its initial value"


def test_a_mask_that_is_a_parameter_is_not_reported(tiny: Path, tmp_path: Path) -> None:
    buffer = 'self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))'
    mask = "self.mask = nn.Parameter({}, requires_grad=False)"
    activation = ('approximate="tanh"', 'approximate="none"')
    for value, codes in (
        ("torch.ones(context, context).triu(1)", ["erf_gelu"]),
        ("torch.rand(context, context).triu(1)", ["random_parameters", "erf_gelu"]),
    ):
        adaptation = adapted(tiny, tmp_path, [(buffer, mask.format(value)), activation])
        assert [f.code for f in adaptation.deviations] == codes


@pytest.mark.parametrize("norm", ["", "self.final_norm"])
@pytest.mark.parametrize("head", ["", "self.head"])
def test_the_call_without_targets_is_examined_as_well(
    tiny: Path, tmp_path: Path, head: str, norm: str
) -> None:
    forward, end = "forward(self, ids{})", "x = self.final_norm(x)\n        return self.head(x)\n"
    last = f"if targets is None:\n            return {head}({norm}(x[:, [-1]]))\n        "
    edits = [
        (forward.format(""), forward.format(", targets=None")),
        (end, last + end.replace("self.head", head)),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    expected = [*([] if head else ["no_head"]), *([] if norm else ["no_final_ln"])]
    assert [f.code for f in adaptation.deviations] == expected
    assert adaptation.compatible is not bool(expected)
    line = "x[:, [-1]]" if head else "x = block(x)"
    assert norm or line in (adaptation.deviations[-1].source_line or "")


def test_every_line_of_a_deviation_is_named(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (f"LayerNorm({name})", f"nn.LayerNorm({name}, eps=1e-6)") for name in ("dim", "emb_dim")
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "eps_value")
    lines = (tmp_path / "learner.py").read_text().splitlines()
    expected = [i for i, text in enumerate(lines, 1) if "eps=1e-6" in text]
    assert found.line == expected[0]
    assert found.also == [f"{tmp_path / 'learner.py'}:{line}" for line in expected[1:]]
    assert len(expected) == 3


def test_the_line_that_sets_a_value_is_named_as_well(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("def __init__(self, dim):\n        super().__init__()\n        self.scale",
         "def __init__(self, dim, eps=1e-6):\n        super().__init__()\n        self.eps = eps\n"
         "        self.scale"),
        ("torch.sqrt(var + 1e-5)", "torch.sqrt(var + self.eps)"),
        ("class GPT(", "def waves(T, C):\n    t = torch.arange(T)[:, None] * torch.arange(C)\n"
         "    return torch.sin(t)\n\n\nclass GPT("),
        ("self.pos_emb(torch.arange(T, device=ids.device))", "waves(T, 24)"),
        ("emb_dim, n_heads, context_length)", "emb_dim, heads=3, context=context_length)"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    lines = (tmp_path / "learner.py").read_text().splitlines()
    for code, words in (
        ("eps_value", "eps=1e-6"),
        ("sinusoidal_pos", "torch.sin(t)"),
        ("n_head_mismatch", "heads=3"),
    ):
        line = next(n for n, text in enumerate(lines, 1) if words in text)
        assert f"{tmp_path / 'learner.py'}:{line}" in only_finding(adaptation, code).also


SECOND_NORM = "        x = self.norm2(x)\n        x = self.ff(x)\n        x = x + shortcut\n"
POST_NORM = [
    ("        x = self.norm1(x)\n        x = self.att(x)\n        x = x + shortcut\n",
     "        x = self.norm1(x + self.att(x))\n"),
    (SECOND_NORM, "        x = self.norm2(x + self.ff(x))\n"),
]  # fmt: skip
OWN_LINEAR = """
class Dense(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(m, n)), nn.Parameter(torch.zeros(m))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class FeedForward("""
GATE = """
class Gate(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.both = nn.Linear(n, 2 * m)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return F.silu(a) * b


class FeedForward("""
WRAPPED_NORM = """
class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(x)


class Block("""
ADD_AND_NORM = WRAPPED_NORM.replace("forward(self, x)", "forward(self, x, y)").replace(
    "self.norm(x)", "self.norm(x + y)"
)
BY_MATRIX = """        pairs = torch.arange(self.head_dim // 2)
        angle = torch.arange(T)[:, None] / 10 ** pairs
        c, s = angle.cos(), angle.sin()
        turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
        queries, keys = (
            torch.einsum("tdij,bhtdj->bhtdi", turn, x.unflatten(-1, (-1, 2))).flatten(-2)
            for x in (queries, keys)
        )
"""
RELATIVE = """        steps = torch.arange(T)[:, None] - torch.arange(T)
        table = torch.sin(steps[..., None] / (1 + torch.arange(self.head_dim)))
        relative = torch.einsum("bhtd,tsd->bhts", queries, table)
"""
# The edits, the code, and parts of lines that the finding must name.
ADDS_BIAS = """class Bias(nn.Module):
    def forward(self, scores):
        places = torch.arange(scores.shape[-1]).flip(0) / 9
        return scores - places


"""
NORM_WITH_METHOD = """class Norm(nn.Module):
    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        return self.norm(x)


"""
SWISH = """class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


"""

LINES: dict[str, tuple[Edits, str, list[str]]] = {
    "an activation as an argument": (
        [
            (
                "dim):\n        super().__init__()\n        self.up",
                "dim, act):\n        super().__init__()\n        self.act = act\n        self.up",
            ),
            (GELU, "self.act(self.up(x))"),
            ("FeedForward(dim)", "FeedForward(dim, F.relu)"),
        ],
        "relu",
        ["self.act(self.up(x))", "FeedForward(dim, F.relu)"],
    ),
    "an activation by its name": (
        [
            (
                "class FeedForward(",
                'ACTIVATIONS = {\n    "relu": F.relu,\n    "silu": F.silu,\n}\n\n\n'
                "class FeedForward(",
            ),
            (GELU, "ACTIVATIONS[self.act](self.up(x))"),
            ("        self.up", '        self.act = "silu"\n        self.up'),
        ],
        "silu",
        ['"silu": F.silu', '= "silu"', "(self.up(x))"],
    ),
    "a mask in a variable": (
        [
            (
                '("mask", torch.triu(torch.ones(context, context), diagonal=1))',
                '("mask", mask)',
            ),
            (
                "        self.register_buffer",
                "        mask = torch.triu(torch.ones(context, context), diagonal=2)\n"
                "        self.register_buffer",
            ),
        ],
        "mask_off",
        ["diagonal=2", "masked_fill"],
    ),
    "no positions": (
        [(" + self.pos_emb(torch.arange(T, device=ids.device))", "")],
        "no_pos",
        ["x = self.tok_emb(ids)", "self.tok_emb = nn.Embedding"],
    ),
    "projections without biases": (
        [
            (f"self.W_{x} = nn.Linear(dim, dim)", f"self.W_{x} = nn.Linear(dim, dim, bias=False)")
            for x in ("query", "key", "value")
        ],
        "no_qkv_bias",
        ["self.W_query =", "self.W_key =", "self.W_value ="],
    ),
    "norms without a bias": (
        [
            ("        self.shift = nn.Parameter(torch.zeros(dim))\n", ""),
            (" + self.shift", ""),
        ],
        "no_ln_bias",
        ["self.norm1 =", "self.norm2 =", "self.final_norm ="],
    ),
    "a second final norm": (
        [
            (
                "self.blocks = nn.ModuleList(blocks)",
                "self.blocks = nn.Sequential(*blocks, nn.LayerNorm(emb_dim))",
            )
        ],
        "extra_ln",
        ["nn.Sequential("],
    ),
    "blocks that all read the embeddings": (
        [
            ("            x = block(x)\n", "            y = block(x)\n"),
            ("self.final_norm(x)", "self.final_norm(y)"),
        ],
        "n_layer_mismatch",
        ["y = block(x)"],
    ),
    "one norm for both branches": (
        [("self.norm2(x)", "self.norm1(x)  # again")],
        "shared_parameters",
        ["# again"],
    ),
    "the final norm after every block": (
        [("        x = self.final_norm(x)\n", "            x = self.final_norm(x)\n")],
        "extra_ln",
        ["x = self.final_norm(x)"],
    ),
    "a norm after attention, and one after the MLP": (
        [
            ("        self.norm2 =", "        self.norm3 = LayerNorm(dim)\n        self.norm2 ="),
            (
                "        x = x + shortcut\n        shortcut = x\n",
                "        x = x + shortcut\n        x = self.norm3(x)\n        shortcut = x\n",
            ),
            ("        return x\n\n\nclass GPT", "        return self.norm3(x)\n\n\nclass GPT"),
        ],
        "extra_ln",
        ["x = self.norm3(x)", "return self.norm3(x)"],
    ),
    "norms in a module around them": (
        [*POST_NORM, ("class Block(", WRAPPED_NORM.lstrip()), ("= LayerNorm(dim)", "= Norm(dim)")],
        "post_ln",
        ["self.norm1(x + self.att(x))", "self.norm2(x + self.ff(x))"],
    ),
    "a module that adds and normalizes": (
        [
            *((old, new.replace("x + self.", "x, self.")) for old, new in POST_NORM),
            ("class Block(", ADD_AND_NORM.lstrip()),
            ("= LayerNorm(dim)", "= Norm(dim)"),
        ],
        "post_ln",
        ["self.norm(x + y)", "self.norm1(x, self.att(x))", "self.norm2(x, self.ff(x))"],
    ),
    "one residual around both": (
        [
            (
                BLOCK,
                "    def forward(self, x):\n        return x + self.ff(self.att(self.norm1(x)))\n\n"
                "    def unused(self, x):\n        shortcut = x\n",
            )
        ],
        "missing_residual",
        ["self.ff(self.att("],
    ),
    "a gate that is a custom linear layer": (
        [
            ("class FeedForward(", OWN_LINEAR.lstrip()),
            ("nn.Linear(dim, 4 * dim)", "Dense(dim, 4 * dim)"),
            ("        self.down", "        self.gate = Dense(dim, 4 * dim)\n        self.down"),
            (GELU, "F.silu(self.up(x)) * self.gate(x)"),
        ],
        "gated_mlp",
        ["self.gate(x)", "self.ff = FeedForward(dim)"],
    ),
    "a rotation by matrices": (
        [("        scores = queries", f"{BY_MATRIX}        scores = queries")],
        "rope",
        ["torch.einsum("],
    ),
    "scores of relative positions": (
        [("        scores = queries @", f"{RELATIVE}        scores = relative + queries @")],
        "position_bias",
        ["scores = relative + queries @"],
    ),
    "a bias of a module of its own": (
        [
            ("class Attention", f"{ADDS_BIAS}class Attention"),
            ("        self.drop =", "        self.bias = Bias()\n        self.drop ="),
            (
                "        scores = scores.",
                "        scores = self.bias(scores)\n        scores = scores.",
            ),
        ],
        "position_bias",
        ["return scores - places", "scores = self.bias(scores)"],
    ),
    "a norm of queries with a method": (
        [
            ("class Attention", f"{NORM_WITH_METHOD}class Attention"),
            ("        self.drop =", "        self.qn = Norm()\n        self.drop ="),
            (
                "        scores = queries @",
                "        queries, keys = self.qn(queries), self.qn(keys)\n"
                "        scores = queries @",
            ),
        ],
        "qk_norm",
        ["torch.rsqrt(", "return self.norm(x)", "queries, keys = self.qn("],
    ),
    "an activation in the arguments of a sequence": (
        [
            ("class FeedForward(nn.Module):", f"{SWISH}class FeedForward(nn.Sequential):"),
            (
                "        super().__init__()\n        self.up = nn.Linear(dim, 4 * dim)\n"
                "        self.down = nn.Linear(4 * dim, dim)\n\n    def forward(self, x):\n"
                f"        return self.down({GELU})\n",
                "        super().__init__(\n            nn.Linear(dim, 4 * dim),\n"
                "            Swish(),\n"
                "            nn.Linear(4 * dim, dim),\n        )\n",
            ),
        ],
        "silu",
        ["torch.sigmoid(x)", "Swish(),"],
    ),
    "attention that is called again": (
        [("x = self.ff(x)", "x = self.att(x)  # again")],
        "shared_parameters",
        ["# again"],
    ),
    "keys and values of several heads": (
        [
            ("self.W_key = nn.Linear(dim, dim)", "self.W_key = nn.Linear(dim, self.head_dim)"),
            ("self.W_value = nn.Linear(dim, dim)", "self.W_value = nn.Linear(dim, self.head_dim)"),
            ("keys = keys.view(B, T, self.heads, self.head_dim).tr", "keys = keys[:, None]  # .tr"),
            (
                "values = values.view(B, T, self.heads, self.head_dim).tr",
                "values = values[:, None]  # .tr",
            ),
        ],
        "grouped_query_attention",
        ["keys = self.W_key(x)", "self.W_key = nn.Linear"],
    ),
    "a mask that adds 1": (
        [
            (
                'scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))',
                "scores += self.mask[:T, :T].bool()",
            )
        ],
        "mask_value",
        ["scores += self.mask"],
    ),
    "a softmax of a softmax": (
        [
            (
                "        weights = self.drop",
                "        weights = torch.softmax(weights, dim=-1)\n        weights = self.drop",
            )
        ],
        "other_softmax",
        ["torch.softmax(weights"],
    ),
    "a softmax of a softmax without a mask": (
        [
            (
                "        weights = self.drop",
                "        weights = torch.softmax(weights, dim=-1)\n        weights = self.drop",
            ),
            ("scores = scores.masked_fill(", "scores.masked_fill("),
        ],
        "no_mask",
        ["torch.softmax(scores"],
    ),
    "sums that are divided": (
        [("        x = x + shortcut\n", "        x = (x + shortcut) / 2\n")],
        "residual_weights",
        ["(x + shortcut) / 2"],
    ),
    "a custom linear layer that contains the gate": (
        [
            ("class FeedForward(", GATE.lstrip()),
            ("nn.Linear(dim, 4 * dim)", "Gate(dim, 4 * dim)"),
            (GELU, "self.up(x)"),
        ],
        "gated_mlp",
        ["F.silu(a) * b"],
    ),
    "inner width of a layer": (
        [("4 * dim", "3 * dim")],
        "inner_dim",
        ["self.up = nn.Linear(dim, 3 * dim)"],
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_lines_of_a_deviation_are_named(tiny: Path, tmp_path: Path, name: str) -> None:
    edits, code, words = LINES[name]
    found = only_finding(adapted(tiny, tmp_path, edits), code)
    lines = (tmp_path / "learner.py").read_text().splitlines()
    named = [f"{found.file}:{found.line}", *found.also]
    texts = [lines[int(line.rpartition(":")[2]) - 1] for line in named]
    for each in words:
        assert any(each in text for text in texts), texts


@pytest.mark.parametrize("is_named", [True, False])
def test_a_condition_on_an_id_is_named_beside_other_deviations(
    tiny: Path, tmp_path: Path, is_named: bool
) -> None:
    effect = "* (ids != 9)" if is_named else "+ 0 * (ids != 9)"
    edits = [(LOOP, f"        x = x {effect}[..., None]\n{LOOP}"), (GELU, "F.relu(self.up(x))")]
    found = {f.code: f for f in adapted(tiny, tmp_path, edits).deviations}
    assert set(found) == ({"relu", "id_condition"} if is_named else {"relu"})
    if is_named:
        assert "the id 9 changes" in found["id_condition"].message


def test_a_second_call_of_attention_is_not_a_layer(tiny: Path, tmp_path: Path) -> None:
    adaptation = adapted(tiny, tmp_path, [("x = self.ff(x)", "x = self.att(x)")])
    codes = {f.code for f in adaptation.deviations}
    assert {"shared_parameters", "no_mlp"} <= codes and "n_layer_mismatch" not in codes


def test_two_projections_that_are_added_are_not_called_a_product(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("self.up = nn.Linear(dim, 4 * dim)", "self.up = nn.Linear(dim, 4 * dim)\n"
         "        self.beside = nn.Linear(dim, 4 * dim)"),
        (GELU, "F.relu(self.up(x)) + self.beside(x)"),
    ]  # fmt: skip
    found = only_finding(adapted(tiny, tmp_path, edits), "gated_mlp")
    assert found.message.startswith("the MLP adds the results of two projections")


def test_missing_biases_are_a_deviation_of_a_gated_mlp_but_not_of_an_rmsnorm(
    tiny: Path, tmp_path: Path
) -> None:
    edits = [
        ("LayerNorm(dim)", "nn.RMSNorm(dim, eps=1e-5)"),
        ("LayerNorm(emb_dim)", "nn.RMSNorm(emb_dim, eps=1e-5)"),
        ("self.up = nn.Linear(dim, 4 * dim)", "self.up = nn.Linear(dim, 4 * dim, bias=False)\n"
         "        self.gate = nn.Linear(dim, 4 * dim, bias=False)"),
        ("nn.Linear(4 * dim, dim)", "nn.Linear(4 * dim, dim, bias=False)"),
        (GELU, "F.silu(self.up(x)) * self.gate(x)"),
    ]  # fmt: skip
    found = {f.code: f for f in adapted(tiny, tmp_path, edits).deviations}
    assert set(found) == {"rmsnorm", "gated_mlp", "no_mlp_bias"}
    assert "has no bias," in found["rmsnorm"].message
    assert found["gated_mlp"].tap == "h.0.act" and found["no_mlp_bias"].tap == "h.0.fc"
    assert "self.up = " in (found["no_mlp_bias"].source_line or "")
    also = [place.rsplit(":", 1) for place in found["no_mlp_bias"].also]
    lines = [linecache.getline(file, int(line)).split()[0] for file, line in also]
    assert lines == ["self.down", "self.gate"]


def test_a_table_of_pairs_is_named_at_its_line(tiny: Path, tmp_path: Path) -> None:
    table = f"        self.pairs = nn.Embedding(vocab_size, vocab_size)\n{HEAD}"
    edits = [("        B, T = ids.shape\n", "        return self.pairs(ids)\n"), (HEAD, table)]
    found = only_finding(adapted(tiny, tmp_path, edits), "no_attention")
    assert (found.source_line or "").strip() == "return self.pairs(ids)"


def test_a_norm_with_one_weight_for_all_channels_is_reported(tiny: Path, tmp_path: Path) -> None:
    edits = [(f"torch.{kind}(dim))", f"torch.{kind}(1))") for kind in ("ones", "zeros")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = only_finding(adaptation, "other_shape")
    assert "h.{0…2}.ln_1.weight" in found.message and "has shape [1] and not [24]" in found.message
    assert (found.source_line or "").strip() == "self.norm1 = LayerNorm(dim)"
    target = Target(f"{tmp_path / 'learner.py'}:GPT")
    search = Search(target, open_checkpoint(tiny), open_checkpoint(tiny).config, unsafe=False)
    assert search.run() is None and not search.has_untried_edits()


@pytest.mark.parametrize(("eps", "found"), [(", eps=1e-6", "1e-06"), ("", "1.19e-07")])
def test_the_eps_of_an_rmsnorm_is_a_separate_deviation(
    tiny: Path, tmp_path: Path, eps: str, found: str
) -> None:
    """The default of torch's RMSNorm is the machine epsilon of float32."""
    norms = [(f"LayerNorm({width})", f"nn.RMSNorm({width}{eps})") for width in ("dim", "emb_dim")]
    adaptation = adapted(tiny, tmp_path, norms)
    assert {f.code for f in adaptation.deviations} == {"rmsnorm", "eps_value"}
    eps_value = only_finding(adaptation, "eps_value")
    assert f"the norm's eps is {found}, but the checkpoint's is 1e-05" in eps_value.message
    assert "nn.RMSNorm(" in (eps_value.source_line or "")
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)
    moved = {f.code: float(f.evidence.split(" by ")[1].split()[0]) for f in adaptation.deviations}
    assert moved["eps_value"] < moved["rmsnorm"] / 100  # each change alone


QUERIES_AND_KEYS = (("queries", "query"), ("keys", "key"))
TURNED = """def turned(x):
    T, D = x.shape[-2:]
    angle = torch.arange(T)[:, None] / 100 ** (torch.arange(0, D, 2) / D)
    a, b = x.chunk(2, -1)
    c, s = angle.cos(), angle.sin()
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class GPT("""


@pytest.mark.parametrize("positions", ["wpe", "no wpe"])
def test_a_rotation_of_all_heads_together_is_named(
    tiny: Path, tmp_path: Path, positions: str
) -> None:
    """The reference cannot be changed in the same way, but the cause is known."""
    edits = [(f"{n} = self.W_{w}(x)", f"{n} = turned(self.W_{w}(x))") for n, w in QUERIES_AND_KEYS]
    edits += [("class GPT(", TURNED)]
    edits += (
        [] if positions == "wpe" else [("+ self.pos_emb(torch.arange(T, device=ids.device))", "")]
    )
    adaptation = adapted(tiny, tmp_path, edits)
    missing = set() if positions == "wpe" else {"no_pos"}
    assert {f.code for f in adaptation.deviations} == {"rope"} | missing
    assert "a * c" in (only_finding(adaptation, "rope").source_line or "")


@pytest.mark.parametrize(("names", "found"), [("keys values", "k and v are"), ("keys", "k is")])
def test_a_rotation_says_what_is_rotated(
    tiny: Path, tmp_path: Path, names: str, found: str
) -> None:
    lines = "".join(f"        {name} = turned({name})\n" for name in names.split())
    scores = "        scores = queries @"
    edits = [(scores, lines + scores), ("class GPT(", TURNED)]
    rope = only_finding(adapted(tiny, tmp_path, edits), "rope")
    assert rope.message.startswith(f"{found} rotated by")
    assert "a * c" in (rope.source_line or "")


@pytest.mark.parametrize("merged", ["transposed", "not transposed"])
def test_heads_of_unknown_attention_that_are_merged_across_tokens_have_no_other_mask(
    tiny: Path, tmp_path: Path, merged: str
) -> None:
    """Each value is weighted by its own weight alone, so no product mixes tokens."""
    own = "torch.einsum('bhnn,bhnd->bhnd', weights, values)"
    merge = ".transpose(1, 2)" if merged == "transposed" else ""
    edits = [("(weights @ values).transpose(1, 2)", own + merge)]
    adaptation = adapted(tiny, tmp_path, edits)
    codes = {"no_attention"} | (set() if merge else {"no_head_merge_transpose"})
    assert {f.code for f in adaptation.deviations} == codes
    assert "because of no_attention" in adaptation.why_unchecked


def test_a_norm_that_adds_its_bias_first_is_named_at_its_line(tiny: Path, tmp_path: Path) -> None:
    norm = "self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift"
    first = "x = (x - mean) / torch.sqrt(var + 1e-5)\n        return (x + self.shift) * self.scale"
    found = only_finding(adapted(tiny, tmp_path, [(f"return {norm}", first)]), "bias_before_scale")
    assert found.source_line == "return (x + self.shift) * self.scale"
    assert found.evidence.startswith("confirmed")


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_norm_with_the_root_of_the_standard_deviation_is_explained(
    tiny: Path, tmp_path: Path, unbiased: bool
) -> None:
    std = f"x.std(-1, keepdim=True, unbiased={unbiased})"
    edits = [("x.var(-1, keepdim=True, unbiased=False)", std)]
    found = only_finding(adapted(tiny, tmp_path, edits), "other_norm")
    assert "square root of the standard deviation" in found.message
    assert found.source_line == f"var = {std}"


@pytest.mark.parametrize("halves", ["both", "queries"])
def test_a_rotation_that_returns_pairs_of_channels_in_halves_is_named(
    tiny: Path, tmp_path: Path, halves: str
) -> None:
    """q·kᵀ is the same if both are reordered, and another product if only one of them is."""
    scores = "        scores = queries @"
    pairs = TURNED.replace("x.chunk(2, -1)", "x[..., ::2], x[..., 1::2]")
    keys = "turned" if halves == "both" else "flat"
    flat = (
        pairs.split("class GPT")[0]
        .replace("turned", "flat")
        .replace("torch.cat([", "torch.stack([")
    )
    flat = flat.replace("], -1)", "], -1).flatten(-2)")
    edits = [
        (scores, f"        queries, keys = turned(queries), {keys}(keys)\n{scores}"),
        ("class GPT(", flat + pairs),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    found = {f.code for f in adaptation.deviations}
    assert (found == {"rope"}) is (halves == "both")
    if halves == "both":
        rope = only_finding(adaptation, "rope")
        assert "a * c" in (rope.source_line or "") and rope.evidence.startswith("confirmed")


def test_a_cast_inside_a_rotation_is_not_one_of_the_scores(tiny: Path, tmp_path: Path) -> None:
    scores = "        scores = queries @"
    turned = TURNED.replace("x.chunk(2, -1)", "x.float().chunk(2, -1)")
    edits = [
        (scores, f"        queries, keys = turned(queries), turned(keys)\n{scores}"),
        ("class GPT(", turned),
    ]
    assert "attn_upcast" not in {f.code for f in adapted(tiny, tmp_path, edits).findings}
    edits.append(("torch.softmax(scores, dim=-1)", "torch.softmax(scores.float(), dim=-1)"))
    found = only_finding(adapted(tiny, tmp_path, edits), "attn_upcast")
    assert found.message.startswith("the attention weights are computed in float32")
    assert "softmax" in (found.source_line or "")


@pytest.mark.parametrize("width", [4, 3])
def test_the_inner_width_of_a_projection_that_computes_the_gate_too(
    tiny: Path, tmp_path: Path, width: int
) -> None:
    edits = [
        ("self.up = nn.Linear(dim, 4 * dim)", f"self.up = nn.Linear(dim, 2 * {width} * dim)"),
        ("nn.Linear(4 * dim, dim)", f"nn.Linear({width} * dim, dim)"),
        (f"return self.down({GELU})",
         "a, b = self.up(x).chunk(2, -1)\n        return self.down(F.silu(a) * b)"),
    ]  # fmt: skip
    found = {f.code: f for f in adapted(tiny, tmp_path, edits).deviations}
    assert ("inner_dim" in found) is (width == 3) and "gated_mlp" in found
    assert "unexplained" not in found
    if width == 3:
        assert "the MLP is 72 wide" in found["inner_dim"].message


def test_a_bias_that_is_added_to_a_gate_belongs_to_it(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        self.down", "        self.gate = nn.Linear(dim, 4 * dim, bias=False)\n"
         "        self.shift = nn.Parameter(torch.ones(4 * dim))\n        self.down"),
        (GELU, "F.silu(self.up(x)) * (self.gate(x) + self.shift)"),
    ]  # fmt: skip
    found = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    assert found == {"gated_mlp"}


@pytest.mark.parametrize(
    ("after", "scores", "found"),
    [
        # The queries are scaled, and not the scores.
        ("* self.head_dim ** -0.5", "@ keys.transpose(2, 3)", set()),
        ("* 1.2", "@ keys.transpose(2, 3) / self.head_dim ** 0.5", {"wrong_scale"}),
        ("* 1.0", "@ keys.transpose(2, 3)", {"no_attn_scale"}),
    ],
)
def test_a_scale_between_a_norm_of_the_queries_and_their_product_counts(
    tiny: Path, tmp_path: Path, after: str, scores: str, found: set[str]
) -> None:
    norm = "F.rms_norm({0}, (self.head_dim,), eps=1e-6)"
    old = "        scores = queries @ keys.transpose(2, 3) / self.head_dim ** 0.5"
    new = f"        queries = {norm.format('queries')} {after}\n"
    new += f"        keys = {norm.format('keys')}\n        scores = queries {scores}"
    adaptation = adapted(tiny, tmp_path, [(old, new)])
    assert {f.code for f in adaptation.deviations} == {"qk_norm", *found}
    assert all(f.severity == "breaks" for f in adaptation.deviations)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_rotation_after_a_norm_of_the_queries_is_named(
    tiny: Path, tmp_path: Path, bfloat16: bool
) -> None:
    """Cosines in bfloat16 change the norm of the queries a little."""
    scores, turned = "        scores = queries @", TURNED
    if bfloat16:
        turned = TURNED.replace("angle.cos()", "angle.cos().bfloat16().float()")
        assert turned != TURNED
    edits = [
        (scores, "        queries, keys = turned(unit(queries)), turned(unit(keys))\n" + scores),
        ("class GPT(", f"def unit(x):\n    return F.rms_norm(x, x.shape[-1:])\n\n\n{turned}"),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"qk_norm", "rope"}
    assert "a * c" in (only_finding(adaptation, "rope").source_line or "")


@pytest.mark.parametrize("call", ["(x)", ".forward(x)"])
def test_the_lines_that_build_a_module_are_named(tiny: Path, tmp_path: Path, call: str) -> None:
    edits = [
        (
            "(x - mean) / torch.sqrt(var + 1e-5)",
            "x * torch.rsqrt(x.square().mean(-1, True) + 1e-5)",
        ),
        *((f"{name}(x)", f"{name}{call}") for name in ("self.norm1", "self.norm2", "final_norm")),
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "rmsnorm")
    lines = (tmp_path / "learner.py").read_text().splitlines()
    built = [i for i, text in enumerate(lines, 1) if "= LayerNorm(" in text]
    assert {f"{tmp_path / 'learner.py'}:{line}" for line in built} <= set(found.also)


def test_a_residual_connection_around_all_attentions_belongs_to_the_last(
    tiny: Path, tmp_path: Path
) -> None:
    loop = f"        start = x\n{LOOP}            x = block.att(x)\n        x = x + start\n"
    adaptation = adapted(tiny, tmp_path, [(f"{LOOP}            x = block(x)\n", loop)])
    assert {"missing_ln", "no_mlp"} <= {f.code for f in adaptation.deviations}
    found = only_finding(adaptation, "missing_residual")
    assert found.message.endswith("(only in h.0 and h.1)") and "block.att(x)" in str(
        found.source_line
    )


def test_a_deviation_in_an_extra_layer_is_reported(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (GELU, 'F.gelu(self.up(x), approximate="none" if self.exact else "tanh")'),
        ("        self.up = nn", "        self.exact = False\n        self.up = nn"),
        ("for _ in range(n_layers)]", "for _ in range(4)]\n        blocks[3].ff.exact = True"),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"erf_gelu", "n_layer_mismatch"}
    found = only_finding(adaptation, "erf_gelu")
    assert found.severity == "breaks" and "does not have" in found.evidence


@pytest.mark.parametrize("positions", [True, False])
def test_positions_after_a_projection_of_the_embedding_are_recognised(
    tiny: Path, tmp_path: Path, positions: bool
) -> None:
    added = "self.pos_emb(torch.arange(T, device=ids.device))"
    later = f" + {added}" if positions else ""
    edits = [
        (f"self.tok_emb(ids) + {added}", f"self.project(self.tok_emb(ids)){later}"),
        ("        self.final_norm = ", "        self.project = nn.Linear(emb_dim, emb_dim)\n"
         "        self.final_norm = "),
    ]  # fmt: skip
    codes = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    assert "extra_projection" in codes and ("no_pos" in codes) is not positions


@pytest.mark.parametrize("computed", [True, False])
def test_attention_that_does_not_reach_the_logits_is_reported(
    tiny: Path, tmp_path: Path, computed: bool
) -> None:
    edits = [("return self.out_proj(out)", "return self.out_proj(x)")]
    if not computed:
        edits += [("out = (weights @ values)", "out = values")]
        edits += [("torch.softmax(scores, dim=-1)", "scores")]
    edits += [("        x = self.final_norm(x)\n", "")]
    adaptation = adapted(tiny, tmp_path, edits)
    found = adaptation.findings[0]
    assert found.code == ("unused_attention" if computed else "no_attention")
    assert {f.code for f in adaptation.findings[1:]} == {"no_final_ln", "untied_head"}
    if computed:
        assert "torch.softmax(scores" in (found.source_line or "")


def test_all_uses_of_a_repeated_block_are_named(tiny: Path, tmp_path: Path) -> None:
    """The line that builds them is named as well, even without an output projection."""
    edits = [
        ("for _ in range(n_layers)]", "] * n_layers"),
        ("return self.out_proj(out)", "return out"),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"shared_parameters", "no_out_proj"}
    found = only_finding(adaptation, "shared_parameters")
    assert "the blocks h.0, h.1 and h.2 share one set" in found.message
    lines = (tmp_path / "learner.py").read_text().splitlines()
    assert any("self.blocks = " in lines[int(p.rpartition(":")[2]) - 1] for p in found.also)


def test_heads_that_are_not_transposed_are_not_a_rotation(tiny: Path, tmp_path: Path) -> None:
    split = "self.heads, self.head_dim).transpose(1, 2)"
    edits = [
        (f".view(B, T, {split}", ".reshape(B, self.heads, T, self.head_dim)"),
        ("self.head_dim ** 0.5", "C ** 0.5"),
    ]
    assert "rope" not in {f.code for f in adapted(tiny, tmp_path, edits).findings}


def test_rounded_probabilities_are_two_deviations(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("        return self.head(x)", "        x = self.head(x).softmax(-1)\n"
         "        return torch.round(x, decimals=4)"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"softmax_output", "changed_logits"}
    assert "torch.round" in (only_finding(adaptation, "changed_logits").source_line or "")


def test_layers_with_a_deviation_are_named_if_others_lack_it(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (GELU, 'F.gelu(self.up(x), approximate="none" if self.exact else "tanh")'),
        ("        self.up = nn", "        self.exact = False\n        self.up = nn"),
        (
            "        self.final_norm = L",
            "        self.blocks[1].ff.exact = True\n        self.final_norm = L",
        ),
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "erf_gelu")
    assert found.tap == "h.1.act" and found.message.endswith("(only in h.1)")


@pytest.mark.parametrize("filename", ["<ipython-input-7-abc>", "/tmp/ipykernel_1/7.py"])
def test_a_line_of_a_live_notebook_is_named_with_the_number_of_its_cell(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, filename: str
) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={filename: 5}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    text = GPT.replace(GELU, "F.gelu(self.up(x))")
    lines = text.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, filename, (len(text), None, lines, filename))
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, filename, "exec"), cell)
    adaptation = adapt(cell["GPT"](97, 32, 24, 4, 3), tiny)
    for code, words in (("erf_gelu", "F.gelu(self.up(x))"), ("train_mode", "nn.Dropout(0.1)")):
        found = only_finding(adaptation, code)
        assert words in (found.source_line or "")
        line = next(n for n, text in enumerate(lines, 1) if words in text)
        assert place(found.file or "", found.line) == f"In[5]:{line}"
    assert adaptation.target is None and adaptation.patch() is None
    with pytest.raises(ParityError, match=r"^In\[5\]:\d+: erf_gelu"):
        adaptation.raise_if_failed()


ONE_NARROW_HEAD = """import torch
from torch import nn


class GPT(nn.Module):
    def __init__(self, vocab_size, context_length, emb_dim, head_size):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, emb_dim)
        self.pos_emb = nn.Embedding(context_length, emb_dim)
        self.qkv = nn.ModuleList([nn.Linear(emb_dim, head_size) for _ in range(3)])
        self.head = nn.Linear(head_size, vocab_size)

    def forward(self, ids):
        T = ids.shape[1]
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(T))
        q, k, v = (project(x) for project in self.qkv)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        mask = torch.ones(T, T).triu(diagonal=1).bool()
        return self.head(torch.softmax(scores.masked_fill(mask, -torch.inf), dim=-1) @ v)
"""


def test_one_head_that_is_narrower_than_the_stream_is_explained(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ONE_NARROW_HEAD)
    adaptation = Target(f"{tmp_path / 'own.py'}:GPT").adapt(open_checkpoint(tiny), {})
    found = {f.code: f for f in adaptation.deviations}
    assert found.keys() == {
        "missing_ln", "n_head_mismatch", "no_out_proj", "missing_residual", "no_mlp",
        "n_layer_mismatch", "no_final_ln", "other_shape",
    }  # fmt: skip
    assert found["n_head_mismatch"].message.startswith("the model has 1 head of ")
    assert found["other_shape"].message.startswith("lm_head.weight cannot be loaded")
    assert [f.code for f in adaptation.findings].count("head_bias") == 1


def test_queries_that_are_summed_up_are_not_a_rotation(tiny: Path, tmp_path: Path) -> None:
    scores = "        scores = queries @"
    edits = [(scores, f"        queries = queries.cumsum(2)\n{scores}")]
    found = {f.code: f.tap for f in adapted(tiny, tmp_path, edits).deviations}
    assert found == {"extra_operation": "h.0.probs"}


MASKED = '        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))\n'
CAPPED = "        scores = 5 * torch.tanh(scores / 5)\n"
SCORE_DEVIATIONS = {
    "no_mask": (MASKED, ""),
    "wrong_scale": ("/ self.head_dim ** 0.5", "/ 2"),
    "softmax_dim": ("torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=-2)"),
    "changed_scores": (MASKED, CAPPED + MASKED),
    "scaled_probs": ("weights = self.drop(weights)", "weights = self.drop(weights) * 2"),
}
PREVIOUS_KEYS = "keys = " + PREVIOUS.format("keys.transpose(1, 2)") + ".transpose(1, 2)"


@pytest.mark.parametrize("other", ["no_mask", "wrong_scale", "softmax_dim"])
@pytest.mark.parametrize("name", [name for name in EQUAL if name.startswith("an axis of heads")])
def test_the_order_of_heads_and_sequences_does_not_matter(
    tiny: Path, tmp_path: Path, name: str, other: str
) -> None:
    adaptation = adapted(tiny, tmp_path, [SCORE_DEVIATIONS[other], *EQUAL[name]])
    [found] = adaptation.deviations
    assert found.code == other and found.evidence.startswith("confirmed")


@pytest.mark.parametrize("other", SCORE_DEVIATIONS)
@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("qk_norm", "queries, keys = F.layer_norm(queries, (8,)), F.layer_norm(keys, (8,))"),
        ("time_shift", PREVIOUS_KEYS),
    ],
)
def test_a_change_of_the_keys_does_not_hide_another_deviation_of_the_scores(
    tiny: Path, tmp_path: Path, code: str, line: str, other: str
) -> None:
    scores = "        scores = queries @"
    line = line.replace("(8,)", "(self.head_dim,)")
    edits = [(scores, f"        {line}\n{scores}"), SCORE_DEVIATIONS[other]]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {code, other}
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)


@pytest.mark.parametrize("other", ["no_mask", "scaled_probs", "wrong_scale"])
def test_a_cap_does_not_hide_another_deviation_of_the_scores(
    tiny: Path, tmp_path: Path, other: str
) -> None:
    old, new = SCORE_DEVIATIONS[other]
    edits = [(MASKED, CAPPED)] if other == "no_mask" else [(MASKED, CAPPED + MASKED), (old, new)]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"changed_scores", other}
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)


def test_a_model_that_overrides_parameters_is_proved(tiny: Path, tmp_path: Path) -> None:
    method = "    def parameters(self):\n        return [*self.blocks.parameters()]\n\n"
    forward = "    def forward(self, ids):"
    assert adapted(tiny, tmp_path, [(forward, method + forward)]).compatible


@pytest.mark.parametrize("fixed", [True, False])
def test_positions_along_the_axis_of_the_batch_are_reported(
    tiny: Path, tmp_path: Path, fixed: bool
) -> None:
    """Code that expects ids (T, B) uses the wrong axis if it is called with ids (B, T)."""
    added = "self.pos_emb(torch.arange(T, device=ids.device))"
    table = "torch.arange(B)[:, None, None] + torch.linspace(0, 1, x.shape[-1])"
    if fixed:
        edits = [(f" + {added}\n", f"\n        x = x + {table}.sin()\n")]
        edits += [("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", "")]
    else:
        edits = [(added, "self.pos_emb(torch.arange(B))[:, None]")]
    adaptation = adapted(tiny, tmp_path, edits)
    codes = {"position_ids", "sinusoidal_pos"} if fixed else {"position_ids"}
    assert {f.code for f in adaptation.deviations} == codes
    found = only_finding(adaptation, "position_ids")
    assert "along the axis of the batch" in found.message
    assert found.evidence.startswith("confirmed") and "torch.arange(B)" in str(found.source_line)


def test_code_that_names_half_precision_is_examined(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("class LayerNorm(", "DTYPE = torch.bfloat16\n\n\nclass LayerNorm("),
        ("torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=-1, dtype=DTYPE)"),
        (HEAD, f"        self.to(DTYPE)\n{HEAD}"),
        ("emb_dim, vocab_size, bias=False)", "emb_dim, vocab_size, bias=False, dtype=DTYPE)"),
        (GELU, "F.relu(self.up(x))"),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"relu"}
    learners = [vars(m) for m in list(sys.modules.values()) if m.__name__.startswith("learner")]
    assert "torch.bfloat16" in {str(names.get("DTYPE")) for names in learners}  # restored


def test_a_gated_mlp_may_end_with_the_product(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("self.down = nn.Linear(4 * dim, dim)",
         "self.gate, self.value = nn.Linear(4 * dim, dim), nn.Linear(4 * dim, dim)"),
        ("return self.down(", "x = ("),
        (GELU + ")\n", "self.up(x))\n        return F.silu(self.gate(x)) * self.value(x)\n"),
    ]  # fmt: skip
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.deviations} == {"gated_mlp"}


def test_an_activation_after_an_mlp_without_a_residual_is_reported(
    tiny: Path, tmp_path: Path
) -> None:
    end = "        x = self.ff(x)\n        x = x + shortcut\n"
    adaptation = adapted(tiny, tmp_path, [(end, "        x = F.relu(self.ff(x))\n")])
    assert {f.code for f in adaptation.deviations} == {"missing_residual", "other_activation"}
    assert all(f.evidence.startswith("confirmed") for f in adaptation.deviations)


def test_methods_are_called_in_place_of_a_missing_forward(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("    def forward(self, ids):", "    def decode(self, ids):"),
        (
            "return self.head(x)",
            "return x\n\n    def project(self, x):\n        return self.head(x)",
        ),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation
    found = only_finding(adaptation, "no_forward")
    assert found.fix == "def forward(self, ids): return self.project(self.decode(ids))"
    assert found.severity == "info" and (found.source_line or "").startswith("class GPT")


def test_a_method_that_returns_logits_is_called(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (
            "return self.head(x)",
            "return x\n\n    def logits(self, ids):\n        return self.head(self.forward(ids))",
        )
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation
    found = only_finding(adaptation, "logits_method")
    assert found.fix == "logits = self.logits(ids)" and found.severity == "info"


def test_the_lines_of_both_branches_without_a_norm_are_shown(tiny: Path, tmp_path: Path) -> None:
    norms = ["        x = self.norm1(x)\n", "        x = self.norm2(x)\n"]
    adaptation = adapted(tiny, tmp_path, [(norm, "") for norm in norms])
    found = only_finding(adaptation, "missing_ln")
    assert found.file is not None and found.line is not None
    text = Path(found.file).read_text().splitlines()
    numbers = [found.line, *(int(place.rpartition(":")[2]) for place in found.also)]
    assert [text[number - 1].strip() for number in numbers] == ["x = self.att(x)", "x = self.ff(x)"]


@pytest.mark.parametrize("name", ["project", "hidden_state_to_token"])
def test_a_method_that_makes_logits_of_hidden_states_is_called(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    """Another method of the model may be of another width, or may not take hidden states."""
    methods = "return x\n\n    def generate(self, ids, steps):\n        return ids\n\n"
    methods += "    def value_head(self, x):\n        return x[..., :1]\n\n"
    methods += f"    def {name}(self, x):\n        return self.head(x)"
    adaptation = adapted(tiny, tmp_path, [("return self.head(x)", methods)])
    assert adaptation
    found = only_finding(adaptation, "logits_method")
    assert found.fix == f"logits = self.{name}(self.forward(ids))" and found.severity == "info"
    wrong = [("return self.head(x)", methods.replace("self.head(x)", "-self.head(x)"))]
    assert not adapted(tiny, tmp_path, wrong)


def test_of_the_logits_after_each_block_the_last_are_compared(tiny: Path, tmp_path: Path) -> None:
    edits = [
        (LOOP, f"        every = []\n{LOOP}"),
        ("            x = block(x)\n", "            x = block(x)\n"
         "            every.append(self.head(self.final_norm(x)))\n"),
        ("        x = self.final_norm(x)\n        return self.head(x)", "        return every"),
    ]  # fmt: skip
    assert adapted(tiny, tmp_path, edits)


def test_flattened_logits_are_reported(tiny: Path, tmp_path: Path) -> None:
    edits = [
        ("return self.head(x)", "logits = self.head(x)\n        return logits.view(B * T, -1)")
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation
    found = only_finding(adaptation, "output_shape")
    assert found.severity == "info" and found.source_line == "return logits.view(B * T, -1)"


def test_a_model_that_leaves_out_the_last_id_is_called_with_one_more(
    tiny: Path, tmp_path: Path
) -> None:
    shifted = "        ids = ids[:, :-1]\n        B, T = ids.shape\n        x = self.tok_emb"
    edits = [("        B, T = ids.shape\n        x = self.tok_emb", shifted)]
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation
    found = only_finding(adaptation, "last_id_left_out")
    assert found.source_line == "ids = ids[:, :-1]" and found.severity == "info"
    target = shifted.replace("        ids", "        target = ids[:, 1:]\n        ids", 1)
    loss = "return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())"
    edits = [(edits[0][0], target), ("return self.head(x)", loss)]
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation and {"last_id_left_out", "loss_only"} <= {f.code for f in adaptation.findings}


def test_a_table_of_relative_positions_is_one_finding(tiny: Path, tmp_path: Path) -> None:
    """A mask that adds -1e9 excludes later tokens, so it is not reported."""
    table = "self.near = nn.Parameter(torch.randn(context, self.head_dim))\n        self.drop = nn"
    edits = [
        ("self.drop = nn", table),
        ("        scores = queries @", RELATIVE + "        scores = relative + queries @"),
        ("torch.sin(steps[..., None] / (1 + torch.arange(self.head_dim)))", "self.near[steps]"),
        ('scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))',
         "scores + self.mask[:T, :T] * -1e9"),
    ]  # fmt: skip
    assert {f.code for f in adapted(tiny, tmp_path, edits).deviations} == {"position_bias"}


def test_heads_of_the_values_may_be_wider(tiny: Path, tmp_path: Path) -> None:
    """The other parts of attention are examined as well."""
    edits = [
        ("self.W_value = nn.Linear(dim, dim)", "self.W_value = nn.Linear(dim, 2 * dim)"),
        ("self.out_proj = nn.Linear(dim, dim)", "self.out_proj = nn.Linear(2 * dim, dim)"),
        ("values.view(B, T, self.heads, self.head_dim)", "values.view(B, T, self.heads, -1)"),
        (".contiguous().view(B, T, C)", ".flatten(2)"),
        ("/ self.head_dim ** 0.5", "/ self.head_dim"),
    ]
    adaptation = adapted(tiny, tmp_path, edits)
    assert {f.code for f in adaptation.findings} & {"unexamined", "unexplained"} == set()
    codes = {f.code for f in adaptation.deviations}
    assert codes == {"head_width", "wrong_scale"}
    found = only_finding(adaptation, "head_width")
    assert "channels of q and k and 12 of v" in found.message


def test_the_parts_around_differential_attention_are_examined(tiny: Path, tmp_path: Path) -> None:
    pair = (
        "self.W_query2, self.W_key2 = nn.Linear(dim, dim), nn.Linear(dim, dim)\n        self.drop"
    )
    edits = [
        ("self.drop", pair),
        ("        weights = self.drop(weights)\n", """
        one = self.W_query2(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        two = self.W_key2(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        other = one @ two.transpose(2, 3) / self.head_dim ** 0.5
        other = other.masked_fill(self.mask[:T, :T].bool(), float("-inf"))
        weights = weights - 0.5 * torch.softmax(other, dim=-1)
"""),
        (GELU, "F.relu(self.up(x))"),
    ]  # fmt: skip
    text = GPT.replace(
        "        self.drop = nn.Dropout(0.1)\n", "        self.drop = nn.Identity()\n"
    )
    file = tmp_path / "differential.py"
    for old, new in edits:
        text = text.replace(old, new, 1)
    file.write_text(text)
    adaptation = Target(f"{file}:GPT").adapt(open_checkpoint(tiny), {})
    found = {f.code: f for f in adaptation.deviations}
    assert found.keys() == {"other_attention", "relu"}
    assert "as in differential attention" in found["other_attention"].message
    assert all(f.evidence.startswith("confirmed") for f in found.values())
    assert not adaptation.unmatched


def test_a_factor_of_each_layer_is_not_the_weight_of_a_norm(tiny: Path, tmp_path: Path) -> None:
    """Norms without weights follow the residual sums, and each layer multiplies its input."""
    table = "        self.final_norm = LayerNorm(emb_dim)\n"
    edits = [
        (table, f"{table}        self.factors = nn.Parameter(torch.ones(n_layers))\n"),
        (LOOP, "        for i, block in enumerate(self.blocks):\n"
         "            x = self.factors[i] * x\n"),
        ("return self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift",
         "return (x - mean) / torch.sqrt(var + 1e-5)"),
        ("        x = x + shortcut\n        return x", "        return self.norm1(x + shortcut)"),
    ]  # fmt: skip
    found = {f.code: f for f in adapted(tiny, tmp_path, edits).deviations}
    assert not {"shared_parameters", "norm_axis", "unexplained", "other_norm"} & found.keys()
    assert "factors" in found["random_parameters"].message


@pytest.mark.parametrize(
    ("table", "row"),
    [("nn.Parameter(torch.randn(rows, width))", "[ids]"), ("nn.Embedding(rows, width)", "(ids)")],
)
def test_the_call_of_an_own_embedding_is_named_where_positions_are_missing(
    tiny: Path, tmp_path: Path, table: str, row: str
) -> None:
    own = f"""class Table(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = {table}

    def forward(self, ids):
        return self.weight{row}


class GPT("""
    edits = [
        ("class GPT(", own),
        ("self.tok_emb = nn.Embedding(", "self.tok_emb = Table("),
        (" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
        ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
    ]
    found = only_finding(adapted(tiny, tmp_path, edits), "no_pos")
    lines = [found.source_line] if "Parameter" in table else further_lines(found)
    assert "x = self.tok_emb(ids)" in lines


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_of_keys_and_values_may_have_no_bias(
    tiny: Path, tmp_path: Path, bias: bool
) -> None:
    edits = [("values = self.W_value(x)", "values = self.W_key(x)")]
    for name in () if bias else ("query", "key", "value"):
        line = f"self.W_{name} = nn.Linear(dim, dim"
        edits.append((f"{line})", f"{line}, bias=False)"))
    codes = {f.code for f in adapted(tiny, tmp_path, edits).deviations}
    assert codes == ({"shared_kv"} if bias else {"shared_kv", "no_qkv_bias"})


COUNTER = [
    (HEAD, f"        self.start = 0\n{HEAD}"),
    (
        "torch.arange(T, device=ids.device)",
        "torch.arange(self.start, self.start + T) % len(self.pos_emb.weight)",
    ),
    ("        x = self.final_norm(x)", "        self.start += T\n        x = self.final_norm(x)"),
]
CACHE = [
    ("        self.drop = nn", "        self.past = None\n        self.drop = nn"),
    ("        values = self.W_value(x)\n", """        values = self.W_value(x)
        if self.past is not None:
            values = values + self.past.mean()
        self.past = values
"""),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "name"), [(COUNTER, "start"), (CACHE, "past")])
def test_calls_that_depend_on_earlier_calls_are_reported(
    tiny: Path, tmp_path: Path, edits: Edits, name: str
) -> None:
    adaptation = adapted(tiny, tmp_path, edits)
    assert adaptation
    found = only_finding(adaptation, "continued")
    assert found.severity == "limit" and f"changes self.{name}," in found.message
    assert (found.source_line or "").startswith(f"self.{name} ")


def test_an_optional_mask_is_passed_beside_dropout(tiny: Path, tmp_path: Path) -> None:
    """Two calls differ, unless their random numbers are the same."""
    edits = [
        ("def forward(self, ids):", "def forward(self, ids, mask=None):"),
        ("x = block(x)", "x = F.dropout(block(x, mask), 0.1)"),
        (BLOCK, BLOCK.replace("(self, x)", "(self, x, mask)")),
        ("x = self.att(x)", "x = self.att(x, mask)"),
        (ATTENTION, ATTENTION.replace("(self, x)", "(self, x, mask)")),
        ('scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))',
         "scores if mask is None else scores.masked_fill(~mask, -torch.inf)"),
    ]  # fmt: skip
    codes = {f.code for f in adapted(tiny, tmp_path, edits).findings}
    assert {"dropout_always_on", "mask_argument"} <= codes and "no_mask" not in codes


def test_a_position_that_the_model_keeps_is_no_offset(tiny: Path, tmp_path: Path) -> None:
    """Other deviations are found as in a first call."""
    adaptation = adapted(tiny, tmp_path, [*COUNTER, (GELU, "F.gelu(self.up(x))")])
    assert {f.code for f in adaptation.deviations} == {"erf_gelu"}


ONE_TOKEN = [
    ("        self.drop = nn",
     "        self.past = torch.zeros(2, 2, 64, dim)\n        self.drop = nn"),
    (ATTENTION, ATTENTION.replace("(self, x)", "(self, x, start)")),
    ("        keys = keys.view(B, T,", "        self.past[0, :B, start:start + T] = keys\n"
     "        self.past[1, :B, start:start + T] = values\n"
     "        keys, values = self.past[:, :B, :start + T]\n        keys = keys.view(B, start + T,"),
    ("values = values.view(B, T,", "values = values.view(B, start + T,"),
    ('        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))\n', ""),
    (BLOCK, BLOCK.replace("(self, x)", "(self, x, start)")),
    ("x = self.att(x)", "x = self.att(x, start)"),
    ("def forward(self, ids):\n        B, T = ids.shape\n", "def forward(self, ids, start_pos):\n"
     "        B, T = ids.shape\n        assert T == 1, 'one token at a time'\n"),
    ("torch.arange(T, device=ids.device)", "torch.arange(start_pos, start_pos + T)"),
    ("x = block(x)", "x = block(x, start_pos)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edits", "codes"),
    [([], {"one_token"}), ([(GELU, "F.relu(self.up(x))")], {"relu"})],
)
def test_a_model_that_takes_one_token_is_examined_with_sequences(
    tiny: Path, tmp_path: Path, edits: Edits, codes: set[str]
) -> None:
    """It needs no mask. Without another deviation, the missing mask is why sequences differ."""
    adaptation = adapted(tiny, tmp_path, [*ONE_TOKEN, *edits])
    assert not adaptation and {f.code for f in adaptation.deviations} == codes
    found = only_finding(adaptation, "one_token")
    assert (found.source_line or "").startswith("assert T == 1")
    assert (found.severity == "breaks") == ("one_token" in codes)
