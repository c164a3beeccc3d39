"""Opens broken checkpoints in a separate process, and reports the outcome, time and memory."""

from __future__ import annotations

import resource
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from compat import load_pretrained, load_tokenizer
from compat.checkpoint import open_checkpoint
from tests.fuzz.worker import status

ROOM_MB = 1024


def open_all(source: Path) -> list[str]:
    """Open a checkpoint, load models and a tokenizer, and return the notes."""
    checkpoint = open_checkpoint(source)
    load_pretrained(checkpoint, "linear")
    load_pretrained(checkpoint, "conv1d")
    load_tokenizer(checkpoint).encode("the thing")
    return checkpoint.notes


def outcome_of(source: Path) -> dict[str, object]:
    """Return the error or the notes, the seconds, and the additional memory in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = status("VmRSS"), time.perf_counter()
    error, text = None, ""
    try:
        text = "\n".join(open_all(source))
    except BaseException as raised:  # panics of tiktoken are not an Exception
        error, text = type(raised).__name__, str(raised)
    seconds, grown = time.perf_counter() - start, (status("VmHWM") - before) / 1024
    return {"error": error, "text": text, "seconds": seconds, "mb": grown}


def main(pipe: Connection, valid: Path, sources: list[Path]) -> None:
    """Open each of the sources, after a valid checkpoint."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)  # because threads need address space
    open_all(valid)  # so that imports are not measured
    most = (status("VmSize") << 10) + (ROOM_MB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    pipe.send("ready")
    for source in sources:
        pipe.send(outcome_of(source))
