"""No adversarial fault passes the proof, and no harmless variant is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import CompatError, adapt, check_parity
from compat.parity import Limit
from tests.conftest import MakeCheckpoint
from tests.parity.adversaries import CHECKPOINT, FAULTS, HARMLESS, Adversary, in_float32, restored

# Known faults that pass the proof:
# - nano_reads_the_stack: `adapt` calls the model in one of its functions, which the stack reveals.
# - delegates_to_transformers: transformers is imported in every process that compares with it.
# - wrong_only_when_compiled: the proof does not compile the model.
KNOWN_TO_PASS = frozenset(
    "nano_reads_the_stack delegates_to_transformers wrong_only_when_compiled".split()
)


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**CHECKPOINT)


def verdict_on(entry: Adversary, folder: Path, scratch: Path) -> tuple[bool, list[Limit]]:
    """Return whether the model passes, and the limits; an error of compat counts as a refusal."""
    with restored():
        try:
            model = entry.build(folder, scratch)
            if entry.use == "check_parity":
                report = check_parity(model, folder)
                # Every wrapper counts its calls, so this limit does not indicate the fault.
                of_wrapper = "the forward pass changes calls, which later calls may read"
                return bool(report), [x for x in report.limits if x.message != of_wrapper]
            adaptation = adapt(model, folder)
        except CompatError:
            return False, []
        return bool(adaptation), adaptation.parity.limits if adaptation.parity else []


@pytest.mark.parametrize(
    "entry",
    [entry for entry in in_float32(FAULTS) if entry.name not in KNOWN_TO_PASS],
    ids=lambda entry: entry.name,
)
def test_no_fault_passes(entry: Adversary, folder: Path, tmp_path: Path) -> None:
    """A fault may pass with a limit if no designed input can be expected to trigger it."""
    compatible, limits = verdict_on(entry, folder, tmp_path)
    assert not compatible or (entry.limit_suffices and limits)


@pytest.mark.parametrize("entry", in_float32(HARMLESS), ids=lambda entry: entry.name)
def test_no_harmless_variant_is_refused(entry: Adversary, folder: Path, tmp_path: Path) -> None:
    compatible, _ = verdict_on(entry, folder, tmp_path)
    assert compatible
