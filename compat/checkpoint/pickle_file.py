"""Files of `torch.save`, read with `weights_only=True`, so that no code in them is executed.

`weights_only=True` alone does not protect against denial of service. A file of one kilobyte can
request any amount of memory (a bytearray), run forever (hashing nested tuples) or crash the process
(deeply nested tuples). Every file is therefore scanned before PyTorch unpickles it.
"""

from __future__ import annotations

import os
import pickletools
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from compat.checkpoint.files import ALL, TensorInfo
from compat.checkpoint.formats import why_unreadable
from compat.errors import CheckpointError, listed

# The pickles of xl and an optimizer's state take 200 kB and 70,000 opcodes.
MAX_PICKLE_BYTES, MAX_OPCODES, MAX_NESTED_TUPLES = 4 << 20, 400_000, 10_000

# The magic number that torch.save pickled first before version 1.6.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ZIP = b"PK\x03\x04"
# The protocol that torch.save writes. torch.load warns of others.
_PROTOCOL = 2

_OPCODES = set(
    "PROTO STOP MARK BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BINFLOAT BININT "
    "BININT1 BININT2 LONG1 BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL REDUCE NEWOBJ BUILD BINPERSID"
    "".split()
)
_OPCODES_OF_A_LIST = set(
    "PROTO EMPTY_LIST MARK BINUNICODE BINPUT LONG_BINPUT APPEND APPENDS STOP".split()
)
_REBUILDERS = "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter".split()
_GLOBALS = {"collections OrderedDict", *(f"torch._utils {name}" for name in _REBUILDERS)}
_DTYPES = set(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 "
    "float8_e4m3fn float8_e5m2".split()
)


class PickleFile:
    """A `.bin`, `.pt` or `.pth` file of named tensors.

    Args:
        path: the file.
        max_unpacked: number of bytes to which it may unpack, if larger than its size on disk.

    Attributes:
        model_args: the arguments that nanoGPT saves beside the tensors; None for other files.

    Raises:
        CheckpointError: The file is damaged, would unpack to more, or holds anything but a
            dictionary of dense tensors.
    """

    def __init__(self, path: Path, max_unpacked: int) -> None:
        self._path, self.model_args = path, None
        # pickletools and torch.load warn about some files and then refuse them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                legacy = _scan(path, max_unpacked)
            except Exception as error:  # zipfile raises almost any exception for a damaged archive
                raise _unreadable(path, str(error)) from error
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # so does the unpickler, and it advises to run the code
                reason = f"it is damaged, or holds other objects ({type(error).__name__})"
                raise _unreadable(path, reason) from error
        if isinstance(content, dict) and {"model", "model_args"} <= content.keys():  # nanoGPT's
            content, self.model_args = content["model"], content["model_args"]
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise CheckpointError(
                f"{path} holds no plain dictionary of named tensors. Save the model's state_dict()."
            )
        if strange := [name for name, tensor in content.items() if not _is_dense(tensor)]:
            raise CheckpointError(
                f"{path} has tensors that are not dense or have no data of their own: "
                f"{listed(strange)}. Save them as contiguous tensors."
            )
        _check_size(path, content, legacy, max_unpacked)
        self._tensors: dict[str, Tensor] = content
        self.infos = {k: TensorInfo(tuple(v.shape), v.dtype) for k, v in content.items()}

    def read(self, name: str, rows: slice = ALL, mapped: bool = False) -> Tensor:
        # Always a copy: two models of one checkpoint must not share what was unpickled once.
        return self._tensors[name].detach()[rows].clone(memory_format=torch.contiguous_format)


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as a PyTorch file of plain tensors: "
        + why_unreadable(path, reason, "Download it again, or ask its author for safetensors.")
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and no expanded view, which could have any size."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class _Legacy:
    """The start of the data and the number of storages of a file saved before torch 1.6.

    PyTorch fills the storages that the last pickle lists. Others keep what is in memory.
    """

    start: int
    storages: int


