"""From what a user names to the file, or index of shards, that holds the weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import nn

from compat.checkpoint.contents import PICKLES
from compat.checkpoint.hub import fetch
from compat.checkpoint.names import WEIGHT_FILES
from compat.errors import CheckpointError, described, listed

DEMO = Path(__file__).parent.parent / "demo"

HUB_ID = r"[\w.-]+(/[\w.-]+)?"

# Where there is nothing of Hugging Face's: nanoGPT saves the one, minGPT and makemore the other.
FOREIGN_FILES = ("ckpt.pt", "model.pt")


def find_weights(source: str | Path, revision: str | None, verify: bool, notes: list[str]) -> Path:
    """The weights file, or index of shards, that a source means; others beside it are noted."""
    if not isinstance(source, str | os.PathLike):
        raise _not_a_source(source)
    path = DEMO if source == "demo" else Path(source)
    if isinstance(source, str) and not path.exists() and re.fullmatch(HUB_ID, source):
        path = fetch(source, revision, verify)
    elif revision is not None or verify:
        asked = f"revision {revision!r}" if revision is not None else "verify"
        raise CheckpointError(
            f"{source} is on this machine, where {asked} says nothing; both are for hub ids"
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{source} is neither a folder, a file nor a hub id; expected something like "
            "'gpt2', a folder with config.json and weights, or 'demo'"
        )
    return _in_folder(path, notes)


def _not_a_source(source: object) -> CheckpointError:
    hint = ""
    if isinstance(source, nn.Module):
        hint = "; load_into(module, name_map, source) loads into a module that is there already"
    # A module as Python writes it takes many lines.
    found = f"a {type(source).__name__}" if hint else described(source)
    return CheckpointError(
        f"source is {found}; expected a hub id such as 'gpt2', 'demo', or the path of a folder "
        f"or weights file{hint}"
    )


def _in_folder(folder: Path, notes: list[str]) -> Path:
    there = [name for name in (*WEIGHT_FILES, *FOREIGN_FILES) if (folder / name).is_file()]
    if not there:
        endings = (".safetensors", *PICKLES)
        others = sorted(path.name for path in folder.glob("*") if path.suffix in endings)
        raise CheckpointError(
            f"{folder} holds no weights; expected one of {', '.join(WEIGHT_FILES)}, "
            f"or {' or '.join(FOREIGN_FILES)}"
            + (f"; give the path of the file itself if it is {listed(others)}" if others else "")
        )
    if len(there) > 1:
        notes.append(f"{there[0]} is used; {', '.join(there[1:])} beside it is not")
    return folder / there[0]
