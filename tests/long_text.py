"""Measures how many bytes of memory a generation of 350 tokens allocates.

This runs in a separate process, whose allocator holds no memory that other tests have freed.
"""

from __future__ import annotations

import os
from ctypes import CDLL
from pathlib import Path
from typing import Any

from torch import Tensor

from compat.engine import Engine


def memory() -> int:
    """Return the resident memory in bytes, after freed memory has been returned to the system.

    How much the allocator would keep depends on the sizes of earlier allocations, which depend on
    the measured acceptance rate of the draft tokens.
    """
    CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(engine: Engine, kept: list[Tensor] | None) -> int:
    """Generate, store all logits in `kept` if passed, and return by how many bytes memory grew."""
    decoder = engine.decoder()
    logits = decoder.start([[464]])
    before = 0
    for step in range(450):
        if step == 100:
            before = memory()
        if kept is not None:
            kept.append(logits.clone())
        logits = decoder.step(logits.argmax(-1))
    return memory() - before


def main(source: Path, settings: dict[str, Any], mode: str = "") -> None:
    engine = Engine.from_pretrained(source, **settings)
    growth(engine, None)  # includes one-time allocations
    print(growth(engine, [] if mode == "keep logits" else None))
