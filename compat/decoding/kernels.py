"""Selection of the fastest matrix product on this machine, measured once and cached on disk."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from compat.checkpoint.layout import expected_shapes
from compat.config import GPT2Config
from compat.decoding.machine import cache_folder, processor
from compat.decoding.matrices import (
    Blas,
    Int8,
    Int8DynamicActivations,
    Int8TwoTerm,
    Linear,
    OneDnn,
    Pack,
    int8_weight_only,
)
from compat.decoding.native import (
    NATIVE,
    NativeInt8,
    NativeInt8Bfloat16,
    NativeInt8Prompts,
    NativeLinear,
    NativePrompts,
    transformer_class,
)
from compat.decoding.native_library import is_available, note
from compat.decoding.transformer import Transformer
from compat.display import write_text

# The last candidate of each precision only uses documented operators, and works everywhere.
FLOATS: tuple[Pack, ...] = (NativePrompts, NativeLinear, OneDnn, Blas, Linear)
INT8: tuple[Pack, ...] = (Int8TwoTerm, int8_weight_only, Int8)
CANDIDATES = {
    "float32": FLOATS,
    "bfloat16": FLOATS,
    "int8": (NativeInt8Prompts, NativeInt8Bfloat16, NativeInt8, *INT8),
    "draft": (NativeInt8Prompts, NativeInt8, Int8DynamicActivations, *INT8),
}
ACTIVATIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.float32,
    "draft": torch.float32,
}
# The largest relative RMS error of a product of random numbers: several times the rounding error.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2, "draft": 3e-2}
CPU = torch.device("cpu")
REMEASURE_AFTER = 60.0  # seconds for which a measurement on a busy machine is valid
LAYERS = 3  # layers of gpt2 for each candidate, more than the processor's caches hold
PROMPT = 64  # tokens of the measured prefill
TOO_SLOW = 8  # times the fastest candidate's first decode step, which may include warming up


def fastest(precision: str, rows: int, threads: int, device: torch.device = CPU) -> Pack:
    """Select the fastest candidate that works on this machine; on an accelerator, the last.

    If the machine was otherwise idle (`was_idle`) and a second measurement agrees, the choice is
    cached on disk. Otherwise it is valid for a minute in this process, and engines that are built
    later or by other processes measure again.

    Args:
        precision: "float32", "bfloat16", "int8", or "draft", which may be less exact.
        rows: the number of rows that are multiplied at a time.
        threads: the number of torch's threads.
        device: the device of the weights.
    """
    if device != CPU:
        return CANDIDATES[precision][-1]
    candidates = {pack.__name__: pack for pack in CANDIDATES[precision]}
    key = f"{_machine()}, {threads} threads, {precision}, {rows} rows: {', '.join(candidates)}"
    with _measuring:
        if _chosen.get(key, _NEVER).until < time.monotonic():
            _chosen[key] = _remembered_or_measured(key, precision, rows, candidates)
        return candidates[_chosen[key].name]


class _Choice(NamedTuple):
    """The name of a kernel, and the value of `time.monotonic()` until which it is valid."""

    name: str
    until: float


_NEVER = _Choice("", -math.inf)
_chosen: dict[str, _Choice] = {}
_measuring = Lock()  # two measurements at once would slow each other down


def _after_fork() -> None:
    """Replace the lock, because a thread of the parent process may hold it."""
    global _measuring
    _measuring = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _working(precision: str) -> dict[str, Pack]:
    candidates = (pack for pack in CANDIDATES[precision] if works(pack, precision))
    return {pack.__name__: pack for pack in candidates}


def _remembered_or_measured(
    key: str, precision: str, rows: int, candidates: dict[str, Pack]
) -> _Choice:
    known = _read_memory()
    if known.get(key) in candidates and works(candidates[known[key]], precision):
        return _Choice(known[key], math.inf)
    working = _working(precision)
    name, idle = _measured(precision, rows, working)
    if not idle or (name, True) != _measured(precision, rows, working):
        return _Choice(name, time.monotonic() + REMEASURE_AFTER)
    _write_memory({**known, key: name})
    return _Choice(name, math.inf)


def _measured(precision: str, rows: int, working: dict[str, Pack]) -> tuple[str, bool]:
    """Return the name of the fastest kernel, and whether the machine was otherwise idle."""
    wall, running = time.perf_counter(), time.thread_time()
    costs = seconds(list(working.values()), ACTIVATIONS[precision], rows)
    wall, running = time.perf_counter() - wall, time.thread_time() - running
    return min(zip(costs, working, strict=True))[1], was_idle(wall, running)


def was_idle(wall: float, running: float) -> bool:
    """Return whether the machine was otherwise idle during a measurement.

    On an idle machine, a computing thread always runs: it computes, or spins until torch's other
    threads are done. On a busy machine, it also waits for a processor, or sleeps while torch's
    other threads wait for one.

    Args:
        wall: the wall time of the measurement in seconds.
        running: the processor time of the measuring thread in seconds.
    """
    return wall - running < 0.1 * wall + 0.01


def clear_choices() -> None:
    """Discard all choices of this process."""
    _chosen.clear()
    _working.cache_clear()


def works(pack: Pack, precision: str) -> bool:
    """Return whether a kernel runs on this machine and its products or decode steps are right."""
    draw = partial(torch.randn, generator=torch.Generator(CPU).manual_seed(0), device=CPU)
    weight, x, bias = draw(64, 96), draw(3, 64), draw(96)
    expected = x.double() @ weight.double() + bias.double()
    w, b, inputs = (tensor.to(ACTIVATIONS[precision]) for tensor in (weight, bias, x))
    try:
        found = pack(w, b)(inputs).double()
    except Exception:  # operator removed, or unsupported on this CPU
        return False
    if _relative(found, expected) >= TOLERANCE[precision]:
        return False
    return pack not in NATIVE or _decodes_as_torch(pack, precision)


def _decodes_as_torch(pack: Pack, precision: str) -> bool:
    """Return whether the native decode step agrees with torch's on the same weights."""
    config = GPT2Config(n_layer=2, n_head=2, n_embd=96, n_positions=24, vocab_size=50)
    dtype = ACTIVATIONS[precision]
    native, exact = _random_transformers(config, [pack, Blas], dtype)
    tokens = torch.arange(20, device=CPU)
    logits = []
    with torch.inference_mode():
        for transformer in (native, exact):
            past = transformer.new_cache(3)
            transformer(tokens[:18].view(3, 6), past.kv, 0)
            starts = torch.tensor([6, 3, 5], device=CPU)
            logits.append(transformer.next_logits(tokens[:3], past, starts))
    if right := _relative(*logits) < 2 * TOLERANCE[precision]:
        return right
    note("its decode step does not compute what torch computes")
    return False


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return the RMS of a difference over the RMS of the tensor; infinity for NaN."""
    error = (found - expected).double().norm() / expected.double().norm()
    return float(error.nan_to_num(math.inf))


def _random_transformers(
    config: GPT2Config, packs: Sequence[Pack], dtype: torch.dtype
) -> list[Transformer]:
    """Build a transformer with the same random weights for each kernel.

    All layers have equal weights, and each layer has its own copy.
    """
    draw = partial(torch.randn, generator=torch.Generator(CPU).manual_seed(0), device=CPU)
    shapes = expected_shapes(replace(config, n_layer=1))
    drawn = {name: draw(shape) / 20 for name, shape in shapes.items()}
    embedding = drawn["wte.weight"].to(dtype), drawn["wpe.weight"].to(dtype)

    def read(name: str) -> list[Tensor]:
        own = re.sub(r"^h\.\d+", "h.0", name)
        return [drawn[own].clone()] if own in drawn else []

    with torch.no_grad():
        return [
            transformer_class(pack, CPU)(config, embedding, read, pack, dtype) for pack in packs
        ]


def seconds(packs: Sequence[Pack], dtype: torch.dtype, rows: int, repeats: int = 5) -> list[float]:
    """Measure the cost of a token with each kernel: its decode step plus its part of a prefill.

    The measurements run a quarter of gpt2. Each cost is the best of several times; of fewer for the
    prefill, which takes longer and matters less. The kernels are timed in turns, so that noise
    affects all of them alike. On some processors an operator takes a thousand times as long as
    others, so a kernel that is much slower in its first decode step is not timed any further. Its
    cost is infinite.
    """
    config = GPT2Config(n_layer=LAYERS, n_positions=2 * PROMPT, vocab_size=50257 * LAYERS // 12)
    built = _random_transformers(config, packs, dtype)
    ids = torch.arange(PROMPT, device=CPU)

    @torch.inference_mode()
    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    # The rows of a decode step belong to several texts, those of a prefill to one text.
    steps = [partial(each.next_logits, ids[:rows], each.new_cache(rows), PROMPT) for each in built]
    first = [timed(step) for step in steps]
    kept = [number for number, time_of in enumerate(first) if time_of < TOO_SLOW * min(first)]
    decode = dict.fromkeys(kept, math.inf)
    for number in kept * repeats:
        decode[number] = min(decode[number], timed(steps[number]))
    # native.c decodes alike with all of its candidates; only their prefills differ.
    native = [number for number in kept if packs[number] in NATIVE]
    decode |= dict.fromkeys(native, min((decode[number] for number in native), default=math.inf))
    passes = [partial(each, ids[None], each.new_cache(1).kv, 0) for each in built]
    prefill = dict.fromkeys(kept, math.inf)
    for number in kept * 2:
        prefill[number] = min(prefill[number], timed(passes[number]))
    costs = {number: decode[number] + prefill[number] / PROMPT for number in kept}
    return [costs.get(number, math.inf) for number in range(len(packs))]


def _machine() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    native = "with" if is_available() else "without"
    machine = f"{processor()['model name']}, {capability}"
    return f"{machine}, torch {torch.__version__}, {native} native.c"


def _memory() -> Path | None:
    """Return the file of measured choices, or None if there is no folder for it."""
    folder = cache_folder()
    return folder / "kernels.json" if folder else None


def _read_memory() -> dict[str, str]:
    """Read the choices on disk. A damaged file, or one of another program, is ignored."""
    memory = _memory()
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(memory.read_text("utf-8")) if memory and memory.is_file() else {}
        if isinstance(found, dict):
            return {place: name for place, name in found.items() if isinstance(name, str)}
    return {}


def _write_memory(known: dict[str, str]) -> None:
    """Write the choices atomically. If that fails, later processes have to measure again."""
    memory = _memory()
    if memory is None:
        return
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_text(memory, json.dumps(known, indent=1))
