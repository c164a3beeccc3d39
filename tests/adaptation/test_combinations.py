"""Of a model with several deviations, each is found, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.adaptation.repair.repair import Target
from compat.checkpoint import open_checkpoint
from tests.adaptation.combinations import OPTIONS, USUAL, codes, draw, source

pytestmark = pytest.mark.usefixtures("shared_reference")

SEEDS = range(100)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_deviations_of_a_combination_are_found(tiny: Path, tmp_path: Path, seed: int) -> None:
    features = draw(seed)
    file = tmp_path / "combined.py"
    file.write_text(source(features))
    adaptation = Target(f"{file}:GPT").adapt(open_checkpoint(tiny), {})
    different = {name: value for name, value in features.items() if value != USUAL[name]}
    assert {f.code for f in adaptation.deviations} == codes(features), different
    assert not [f for f in adaptation.findings if f.code == "unexamined"]


def test_every_value_of_every_feature_is_drawn() -> None:
    drawn = {pair for seed in SEEDS for pair in draw(seed).items()}
    assert drawn == {(name, value) for name, values in OPTIONS.items() for value in values}
