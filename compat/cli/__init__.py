"""The command line: every subcommand is one call of the library and one way to show its result.

This file imports nothing that takes long, so that the signal handler is installed before torch,
typer and rich are imported.
"""

from __future__ import annotations

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
    from compat.cli.app import run

    run(list(sys.argv[1:] if argv is None else argv))


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
