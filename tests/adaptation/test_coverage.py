"""The tables in tests/adaptation/README.md match the catalogue, which covers all files."""

from __future__ import annotations

from pathlib import Path

from tests.adaptation.catalogue import FOREIGN, MODELS, MUTATIONS, ZOO
from tests.adaptation.coverage_table import README, with_tables


def test_the_tables_are_up_to_date() -> None:
    text = README.read_text()
    assert text == with_tables(text), "to update it: python -m tests.adaptation.coverage_table"


def test_every_file_of_the_zoo_is_in_the_catalogue() -> None:
    files = {path.name for path in ZOO.glob("*.py")} - {"__init__.py"}
    assert files == {model.file for model in [*MODELS.values(), *FOREIGN.values()]}


def test_every_model_has_mutations() -> None:
    assert set(MODELS) - {mutation.style for mutation in MUTATIONS} == set()


def test_every_test_file_is_in_the_readme() -> None:
    tests = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert {name for name in tests if name not in README.read_text()} == {Path(__file__).name}
