"""Engines are compared with transformers: prefill, and decode steps with the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat import Engine, PlainBlocks, check_parity, load_pretrained
from tests.command_line import Cli

SETTINGS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "float32", "max_batch": 2},
    {"dtype": "float32", "speculate": "int8"},
    {"dtype": "float32", "speculate": "lookup"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "speculate": "lookup"},
    {"dtype": "int8"},
    {"dtype": "int8", "speculate": "int8"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_an_engine_computes_what_transformers_computes(
    noisy: Path, settings: dict[str, Any]
) -> None:
    report = check_parity(Engine.from_pretrained(noisy, **settings), noisy)
    assert report.passed, report.headline
    assert report.dtype == settings["dtype"] and report.taps == []
    shapes = {result.input_shape for result in report.logits.inputs}
    assert (1, 256) in shapes, "no input fills the context"
    if settings["dtype"] == "float32":
        assert report.smallest_detectable < 1e-4
    if settings["dtype"] == "int8":
        assert "quantization error of the reference" in report.notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_blocks_are_compared_with_transformers(noisy: Path, dtype: torch.dtype) -> None:
    model = load_pretrained(noisy, "linear", dtype=dtype)
    report = check_parity(PlainBlocks(model), noisy)
    assert report.passed, report.headline
    assert report.smallest_detectable < 1e-4
    model.trf_blocks[1].attention.scale *= 1.01
    assert not check_parity(PlainBlocks(model), noisy)


def changed_scale(engine: Engine) -> None:
    engine.transformer.h[1].scale *= 1.02


def changed_activation(engine: Engine) -> None:
    for block in engine.transformer.h:
        block.act = torch.nn.GELU()


def shifted_positions(engine: Engine) -> None:
    engine.transformer.wpe = engine.transformer.wpe.roll(1, 0)


def wrong_decode_steps(engine: Engine) -> None:
    step = engine.transformer.next_logits
    engine.transformer.next_logits = lambda *args: step(*args) * 1.001


def wrong_last_position(engine: Engine) -> None:
    step = engine.transformer.next_logits

    def next_logits(ids: Tensor, cache: Any, start: int | Tensor) -> Tensor:
        logits: Tensor = step(ids, cache, start)
        return logits * 1.001 if start == 255 else logits

    engine.transformer.next_logits = next_logits


def raises_system_exit(engine: Engine) -> None:
    def logits(*args: Any) -> Tensor:
        raise SystemExit("no")

    engine.transformer.next_logits = logits


def wrong_batches(engine: Engine) -> None:
    logits = engine.transformer.logits
    engine.transformer.logits = lambda hidden: (
        logits(hidden).roll(1, 0) if len(hidden) > 2 else logits(hidden)
    )


FAULTS = [
    changed_scale, changed_activation, shifted_positions, wrong_decode_steps,
    wrong_last_position, wrong_batches, raises_system_exit,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_engine_is_found(noisy: Path, fault: Callable[[Engine], None]) -> None:
    engine = Engine.from_pretrained(noisy)
    fault(engine)
    assert not check_parity(engine, noisy)


@pytest.mark.parametrize("fault", [shifted_positions, wrong_batches])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_large_fault_is_found_in_lower_precision(
    noisy: Path, dtype: Any, fault: Callable[[Engine], None]
) -> None:
    engine = Engine.from_pretrained(noisy, dtype=dtype)
    fault(engine)
    assert not check_parity(engine, noisy)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_the_parity_command_prints_the_report_of_an_engine(
    cli: Cli, noisy: Path, precision: str
) -> None:
    done = cli("parity", "--model", noisy, "--engine", precision)
    assert done.code == 0, done.err
    assert f"✓ Engine({precision}) computes what transformers computes" in done.out
    assert "decode steps alone" in done.out and "bound" in done.out
    assert ("quantization error" in done.out) == (precision == "int8")
