"""A model that predicts like GPT-2 but trains differently, and the taps of modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import adapt, trace
from tests.adaptation.common import adapted, fresh_ids
from tests.conftest import noisy_reference
from tests.own_gpt2 import MyGPT2

pytestmark = pytest.mark.usefixtures("shared_reference")

OWN = Path(__file__).parents[1] / "own_gpt2.py"
RESIDUAL = "x = x + self.merge(heads.transpose(1, 2).flatten(2))"


def edited(folder: Path, old: str, new: str) -> tuple[Path, Any]:
    """Write a copy of tests/own_gpt2.py with one edit, and return its path and its class."""
    text = OWN.read_text()
    assert text.count(old) == 1
    path = folder / "my_model.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("my_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module.MyGPT2


def test_a_detached_residual_is_reported_with_its_line(tiny: Path, tmp_path: Path) -> None:
    path, cls = edited(tmp_path, RESIDUAL, RESIDUAL.replace("x + ", "x.detach() + "))
    adaptation = adapt(cls(), tiny)
    assert adaptation.compatible  # the logits are the same
    [found] = [f for f in adaptation.findings if f.code == "wrong_gradient"]
    assert found.severity == "limit" and found.file == str(path)
    assert found.source_line is not None and "detach" in found.source_line
    assert "is that of h.1.mlp.c_proj.weight (stack.1.narrow.weight)" in found.message


def test_a_forward_pass_without_gradients_is_reported(tiny: Path, tmp_path: Path) -> None:
    _, cls = edited(
        tmp_path,
        "    def forward(self, input_ids",
        "    @torch.no_grad()\n    def forward(self, input_ids",
    )
    findings = adapt(cls(), tiny).findings
    [found] = [f for f in findings if f.code == "wrong_gradient"]
    assert "does not require grad" in found.message


def test_a_tensor_that_the_backward_pass_needs_and_that_is_changed_in_place_is_reported(
    tiny: Path, tmp_path: Path
) -> None:
    path, cls = edited(tmp_path, RESIDUAL, RESIDUAL.replace("x = x + ", "x += "))
    adaptation = adapt(cls(), tiny)
    assert adaptation.compatible
    [found] = [f for f in adaptation.findings if f.severity != "info"]
    assert (found.code, found.severity, found.file) == ("changed_in_place", "limit", str(path))
    assert "x += " in (found.source_line or "") and "inplace operation" in found.evidence


def test_a_correct_model_has_correct_gradients(tiny: Path) -> None:
    model = MyGPT2()
    adaptation = adapt(model, tiny)
    assert [f.code for f in adaptation.findings] == []
    assert all(parameter.grad is None for parameter in model.parameters())


# The taps of a block that are outputs of modules, in a few styles; all styles have the logits.
MODULE_TAPS = {
    "mingpt": "ln_1 q k v probs heads attn resid_mid ln_2 fc act mlp out",
    "nano": "ln_1 q k v heads attn resid_mid ln_2 fc act mlp out",  # SDPA
    "megatron": "ln_1 probs heads attn resid_mid ln_2 fc act mlp out",  # q, k, v head by head
}


@pytest.mark.parametrize("style", MODULE_TAPS)
def test_the_taps_that_are_outputs_of_modules_are_found(tiny: Path, style: str) -> None:
    found = adapted(style, tiny)
    names = [tap.name for tap in found.adaptation.taps]
    assert [name.split(".")[2] for name in names if name.startswith("h.1.")] == MODULE_TAPS[
        style
    ].split()
    assert {"embed", "ln_f", "logits"} <= set(names)
    ids = fresh_ids()
    states = trace(found.model.eval(), ids, found.adaptation.taps)
    with torch.no_grad():
        expected = trace(noisy_reference(), ids)
    for name, state in states.items():
        assert torch.allclose(state, expected[name], atol=1e-4, rtol=1e-4), name


def test_a_module_whose_output_is_not_used_is_not_a_tap(tiny: Path, tmp_path: Path) -> None:
    """A module returns the right hidden state, but the model computes it a second time."""
    again = """y = heads.transpose(1, 2).flatten(2)
        self.merge(y)
        x = x + F.linear(y, self.merge.weight, self.merge.bias)"""
    _, cls = edited(tmp_path, RESIDUAL, again)
    names = [tap.name for tap in adapt(cls(), tiny).taps]
    assert "h.1.mlp" in names and "h.1.attn" not in names and "h.1.heads" not in names
    assert {"h.1.attn", "h.1.heads"} <= {tap.name for tap in adapt(MyGPT2(), tiny).taps}
