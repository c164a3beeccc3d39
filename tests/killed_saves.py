"""Kill saves at random moments, each in a separate process, and read the folder afterwards.

    python -m tests.killed_saves NUMBER SIGNAL FOLDER

prints how often the folder held the complete old model, how often the complete new one, and how
often temporary files remained next to it. Any other result is an AssertionError.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from compat import GPT2Config, load_pretrained, save_pretrained, to_hf_state_dict
from compat.checkpoint import open_checkpoint
from compat.checkpoint.layout import saved_name
from compat.dialects import Model

SavedModel = tuple[GPT2Config, dict[str, torch.Tensor]]


def models() -> list[Model]:
    """Return two models of 3.8 MB that differ in every tensor and in the config."""
    old, new = load_pretrained("demo"), load_pretrained("demo")
    new.config = replace(new.config, eos_token_id=7)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    return [old, new]


def contents_of(model: Model) -> SavedModel:
    return model.config, to_hf_state_dict(model)


def read_folder(folder: Path) -> SavedModel:
    """Read the config and the tensors from the folder."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == []
    assert (folder / "notes.txt").read_text() == "mine"
    names = [name for name in checkpoint.infos if name != "lm_head.weight"]
    return checkpoint.config, {saved_name(name): checkpoint.read(name) for name in names}


def equal(one: SavedModel, other: SavedModel) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )


def start_save(model: Model, folder: Path) -> int:
    """Save many shards in a separate process, which then waits for the signal; return its id."""
    (folder.parent / "done").unlink(missing_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the fork has completed
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return process
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        save_pretrained(model, folder, tokenizer="demo", max_shard_size="150KB")
        (folder.parent / "done").touch()
        time.sleep(60)
    finally:
        os._exit(0)


def duration(model: Model, folder: Path) -> float:
    """Return how many seconds a save takes that is not killed."""
    start = time.perf_counter()
    process = start_save(model, folder)
    wait_for_end(folder)
    seconds = time.perf_counter() - start
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return seconds


def wait_for_end(folder: Path) -> None:
    while not (folder.parent / "done").exists():
        time.sleep(0.001)


def main(number: int, kind: signal.Signals, folder: Path) -> Counter[str]:
    torch.set_num_threads(1)
    # Some shells ignore SIGINT in background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (old, new), rng, counts = models(), random.Random(0), Counter[str]()
    states = {"old": contents_of(old), "new": contents_of(new)}
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    save_pretrained(new, folder, tokenizer="demo")  # imports what would distort the measured times
    seconds = min(duration(new, folder) for _ in range(3))
    for i in range(number):
        save_pretrained(old, folder, tokenizer="demo")
        assert {path.name for path in folder.parent.iterdir()} <= {folder.name, "done"}
        process = start_save(new, folder)
        if i < number - 3:
            time.sleep(seconds * 1.5 * (i + rng.random()) / number)  # covers all parts of a save
        else:  # on a busy machine, all earlier signals may have come too early
            wait_for_end(folder)
        os.kill(process, kind)
        os.waitpid(process, 0)
        left = read_folder(folder)
        which = [name for name, state in states.items() if equal(left, state)]
        assert len(which) == 1, f"the folder holds neither model, after {counts}"
        has_temporary = any(path.name.startswith(".") for path in folder.parent.iterdir())
        assert kind == signal.SIGKILL or not has_temporary, "Ctrl-C left temporary files"
        counts.update([*which, *(["with a temporary"] if has_temporary else [])])
    save_pretrained(old, folder)
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, "done"}
    print(f"a save takes {seconds:.3f} s", file=sys.stderr)
    return counts


def report(number: int, kind: signal.Signals, folder: Path) -> None:
    print(json.dumps(main(number, kind, folder)))


if __name__ == "__main__":
    report(int(sys.argv[1]), signal.Signals[sys.argv[2]], Path(sys.argv[3]))
