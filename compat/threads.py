"""A pool of two threads for copying and packing weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch


def two_threads() -> ThreadPoolExecutor:
    """Return a pool of two threads, which initialise torch one after the other.

    In a process that was forked after `torch.set_num_threads`, torch replaces its own thread pool
    when a new thread first calls it. Two threads that do so at once can fail with "Invalid thread
    pool!".
    """
    lock = Lock()

    def prepare_torch() -> None:
        with lock:
            torch.get_num_threads()

    return ThreadPoolExecutor(max_workers=2, initializer=prepare_torch)
