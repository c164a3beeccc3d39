"""Every model of the zoo has the hand-written map and computes the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compat import NameMap, NameMapError, load_into, to_hf_state_dict
from compat.ops import Op
from tests.adaptation.catalogue import MODELS
from tests.adaptation.common import (
    adapted,
    build_style,
    error_of,
    expected_map,
    mapped,
)
from tests.conftest import MakeCheckpoint
from tests.loading_common import check_identical

pytestmark = pytest.mark.usefixtures("shared_reference")

each_style = pytest.mark.parametrize("style", MODELS)


@each_style
def test_a_model_of_the_zoo_is_found_compatible(tiny: Path, style: str) -> None:
    found = adapted(style, tiny).adaptation
    assert found.compatible
    assert (found.tensors, found.unmatched) == (40, [])
    assert [f.code for f in found.findings if f.severity != "info"] == []
    assert found.parity is not None and len(found.parity.taps) >= 38
    assert found.parity.passed


@each_style
def test_the_map_equals_the_hand_written_one(tiny: Path, style: str) -> None:
    found = adapted(style, tiny)
    name_map = found.adaptation.name_map
    assert mapped(name_map, found.model) == expected_map(style, found.model)
    assert name_map.zeros == MODELS[style].zero


@each_style
def test_the_model_computes_the_logits_of_transformers(tiny: Path, style: str) -> None:
    assert error_of(adapted(style, tiny).model) < 1e-5


@each_style
def test_the_round_trip_of_the_weights_is_bit_identical(tiny: Path, style: str) -> None:
    found = adapted(style, tiny)
    written = to_hf_state_dict(found.model, found.adaptation.name_map)
    check_identical(written, load_file(tiny / "model.safetensors"))


@each_style
def test_the_map_loads_into_a_fresh_model(tiny: Path, style: str) -> None:
    found, fresh = adapted(style, tiny), build_style(style, tiny)
    assert not error_of(fresh) < 0.1  # its weights are random
    load_into(fresh, found.adaptation.name_map, tiny)
    ours = dict(fresh.named_parameters())
    check_identical(ours, {name: p.detach() for name, p in found.model.named_parameters()})
    assert error_of(fresh) < 1e-5


@pytest.mark.parametrize("style", ["nano", "lens", "vkq_fused", "lecture"])
def test_the_map_loads_another_checkpoint_of_the_same_shape(
    tiny: Path, make_checkpoint: MakeCheckpoint, style: str
) -> None:
    other = make_checkpoint(seed=5)
    model = build_style(style, tiny)
    load_into(model, adapted(style, tiny).adaptation.name_map, other)
    check_identical(
        to_hf_state_dict(model, adapted(style, tiny).adaptation.name_map),
        load_file(other / "model.safetensors"),
    )
    assert error_of(model) > 0.1  # the model has the other checkpoint's weights


# The checks above detect a map with one error.


class Reversed:
    """An operation that reverses the rows of its first parameter."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        first, *rest = self.op.load(tensor)
        return (first.flip(0).contiguous(), *rest)

    def save(self, tensors: list[Tensor]) -> Tensor:
        return self.op.save([tensors[0].flip(0), *tensors[1:]])


@pytest.mark.parametrize("style", ["nano", "book", "lens", "head_loop"])
@pytest.mark.parametrize(
    "hf", ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.bias", "ln_2.weight"]
)
def test_one_wrong_operation_changes_the_logits(tiny: Path, style: str, hf: str) -> None:
    name_map = adapted(style, tiny).adaptation.name_map
    rows = [
        replace(row, op=Reversed(row.op)) if row.hf.endswith(hf) else row for row in name_map.rows
    ]
    assert rows != list(name_map.rows)
    model = build_style(style, tiny)
    load_into(model, NameMap(tuple(rows), name_map.zeros), tiny)
    assert error_of(model) > 1e-3


@pytest.mark.parametrize("style", ["nano", "mingpt", "flat"])
def test_exchanging_two_rows_changes_the_map_and_the_logits(tiny: Path, style: str) -> None:
    name_map = adapted(style, tiny).adaptation.name_map
    ours = {row.hf: row.ours for row in name_map.rows}
    other = {"h.{i}.ln_1.weight": "h.{i}.ln_2.weight", "h.{i}.ln_2.weight": "h.{i}.ln_1.weight"}
    rows = tuple(replace(row, ours=ours[other.get(row.hf, row.hf)]) for row in name_map.rows)
    model = build_style(style, tiny)
    assert mapped(NameMap(rows), model) != expected_map(style, model)
    load_into(model, NameMap(rows, name_map.zeros), tiny)
    assert error_of(model) > 1e-3


def test_a_small_error_in_one_parameter_changes_the_logits(tiny: Path) -> None:
    model = build_style("nano", tiny)
    load_into(model, adapted("nano", tiny).adaptation.name_map, tiny)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "h.1.mlp.c_fc.bias" in name)[3] += 0.05
    assert error_of(model) > 1e-5


def test_slices_of_one_parameter_are_loaded_on_the_meta_device(tiny: Path) -> None:
    name_map = adapted("stacked", tiny).adaptation.name_map
    with torch.device("meta"):
        fresh = build_style("stacked", tiny)
    load_into(fresh, name_map, tiny)
    assert fresh.get_parameter("qkv_weight").is_leaf
    assert error_of(fresh) < 1e-5


@pytest.mark.parametrize("number", [1, 3])
def test_a_map_with_a_wrong_slice_is_refused(tiny: Path, number: int) -> None:
    """The slice of layer 2 is named twice or does not exist, so that one slice has no row."""
    name_map = adapted("stacked", tiny).adaptation.name_map
    rows = [row.at(i) for row in name_map.rows for i in range(3 if "{i}" in row.hf else 1)]
    wrong = [
        replace(row, ours=(f"up_weight[{number}]",)) if "up_weight[2]" in row.ours else row
        for row in rows
    ]
    fresh = build_style("stacked", tiny)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(NameMapError, match=r"up_weight\[(1|2)\]"):
        load_into(fresh, NameMap(tuple(wrong)), tiny)
    check_identical(fresh.state_dict(), before)
