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
from compat.errors import CheckpointError, described, listed, short_repr

DEMO = Path(__file__).parent.parent / "demo"

# As the hub has them: letters, digits, "_", and inside a name "-" and "."; at most one "/".
HUB_ID = r"(?a:\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?)"

# A name that ends so means a file, also where there is none.
FILE_SUFFIXES = (".safetensors", *PICKLES, ".json", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

FOREIGN_FORMATS = (TENSORFLOW, HDF5, FLAX, GGUF, ONNX, NPZ)

# Where there is nothing of Hugging Face's: nanoGPT saves the one, minGPT and makemore the other.
FOREIGN_FILES = ("ckpt.pt", "model.pt")


def find_weights(source: str | Path, revision: str | None, verify: bool, notes: list[str]) -> Path:
    """The weights file, or index of shards, that a source means; others beside it are noted."""
    if not isinstance(source, str | os.PathLike):
        raise _not_a_source(source)
    path = DEMO if source == "demo" else Path(os.path.expanduser(source))
    if not _exists(path) and _exists(Path(f"{path}.index")):
        raise CheckpointError(
            f"{source} is a TensorFlow checkpoint; expected one of PyTorch\n{TENSORFLOW.advice}."
        )
    if isinstance(source, str) and is_hub_id(source) and not _exists(path):
        path = fetch(source, revision, verify)
    elif revision is not None or verify:
        asked = f"revision {revision!r}" if revision is not None else "verify"
        raise CheckpointError(
            f"{source} is on this machine, where {asked} says nothing; both are for hub ids"
        )
    if not _exists(path):
        raise CheckpointError(
            f"{source} does not exist{_looked_at(path)}; it is neither a folder, a file nor a hub "
            "id; expected something like 'gpt2', a folder with config.json and weights, or 'demo'"
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{source} is neither a folder nor a file that can be read")
    return _in_folder(path, notes)


def is_hub_id(source: str) -> bool:
    """Whether a name could be a repository's on the hub; `./gpt2` and `out/ckpt.pt` are paths."""
    forbidden = "--" in source or ".." in source or source.endswith(".git")
    is_path = forbidden or source.lower().endswith(FILE_SUFFIXES)
    return not is_path and re.fullmatch(HUB_ID, source) is not None


def _exists(path: Path) -> bool:
    """Whether there is anything at a path.

    Raises:
        CheckpointError: the system refuses to look, as in a folder that may not be read.
    """
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{short_repr(str(path))} cannot be opened: {error}") from None


def _looked_at(path: Path) -> str:
    """The path in full, where it was not given so."""
    return "" if path.is_absolute() else f" ({path.absolute()})"


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
