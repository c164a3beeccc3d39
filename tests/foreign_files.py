"""Hugging Face models in the file formats of nanoGPT and minGPT."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.conftest import State
from tests.loading_common import ids

PROJECTIONS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
ARGS = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 24,
    "block_size": 32,
    "bias": True,
    "vocab_size": 97,
    "dropout": 0.0,
}
NANO_GPT, TANH = {"activation_function": "gelu"}, {"activation_function": "gelu_new"}


def linear(state: State, prefix: str = "transformer.") -> State:
    """Return the state in the layout of `nn.Linear`; the head gets only the outer prefixes."""
    outer = prefix.removesuffix("transformer.")
    transposed = {k: v.t().contiguous() if k.endswith(PROJECTIONS) else v for k, v in state.items()}
    return {(outer if k == "lm_head.weight" else prefix) + k: v for k, v in transposed.items()}


def plain_state(model: transformers.GPT2LMHeadModel) -> State:
    return {k.removeprefix("transformer."): v for k, v in model.state_dict().items()}


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(ids())
    return out if isinstance(out, Tensor) else out.logits


def masks() -> State:
    mask = torch.ones(32, 32).tril()[None, None]
    return {f"h.{i}.attn.bias": mask.clone() for i in range(3)}
