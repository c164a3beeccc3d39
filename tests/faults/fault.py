"""A fault: a change that breaks a valid checkpoint, and the expected outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compat.errors import CheckpointError, CompatError
from tests.faults.builder import State

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True)
class Fault:
    """A change of a folder, and the expected outcome.

    Args:
        breaks: breaks the folder, and may return another path to open.
        says: fragments of the error message, or of the notes if there is no error.
        error: the class of the error, or None if the checkpoint loads nevertheless.
        layout: the layout of the checkpoint before the change.
    """

    breaks: Callable[[Path], Path | None]
    says: tuple[str, ...]
    error: type[CompatError] | None = CheckpointError
    layout: str = "safetensors"


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the header of a safetensors file; its stated length is correct, and the data stays."""

    def breaks(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        content = json.loads(data[8:end])
        change(content)
        write_header(folder, json.dumps(content).encode(), data[end:])

    return breaks


def write_header(folder: Path, text: bytes, data: bytes = b"") -> None:
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


def content(name: str, data: bytes) -> Callable[[Path], None]:
    """Replace the bytes of a file."""

    def breaks(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return breaks


def sparse(name: str, size: int) -> Callable[[Path], None]:
    """Create a sparse file of any size."""

    def breaks(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return breaks


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(keep * len(data))])

    return breaks


def without(*names: str) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return breaks


def values(name: str, **fields: Any) -> Callable[[Path], None]:
    """Change fields of a JSON file."""

    def breaks(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return breaks


def tensors(change: Callable[[State], object], **config: Any) -> Callable[[Path], None]:
    """Change tensors of a safetensors file, and fields of the config."""

    def breaks(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS)
        values("config.json", **config)(folder)

    return breaks


def pickled(make: Callable[[Path], Any], **options: Any) -> Callable[[Path], None]:
    """Store another object in the `.bin` file."""

    def breaks(folder: Path) -> None:
        torch.save(make(folder), folder / PICKLE, **options)

    return breaks


def both(*steps: Callable[[Path], Any]) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        for step in steps:
            step(folder)

    return breaks
