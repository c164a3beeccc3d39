"""Every fault has its expected outcome within 2 s and 200 MB, and no code is executed."""

from __future__ import annotations

import pickle
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

import compat.errors
from tests.faults import (
    measure,
    of_configs,
    of_folders,
    of_pickles,
    of_safetensors,
    of_tensors,
    of_tokenizers,
)
from tests.faults.builder import build
from tests.faults.fault import Fault
from tests.faults.pickles import MARK, Malice, MaliceByEval
from tests.forked import CONTEXT
from tests.fuzz.harness import answer
from tests.fuzz.worker import LONGEST_MESSAGE

TABLES = (of_safetensors, of_pickles, of_tensors, of_folders, of_configs, of_tokenizers)
FAULTS: dict[str, Fault] = {k: v for table in TABLES for k, v in table.FAULTS.items()}
MOST_SECONDS, MOST_MB = 2.0, 200
ANSWERS_WITHIN, STARTS_WITHIN = 20.0, 120.0

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fault → the path of a checkpoint with this fault."""
    top, found = tmp_path_factory.mktemp("faults"), {}
    for number, (name, fault) in enumerate(FAULTS.items()):
        folder = build(top / f"broken-{number}", fault.layout)
        other_path = fault.breaks(folder)
        found[name] = other_path if isinstance(other_path, Path) else folder
    return found


@pytest.fixture(scope="module")
def outcomes(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Fault → its outcome, from a process that is restarted if a fault terminates it."""
    valid = build(tmp_path_factory.mktemp("measured") / "valid")
    remaining, found = list(folders), {}
    while remaining:
        ours, theirs = Pipe()
        task = (theirs, valid, [folders[name] for name in remaining])
        process: Any = CONTEXT.Process(target=measure.main, args=task, daemon=True)
        process.start()
        theirs.close()  # so that the pipe closes when the process ends
        assert answer(ours, STARTS_WITHIN) == "ready"
        while remaining:
            name = remaining.pop(0)
            found[name] = answer(ours, ANSWERS_WITHIN)
            if not found[name]:
                break
        process.kill()
        process.join()
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_expected_outcome(
    name: str, outcomes: dict[str, Outcome], folders: dict[str, Path]
) -> None:
    fault, outcome = FAULTS[name], outcomes[name]
    assert outcome, "the process crashed or did not answer"
    assert outcome["error"] == (fault.error and fault.error.__name__), outcome["text"]
    for fragment in fault.says:
        assert fragment in outcome["text"]
    if fault.error:
        assert "broken-" in outcome["text"], "the message does not contain the path"
    assert "weights_only" not in outcome["text"]
    assert len(outcome["text"]) < LONGEST_MESSAGE
    assert outcome["seconds"] < MOST_SECONDS
    assert outcome["mb"] < MOST_MB


def test_no_payload_was_executed(outcomes: dict[str, Outcome], folders: dict[str, Path]) -> None:
    assert outcomes.keys() == FAULTS.keys()
    top = next(iter(folders.values())).parent
    assert list(top.rglob(MARK)) == []


@pytest.mark.parametrize("kind", [Malice, MaliceByEval])
@pytest.mark.parametrize("writer", ["pickle", "zip", "old style"])
def test_the_payloads_run_without_protection(
    tmp_path: Path, kind: type[Malice | MaliceByEval], writer: str
) -> None:
    """The previous test depends on this."""
    path = tmp_path / "payload"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(kind(tmp_path), protocol=2))
        pickle.loads(path.read_bytes())
    else:
        torch.save(kind(tmp_path), path, _use_new_zipfile_serialization=writer == "zip")
        torch.load(path, weights_only=False)
    assert (tmp_path / MARK).exists()


def test_every_outcome_is_a_compat_error_or_none() -> None:
    for fault in FAULTS.values():
        assert fault.error is None or fault.error.__name__ in vars(compat.errors)
