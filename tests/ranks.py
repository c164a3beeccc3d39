"""Groups of processes on this machine that run checks together and report the results by name.

A module of checks registers functions with `@check`. `run_ranks` starts the processes, each of
which runs all checks in order, and returns the tracebacks of the checks that failed. One group of
processes, which takes seconds to start, thus serves many tests.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import torch
from torch import distributed

from tests.forked import CONTEXT

Outcomes = dict[str, str | None]  # the traceback of each check; None if it passed


@dataclass
class Ranks:
    """The argument of a check: the rank, the group's size, and a folder that the test prepared."""

    rank: int
    size: int
    folder: Path


Check = Callable[[Ranks], None]


def run_ranks(module: str, size: int, folder: Path, timeout: float = 240) -> Outcomes:
    """Run the checks `CHECKS` of a module in `size` processes that gloo connects.

    Args:
        module: the name of the module, which has a dictionary `CHECKS` of functions.
        size: number of processes.
        folder: an empty folder, or one with files for the checks. The processes find each other by
            a file in it, so that no fixed port is needed.
        timeout: seconds after which the processes are killed.
    """
    context = CONTEXT
    processes = [
        context.Process(target=_run, args=(module, rank, size, folder)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = monotonic() + timeout
    waiting = [process.sentinel for process in processes]
    while waiting and (left := end - monotonic()) > 0:
        done = wait(waiting, left)
        waiting = [sentinel for sentinel in waiting if sentinel not in done]
        if any(process.exitcode for process in processes):  # the others would wait for it forever
            end = min(end, monotonic() + 10)
    for process in processes:
        process.kill()
        process.join()
    unfinished = f"not finished: exit codes {[p.exitcode for p in processes]}"
    faults: dict[str, list[str]] = {name: [] for name in import_module(module).CHECKS}
    for rank in range(size):  # one that fails may let others fail, so all are shown
        path = folder / f"outcomes-{rank}"
        found = dict(map(json.loads, path.read_text().splitlines() if path.exists() else []))
        for name, every in faults.items():
            if fault := found.get(name, unfinished):
                every.append(f"rank {rank}: {fault}")
    return {name: "\n".join(every) or None for name, every in faults.items()}


def _run(module: str, rank: int, size: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    ranks = Ranks(rank, size, folder)
    with (folder / f"outcomes-{rank}").open("w", buffering=1) as file:
        for name, check in import_module(module).CHECKS.items():
            fault = None
            try:
                check(ranks)
            except Exception:
                fault = traceback.format_exc()
            print(json.dumps([name, fault]), file=file)
    distributed.destroy_process_group()
