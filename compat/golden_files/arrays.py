"""Named arrays in a .safetensors file, a .npz file or a folder of .npy files.

Arrays are read one at a time and are never unpickled. Values that float64 and bfloat16 tensors
cannot hold are refused.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.errors import CompatError, ParityError, described
from compat.parity.functions import check_kind, tensor_of

MAX_ARRAYS = 100_000
READ_ERRORS = (  # the exceptions that readers raise for a damaged file
    OSError, EOFError, LookupError, zipfile.BadZipFile, zlib.error, ValueError, TypeError,
    RuntimeError, NotImplementedError, MemoryError,
)  # fmt: skip
FORMATS = "a .safetensors file, a .npz file or a folder of .npy files"


@dataclass(frozen=True)
class Array:
    """One stored array whose values are only read on demand.

    Args:
        shape: the shape of the array.
        dtype: the name of its data type, such as "float32", ">f8" or "BF16".
        load: reads the values.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]


Arrays = dict[str, Array]


def open_arrays(path: Path) -> Arrays:
    """Return the arrays in a file or folder by name.

    Raises:
        ParityError: the path does not exist, has another format, is damaged, or holds values that
            are not numbers.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ParityError(f"{path} does not exist. Pass {FORMATS}.")
    if not path.is_file():
        raise ParityError(f"{path} is a pipe or a device. Pass {FORMATS}.")
    if path.stat().st_size == 0:
        raise ParityError(f"{path} is empty. Write the arrays again.")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".npz":
        return _open_npz(path)
    raise ParityError(f"{path} has the suffix {path.suffix!r}. Pass {FORMATS}.")


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file whose header was already checked."""
    with safe_open(path, framework="pt") as file:
        found: dict[str, str] | None = file.metadata()
    return found or {}


def as_array(name: str, value: object) -> Array:
    """Wrap an array in memory: NumPy, torch, or any object with `__array__` or `__dlpack__`.

    Raises:
        ParityError: the value is not an array, or does not hold numbers.
    """
    if isinstance(value, Array):
        return value
    if isinstance(value, Tensor):
        tensor = value.detach()
        return Array(tuple(tensor.shape), str(tensor.dtype), partial(_read_torch, name, tensor))
    if hasattr(value, "__array__") or isinstance(value, (list, tuple, float, int)):
        with _reading(name):
            array = np.asarray(value)
        check_kind(name, array.dtype)
        return Array(array.shape, str(array.dtype), partial(tensor_of, name, array))
    if hasattr(value, "__dlpack__"):
        with _reading(name):
            return as_array(name, from_dlpack(value))
    raise ParityError(
        f"{name} is {described(value)}; expected an array, such as one of NumPy, torch or JAX."
    )


def _read_torch(name: str, tensor: Tensor) -> Tensor:
    with _reading(name):
        if tensor.is_complex() or tensor.device.type == "meta":
            raise ValueError(f"it is a {tensor.dtype} tensor on {tensor.device}")
        return tensor.cpu().to_dense()


@contextmanager
def _reading(name: object) -> Iterator[None]:
    """Convert the exceptions that readers raise for a damaged file to a ParityError."""
    try:
        yield
    except CompatError:
        raise
    except READ_ERRORS as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise ParityError(f"{name} cannot be read: {text}. Write it again.") from None


