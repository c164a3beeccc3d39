"""Which matrix product this machine does fastest: measured once, then remembered on disk."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from compat.engine.matrices import (
    Blas,
    Int8,
    Int8Both,
    Linear,
    Matrix,
    OneDnn,
    Pack,
    int8_weight_only,
)

# The last of each is of documented operators only, and works everywhere.
CANDIDATES: dict[str, tuple[Pack, ...]] = {
    "float32": (OneDnn, Blas, Linear),
    "bfloat16": (OneDnn, Blas, Linear),
    "int8": (int8_weight_only, Int8),
    "draft": (Int8Both, int8_weight_only, Int8),
}
ACTIVATIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "draft": torch.bfloat16,
}
# Relative RMS of a product of random numbers: several times what each precision leaves.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2, "draft": 3e-2}


@cache
def fastest(precision: str, threads: int) -> Pack:
    """The fastest of the candidates that work here, for one row at a time.

    Args:
        precision: "float32", "bfloat16", "int8", or "draft", which may be less exact.
        threads: that torch computes with.
    """
    working = {pack.__name__: pack for pack in CANDIDATES[precision] if works(pack, precision)}
    known = _read_memory()
    place = f"{_machine()}, {threads} threads, {precision}: {', '.join(working)}"
    if known.get(place) not in working:
        known[place] = min(working, key=lambda name: seconds(working[name], precision))
        _write_memory(known)
    return working[known[place]]


def works(pack: Pack, precision: str) -> bool:
    """Whether it runs here and gives the right product."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=generator) for size in ((64, 96), (3, 64)))
    bias, dtype = torch.randn(96, generator=generator), ACTIVATIONS[precision]
    expected = x.double() @ weight.double() + bias.double()
    try:
        found = pack(weight.to(dtype), bias.to(dtype))(x.to(dtype)).double()
    except Exception:  # an operator that is gone, or not for this machine
        return False
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return bool(error < TOLERANCE[precision])


def seconds(pack: Pack, precision: str, rounds: int = 5) -> float:
    """The best time for a round of products with different weights, which no near cache holds."""
    dtype = ACTIVATIONS[precision]
    weights = torch.randn(768, 3072, dtype=dtype)
    matrices: list[Matrix] = [pack(weights, None) for _ in range(6)]
    x, best = torch.randn(1, 768, dtype=dtype), float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for matrix in matrices:
            matrix(x)
        best = min(best, time.perf_counter() - start)
    return best


def _machine() -> str:
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        info = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in info if line.startswith("model name")).partition(": ")[2]
    return f"{model}, torch {torch.__version__}"


def _memory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "gpt2-compat" / "kernels.json"


def _read_memory() -> dict[str, str]:
    with suppress(OSError, ValueError):
        found = json.loads(_memory().read_text())
        if isinstance(found, dict):
            return found
    return {}


def _write_memory(known: dict[str, str]) -> None:
    """Whole or not at all; where it cannot be written, it is measured again."""
    with suppress(OSError):
        _memory().parent.mkdir(parents=True, exist_ok=True)
        part = _memory().with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps(known, indent=1))
        part.replace(_memory())
