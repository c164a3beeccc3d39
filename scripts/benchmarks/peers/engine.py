"""compat's engine. The kind is its data type, and after a + the speculation, or "none"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.peers import Generate
from compat.engine import Engine


def load(folder: Path, kind: str, batch: int, threads: int, device: str = "cpu") -> Generate:
    torch.set_num_threads(threads)
    dtype, _, given = kind.partition("+")
    speculate = None if given == "none" else given or "auto"
    engine = Engine.from_pretrained(
        folder, dtype=dtype, device=device, max_batch=batch, speculate=speculate
    )

    def generate(prompts: list[list[int]], new: int, tick: Callable[[], None]) -> list[list[int]]:
        steps = []
        ids = torch.tensor(prompts)
        for step in engine.stream(ids, max_new_tokens=new, temperature=0, stop_ids=()):
            tick()
            steps.append(step)
        return torch.stack(steps, dim=1).tolist()

    return generate
