"""A single block that is loaded from a layer of a checkpoint equals the reference's block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from compat import load_block
from compat.dialects import DIALECTS, linear
from compat.parity.compare import rms


def their_output(folder: Path, layer: int, x: Tensor) -> Tensor:
    """Return the output of transformers' block for hidden states x, in the data type of x."""
    model = transformers.GPT2LMHeadModel.from_pretrained(
        folder, attn_implementation="eager", dtype=x.dtype
    )
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    out: Tensor = model.eval().transformer.h[layer](x, attention_mask=mask[None, None])
    return out


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("dialect", DIALECTS)
@torch.no_grad()
def test_a_single_block_equals_that_of_the_reference(tiny: Path, dialect: str, layer: int) -> None:
    torch.manual_seed(layer)
    x = torch.randn(2, 20, 24)
    ours, theirs = load_block(tiny, layer, dialect)(x), their_output(tiny, layer, x)
    if dialect == "conv1d":
        assert torch.equal(ours, theirs)
    exact = their_output(tiny, layer, x.double())
    assert rms(ours - exact) <= 2 * rms(theirs - exact)


@torch.no_grad()
def test_a_block_of_another_layer_differs(tiny: Path) -> None:
    x = torch.randn(2, 20, 24)
    exact = their_output(tiny, 1, x.double())
    for layer in (0, 2):
        assert rms(load_block(tiny, layer)(x) - exact) > 0.1 * rms(exact)


@torch.no_grad()
def test_a_broken_block_differs(tiny: Path) -> None:
    x = torch.randn(2, 20, 24)
    block = load_block(tiny, 1)
    assert isinstance(block, linear.TransformerBlock)
    block.feedforward.layers[1] = torch.nn.GELU()
    exact = their_output(tiny, 1, x.double())
    assert rms(block(x) - exact) > 2 * rms(their_output(tiny, 1, x) - exact)
