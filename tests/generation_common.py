"""Helpers of the generation tests: our and transformers' models, prompts and greedy decoding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from compat import generate, load_pretrained
from compat.decoding import HasDecoder
from compat.dialects import DIALECTS, Model

each_dialect = pytest.mark.parametrize("dialect", DIALECTS)
cached_or_not = pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])

PROMPT = torch.tensor([[5, 17, 60]])
BATCH = torch.tensor([[5, 17, 60], [0, 96, 3], [44, 44, 2]])


@functools.cache
def ours(folder: Path, dialect: str = "linear") -> Model:
    return load_pretrained(folder, dialect)


@functools.cache
def reference(folder: Path) -> transformers.GPT2LMHeadModel:
    """Return the model of transformers without its generation settings, such as stop ids."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    model.generation_config = GenerationConfig()
    return model.eval()


def theirs(folder: Path, input_ids: Tensor, new: int, seed: int = 0, **settings: Any) -> Tensor:
    """Return the ids that transformers generates, greedily or with the global generator."""
    torch.manual_seed(seed)
    mask = settings.pop("attention_mask", torch.ones_like(input_ids))
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, **settings}
    return reference(folder).generate(input_ids, attention_mask=mask, **options)


def greedy(model: Model | HasDecoder, input_ids: Tensor, new: int, **settings: Any) -> Tensor:
    return generate(
        model, input_ids, max_new_tokens=new, **{"temperature": 0, "stop_ids": (), **settings}
    )


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of the expected values."""
    return float((found - expected).norm() / expected.norm())