def _check_size(
    path: Path, tensors: dict[str, Tensor], legacy: _Legacy | None, max_unpacked: int
) -> None:
    """Check that the tensors need no more bytes than the file has; exactly as many if legacy."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
    sizes, has = [storage.nbytes() for storage in storages.values()], path.stat().st_size
    needed = legacy.start + sum(8 + size for size in sizes) if legacy else sum(sizes)
    if needed > max(has, max_unpacked) or (legacy and needed != has):
        raise CheckpointError(
            f"{path} has {has:,} bytes and its tensors need {needed:,}. Download it again."
        )
    if legacy and legacy.storages != len(sizes):
        raise CheckpointError(
            f"{path} does not have the data of all of its tensors. Download it again."
        )


# The scan. All functions below raise ValueError for a file that is damaged or requests too much.


def _scan(path: Path, max_unpacked: int) -> _Legacy | None:
    """Scan a file of `torch.save`; return the offset of a legacy file's data, else None."""
    with path.open("rb") as file:
        start = file.read(len(_LEGACY))
        if start.startswith(_ZIP):
            _scan_pickles(_pickle_in_zip(file, max_unpacked), 1)
            return None
        if start != _LEGACY:
            raise ValueError("it is not a file of torch.save, or a damaged one")
        # Then follow the version, the system's sizes, the tensors, and the storages' keys.
        data = file.read(MAX_PICKLE_BYTES)
        before = _scan_pickles(data, 3)
        length = _scan_pickles(data[before:], 1)
        return _Legacy(len(start) + before + length, _count_keys(data[before:]))


def _scan_pickles(data: bytes, count: int) -> int:
    """Scan this many consecutive pickles and return their length in bytes."""
    position, opcodes = 0, MAX_OPCODES
    for _ in range(count):
        length, used = _scan_pickle(data[position:], opcodes)
        position, opcodes = position + length, opcodes - used
    return position


def _scan_pickle(data: bytes, max_opcodes: int) -> tuple[int, int]:
    """Simulate the stack of the unpickler, and return the length in bytes and in opcodes.

    In place of each value, the stack holds the number of tuples nested in it.
    """
    stack: list[int] = []
    below_marks: list[list[int]] = []
    memo: dict[object, int] = {}
    number = position = 0
    try:
        for number, (code, argument, at) in enumerate(pickletools.genops(data), start=1):
            name, position = code.name, at or 0
            if number > max_opcodes:
                raise ValueError(f"its pickle has more than {MAX_OPCODES:,} opcodes")
            if name not in _OPCODES:
                raise ValueError(f"its pickle has the opcode {name}, which torch.save does not use")
            _check_argument(name, argument)
            if name == "MARK":
                below_marks.append(stack)
                stack = []
                continue
            popped, operands = [], code.stack_before
            if pickletools.markobject in operands:
                operands = operands[: operands.index(pickletools.markobject)]
                popped, stack = stack, below_marks.pop()
            popped = [stack.pop() for _ in operands] + popped
            if "GET" in name:
                stack.append(memo[argument])
            elif "TUPLE" in name:
                stack.append(1 + sum(popped))
                if stack[-1] > MAX_NESTED_TUPLES:
                    raise ValueError(f"its pickle nests more than {MAX_NESTED_TUPLES:,} tuples")
            elif code.stack_after:
                stack.append(1)
            if "PUT" in name:
                memo[argument] = stack[-1]
    except (IndexError, KeyError) as error:
        raise ValueError("its pickle is damaged") from error
    return position + 1, number


