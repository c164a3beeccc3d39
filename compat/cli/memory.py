"""Memory of the command's process: what a tensor freed is kept for the next one."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
KEPT = 2**31 - 1  # bytes, the largest int


def keep_freed_memory() -> None:
    """Let glibc keep freed memory in the process instead of returning it to the system.

    Every operator of torch allocates its result. glibc maps new pages for each large result, and
    the system fills them with zeros, which took 10 to 20 % of the time of `adapt` and `parity` at
    the shape of GPT-2 small. Without glibc, this function does nothing.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, KEPT)
