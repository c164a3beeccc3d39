"""A limit on the time for which a user's file may run while it is loaded."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from compat.user_code import is_users

SECONDS = 30.0


class _TimeIsUp(BaseException):
    """Raised where the code runs. It is not an `Exception`, because the code may catch those."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Run the body for at most `SECONDS`, and until the import of a library that it began ends.

    There is no limit outside the main thread, on systems without timers, and in the body of another
    limit, which holds for both.

    Raises:
        TimeoutError: the body did not end in time.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer") or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if _imports_library(frame):  # on a busy machine, that of transformers takes a minute
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        else:
            raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except _TimeIsUp as error:
        fault = TimeoutError(f"it did not end in {SECONDS:g} seconds")
        raise fault.with_traceback(error.__traceback__) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _imports_library(frame: FrameType | None) -> bool:
    """Return whether a frame runs in the import of a module that is not the user's."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and not code.co_filename.startswith("<"):
            return not is_users(code.co_filename)
        frame = frame.f_back
    return False