def _check_argument(name: str, argument: object) -> None:
    """Refuse names other than tensors', and long integers, which can be made to collide."""
    if name == "PROTO" and argument != _PROTOCOL:
        raise ValueError(
            f"its pickle has protocol {argument}, but torch.save writes protocol {_PROTOCOL}. "
            "Save it again without pickle_protocol"
        )
    if name == "LONG1" and isinstance(argument, int) and abs(argument) >= 2**63:
        raise ValueError("its pickle has a number of more than 64 bits")
    if name != "GLOBAL":
        return
    module, _, attribute = str(argument).partition(" ")
    is_storage = module in ("torch", "torch.storage") and attribute.endswith("Storage")
    is_quantized = attribute.startswith("Q")
    is_dtype = module == "torch" and attribute in _DTYPES
    is_storage = is_storage and attribute.isidentifier() and not is_quantized
    known = argument in _GLOBALS or is_dtype or is_storage
    if not known:
        raise ValueError(
            f"it imports {f'{module}.{attribute}'!r}, which is not executed, because a "
            "checkpoint holds plain tensors"
        )


def _count_keys(data: bytes) -> int:
    """Return the number of storage keys in the list that ends a legacy file's pickles."""
    ops = [(code.name, argument) for code, argument, _ in pickletools.genops(data)]
    names, keys = [name for name, _ in ops], [key for name, key in ops if name == "BINUNICODE"]
    one_list = names.count("EMPTY_LIST") == 1 and set(names) <= _OPCODES_OF_A_LIST
    if not one_list or (keys and names[-2][:6] != "APPEND") or len(set(keys)) < len(keys):
        raise ValueError("its list of the data that follows is damaged")
    return len(keys)


def _pickle_in_zip(file: BinaryIO, max_unpacked: int) -> bytes:
    """Return the pickle in an archive that does not unpack to too much."""
    _check_end_of_zip(file)
    limit = max(max_unpacked, os.fstat(file.fileno()).st_size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if (unpacked := sum(entry.file_size for entry in entries)) > limit:
            raise ValueError(
                f"it would unpack to {unpacked:,} bytes, but may take at most {limit:,}, by its "
                "size and its config. Do not trust its origin"
            )
        # For entries that PyTorch does not unpack it silently returns uninitialised memory.
        if odd := [entry.filename for entry in entries if not _is_plain(entry)]:
            raise ValueError(
                f"in its archive {listed(odd, 3)} are compressed or folders, unlike what "
                "torch.save writes. Load it and save it again with PyTorch"
            )
        # PyTorch ignores upper and lower case.
        if any(entry.filename.lower().endswith("/constants.pkl") for entry in entries):
            raise ValueError(
                "it is a TorchScript program, which is not executed. Save the model's state_dict()"
            )
        pickles = [entry for entry in entries if entry.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"its archive has {len(pickles)} files data.pkl, but must have one")
        if (size := pickles[0].file_size) > MAX_PICKLE_BYTES:
            raise ValueError(
                f"its pickle takes {size:,} bytes, but may take at most {MAX_PICKLE_BYTES:,}"
            )
        return archive.read(pickles[0])


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    """Return whether an entry is neither compressed nor a folder by name or MS-DOS attributes."""
    folder = entry.is_dir() or entry.external_attr & 0x10
    return not (folder or entry.compress_type or entry.compress_size != entry.file_size)


def _check_end_of_zip(file: BinaryIO) -> None:
    """Check that the archive ends with its only table of contents.

    PyTorch's reader and Python's search for it differently, and must find the same one.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read(98).rjust(98)
    zip64, locator, end = tail[:56], tail[56:76], tail[76:]
    offset, length, table_end, proper = end[16:20], end[12:16], size - 22, True
    if locator[:4] == b"PK\x06\x07":  # the form for large files
        offset, length, table_end = zip64[48:56], zip64[40:48], size - 98
        at = int.from_bytes(locator[8:16], "little")
        proper = zip64[:4] == b"PK\x06\x06" and at == table_end
    reaches = int.from_bytes(offset, "little") + int.from_bytes(length, "little")
    if not (proper and end[:4] == b"PK\x05\x06" and end[20:] == b"\0\0" and reaches == table_end):
        raise ValueError("its archive is cut short, or does not end with its table of contents")
