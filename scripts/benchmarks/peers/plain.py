"""compat's dialects run by their own `forward`. The kind is the dialect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.peers import Generate
from compat import PlainBlocks, load_pretrained, stream


def load(folder: Path, kind: str, batch: int, threads: int, device: str = "cpu") -> Generate:
    torch.set_num_threads(threads)
    model = PlainBlocks(load_pretrained(folder, kind, device=device))

    def generate(prompts: list[list[int]], new: int, tick: Callable[[], None]) -> list[list[int]]:
        steps = []
        ids = torch.tensor(prompts)
        for step in stream(model, ids, max_new_tokens=new, temperature=0, stop_ids=()):
            tick()
            steps.append(step)
        return torch.stack(steps, dim=1).tolist()

    return generate
