"""Differences between the weights of a fine-tuned model and its base are reported first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compat import Transpose, check_parity, load_into, load_pretrained, open_checkpoint
from compat.dialects.conv1d import NAME_MAP
from compat.parity.check import weight_differences
from tests.own_gpt2 import MyGPT2, my_map

pytestmark = pytest.mark.usefixtures("shared_reference")


def fine_tuned(tiny: Path) -> MyGPT2:
    """Return a model in which all weights of the last block and one bias of the first differ."""
    model = MyGPT2()
    load_into(model, my_map(), tiny)
    with torch.no_grad():
        for parameter in model.stack[2].parameters():
            parameter.add_(0.01 * parameter.square().mean().sqrt())
        model.stack[0].wide.bias[3] += 1
    return model


def test_different_weights_are_reported_first(tiny: Path) -> None:
    model = fine_tuned(tiny)
    report = check_parity(model, tiny, name_map=my_map())
    assert not report.passed
    start, _, rest = report.headline.partition(" With these weights, ")
    assert start.startswith("MyGPT2 has other weights than ") and "diverges" not in start
    assert "13 tensors differ" in start and "h.0.mlp.c_fc.bias by " in start
    assert "h.2.attn.c_attn.weight" in start and rest.startswith("MyGPT2 diverges from")
    assert report.weights[0].tensor == "h.0.mlp.c_fc.bias"
    assert {f"{found.rel_rms:.2g}" for found in report.weights[1:]} == {"0.01"}
    assert report.to_json()["weights"][0]["max_abs"] == pytest.approx(1)
    assert not check_parity(model, tiny).weights  # cannot be compared without a map


def test_a_fault_of_the_code_is_not_attributed_to_the_weights(tiny: Path) -> None:
    model = load_pretrained(tiny)
    model.final_norm.eps = 0.1
    report = check_parity(model, tiny)
    assert not report.passed and report.weights == []
    assert report.headline.startswith("linear diverges from transformers at ln_f")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounded_weights_count_as_the_same_weights(tiny: Path, dtype: torch.dtype) -> None:
    model = load_pretrained(tiny, "conv1d", dtype=dtype)
    checkpoint = open_checkpoint(tiny)
    assert weight_differences(model, NAME_MAP, checkpoint) == []
    model.h[1].attn.c_proj.weight.data = Transpose().load(model.h[1].attn.c_proj.weight.data)[0]
    [found] = weight_differences(model, NAME_MAP, checkpoint)
    assert found.tensor == "h.1.attn.c_proj.weight" and found.rel_rms > 1
