"""Gradients of the loss in our models and in transformers, under the same names."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from compat.dialects import dialect_of

Gradients = dict[str, Tensor]


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V) with respect to the next ids of (B, T)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def our_gradients(model: nn.Module, ids: Tensor) -> Gradients:
    """Return the gradients of the next-token loss by Hugging Face's names, using the name map."""
    dialect = dialect_of(model)
    assert dialect is not None
    next_token_loss(model(ids), ids).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    rows = [r for r in dialect.name_map.expand(model.config.n_layer) if r.ours[0] in ours]
    return {row.hf: row.op.save([ours[name] for name in row.ours]) for row in rows}


def their_gradients(folder: Path, ids: Tensor, dtype: torch.dtype) -> Gradients:
    """Return transformers' gradients; its own loss would be computed in float32."""
    model = transformers.GPT2LMHeadModel.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    ).eval()
    next_token_loss(model(ids).logits, ids).backward()
    return {k.removeprefix("transformer."): p.grad for k, p in model.named_parameters()}


def worst_difference(ours: Gradients, theirs: Gradients) -> tuple[float, str]:
    """Return the largest ‖Δ‖/‖g‖ and its parameter. Key biases are part of `attn.c_attn.bias`."""
    assert ours.keys() == theirs.keys()
    return max(
        (((ours[name] - expected).norm() / expected.norm()).item(), name)
        for name, expected in theirs.items()
    )


def key_bias_gradients(gradients: Gradients) -> list[float]:
    """Return max|g| of the key bias of every layer, which is zero except for rounding errors."""
    biases = [g for name, g in gradients.items() if name.endswith("attn.c_attn.bias")]
    return [g.chunk(3)[1].abs().max().item() for g in biases]
