"""A limit on the time for which a user's file may run while it is loaded."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SECONDS = 30.0


class _TimeIsUp(BaseException):
    """Raised where the code runs. It is not an `Exception`, because the code may catch those."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Run the body for at most `SECONDS`.

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
