"""Gradients of the loss, ours and transformers', under the same names."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from compat.dialects import dialect_of

Gradients = dict[str, Tensor]


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, T, V) against the ids (B, T) one place on."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def our_gradients(model: nn.Module, ids: Tensor) -> Gradients:
    """Gradients of the next-token loss by Hugging Face names, through the dialect's name map."""
    dialect = dialect_of(model)
    assert dialect is not None
    next_token_loss(model(ids), ids).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    rows = [r for r in dialect.name_map.expand(model.config.n_layer) if r.ours[0] in ours]
    return {row.hf: row.op.save([ours[name] for name in row.ours]) for row in rows}


def their_gradients(folder: Path, ids: Tensor, dtype: torch.dtype) -> Gradients:
    """The same by transformers, eager; the loss is taken here, since theirs is cast to float32."""
    model = transformers.GPT2LMHeadModel.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    ).eval()
    next_token_loss(model(ids).logits, ids).backward()
    return {k.removeprefix("transformer."): p.grad for k, p in model.named_parameters()}


def worst_difference(ours: Gradients, theirs: Gradients) -> tuple[float, str]:
    """The largest ‖Δ‖/‖g‖ and its parameter; key biases are a third of `attn.c_attn.bias` here."""
    assert ours.keys() == theirs.keys()
    return max(
        (((ours[name] - expected).norm() / expected.norm()).item(), name)
        for name, expected in theirs.items()
    )


def key_bias_gradients(gradients: Gradients) -> list[float]:
    """max|g| of the key bias of every layer: zero in exact arithmetic, the rest is rounding."""
    biases = [g for name, g in gradients.items() if name.endswith("attn.c_attn.bias")]
    return [g.chunk(3)[1].abs().max().item() for g in biases]
