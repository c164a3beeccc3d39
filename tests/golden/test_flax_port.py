"""A correct port in flax passes, and all planted faults are found and named.

Without flax, these tests are skipped; `.ci/run` installs it and fails if none of them ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compat import open_checkpoint
from compat.golden_files import Golden, golden

pytest.importorskip("flax", reason="flax is not installed")
from tests.golden.flax_port import FAULTS, forward

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(3))
Weights = Mapping[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def weights(tiny: Path) -> Weights:
    checkpoint = open_checkpoint(tiny)
    return {name: checkpoint.read(name).numpy() for name in checkpoint.infos}


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    golden(tiny, path, input_ids=IDS)
    return Golden.open(path)


def test_a_correct_port_in_flax_passes(reference: Golden, weights: Weights, tiny: Path) -> None:
    report = reference.check(forward(weights, IDS.numpy(), 3, 4), model=tiny)
    assert report.passed and not report.findings and len(report.taps) == 42


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_flax_is_named(
    reference: Golden, weights: Weights, tiny: Path, fault: str
) -> None:
    report = reference.check(forward(weights, IDS.numpy(), 3, 4, fault), model=tiny)
    code, tap = FAULTS[fault]
    assert not report.passed and report.first_divergence == tap
    assert [(finding.code, finding.tap) for finding in report.findings] == [(code, tap)]
