"""Each adversary is the fault or the harmless variant that it claims to be.

The models are compared with transformers without compat's proof.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from compat import adapt, load_into
from tests.adaptation.common import build_style
from tests.conftest import MakeCheckpoint, noisy_reference
from tests.parity.adversaries import CHECKPOINT, FAULTS, HARMLESS, Adversary, in_float32, restored
from tests.parity.adversary import ORDINARY_TEXTS, once, valid_inputs

DIFFERENT = 1e-4  # relative RMS error of the logits of a fault


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**CHECKPOINT)


@pytest.fixture(scope="module")
def half_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same checkpoint in both half-precision data types."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("bfloat16", "float16")}
    for name, folder in folders.items():
        reference = noisy_reference(**CHECKPOINT)
        reference.to(getattr(torch, name)).save_pretrained(folder)
    return folders


@cache
def expected_logits(folder: Path, ids: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return transformers' logits, and delete its model, because some entries search for one."""
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor(ids)).logits
    del reference
    gc.collect()
    return logits


@cache
def style_map(style: str, folder: Path) -> object:
    """Return the name map of an unchanged model of the zoo."""
    return adapt(build_style(style, folder), folder).name_map


def build_loaded(entry: Adversary, folder: Path, scratch: Path) -> nn.Module:
    model = entry.build(folder, scratch)
    if entry.style:
        load_into(model, style_map(entry.style, folder), folder)
    return model.eval()


def expected(folder: Path, ids: Tensor) -> Tensor:
    return expected_logits(folder, tuple(map(tuple, ids.tolist())))


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative RMS error, or infinity for another shape or non-finite values."""
    found = found.as_subclass(Tensor)
    if found.shape != wanted.shape or not found.isfinite().all():
        return float("inf")
    return float((found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


@contextlib.contextmanager
def prepared(folder: Path, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the expected logits, which are computed before an entry can change the process."""
    for style in ("nano", "mingpt", "book"):
        style_map(style, folder)
    wanted = [expected(folder, ids) for ids in inputs]
    with restored():
        yield wanted


def sampled(entries: list[Adversary]) -> list[object]:
    """Return every sixth entry, or all of them if COMPAT_ALL_ADVERSARIES is set.

    These tests check the test material and not compat. Run all of them after changing an entry.
    """
    step = 1 if os.environ.get("COMPAT_ALL_ADVERSARIES") else 6
    return [pytest.param(entry, id=entry.name) for entry in entries[::step]]


@pytest.mark.parametrize("entry", sampled(in_float32(FAULTS)))
def test_a_fault_is_wrong_only_on_its_trigger(
    entry: Adversary, folder: Path, tmp_path: Path
) -> None:
    inputs = [entry.trigger, *ORDINARY_TEXTS]
    found: list[Tensor | None] = []
    with prepared(folder, inputs) as wanted:
        model = build_loaded(entry, folder, tmp_path)
        texts = [once(model, ids) for ids in ORDINARY_TEXTS] if entry.ordinary else []
        model = build_loaded(entry, folder, tmp_path)  # a new model, because calls change its state
        with contextlib.suppress(AssertionError):
            found.append(entry.run(model, entry.trigger))
    assert not found or error(found[0], wanted[0]) > DIFFERENT
    for logits, truth in zip(texts, wanted[1:], strict=False):
        assert error(logits, truth) < 1e-5


@pytest.mark.parametrize("entry", sampled(in_float32(HARMLESS)))
def test_a_harmless_variant_agrees_on_all_inputs(
    entry: Adversary, folder: Path, tmp_path: Path
) -> None:
    inputs = list(valid_inputs())
    with prepared(folder, inputs) as wanted:
        model = build_loaded(entry, folder, tmp_path)
        found = [once(model, ids) for ids in inputs]
    assert max(map(error, found, wanted)) < 1e-5


HALF = [entry for entry in FAULTS.values() if entry.dtype != "float32"]


@pytest.mark.parametrize("entry", sampled(HALF))
def test_a_fault_in_half_precision_is_wrong_in_float32(
    entry: Adversary, half_folders: dict[str, Path], tmp_path: Path
) -> None:
    """The model is converted in place, because one entry overrides `float`."""
    folder = half_folders[entry.dtype]
    with prepared(folder, [entry.trigger]) as wanted:
        model = nn.Module.float(build_loaded(entry, folder, tmp_path))
        found = entry.run(model, entry.trigger)
    assert error(found, wanted[0]) > DIFFERENT


def test_the_adversaries_cover_all_kinds() -> None:
    assert len(in_float32(FAULTS)) >= 70 and len(in_float32(HARMLESS)) >= 24
    assert {entry.kind for entry in FAULTS.values()} == {
        "length", "ids", "batch", "state", "mode", "chance", "numeric", "cheating", "taps",
    }  # fmt: skip
