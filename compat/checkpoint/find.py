"""From what a user names to the file, or index of shards, that holds the weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import nn

from compat.checkpoint.contents import PICKLES
from compat.checkpoint.formats import FLAX, GGUF, HDF5, NPZ, ONNX, TENSORFLOW, recognized
from compat.checkpoint.hub import fetch
from compat.checkpoint.names import WEIGHT_FILES
from compat.errors import CheckpointError, described, listed

DEMO = Path(__file__).parent.parent / "demo"

# A name that starts as a path does is not a hub id.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

_NEITHER = (
    "neither a folder, a file nor a hub id; expected something like 'gpt2', a folder with "
    "config.json and weights, or 'demo'"
)

FOREIGN_FORMATS = (TENSORFLOW, HDF5, FLAX, GGUF, ONNX, NPZ)

# Where there is nothing of Hugging Face's: nanoGPT saves the one, minGPT and makemore the other.
FOREIGN_FILES = ("ckpt.pt", "model.pt")


def find_weights(source: str | Path, revision: str | None, verify: bool, notes: list[str]) -> Path:
    """The weights file, or index of shards, that a source means; others beside it are noted."""
    if not isinstance(source, str | os.PathLike):
        raise _not_a_source(source)
    path = DEMO if source == "demo" else Path(source)
    if Path(f"{path}.index").is_file() and not path.exists():
        raise CheckpointError(
            f"{source} is a TensorFlow checkpoint; expected one of PyTorch\n{TENSORFLOW.advice}."
        )
    is_id = isinstance(source, str) and HUB_ID.fullmatch(source) is not None
    if not path.exists() and not is_id:
        raise CheckpointError(f"{source} does not exist: it is {_NEITHER}")
    if isinstance(source, str) and not path.exists():
        path = fetch(source, revision, verify)
    elif revision is not None or verify:
        asked = f"revision {revision!r}" if revision is not None else "verify"
        raise CheckpointError(
            f"{source} is on this machine, where {asked} says nothing; both are for hub ids"
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{source} is {_NEITHER}")
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
            + _other_formats(folder)
        )
    if len(there) > 1:
        notes.append(f"{there[0]} is used; {', '.join(there[1:])} beside it is not")
    return folder / there[0]


def _other_formats(folder: Path) -> str:
    """A line for each kind of weights that others read."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*")):
        known = recognized(path) if path.is_file() else None
        if known in FOREIGN_FORMATS:
            found.setdefault(known.name, f"\n{path.name} is {known.phrase}: {known.advice}.")
    return "".join(found.values())
