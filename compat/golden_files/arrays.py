"""Named arrays in a .safetensors file, a .npz file or a folder of .npy files.

Arrays are read one at a time and are never unpickled. Values that float64 and bfloat16 tensors
cannot hold are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from compat.checkpoint.safetensors_file import SafetensorsFile, header_of, tensor_bytes
from compat.config import dtype_name
from compat.errors import CompatError, ParityError, described
from compat.parity.functions import check_kind, tensor_of
from compat.saving.atomic import replacing_file

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
        name: its name in the file, or the one under which it was passed.
        shape: the shape of the array.
        dtype: the name of its data type, such as "float32", ">f8" or "BF16".
        load: reads the values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]


Arrays = dict[str, Array]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # and data types, by name
Write = Callable[[str, Tensor], None]


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


def as_array(name: str, value: object) -> Array:
    """Wrap an array in memory: NumPy, torch, or any object with `__array__` or `__dlpack__`.

    Raises:
        ParityError: the value is not an array, or does not hold numbers.
    """
    if isinstance(value, Array):
        return replace(value, name=name)
    if isinstance(value, Tensor):
        tensor = value.detach()
        dtype = dtype_name(tensor.dtype)
        return Array(name, tuple(tensor.shape), dtype, partial(_read_torch, name, tensor))
    if hasattr(value, "__array__") or isinstance(value, (list, tuple, float, int)):
        with _reading(name):
            array = np.asarray(value)
        check_kind(name, array.dtype)
        return Array(name, array.shape, str(array.dtype), partial(tensor_of, name, array))
    if hasattr(value, "__dlpack__"):
        with _reading(name):
            return as_array(name, from_dlpack(value))
    raise ParityError(
        f"{name} is {described(value)}, but must be an array, such as one of NumPy, torch or JAX."
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
        name: Array(name, info.shape, dtype_name(info.dtype), partial(load, name))
        for name, info in file.infos.items()
    }


def _open_npz(path: Path) -> Arrays:
    with _reading(path):
        archive = zipfile.ZipFile(path)  # open as long as one of its arrays is
        members = archive.namelist()
        _check_count(path, len(members))
        arrays = {}
        for member in members:
            name = member.removesuffix(".npy")
            arrays[name] = _npy(name, f"{name} in {path}", partial(archive.open, member))
        return arrays


def _open_folder(path: Path) -> Arrays:
    files = sorted(path.rglob("*.npy"))
    _check_count(path, len(files))
    if not files:
        raise ParityError(f"{path} contains no .npy files. Pass {FORMATS}.")
    arrays = {}
    for file in files:
        # `h.0/act.npy` and `h/0/act.npy` have the same name as `h.0.act.npy`.
        name = ".".join(file.relative_to(path).with_suffix("").parts)
        with _reading(file):
            arrays[name] = _npy(name, str(file), partial[IO[bytes]](file.open, "rb"))
    return arrays


def _check_count(path: Path, count: int) -> None:
    if count > MAX_ARRAYS:
        raise ParityError(
            f"{path} contains {count:,} arrays, but may contain at most {MAX_ARRAYS:,}."
        )


def _npy(name: str, place: str, reopen: Callable[[], IO[bytes]]) -> Array:
    """Read the header of an array in NumPy's format; messages state its place."""
    with reopen() as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        start, count = file.tell(), int(np.prod(shape, dtype=object))
    if dtype.kind not in "SU":  # the metadata of a golden file
        check_kind(place, dtype)

    def load() -> Tensor:
        with _reading(place), reopen() as file:
            file.read(start)
            size = count * dtype.itemsize
            data = file.read(size)
            if len(data) != size:
                raise ValueError(
                    f"it may be truncated, because it has {len(data):,} of {size:,} bytes"
                )
            array = np.frombuffer(data, dtype, count).reshape(shape, order="F" if fortran else "C")
            if dtype.kind in "SU":
                array = np.frombuffer(str(array[()]).encode(), np.uint8)
            return tensor_of(place, array)

    return Array(name, tuple(shape), str(dtype), load)


def describe(array: Array) -> str:
    """Return the data type and shape as text, such as "float32 [2, 16, 128]"."""
    return f"{array.dtype} {list(array.shape)}"


# Writing


def writable(path: str | Path, dtypes: Iterable[torch.dtype]) -> Path:
    """Return a path to which arrays of these data types can be written.

    Raises:
        ParityError: the suffix is another one, or NumPy lacks a data type.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        raise ParityError(
            f"{path} has the suffix {path.suffix!r}, but must have .safetensors or .npz."
        )
    if path.suffix == ".npz" and torch.bfloat16 in dtypes:
        raise ParityError(
            f"{path} cannot store bfloat16, which NumPy does not have. Write a .safetensors file."
        )
    return path


@contextmanager
def writing(path: Path, shapes: Shapes, metadata: str) -> Iterator[Write]:
    """Yield a function that writes arrays, in any order, to a new file.

    The file replaces `path` when the block ends. By then all arrays have to be written.

    Args:
        path: the file to write, see `writable`.
        shapes: the shape and data type of every array, in the order in which the file stores them.
        metadata: the JSON text for the header.

    Raises:
        CheckpointError: the file cannot be written.
    """
    missing = set(shapes)
    with replacing_file(path) as temporary, ExitStack() as stack:
        if path.suffix == ".npz":
            store = partial(_store_npy, stack.enter_context(zipfile.ZipFile(temporary, "w")))
            store("metadata", np.array(metadata))
        else:
            header, starts = header_of(shapes, {"golden": metadata})
            file = stack.enter_context(temporary.open("wb"))
            file.write(header)

        def write(name: str, tensor: Tensor) -> None:
            shape, dtype = shapes[name]
            assert name in missing and tuple(tensor.shape) == shape, (name, tensor.shape)
            missing.remove(name)
            tensor = tensor.detach().to(dtype)
            if path.suffix == ".npz":
                store(name, tensor.contiguous().numpy())
            else:
                file.seek(starts[name])
                file.write(tensor_bytes(tensor))

        yield write
        assert not missing, missing


def _store_npy(archive: zipfile.ZipFile, name: str, array: np.ndarray[Any, Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)
