"""The command line: every subcommand is one call of the library and one way to show its result.

This file imports nothing that takes long, so that the signal handler is installed before torch,
typer and rich are imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    Exit codes: 0 ok, 1 no parity, 2 usage, 3 bad input, 4 network, 70 internal error, 130 Ctrl-C.

    Args:
        argv: the arguments after the program's name; by default those of the process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT may be ignored
        signal.signal(signal.SIGINT, _exit_at_once)
    if argv is None:  # this process runs nothing else
        keep_freed_memory()
    from compat.cli.app import run

    run(list(sys.argv[1:] if argv is None else argv))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensor.

    By default glibc returns large blocks to the system, which has to clear them when they are
    allocated again. This takes an eighth of the time of `adapt` with the weights of GPT-2 small,
    and a quarter of that of `parity --all`.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # not in musl
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, so that a command can keep what it has.

    Before and after the command, Ctrl-C ends the process at once: there is nothing to keep, and an
    exception during an import or while Python exits would print a traceback.
    """
    ours = signal.getsignal(signal.SIGINT) is _exit_at_once
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, _exit_at_once)


def _exit_at_once(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)
