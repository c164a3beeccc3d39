"""Which matrix product this machine does fastest: measured once, then remembered on disk."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch

from compat.decoding.matrices import (
    Blas,
    Int8,
    Int8Both,
    Int8Pairs,
    Linear,
    OneDnn,
    Pack,
    int8_weight_only,
)

# The last of each is of documented operators only, and works everywhere.
CANDIDATES: dict[str, tuple[Pack, ...]] = {
    "float32": (OneDnn, Blas, Linear),
    "bfloat16": (OneDnn, Blas, Linear),
    "int8": (Int8Pairs, int8_weight_only, Int8),
    "draft": (Int8Both, Int8Pairs, int8_weight_only, Int8),
}
ACTIVATIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.float32,
    "draft": torch.float32,
}
# Relative RMS of a product of random numbers: several times what each precision leaves.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2, "draft": 3e-2}
CPU = torch.device("cpu")
LAYERS = 3  # for each candidate: more than the nearest caches hold
PROMPT = 64  # ids read at once


@cache
def fastest(precision: str, rows: int, threads: int, device: torch.device = CPU) -> Pack:
    """The fastest of the candidates that work here; on an accelerator, the first.

    Args:
        precision: "float32", "bfloat16", "int8", or "draft", which may be less exact.
        rows: multiplied at a time.
        threads: that torch computes with.
        device: where the weights lie.
    """
    candidates = (pack for pack in CANDIDATES[precision] if works(pack, precision, device))
    working = {pack.__name__: pack for pack in candidates}
    if device != CPU:
        return next(iter(working.values()))
    known = _read_memory()
    place = f"{_machine()}, {threads} threads, {precision}, {rows} rows: {', '.join(working)}"
    if known.get(place) not in working:
        taken = seconds(list(working.values()), ACTIVATIONS[precision], rows)
        known[place] = min(zip(taken, working, strict=True))[1]
        _write_memory(known)
    return working[known[place]]


def works(pack: Pack, precision: str, device: torch.device = CPU) -> bool:
    """Whether it runs there and gives the right product."""
    draw = partial(torch.randn, generator=torch.Generator(CPU).manual_seed(0), device=CPU)
    weight, x, bias = draw(64, 96), draw(3, 64), draw(96)
    expected = x.double() @ weight.double() + bias.double()
    given = [tensor.to(device, ACTIVATIONS[precision]) for tensor in (weight, bias, x)]
    try:
        found = pack(given[0], given[1])(given[2]).cpu().double()
    except Exception:  # an operator that is gone, or not for this machine
        return False
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return bool(error < TOLERANCE[precision])


def seconds(packs: Sequence[Pack], dtype: torch.dtype, rows: int, rounds: int = 7) -> list[float]:
    """What an id costs each of them, generated and in a prompt: the best times of a few.

    They have their turns one after another, so that noise hits all alike.
    """
    block = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    sizes = [*block * LAYERS, (768, 50257 * LAYERS // 12)]  # a quarter of gpt2, and of its head
    seeded = torch.Generator(CPU).manual_seed(0)
    draw = partial(torch.randn, generator=seeded, dtype=dtype, device=CPU)
    packed = [[pack(draw(size), draw(size[1])) for size in sizes] for pack in packs]
    costs = [0.0] * len(packs)
    for count in (rows, PROMPT):
        inputs = {size: draw(count, size) for size in (768, 3072)}
        times: list[list[float]] = [[] for _ in packs]
        for _ in range(rounds):
            for taken, matrices in zip(times, packed, strict=True):
                start = time.perf_counter()
                for matrix, (size, _) in zip(matrices, sizes, strict=True):
                    matrix(inputs[size])
                taken.append(time.perf_counter() - start)
        # Rows that are read in one prompt count as so many ids, the others as one each of a text.
        share = 1 if count == rows else 1 / count
        costs = [cost + min(taken) * share for cost, taken in zip(costs, times, strict=True)]
    return costs


def _machine() -> str:
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        info = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in info if line.startswith("model name")).partition(": ")[2]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


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
