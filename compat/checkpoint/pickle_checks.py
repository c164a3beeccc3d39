"""A file of `torch.save` looked through before PyTorch unpickles it.

`weights_only=True` runs no code from a file. It still lets a kilobyte ask for any amount of memory
(a bytearray), for ever (the hash of tuples in tuples) or for a crash (of too many of them).
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from compat.errors import listed

# The pickles of xl and an optimizer's state take 200 kB and 70,000 opcodes.
MOST_BYTES, MOST_OPCODES, MOST_NESTED = 4 << 20, 400_000, 10_000

# What torch.save wrote first before version 1.6: its magic number, pickled.
_OLD_STYLE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ZIP = b"PK\x03\x04"

_REBUILDERS = "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter".split()
_KNOWN = {"collections OrderedDict", *(f"torch._utils {name}" for name in _REBUILDERS)}
_DTYPES = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 "
    "float8_e4m3fn float8_e5m2".split()
)

# What the opcodes that PyTorch reads take from the stack and leave on it.
_EFFECTS = {
    **dict.fromkeys(("PROTO", "STOP", "BINPUT", "LONG_BINPUT"), (0, 0)),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "BINUNICODE"), (0, 1)),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINSTRING"), (0, 1)),
    **dict.fromkeys(("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "GLOBAL"), (0, 1)),
    **dict.fromkeys(("APPEND", "BUILD"), (1, 0)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (2, 1)),
    "BINPERSID": (1, 1),
    "SETITEM": (2, 0),
}
_OF_LISTS = set("PROTO EMPTY_LIST MARK BINUNICODE BINPUT LONG_BINPUT APPEND APPENDS STOP".split())
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PROTOCOL = 2  # that torch.save writes; of others torch.load warns


@dataclass(frozen=True)
class OldStyle:
    """Of a file of before torch 1.6: where the tensors' data starts, and in how many pieces it is.

    PyTorch fills the pieces that the last pickle lists; others stay as they are found in memory.
    """

    start: int
    pieces: int


def check_pickled(path: Path, most: int) -> OldStyle | None:
    """Look through a file of `torch.save`, of either style.

    Args:
        path: the file.
        most: bytes that it may unpack to, if that is more than it takes on disk.

    Returns:
        Where an old-style file has its data; None of any other.

    Raises:
        ValueError: it is no such file, would unpack to more, or asks for anything but tensors.
        zipfile.BadZipFile: its archive is damaged.
    """
    with path.open("rb") as file:
        start = file.read(len(_OLD_STYLE))
        if start.startswith(_ZIP):
            check_pickle(_pickle_in_zip(file, most), 1)
            return None
        if start == _OLD_STYLE:  # and then its version, the system's sizes, the tensors, their keys
            data = file.read(MOST_BYTES)
            before = check_pickle(data, 3)
            length = check_pickle(data[before:], 1)
            return OldStyle(len(start) + before + length, _count_keys(data[before:]))
    raise ValueError("it is no file of torch.save, or a damaged one")


def check_pickle(data: bytes, count: int) -> int:
    """Look through so many pickles, one behind the other; returns how long they are.

    Raises:
        ValueError: they are damaged, ask for more than tensors, or for something immense.
    """
    position = opcodes = 0
    for _ in range(count):
        length, seen = _check_one(data[position:], MOST_OPCODES - opcodes)
        position, opcodes = position + length, opcodes + seen
    return position


def _check_one(data: bytes, most_opcodes: int) -> tuple[int, int]:
    """One pickle, followed on a stack that holds, of every value, how many tuples are nested in it.

    PyTorch's unpickler has no other opcodes than those here.
    """
    stack: list[int] = []
    below: list[list[int]] = []
    memo: dict[object, int] = {}
    number = position = 0
    try:
        for number, (code, argument, at) in enumerate(pickletools.genops(data), start=1):
            name, position = code.name, at or 0
            if number > most_opcodes:
                raise ValueError(f"its pickle has more than {MOST_OPCODES:,} opcodes")
            if name in _EFFECTS:
                taken, left = _EFFECTS[name]
                del stack[_deep_enough(stack, taken) :]
                stack += [1] * left
            elif name in _TUPLES or name == "TUPLE":
                start = _deep_enough(stack, _TUPLES[name]) if name in _TUPLES else 0
                nested = 1 + sum(stack[start:])
                if nested > MOST_NESTED:
                    raise ValueError(f"its pickle nests more than {MOST_NESTED:,} tuples")
                stack = (stack[:start] if name in _TUPLES else below.pop()) + [nested]
            elif name == "MARK":
                below.append(stack)
                stack = []
            elif name in ("APPENDS", "SETITEMS"):
                stack = below.pop()
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            else:
                raise ValueError(f"its pickle has the opcode {name}, which torch.save does not use")
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            _check_argument(name, argument)
    except (IndexError, KeyError) as error:
        raise ValueError("its pickle is damaged") from error
    return position + 1, number


def _count_keys(data: bytes) -> int:
    """How many pieces of data a list of their keys names, each of them once."""
    ops = [(code.name, argument) for code, argument, _ in pickletools.genops(data)]
    names, keys = [name for name, _ in ops], [key for name, key in ops if name == "BINUNICODE"]
    one_list = names.count("EMPTY_LIST") == 1 and set(names) <= _OF_LISTS
    if not one_list or (keys and names[-2][:6] != "APPEND") or len(set(keys)) < len(keys):
        raise ValueError("its list of the data that follows is damaged")
    return len(keys)


def _check_argument(name: str, argument: object) -> None:
    """Nothing but tensors is named; and whole numbers are short, for long ones can hash alike."""
    if name == "PROTO" and argument != _PROTOCOL:
        raise ValueError(
            f"its pickle has protocol {argument}, and torch.save writes protocol {_PROTOCOL}; "
            "save it again without pickle_protocol"
        )
    if name == "GLOBAL" and not _is_known(str(argument)):
        raise ValueError(
            f"it asks for {str(argument).replace(' ', '.')!r}, which is not run; "
            "a checkpoint is made of plain tensors"
        )
    if name == "LONG1" and isinstance(argument, int) and abs(argument) >= 2**63:
        raise ValueError("its pickle has a number of more than 64 bits")


def _deep_enough(stack: list[int], taken: int) -> int:
    """Where the topmost values start."""
    if len(stack) < taken:
        raise IndexError(taken)
    return len(stack) - taken


def _is_known(name: str) -> bool:
    """A tensor's or storage's type, or what puts tensors together."""
    module, _, attribute = name.partition(" ")
    if module in ("torch", "torch.storage") and attribute.endswith("Storage"):
        return attribute.isidentifier() and not attribute.startswith("Q")  # of quantized tensors
    return name in _KNOWN or (module == "torch" and attribute in _DTYPES)


def _pickle_in_zip(file: BinaryIO, most: int) -> bytes:
    """The pickle in an archive that does not unpack to too much."""
    _check_end(file)
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        unpacked, most = sum(entry.file_size for entry in entries), max(most, size)
        if unpacked > most:
            raise ValueError(
                f"it would unpack to {unpacked:,} bytes; expected at most {most:,}, by its size "
                "and its config; do not trust where it comes from"
            )
        # What PyTorch does not unpack, it leaves as it finds it in memory, without a word.
        if odd := [entry.filename for entry in entries if not _is_plain(entry)]:
            raise ValueError(
                f"in its archive {listed(odd, 3)} are compressed or folders, as torch.save has "
                "none; load it and save it again with PyTorch"
            )
        if any(entry.filename.lower().endswith("/constants.pkl") for entry in entries):
            raise ValueError(
                "it is a TorchScript program, which is not run; save the state_dict() of the model"
            )
        # PyTorch finds it in upper case too.
        pickles = [entry for entry in entries if entry.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"its archive has {len(pickles)} files data.pkl; expected one")
        if pickles[0].file_size > MOST_BYTES:
            raise ValueError(
                f"its pickle takes {pickles[0].file_size:,} bytes; expected at most {MOST_BYTES:,}"
            )
        return archive.read(pickles[0])


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    """Neither compressed nor a folder, by its name or, as in MS-DOS, by its attributes."""
    folder = entry.is_dir() or entry.external_attr & 0x10
    return not (folder or entry.compress_type or entry.compress_size != entry.file_size)


def _check_end(file: BinaryIO) -> None:
    """The archive's table of contents lies at its end, and nothing else does.

    PyTorch's reader and Python's look for it each in its own way; only so do both find the same.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read(98).rjust(98)
    wide, locator, end = tail[:56], tail[56:76], tail[76:]
    where, length, ends = end[16:20], end[12:16], size - 22
    if locator[:4] == b"PK\x06\x07":  # the wide form of the same, for large files
        where, length, ends = wide[48:56], wide[40:48], size - 98
        proper = wide[:4] == b"PK\x06\x06" and int.from_bytes(locator[8:16], "little") == ends
    else:
        proper = True
    reaches = int.from_bytes(where, "little") + int.from_bytes(length, "little")
    if not (proper and end[:4] == b"PK\x05\x06" and end[20:] == b"\0\0" and reaches == ends):
        raise ValueError("its archive is cut short, or does not end with its table of contents")
