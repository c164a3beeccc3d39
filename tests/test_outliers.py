"""Inputs with outliers, which the products of an int8 model multiply in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat import Engine
from compat.checkpoint import open_checkpoint
from compat.decoding import matrices
from compat.decoding.matrices import Blas, Pack, WithOutliers
from compat.decoding.native import NativeInt8, NativeInt8Prompts
from compat.decoding.outliers import MOST, inputs_with_outliers
from tests.conftest import MakeCheckpoint
from tests.native_common import needs_compiler, needs_vnni, plant_outliers, transformer_with

SIZES: dict[str, Any] = {"n_positions": 64, "n_embd": 96, "n_layer": 2}
TEXT = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(2))
KERNELS = [
    pytest.param(NativeInt8, marks=needs_compiler),
    pytest.param(NativeInt8Prompts, marks=needs_vnni),
    matrices.Int8TwoTerm,
    matrices.int8_weight_only,
    matrices.Int8,
]


@pytest.fixture
def planted(make_checkpoint: MakeCheckpoint) -> tuple[Path, dict[str, list[int]]]:
    folder = make_checkpoint(**SIZES)
    return folder, plant_outliers(folder)


def find_outliers(folder: Path) -> dict[str, list[int]]:
    checkpoint = open_checkpoint(folder)
    embedding = checkpoint.read("wte.weight"), checkpoint.read("wpe.weight")
    inputs = inputs_with_outliers(
        checkpoint.config, embedding, lambda name: [checkpoint.read(name)]
    )
    return {name: indices.tolist() for name, indices in inputs.items()}


def logits(transformer: Any) -> Tensor:
    """Return the logits of a prompt and of the decode steps after it."""
    with torch.inference_mode():
        cache = transformer.new_cache(1)
        prompt = transformer.logits(transformer(TEXT[:, :30], cache.kv, 0))
        steps = [transformer.next_logits(TEXT[:, t], cache, t)[None] for t in range(30, 40)]
    return torch.cat([prompt, *steps], dim=1)


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def test_all_planted_outliers_and_no_others_are_found(
    planted: tuple[Path, dict[str, list[int]]], make_checkpoint: MakeCheckpoint
) -> None:
    folder, expected = planted
    assert find_outliers(folder) == expected
    assert find_outliers(make_checkpoint(**SIZES)) == {}


@pytest.mark.parametrize("kernel", KERNELS)
def test_outliers_do_not_reduce_the_precision(
    monkeypatch: pytest.MonkeyPatch,
    planted: tuple[Path, dict[str, list[int]]],
    make_checkpoint: MakeCheckpoint,
    kernel: Pack,
) -> None:
    monkeypatch.setattr("compat.engine.fastest", lambda *_: kernel)

    def error(folder: Path) -> float:
        engine = Engine.from_pretrained(folder, dtype="int8")
        return relative(
            logits(engine.transformer), logits(transformer_with(Blas, folder, "float64"))
        )

    usual = error(make_checkpoint(**SIZES))
    assert error(planted[0]) < 1.3 * usual
    monkeypatch.setattr("compat.decoding.outliers.inputs_with_outliers", lambda *_: {})
    assert error(planted[0]) > 3 * usual


def test_a_draft_model_treats_outliers_separately(
    planted: tuple[Path, dict[str, list[int]]],
) -> None:
    engine = Engine.from_pretrained(planted[0], speculate="int8")
    draft: Any = engine._draft_sources[1].draft
    products = [
        module for module in draft.transformer.modules() if isinstance(module, WithOutliers)
    ]
    assert len(products) == len(planted[1])
    assert not any(isinstance(module, WithOutliers) for module in engine.transformer.modules())


def test_a_non_finite_outlier_reaches_the_logits(
    planted: tuple[Path, dict[str, list[int]]],
) -> None:
    transformer: Any = Engine.from_pretrained(planted[0], dtype="int8").transformer
    assert logits(transformer).isfinite().all()
    transformer.h[0].ln_1.bias[3] = torch.inf
    assert not logits(transformer).isfinite().any()


def test_no_product_has_more_outliers_than_native_c_supports(
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint(**SIZES, activation_function="relu")
    checkpoint = open_checkpoint(folder)
    bias = checkpoint.read("h.0.mlp.c_fc.bias").clone()
    bias[:200], bias[200:] = -1e4, 1.0  # most units are inactive, so that the median is 0
    embedding = checkpoint.read("wte.weight"), checkpoint.read("wpe.weight")

    def read(name: str) -> list[Tensor]:
        return [bias if name == "h.0.mlp.c_fc.bias" else checkpoint.read(name)]

    inputs = inputs_with_outliers(checkpoint.config, embedding, read)
    assert len(inputs["h.0.mlp.c_proj.weight"]) == MOST
    assert inputs["h.0.mlp.c_proj.weight"].min() >= 200
