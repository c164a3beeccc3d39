"""`.safetensors` files: the header is checked, then tensors are read or mapped one by one.

New files whose tensors are written one by one begin with `header_of`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compat.checkpoint.files import ALL, MAX_JSON_BYTES, TensorInfo, allocate, parse_json
from compat.checkpoint.formats import why_unreadable
from compat.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """A `.safetensors` file. Opening it reads only the header.

    Attributes:
        metadata: the strings in its header's `__metadata__`.

    Raises:
        CheckpointError: The header is damaged, or does not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            header, self._start = _read_header(path)
            # The library checks offsets, sizes and types, and reports gaps.
            checked = cast(Any, safe_open(path, framework="pt"))  # its stubs are incomplete
            self._opened = _identity(os.stat(path))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: "
                + why_unreadable(path, error, "Download or export it again.")
            ) from error
        self.metadata: dict[str, str] = header.get("__metadata__", {})
        self._offsets: dict[str, list[int]] = {}
        self.infos: dict[str, TensorInfo] = {}
        for name in checked.keys():
            code = header[name]["dtype"]
            self.infos[name] = TensorInfo(tuple(header[name]["shape"]), DTYPES.get(code, code))
            self._offsets[name] = header[name]["data_offsets"]

    def read(self, name: str, rows: slice = ALL, mapped: bool = False) -> Tensor:
        if mapped:
            return self._map(name)[rows]
        # Not through a memory map: truncating a mapped file would kill the process.
        begin, end = self._offsets[name]
        shape = self.infos[name].shape
        if rows != ALL:
            start, stop, _ = rows.indices(shape[0])
            size = (end - begin) // shape[0]  # bytes of a row
            begin, end = begin + start * size, begin + stop * size
            shape = (stop - start, *shape[1:])
        memory = allocate(end - begin)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + begin)
            rest = memoryview(memory)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
            self._check_unchanged(file, name, complete=not rest)
        return self._tensor(name, memory).view(shape)

    def _map(self, name: str) -> Tensor:
        # One map for each tensor, so that its pages are freed with the tensor.
        begin, end = (self._start + at for at in self._offsets[name])
        if begin % cast(torch.dtype, self.infos[name].dtype).itemsize:
            return self.read(name)  # not aligned
        before = begin % mmap.ALLOCATIONGRANULARITY
        with self._path.open("rb") as file:
            self._check_unchanged(file, name)
            size = before + end - begin
            pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin - before)
        return self._tensor(name, pages, before).view(self.infos[name].shape)

    def _tensor(self, name: str, memory: Any, offset: int = 0) -> Tensor:
        dtype = cast(torch.dtype, self.infos[name].dtype)
        return torch.frombuffer(memory, dtype=dtype, offset=offset)

    def _check_unchanged(self, file: IO[bytes], name: str, complete: bool = True) -> None:
        if not complete or _identity(os.fstat(file.fileno())) != self._opened:
            raise CheckpointError(f"{self._path} was changed while {name} was read. Load it again.")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of the data.

    Raises:
        ValueError: The header is missing, is too large, or repeats a key. The library would
            silently use the last value of a repeated key.
    """
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, file.read(8)
        start = 8 + int.from_bytes(length, "little")
        if len(length) < 8 or start > size:
            raise ValueError(
                f"it may be truncated, because it has {size:,} bytes and its header needs {start:,}"
            )
        if start > MAX_JSON_BYTES:
            raise ValueError(
                f"its header takes {start:,} bytes, but may take at most {MAX_JSON_BYTES:,}"
            )
        header = parse_json(file.read(start - 8))
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, but must be an object")
    needed = start + max(map(_end, header.values()), default=0)
    if needed > size:
        raise ValueError(
            f"it may be truncated, because it has {size:,} bytes and its tensors need {needed:,}"
        )
    return header, start


def _end(entry: Any) -> int:
    """Return where a tensor's data ends; 0 for a malformed entry, which the library reports."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    proper = isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int
    return offsets[1] if proper and offsets else 0


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes as the file stores them: contiguous, in the machine's byte order."""
    found: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return found


def header_of(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    metadata: Mapping[str, str],
    alignment: int = 8,
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a new file, and the offset in the file of each tensor's data.

    Args:
        tensors: the shape and data type of every tensor, in the order in which they are stored.
        metadata: the strings for its `__metadata__`.
        alignment: the header is padded to a multiple of so many bytes.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        starts[name], end = end, end + dtype.itemsize * math.prod(shape)
        offsets = [starts[name], end]
        entries[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
