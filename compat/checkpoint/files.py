"""Reading one file of a checkpoint, tensors or JSON, with bounds on memory."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compat.checkpoint.formats import why_unreadable
from compat.errors import CheckpointError

# GPT-2's config takes a kilobyte, the header of xl 60. Larger files are refused unread, because
# parsed JSON can take 20 times its size in memory.
MAX_JSON_BYTES = 4 << 20
# Each list or object takes 60 bytes or more. A tokenizer may have one for every merge.
MAX_JSON_CONTAINERS = 200_000


@dataclass(frozen=True)
class TensorInfo:
    """Shape and data type of a stored tensor; a type that PyTorch lacks keeps the file's name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


ALL = slice(None)  # rows: indices of axis 0


class TensorFile(Protocol):
    """One file of named tensors."""

    infos: dict[str, TensorInfo]

    def read(self, name: str, rows: slice = ALL, mapped: bool = False) -> Tensor:
        """Return a contiguous copy of a tensor, or of some of its rows.

        With `mapped`, a safetensors file returns a tensor that shares its pages. Writing to it
        copies the pages.
        """
        ...


def allocate(size: int) -> Any:
    """Allocate a writable buffer. A large one is mapped, so that freeing it returns its memory."""
    if size < 1 << 17 or not hasattr(mmap, "MAP_PRIVATE"):
        return bytearray(size)
    return private_memory(size)


def private_memory(size: int) -> mmap.mmap:
    """Allocate `size` bytes of zeros, which a forked child process copies on write.

    The memory comes directly from the operating system: pages take no space until they are written,
    and are returned when the last tensor on them is deleted. By default, mmap on Unix would share
    the memory between parent and child. Windows has neither fork nor these flags.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, size, **flags)


def read_small(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return all bytes of a file.

    Raises:
        CheckpointError: The file is missing, larger than `max_bytes`, a pipe or a device.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is a pipe or a device. Replace it by a file.")
            if status.st_size > max_bytes:
                raise CheckpointError(
                    f"{path} has {status.st_size:,} bytes, but may have at most {max_bytes:,}. "
                    "Check where it comes from."
                )
            return file.read(max_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Put it beside the weights.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: The file is missing, larger than `max_bytes`, not JSON, not an object, or
            repeats a key.
    """
    try:
        value = parse_json(read_small(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: "
            + why_unreadable(path, error, "Download or write it again.")
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}, but must hold an object."
        )
    return value


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: The data is not JSON, has too many lists and objects, or repeats a key in an
            object. Other parsers silently take the last value of a repeated key.
        RecursionError: It is nested too deep.
    """
    if data.count(b"[") + data.count(b"{") > MAX_JSON_CONTAINERS:
        raise ValueError(f"it has more than {MAX_JSON_CONTAINERS:,} lists and objects")

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"it repeats the key {name!r}")
        return found

    return json.loads(data.decode(), object_pairs_hook=without_repeats)
