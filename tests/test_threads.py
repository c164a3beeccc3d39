"""Copying weights in two threads works in forked processes."""

from __future__ import annotations

from tests.command_line import python

FORKS = """
import os
import threading

import torch

from compat.threads import two_threads

torch.set_num_threads(2)  # only then do new threads touch torch's pool
x = torch.ones(2000, 200)
x.clone()


def call(together):
    together.wait()
    return x.clone()


def child():
    together = threading.Barrier(2)
    with two_threads() as pool:
        list(pool.map(call, [together, together]))


failed = 0
for _ in range(100):
    if (process := os.fork()) == 0:
        try:
            child()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    failed += os.waitpid(process, 0)[1] != 0
print(failed, "of 100 failed")
"""


def test_two_threads_can_call_torch_concurrently_in_a_forked_process() -> None:
    assert python(FORKS).stdout == "0 of 100 failed\n"
