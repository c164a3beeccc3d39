"""`adapt`: the state that it restores, the code that it supports, and its errors."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat import AdaptError, CheckpointError, adapt, load_pretrained
from compat.adaptation.diagnosis import registry
from compat.adaptation.diagnosis.diagnose import AREAS
from compat.checkpoint import open_checkpoint
from tests.adaptation.catalogue import MODELS, ZOO
from tests.adaptation.common import adapted, build, build_style, error_of, mapped
from tests.conftest import MakeCheckpoint
from tests.loading_common import both_dialects
from tests.own_gpt2 import MyGPT2, my_map

pytestmark = pytest.mark.usefixtures("shared_reference")


def edited(style: str, folder: Path, old: str, new: str, tiny: Path) -> tuple[nn.Module, Path]:
    """Build a zoo model with an edit of its file."""
    source = (ZOO / MODELS[style].file).read_text()
    assert old in source
    path = folder / MODELS[style].file
    path.write_text(source.replace(old, new, 1))
    return build(MODELS[style], path, tiny), path


# State that is not changed


@pytest.mark.parametrize("training", [True, False])
def test_mode_gradients_and_identity_of_parameters_are_kept(tiny: Path, training: bool) -> None:
    model = build_style("nano", tiny).train(training)
    model.transformer.h[1].eval()
    model.transformer.wpe.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    modes = [module.training for module in model.modules()]
    frozen = [name for name, p in before.items() if not p.requires_grad]
    adapt(model, tiny)
    assert [module.training for module in model.modules()] == modes
    after = dict(model.named_parameters())
    assert [name for name, p in after.items() if not p.requires_grad] == frozen
    assert all(after[name] is before[name] for name in before)
    assert all(p.grad is None for p in after.values())


def test_torchs_setting_of_fused_kernels_is_restored(tiny: Path) -> None:
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            adapt(build_style("encoder_stack", tiny), tiny)
            assert torch.backends.mha.get_fastpath_enabled() is enabled
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


# Supported code


@both_dialects
def test_the_dialects_of_compat_are_mapped_as_in_their_maps(tiny: Path, dialect: str) -> None:
    model = load_pretrained(tiny, dialect)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    found = adapt(model, tiny)
    assert found.compatible
    assert [f.code for f in found.findings if f.severity != "info"] == []
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_the_model_of_the_readme_is_mapped_as_in_its_map(tiny: Path) -> None:
    model = MyGPT2("untied")
    found = adapt(model, tiny)
    assert found.compatible
    assert mapped(found.name_map, model) == mapped(my_map(), model)


CHECKED = """        x = self.norm(x)
        assert torch.allclose(x.mean(-1), torch.zeros_like(x.mean(-1)), atol=9.0)
        assert float(x.abs().sum()) >= 0
        return x @"""


def test_code_that_branches_on_activations_is_traced(tiny: Path, tmp_path: Path) -> None:
    model, _ = edited("vkq_fused", tmp_path, "        return self.norm(x) @", CHECKED, tiny)
    found = adapt(model, tiny)
    assert found.compatible
    assert mapped(found.name_map, model) == mapped(
        adapted("vkq_fused", tiny).adaptation.name_map, model
    )
    assert error_of(model) < 1e-5


def test_the_error_for_untraceable_code_names_its_line(tiny: Path, tmp_path: Path) -> None:
    check = 'self.runs = getattr(self, "runs", 0) + 1; assert self.runs < 2, "runs only once"'
    line = "        x = self.transformer.ln_f(x)\n"
    model, path = edited("nano", tmp_path, line, f"        {check}\n{line}", tiny)
    with pytest.raises(AdaptError, match="cannot be traced") as caught:
        adapt(model, tiny)
    number = path.read_text().splitlines().index(f"        {check}") + 1
    assert f"{path}:{number}" in str(caught.value)
    assert "runs only once" in str(caught.value)
    assert model.training


def test_a_custom_forward_is_used(tiny: Path, tmp_path: Path) -> None:
    model, _ = edited(
        "vkq_fused", tmp_path, "def forward(self, tokens):", "def scores(self, tokens, /):", tiny
    )
    calls = []

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        calls.append(ids.shape)
        return model.scores(ids)

    with pytest.raises(AdaptError):
        adapt(model, tiny)
    assert adapt(model, tiny, forward=forward).compatible
    assert calls


@pytest.mark.parametrize("length", [5, 12, 24])
def test_the_length_of_the_example_can_be_chosen(tiny: Path, length: int) -> None:
    model = build_style("mingpt", tiny)
    found = adapt(model, tiny, example_length=length)
    assert found.compatible
    assert mapped(found.name_map, model) == mapped(
        adapted("mingpt", tiny).adaptation.name_map, model
    )


@pytest.mark.parametrize("style", ["nano", "scratch", "head_loop", "lecture"])
@pytest.mark.parametrize(
    "shape", [{"n_head": 1}, {"n_layer": 1}, {"n_head": 24, "n_embd": 24, "n_layer": 2}]
)
def test_unusual_shapes_are_compatible(
    make_checkpoint: MakeCheckpoint, style: str, shape: dict[str, int]
) -> None:
    folder = make_checkpoint(**shape)
    model = build_style(style, folder)
    found = adapt(model, folder)
    assert found.compatible, [(f.code, f.message) for f in found.findings]
    assert found.unmatched == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parity_is_proved_in_the_models_own_data_type(tiny: Path, dtype: torch.dtype) -> None:
    model = build_style("mingpt", tiny).to(dtype)
    found = adapt(model, tiny)
    assert found.compatible, [(f.code, f.message) for f in found.findings]
    assert found.parity is not None and found.parity.to_json(full=True)["dtype"] == str(dtype)[6:]
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_an_open_checkpoint_is_accepted(tiny: Path) -> None:
    assert adapt(build_style("scratch", tiny), open_checkpoint(tiny)).compatible


# The result as plain values, and errors


def test_the_result_is_plain_json(tiny: Path) -> None:
    found = adapted("mingpt", tiny).adaptation
    plain = json.loads(json.dumps(found.to_json(full=True)))
    assert (plain["compatible"], plain["mapped"], plain["tensors"]) == (True, 40, 40)
    assert plain["model"] == "GPT"
    assert len(plain["name_map"]) == 41  # the untied head is a row, but not a tensor of the file
    assert {f["code"] for f in plain["findings"]} == {"untied_head", "train_mode"}


def test_a_model_with_incompatible_data_types_raises_an_error(tiny: Path) -> None:
    model = build_style("vkq_fused", tiny)
    model.layers[0].up.double()
    with pytest.raises(AdaptError, match="same dtype"):
        adapt(model, tiny)
    assert model.layers[0].up.weight.dtype == torch.float64
    assert model.layers[1].up.weight.dtype == torch.float32


def test_a_missing_checkpoint_raises_an_error(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(CheckpointError):
        adapt(build_style("nano", tiny), tmp_path)


def test_a_failing_detector_is_reported_in_addition_to_the_comparison(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(context: object) -> list[object]:
        raise KeyError("no such node")

    detectors = [(code, fails if code == "relu" else f) for code, f in registry.DETECTORS]
    monkeypatch.setattr(registry, "DETECTORS", detectors)
    found = adapt(build_style("tf_port", tiny), tiny)
    messages = {finding.code: finding.message for finding in found.findings}
    assert messages.keys() == {"finite_mask", "unexamined"} and found.compatible
    assert "for relu (KeyError" in messages["unexamined"]


def test_detectors_run_in_the_order_of_their_areas() -> None:
    modules = [detector.__module__ for _, detector in registry.DETECTORS]
    assert [module for module, _ in groupby(modules)] == [area.__name__ for area in AREAS]


def test_an_internal_error_asks_for_a_report(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dissect(graph: object, accepts_others: bool) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(import_module("compat.adaptation.stages"), "dissect", dissect)
    with pytest.raises(AdaptError, match=r"IndexError: tuple index out of range\. Report it"):
        adapt(build_style("tf_port", tiny), tiny)


def test_a_quantized_model_raises_an_error_before_anything_is_written(tiny: Path) -> None:
    model = build_style("nano", tiny)
    weight = model.lm_head.weight.detach().round().to(torch.int8)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(AdaptError, match="without quantization"):
        adapt(model, tiny)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_untraced_code_that_runs_only_with_one_length_is_not_compatible(
    tiny: Path, tmp_path: Path
) -> None:
    """Parity is not confirmed if the logits cannot be compared."""
    old = "        x = self.ln_f(x)\n"
    new = "        assert t == 13\n        x = self.ln_f(torch.tensor(x.tolist()))\n"
    model, _ = edited("mingpt", tmp_path, old, new, tiny)
    found = adapt(model, tiny)
    assert {f.code for f in found.findings} == {"untraced", "unexplained"}
    assert found.parity is not None and all(tap.passed for tap in found.parity.taps)
    assert not found.parity.passed and not found.compatible


def test_a_model_that_fails_at_random_accepts_sequences_of_any_length(tiny: Path) -> None:
    model = build_style("nano", tiny)
    own, lengths = model.forward, list[int]()

    def forward(ids: Tensor, *args: Any) -> Any:
        lengths.append(ids.shape[1])
        if lengths.count(12) == 1 and lengths[-1] == 12:
            raise KeyError("a character that is printed now and then")
        return own(ids, *args)

    model.forward = forward
    assert "fixed_length" not in {f.code for f in adapt(model, tiny).findings}
    assert lengths.count(12) >= 2
