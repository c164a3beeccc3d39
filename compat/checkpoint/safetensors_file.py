"""`.safetensors` files: the header checked, tensors read or mapped one by one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compat.checkpoint.files import MOST_JSON, TensorInfo, parse_json
from compat.checkpoint.formats import looks_like
from compat.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """A `.safetensors` file; only the header is read before a tensor is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            header, self._start = _read_header(path)
            # The library checks what the format asks for: offsets, sizes, no holes, known types.
            checked = cast(Any, safe_open(path, framework="pt"))  # its stubs are incomplete
            self._written = _identity(os.stat(path))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {looks_like(path) or error}; "
                "download or export it again"
            ) from error
        self._offsets: dict[str, list[int]] = {}
        self.infos: dict[str, TensorInfo] = {}
        for name in checked.keys():
            code = header[name]["dtype"]
            self.infos[name] = TensorInfo(tuple(header[name]["shape"]), _DTYPES.get(code, code))
            self._offsets[name] = header[name]["data_offsets"]

    def read(self, name: str) -> Tensor:
        # Not from a map: a file that is cut short meanwhile would end the process.
        begin, end = self._offsets[name]
        memory = _fresh_memory(end - begin)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + begin)
            into = memoryview(memory)
            while into and (count := file.readinto(into)):
                into = into[count:]
            self._check_unchanged(file, name, whole=not into)
        return self._tensor(name, memory)

    def map(self, name: str) -> Tensor:
        # Each a map of its own, whose pages go when the tensor goes; writes stay in the process.
        begin, end = (self._start + at for at in self._offsets[name])
        if begin % cast(torch.dtype, self.infos[name].dtype).itemsize:
            return self.read(name)  # numbers that lie across the borders of words
        before = begin % mmap.ALLOCATIONGRANULARITY
        with self._path.open("rb") as file:
            self._check_unchanged(file, name)
            size = before + end - begin
            pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin - before)
        return self._tensor(name, pages, before)

    def _tensor(self, name: str, memory: Any, offset: int = 0) -> Tensor:
        info = self.infos[name]
        dtype = cast(torch.dtype, info.dtype)
        return torch.frombuffer(memory, dtype=dtype, offset=offset).view(info.shape)

    def _check_unchanged(self, file: IO[bytes], name: str, whole: bool = True) -> None:
        if not whole or _identity(os.fstat(file.fileno())) != self._written:
            raise CheckpointError(f"{self._path} was changed while {name} was read; load it again")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, in which no key stands twice, and where the data starts.

    Raises:
        ValueError: there is none, it is too large, or names something twice.
    """
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, file.read(8)
        start = 8 + int.from_bytes(length, "little")
        if len(length) < 8 or start > size:
            raise ValueError(f"truncated? it has {size:,} bytes, its header needs {start:,}")
        if start > MOST_JSON:
            raise ValueError(f"its header takes {start:,} bytes; expected at most {MOST_JSON:,}")
        # The library would take the last of two entries of one name without a word.
        header = parse_json(file.read(start - 8))
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}; expected an object")
    ends = [_end(entry) for entry in header.values()]
    need = start + max(ends, default=0)
    if need > size:
        raise ValueError(f"truncated? it has {size:,} bytes and its tensors need {need:,}")
    return header, start


def _end(entry: Any) -> int:
    """Where a tensor's data ends, if it has any; the library says what else is wrong."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    proper = isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int
    return offsets[1] if proper and offsets else 0


def _fresh_memory(size: int) -> Any:
    """A writable buffer; a large one goes back to the system as soon as it is freed.

    The allocator would keep it, for a next tensor that may not fit in it.
    """
    if size < 1 << 17 or not hasattr(mmap, "MAP_PRIVATE"):
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
