"""Memory straight from the system: zero pages that take none until they are written to."""

from __future__ import annotations

import mmap


def private_memory(size: int) -> mmap.mmap:
    """`size` bytes of zeros, which a child process gets a copy of when it is forked.

    Python's own default on Unix is memory that parent and child share. Windows has no fork, and
    none of these flags.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, size, **flags)
