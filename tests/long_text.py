"""How memory grows over 350 ids, in bytes.

For a process of its own, whose allocator has nothing left over from other tests.
"""

from __future__ import annotations

import os
from ctypes import CDLL
from pathlib import Path
from typing import Any

from torch import Tensor

from compat.engine import Engine


def memory() -> int:
    """Resident, in bytes, after the allocator has returned what was freed to the system.

    How much it keeps depends on the sizes that were allocated before, and these on how many draft
    tokens paid off, which is measured.
    """
    CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(engine: Engine, hoard: list[Tensor] | None) -> int:
    """Generate and measure; with `hoard`, all logits are kept."""
    decoder = engine.decoder()
    logits = decoder.start([[464]])
    before = 0
    for step in range(450):
        if step == 100:
            before = memory()
        if hoard is not None:
            hoard.append(logits.clone())
        logits = decoder.step(logits.argmax(-1))
    return memory() - before


def main(source: Path, settings: dict[str, Any], how: str = "") -> None:
    made = Engine.from_pretrained(source, **settings)
    growth(made, None)  # what is allocated once
    print(growth(made, [] if how == "hoard" else None))