def _open_safetensors(path: Path) -> Arrays:
    file = SafetensorsFile(path)

    def load(name: str) -> Tensor:
        if isinstance(file.infos[name].dtype, torch.dtype):
            return file.read(name)
        with _reading(f"{name} in {path}"), safe_open(path, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor.clone()

    return {
        name: Array(info.shape, str(info.dtype), partial(load, name))
        for name, info in file.infos.items()
    }


def _open_npz(path: Path) -> Arrays:
    with _reading(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info.filename for info in archive.infolist()}
        _check_count(path, len(members))
        found = {}
        for name, member in members.items():
            with archive.open(member) as file:
                found[name] = _npy(f"{name} in {path}", file, partial(_open_member, path, member))
        return found


def _open_member(path: Path, member: str) -> IO[bytes]:
    return zipfile.ZipFile(path).open(member)


def _open_file(path: Path) -> IO[bytes]:
    return path.open("rb")


def _open_folder(path: Path) -> Arrays:
    files = sorted(path.rglob("*.npy"))
    _check_count(path, len(files))
    if not files:
        raise ParityError(f"{path} contains no .npy files. Pass {FORMATS}.")
    found = {}
    for file in files:
        # `h.0/act.npy` and `h/0/act.npy` have the same name as `h.0.act.npy`.
        name = ".".join(file.relative_to(path).with_suffix("").parts)
        with _reading(file), file.open("rb") as opened:
            found[name] = _npy(str(file), opened, partial(_open_file, file))
    return found


def _check_count(path: Path, count: int) -> None:
    if count > MAX_ARRAYS:
        raise ParityError(f"{path} contains {count:,} arrays; expected at most {MAX_ARRAYS:,}.")


def _npy(name: str, file: IO[bytes], reopen: Callable[[], IO[bytes]]) -> Array:
    """Read the header of an array in NumPy's format."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.kind not in "SU":  # the metadata of a golden file
        check_kind(name, dtype)
    start, count = file.tell(), int(np.prod(shape, dtype=object))

    def load() -> Tensor:
        with _reading(name), reopen() as again:
            again.read(start)
            size = count * dtype.itemsize
            data = again.read(size)
            if len(data) != size:
                raise ValueError(f"truncated? it has {len(data):,} bytes of {size:,}")
            array = np.frombuffer(data, dtype, count).reshape(shape, order="F" if fortran else "C")
            if dtype.kind in "SU":
                array = np.frombuffer(str(array[()]).encode(), np.uint8)
            return tensor_of(name, array)

    return Array(tuple(shape), str(dtype), load)


def describe(array: Array) -> str:
    """Return the data type and shape as text, such as "float32 [2, 16, 128]"."""
    return f"{array.dtype.removeprefix('torch.')} {list(array.shape)}"


# Writing


class Writer:
    """Writes arrays, in any order, to a file that only appears once it is complete.

    Args:
        path: the file to write, with the suffix .safetensors or .npz.
        shapes: the shape and data type of every array, in the order in which the file stores them.
        metadata: the JSON text for the header.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: str
    ) -> None:
        self.path, self._missing = path, set(shapes)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._is_npz = path.suffix == ".npz"
        self._shapes, self._metadata = shapes, metadata
        self._starts: dict[str, int] = {}

    def __enter__(self) -> Writer:
        try:
            self._file: Any = self._temporary.open("wb")
        except OSError as error:
            raise ParityError(
                f"{self.path} cannot be written: {error.strerror}. Pass another path."
            ) from None
        if self._is_npz:
            self._file = zipfile.ZipFile(self._file, "w")
            self._write_member("metadata", np.array(self._metadata))
        else:
            header, starts = _header(self._shapes, self._metadata)
            self._file.write(header)
            self._starts = {name: len(header) + start for name, start in starts.items()}
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one array."""
        shape, dtype = self._shapes[name]
        assert name in self._missing and tuple(tensor.shape) == shape, (name, tensor.shape)
        self._missing.remove(name)
        tensor = tensor.detach().to(dtype).contiguous()
        try:
            if self._is_npz:
                self._write_member(name, tensor.numpy())
            else:
                self._file.seek(self._starts[name])
                self._file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise self._failed(error) from None

    def _write_member(self, name: str, array: np.ndarray[Any, Any]) -> None:
        with self._file.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            file = self._file.fp if self._is_npz else self._file
            self._file.close()
            file.close()
            if kind is None:
                assert not self._missing, self._missing
                os.replace(self._temporary, self.path)
        except OSError as error:
            if kind is None:
                raise self._failed(error) from None
        finally:
            self._temporary.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> ParityError:
        return ParityError(
            f"{self.path} cannot be written: {error.strerror}. Nothing was changed. Free space "
            "there, or pass another path."
        )


def _header(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: str
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and the offset of each array after it."""
    codes = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.int64: "I64",
    }  # fmt: skip
    entries: dict[str, Any] = {"__metadata__": {"golden": metadata}}
    starts, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        starts[name] = start
        end = start + dtype.itemsize * int(np.prod(shape, dtype=object))
        entries[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts
