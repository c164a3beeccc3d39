"""The gradients of the loss match the reference's for every parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compat import load_pretrained
from compat.dialects import DIALECTS, linear
from tests.parity.gradients import (
    key_bias_gradients,
    our_gradients,
    their_gradients,
    worst_difference,
)

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
IDS = torch.arange(64).view(2, 32) * 7 % 97


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_gradients_match_those_of_transformers(
    tiny: Path, dialect: str, dtype: torch.dtype
) -> None:
    ours = our_gradients(load_pretrained(tiny, dialect, dtype=dtype), IDS)
    theirs = their_gradients(tiny, IDS, dtype)
    assert len(ours) == 2 + 12 * 3 + 2
    worst, name = worst_difference(ours, theirs)
    assert worst <= BOUNDS[dtype], name
    # The gradients of key biases are zero in exact arithmetic, so only rounding errors remain.
    assert max(key_bias_gradients(ours)) <= BOUNDS[dtype]
    assert max(key_bias_gradients(theirs)) <= BOUNDS[dtype]


def test_gradients_of_a_broken_model_do_not_match(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear", dtype=torch.float64)
    assert isinstance(model, linear.GPTModel)
    model.trf_blocks[1].feedforward.layers[1] = nn.GELU()
    worst, _ = worst_difference(
        our_gradients(model, IDS), their_gradients(tiny, IDS, torch.float64)
    )
    assert worst > BOUNDS[torch.float32]
