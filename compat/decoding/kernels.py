"""Which matrix product this machine does fastest: measured once, then remembered on disk."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

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
AGAIN_AFTER = 60.0  # seconds for which a measurement on a busy machine is used
LAYERS = 3  # for each candidate: more than the nearest caches hold
PROMPT = 64  # ids read at once


def fastest(precision: str, rows: int, threads: int, device: torch.device = CPU) -> Pack:
    """The fastest of the candidates that work here; on an accelerator, the first.

    If the machine was idle but for the measurement (`was_idle`), and a second one agrees, the name
    is remembered, on disk too. Otherwise it holds for a minute and in this process only; an engine
    that is built later, or by another process, measures again.

    Args:
        precision: "float32", "bfloat16", "int8", or "draft", which may be less exact.
        rows: multiplied at a time.
        threads: that torch computes with.
        device: where the weights lie.
    """
    working = _working(precision, device)
    if device != CPU:
        return next(iter(working.values()))
    place = f"{_machine()}, {threads} threads, {precision}, {rows} rows: {', '.join(working)}"
    with _measuring:
        if _chosen.get(place, _NEVER).until < time.monotonic():
            _chosen[place] = _remembered_or_measured(place, precision, rows, working)
        return working[_chosen[place].name]


class _Choice(NamedTuple):
    """The name of a kernel, and until when it holds, in seconds of `time.monotonic`."""

    name: str
    until: float


_NEVER = _Choice("", -math.inf)
_chosen: dict[str, _Choice] = {}
_measuring = Lock()  # two at once would slow each other down


def _after_fork() -> None:
    """The lock may be held by a thread that this process does not have."""
    global _measuring
    _measuring = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _working(precision: str, device: torch.device) -> dict[str, Pack]:
    candidates = (pack for pack in CANDIDATES[precision] if works(pack, precision, device))
    return {pack.__name__: pack for pack in candidates}


def _remembered_or_measured(
    place: str, precision: str, rows: int, working: dict[str, Pack]
) -> _Choice:
    known = _read_memory()
    if known.get(place) in working:
        return _Choice(known[place], math.inf)
    name, idle = _measured(precision, rows, working)
    if not idle or (name, True) != _measured(precision, rows, working):
        return _Choice(name, time.monotonic() + AGAIN_AFTER)
    _write_memory({**known, place: name})
    return _Choice(name, math.inf)


def _measured(precision: str, rows: int, working: dict[str, Pack]) -> tuple[str, bool]:
    """The name of the fastest, and whether the machine was idle but for the measurement."""
    wall, running = time.perf_counter(), time.thread_time()
    taken = seconds(list(working.values()), ACTIVATIONS[precision], rows)
    wall, running = time.perf_counter() - wall, time.thread_time() - running
    return min(zip(taken, working, strict=True))[1], was_idle(wall, running)


def was_idle(wall: float, running: float) -> bool:
    """Whether the machine was, but for a measurement.

    A thread that computes runs all the time, or spins until torch's other threads are done. Where
    others compute, it waits: for a processor, or asleep for a thread of torch that waits for one.

    Args:
        wall: seconds that the measurement took.
        running: seconds of these that the measuring thread ran.
    """
    return wall - running < 0.1 * wall + 0.01


def forget() -> None:
    """Everything known in this process."""
    _chosen.clear()
    _working.cache_clear()


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
    try:
        info = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in info if line.startswith("model name")).partition(": ")[2]
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()  # which starts another process
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _memory() -> Path | None:
    """The file with what was measured; None where no folder for it is known."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # which the standard says to ignore
        try:
            root = str(Path.home() / ".cache")
        except (RuntimeError, KeyError):  # neither HOME nor an entry for the user
            return None
    return Path(root) / "gpt2-compat" / "kernels.json"


def _read_memory() -> dict[str, str]:
    """What was measured before; nothing of a file that something else wrote or damaged."""
    memory = _memory()
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(memory.read_text("utf-8")) if memory and memory.is_file() else {}
        if isinstance(found, dict):
            return {place: name for place, name in found.items() if isinstance(name, str)}
    return {}


def _write_memory(known: dict[str, str]) -> None:
    """Whole or not at all; where it cannot be written, it is measured again."""
    memory = _memory()
    if memory is None:
        return
    part = memory.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(known, indent=1), "utf-8")
            part.replace(memory)
        finally:
            part.unlink(missing_ok=True)
