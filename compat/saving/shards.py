"""Writing tensors to safetensors files of limited size, with an index if there are several."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from compat.errors import ConfigError
from compat.export_view import HFTensor
from compat.sharding import raising_together

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: int | str) -> int:
    """Return a number of bytes from an int or a string such as "5GB" or "0.5 MB" (units of 1000).

    Raises:
        ConfigError: The size is anything else, or less than one byte.
    """
    found: float = 0
    if type(size) is int:
        found = size
    elif isinstance(size, str) and (
        match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)?", size.strip().upper(), re.ASCII)
    ):
        found = float(match[1]) * UNITS.get(match[2], 1)
    if found < 1:
        raise ConfigError(
            f"max_shard_size is {size!r}, but must be a number of bytes from 1, or a string such "
            "as '5GB', '200MB' or '20KB'."
        )
    return int(found)


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names in each shard, filled in order; a larger tensor has a shard of its own."""
    shards: list[list[str]] = []
    current: list[str] = []
    room = limit
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if size > room:
            shards.append(current)
            current, room = [], limit
        current.append(name)
        room -= size
    return [*shards, current] if current else shards


def write_shards(folder: Path | None, tensors: Mapping[str, HFTensor], limit: int) -> list[str]:
    """Write model.safetensors, or shards and their index, and return the files' names.

    Only one shard at a time is in memory beside the model.

    Args:
        folder: where to write. None writes nothing: every rank of a divided model has to compute
            the tensors, but only one rank writes them.
        tensors: the tensors, by their name in the files.
        limit: the maximum number of bytes in a file with several tensors.
    """
    sizes = {name: tensor.like.nbytes for name, tensor in tensors.items()}
    shards = split(sizes, limit)
    if len(shards) == 1:
        _write(folder, "model.safetensors", tensors, shards[0])
        return ["model.safetensors"]
    weight_map, files = {}, []
    for number, names in enumerate(shards, start=1):
        files.append(f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        _write(folder, files[-1], tensors, names)
        weight_map.update(dict.fromkeys(names, files[-1]))
    values = sum(tensor.like.numel() for tensor in tensors.values())
    index = {
        "metadata": {"total_parameters": values, "total_size": sum(sizes.values())},
        "weight_map": weight_map,
    }
    files.append("model.safetensors.index.json")
    if folder is not None:
        (folder / files[-1]).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return files


def _write(
    folder: Path | None, file: str, tensors: Mapping[str, HFTensor], names: Sequence[str]
) -> None:
    made: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in names:
        tensor = tensors[name].make().cpu()
        if folder is None:
            continue
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as views of one flat buffer.
        made[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    with raising_together(source for name in names for source in tensors[name].sources):
        if folder is None:
            return
        write_tensors(folder / file, made)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file as PyTorch programs expect it.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps errors of the system
        raise OSError(f"{path.name}: {error}") from error
