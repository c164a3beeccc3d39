"""Helpers of the loading tests: save references, inputs and bitwise comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from compat.dialects import DIALECTS
from tests.conftest import State

both_dialects = pytest.mark.parametrize("dialect", DIALECTS)


def check_identical(found: State, expected: State) -> None:
    """Check that both states have the same names, data types and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def state_of_tied(model: transformers.GPT2LMHeadModel) -> State:
    """Return the tensors that transformers saves: without the head, which is the embedding."""
    return {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}


def save(folder: Path, model: transformers.GPT2LMHeadModel) -> Path:
    model.save_pretrained(folder)
    return folder


def ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))
