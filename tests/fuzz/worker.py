"""Makes mutations, one after the other, loads them, and reports the outcome of each.

A hostile file can harm only this process; the harness observes it from outside.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import torch

from compat.errors import CompatError
from tests.fuzz.mutations import Files, mutation, seed_files
from tests.fuzz.oracle import Loader, wrong
from tests.fuzz.oracle import load as load_right

MOST_SECONDS, MOST_MB, ROOM_MB = 2.0, 200, 512
LONGEST_MESSAGE = 10_000


def write(folder: Path, files: Files) -> None:
    """Replace the contents of the folder with these files."""
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def outcome(folder: Path, load: Loader) -> tuple[str, str]:
    """Return the name of the outcome, and the faults of a wrong one."""
    try:
        loaded = load(folder)
    except CompatError as error:
        return type(error).__name__, _wrong_message(str(error), folder)
    except BaseException as error:  # panics of tiktoken are not an Exception
        return f"escaped {type(error).__name__}", f"{type(error).__name__}: {str(error)[:300]}"
    return "loaded", "; ".join(list(wrong(loaded))[:3])


def _wrong_message(text: str, folder: Path) -> str:
    if not all(c.isprintable() or c == "\n" for c in text):
        return f"a message that is not fit to print: {text[:300]!r}"
    if len(text) > LONGEST_MESSAGE:
        return f"a message of {len(text):,} characters"
    return "" if folder.name in text else f"a message without the path: {text[:300]}"


def measured(folder: Path, load: Loader, noise: IO[bytes]) -> tuple[str, str]:
    """Return the same within limits on time and memory, and check for output and warnings."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start, printed = status("VmRSS"), time.process_time(), noise.tell()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        name, fault = outcome(folder, load)
    seconds, grown = time.process_time() - start, (status("VmHWM") - before) / 1024
    if warned:
        fault = fault or f"a warning: {warned[0].message}"
    if noise.seek(0, os.SEEK_END) > printed:
        fault = fault or "something was printed"
    if seconds > MOST_SECONDS:
        fault = fault or f"{seconds:.1f} s"
    if grown > MOST_MB:
        fault = fault or f"{grown:.0f} MB"
    return name, fault


def status(name: str) -> int:
    """Return a number of kB from /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0])


def main(
    pipe: Connection,
    place: str,
    noise_file: Path,
    seed: int,
    start: int,
    stop: int,
    kinds: list[str],
    target: str,
) -> None:
    """Answer once when the unmutated checkpoints are loaded, and then once for each mutation."""
    torch.set_num_threads(1)  # because threads need address space
    module, _, name = target.partition(":")
    load: Loader = getattr(importlib.import_module(module), name)
    with (
        noise_file.open("w+b", buffering=0) as noise,
        TemporaryDirectory(prefix="fuzz-", dir=place) as folder_name,
    ):
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
        folder = Path(folder_name)
        for kind in kinds:  # so that no mutation is charged for imports
            write(folder, seed_files(kind))
            if (came_of := outcome(folder, load_right)) != ("loaded", ""):
                raise SystemExit(f"the {kind} checkpoint, unchanged: {came_of}")
        most = (status("VmSize") << 10) + (ROOM_MB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        pipe.send({"ready": True})
        for index in range(start, stop):
            kind, files = mutation(seed, index, kinds)
            write(folder, files)
            outcome_name, fault = measured(folder, load, noise)
            pipe.send({"index": index, "kind": kind, "outcome": outcome_name, "fault": fault})
