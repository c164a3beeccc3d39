"""Matrix products: every one is right or is not taken, and the fastest is remembered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat.decoding import kernels
from compat.decoding.matrices import Blas, Int8, Linear, Pack


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What these tests measure is not remembered for the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    kernels.fastest.cache_clear()


@pytest.mark.parametrize("precision", list(kernels.CANDIDATES))
def test_every_kernel_gives_the_product_or_is_not_taken(precision: str) -> None:
    *_, documented = kernels.CANDIDATES[precision]
    assert documented in (Linear, Int8)
    assert kernels.works(documented, precision)


@pytest.mark.parametrize(
    ("precision", "count"),
    [(p, n) for p, packs in kernels.CANDIDATES.items() for n in range(len(packs))],
)
@pytest.mark.parametrize("fault", ["gone", "wrong"])
def test_an_engine_does_without_any_kernel_but_the_last(
    precision: str, count: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each optional operator in turn raises as one that torch no longer has, or computes wrong."""
    packs = kernels.CANDIDATES[precision]

    def gone(weight: Tensor, bias: Tensor | None) -> Any:
        raise AttributeError("no such operator")

    def wrong(weight: Tensor, bias: Tensor | None) -> Any:
        return Blas(weight * 1.2, bias)

    broken = gone if fault == "gone" else wrong
    left = (*[broken] * count, *packs[count:])
    monkeypatch.setitem(kernels.CANDIDATES, precision, left)
    kernels.fastest.cache_clear()
    assert kernels.fastest(precision, 1, 1) in packs[count:]


@pytest.mark.parametrize("size", [(24, 72), (40, 64), (33, 7), (96, 97), (64, 64)])
def test_8_bit_products_are_right_for_any_size(size: tuple[int, int]) -> None:
    """torch's own kernel reads beyond the end of rows that its blocks do not divide."""
    weight, bias, x = torch.randn(size), torch.randn(size[1]), torch.randn(3, size[0])
    for pack in {*kernels.CANDIDATES["int8"], *kernels.CANDIDATES["draft"]}:
        found = pack(weight, bias)(x)
        assert (found - (exact := x @ weight + bias)).norm() < 0.03 * exact.norm()


def test_on_an_accelerator_the_first_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def works(pack: Pack, precision: str, device: torch.device) -> bool:
        return device.type == "cuda" and pack is not kernels.CANDIDATES[precision][0]

    monkeypatch.setattr(kernels, "works", works)
    monkeypatch.setattr(kernels, "seconds", None)  # nothing is measured, by a clock of the CPU
    for precision, candidates in kernels.CANDIDATES.items():
        kernels.fastest.cache_clear()
        assert kernels.fastest(precision, 1, 1, torch.device("cuda")) is candidates[1]


def test_the_fastest_kernel_is_taken_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def seconds(packs: Sequence[Any], dtype: torch.dtype, rows: int) -> list[float]:
        timed.extend(pack.__name__ for pack in packs)
        known = {"OneDnn": 2.0, "Blas": 1.0, "Linear": 3.0}
        return [known[pack.__name__] for pack in packs]

    monkeypatch.setattr(kernels, "seconds", seconds)
    assert kernels.fastest("float32", 1, 7) is Blas
    assert len(timed) >= 2
    kernels.fastest.cache_clear()
    timed.clear()
    assert kernels.fastest("float32", 1, 7) is Blas
    assert timed == []
    (tmp_path / "cache/gpt2-compat/kernels.json").write_text("{")
    kernels.fastest.cache_clear()
    assert kernels.fastest("float32", 1, 7) is Blas
    assert len(timed) >= 2


def test_measuring_draws_nothing_from_the_random_numbers_of_the_user() -> None:
    before = torch.get_rng_state()
    times = kernels.seconds([Blas, Linear], torch.float32, rows=1, rounds=1)
    assert len(times) == 2 and min(times) > 0
    assert kernels.works(Blas, "float32")
    assert torch.equal(torch.get_rng_state(), before)
