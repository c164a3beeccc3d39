"""Python's garbage collector, paused where many objects are created and none is freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from running.

    Building a model or importing a large library would trigger it, and visiting all of torch's
    objects takes as long as loading a small GPT-2.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
