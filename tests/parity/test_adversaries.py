"""The proof against its adversaries: no planted fault passes, no harmless variant is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import CompatError, adapt, check_parity
from compat.parity import Limit
from tests.conftest import MakeCheckpoint
from tests.parity.adversaries import CHECKPOINT, FAULTS, HARMLESS, Adversary, restored

# Faults that pass:
# - nano_reads_the_stack: `adapt` calls the model by a function of its own, which is on every stack;
# - delegates_to_transformers: transformers cannot be removed from a process that compares with it;
# - wrong_only_when_compiled: the proof does not compile the model; the condition is a limit.
BEYOND = frozenset(
    "nano_reads_the_stack delegates_to_transformers wrong_only_when_compiled".split()
)


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**CHECKPOINT)


def in_float32(
    entries: dict[str, Adversary], without: frozenset[str] = frozenset()
) -> list[Adversary]:
    return [e for e in entries.values() if e.dtype == "float32" and e.name not in without]


def judged(entry: Adversary, folder: Path, scratch: Path) -> tuple[bool, list[Limit]]:
    """The verdict and its limits; what the library refuses to judge is not called compatible."""
    with restored():
        try:
            model = entry.build(folder, scratch)
            if entry.use == "check_parity":
                report = check_parity(model, folder)
                # Every wrapper counts its calls, which says nothing of the fault.
                counted = "the forward pass changes calls,"
                return bool(report), [x for x in report.limits if counted not in x.message]
            adaptation = adapt(model, folder)
        except CompatError:
            return False, []
        return bool(adaptation), adaptation.parity.limits if adaptation.parity else []


@pytest.mark.parametrize("entry", in_float32(FAULTS, BEYOND), ids=lambda entry: entry.name)
def test_no_fault_passes(entry: Adversary, folder: Path, tmp_path: Path) -> None:
    """Where no input can be expected to meet the condition, it passes with a limit at most."""
    compatible, limits = judged(entry, folder, tmp_path)
    assert not compatible or (entry.limit_suffices and limits)


@pytest.mark.parametrize("entry", in_float32(HARMLESS), ids=lambda entry: entry.name)
def test_no_harmless_variant_is_refused(entry: Adversary, folder: Path, tmp_path: Path) -> None:
    compatible, _ = judged(entry, folder, tmp_path)
    assert compatible
