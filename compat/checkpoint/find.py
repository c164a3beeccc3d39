"""From a source (a hub id, a folder, a file, "demo") to the weights file or index of shards."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import nn

from compat.checkpoint.formats import OTHER_WEIGHTS, PICKLES, TENSORFLOW, recognized
from compat.checkpoint.layout import WEIGHT_FILES
from compat.errors import CheckpointError, described, listed, short_repr

DEMO = Path(__file__).parent.parent / "demo"

# The hub's rule: letters, digits and "_", inside a name also "-" and ".", and at most one "/".
HUB_ID = r"(?a:\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?)"

# A name with one of these endings is a path, even if no such file exists.
FILE_SUFFIXES = (".safetensors", *PICKLES, ".json", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

# What nanoGPT saves, and what minGPT and makemore save.
FOREIGN_FILES = ("ckpt.pt", "model.pt")


def find_weights(source: str | Path, revision: str | None, verify: bool, notes: list[str]) -> Path:
    """Return the weights file, or the index of shards, of a source; download it if necessary.

    Weights files that are not used because of another one are added to `notes`.

    Raises:
        CheckpointError: The source does not exist or holds no weights.
        HubError: The hub could not be reached, or refused.
    """
    if not isinstance(source, str | os.PathLike):
        raise _not_a_source(source)
    path = DEMO if source == "demo" else Path(os.path.expanduser(source))
    if not _exists(path) and _exists(Path(f"{path}.index")):
        raise CheckpointError(
            f"{source} is a TensorFlow checkpoint, but must be one of PyTorch.\n{TENSORFLOW.advice}"
        )
    if isinstance(source, str) and _is_hub_id(source) and not _exists(path):
        from compat.checkpoint.hub import fetch

        path = fetch(source, revision, verify)
    elif revision is not None or verify:
        option = f"revision {revision!r}" if revision is not None else "verify"
        raise CheckpointError(
            f"{source} is a local path, and {option} applies only to the hub. Leave it out, or "
            "use a hub id."
        )
    if not _exists(path):
        absolute = "" if path.is_absolute() else f" ({path.absolute()})"
        raise CheckpointError(
            f"{source} does not exist{absolute}, and it is not a hub id. Use something like "
            "'gpt2', a folder with config.json and weights, or 'demo'."
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{source} is neither a folder nor a file that can be read. Use the path of a folder "
            "or file."
        )
    return _find_in_folder(path, notes)


def _is_hub_id(source: str) -> bool:
    """Return whether a repository could have this name; `./gpt2` and `out/ckpt.pt` are paths."""
    forbidden = "--" in source or ".." in source or source.endswith(".git")
    is_path = forbidden or source.lower().endswith(FILE_SUFFIXES)
    return not is_path and re.fullmatch(HUB_ID, source) is not None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # the folder cannot be read, or the name is not valid
        raise CheckpointError(f"{short_repr(str(path))} cannot be opened: {error}.") from None


def _not_a_source(source: object) -> CheckpointError:
    hint = ""
    if isinstance(source, nn.Module):
        hint = " To load into an existing module, call load_into(module, name_map, source)."
    # The repr of a module takes many lines.
    found = f"a {type(source).__name__}" if hint else described(source)
    return CheckpointError(
        f"source is {found}, but must be a hub id such as 'gpt2', 'demo', or the path of a folder "
        f"or weights file.{hint}"
    )


def _find_in_folder(folder: Path, notes: list[str]) -> Path:
    candidates = [name for name in (*WEIGHT_FILES, *FOREIGN_FILES) if (folder / name).is_file()]
    if candidates:
        if len(candidates) > 1:
            unused = f"{listed(candidates[1:])} beside it {'is' if len(candidates) == 2 else 'are'}"
            notes.append(f"{candidates[0]} is used, and {unused} not")
        return folder / candidates[0]
    message = (
        f"{folder} holds no weights. It must contain one of {', '.join(WEIGHT_FILES)}, "
        f"or {' or '.join(FOREIGN_FILES)}."
    )
    paths = sorted(folder.glob("*"))
    if others := [path.name for path in paths if path.suffix in (".safetensors", *PICKLES)]:
        message += f" If the weights are in {listed(others)}, use the path of that file."
    named = set()
    for path in paths:
        known = recognized(path) if path.is_file() else None
        if known in OTHER_WEIGHTS and known.name not in named:
            named.add(known.name)
            message += f"\n{path.name} is {known.phrase}. {known.advice}"
    raise CheckpointError(message)
