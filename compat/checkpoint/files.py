"""What every file of a checkpoint is asked: the tensors it holds, or its JSON, within bounds."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compat.checkpoint.formats import looks_like
from compat.config import GPT2Config
from compat.errors import CheckpointError, ConfigError, listed
from compat.layers import activation

# A GPT-2's config takes a kilobyte, the header of xl 60. Larger ones are refused unread: parsed,
# JSON can take 20 times its size.
MOST_JSON = 4 << 20
# Each of them takes 60 bytes and more; a tokenizer may have one for every merge.
MOST_NESTED = 200_000


@dataclass(frozen=True)
class TensorInfo:
    """Shape and data type of a stored tensor; `dtype` is the file's own word for a rare one."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class TensorFile(Protocol):
    """One file of named tensors."""

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """A contiguous copy in memory: a file that is later cut short must not take it away."""
        ...

    def map(self, name: str) -> Tensor:
        """The tensor in the file's own pages, shared and copied on writing."""
        ...


@dataclass(frozen=True)
class Stored:
    """Where a tensor of Hugging Face's lies: its file, its name in there, and how it is turned."""

    file: TensorFile
    name: str
    transposed: bool = False

    @property
    def info(self) -> TensorInfo:
        """Shape and data type as Hugging Face has them."""
        info = self.file.infos[self.name]
        return TensorInfo(info.shape[::-1], info.dtype) if self.transposed else info

    def read(self, mapped: bool = False) -> Tensor:
        """The tensor as Hugging Face has it, contiguous."""
        tensor = self.file.map(self.name) if mapped else self.file.read(self.name)
        return tensor.t().contiguous() if self.transposed else tensor


def read_small(path: Path, most: int = MOST_JSON) -> bytes:
    """All of a file of at most `most` bytes.

    Raises:
        CheckpointError: it is missing or too large, or no file but a folder, a pipe or a device.
    """
    try:
        # Opened without waiting: a pipe would wait for its other end.
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is a pipe or a device; expected a file")
            if status.st_size > most:
                raise CheckpointError(
                    f"{path} takes {status.st_size:,} bytes; expected at most {most:,}"
                )
            return file.read(most)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; it belongs beside the weights") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """A JSON object from a file of at most `most` bytes, in which no key stands twice.

    Raises:
        CheckpointError: the file is missing, too large, no JSON, or another value than an object.
    """
    try:
        value = parse_json(read_small(path, most))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {looks_like(path) or error}; fetch or write it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8.

    Raises:
        ValueError: it is none, has an endless number of lists and objects, or in an object the same
            key twice, of which others take the last.
        RecursionError: it is nested too deep.
    """
    if data.count(b"[") + data.count(b"{") > MOST_NESTED:
        raise ValueError(f"it has more than {MOST_NESTED:,} lists and objects")
    return json.loads(data.decode(), object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {twice!r} twice")
    return found


def read_index(index: Path) -> dict[str, str]:
    """The weight map of a `*.index.json`: tensor → file, all there and in the index's own folder.

    Raises:
        CheckpointError: the index is malformed, leaves the folder, or a shard is missing.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [
        name
        for name in names
        if name in ("", ".", "..") or set(name) & set("/\\:") or not name.isprintable()
    ]
    if outside:
        raise CheckpointError(
            f"{index} names {listed([repr(name) for name in outside])}; "
            "shards must lie beside the index"
        )
    missing = [name for name in names if not os.path.isfile(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {listed(missing)}, {len(missing)} of the {len(names)} shards "
            "that the index names; fetch them"
        )
    return weight_map


def config_of(fields: Mapping[str, Any], where: Path) -> GPT2Config:
    """The configuration that a file states.

    Raises:
        ConfigError: it is not understood; the file is named.
    """
    try:
        config = GPT2Config.from_dict(fields)
        activation(config.activation_function)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config
