"""Faults of `.safetensors` files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from tests.faults.fault import PICKLE, WEIGHTS, Fault, content, cut, header, sparse, write_header

_UNREADABLE = (WEIGHTS, "cannot be read as safetensors", "export it again")


def _set(name: str, **fields: Any) -> Any:
    return header(lambda entries: entries[name].update(fields))


def _length(length: int) -> Any:
    """State a wrong length of the header."""

    def breaks(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + data[8:])

    return breaks


def _key_twice(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = data[8:end].decode().rstrip()
    entry = json.dumps(json.loads(text)["ln_f.bias"])
    write_header(folder, f'{text[:-1]},"ln_f.bias":{entry}}}'.encode(), data[end:])


def _many_keys_twice(folder: Path) -> None:
    keys = ",".join(f'"{i}":0' for i in range(300_000))
    write_header(folder, f'{{{keys},"299999":0}}'.encode())


def _appended(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 4)


def _deep(text: bytes) -> Any:
    return lambda folder: write_header(folder, text)


def _a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps({"wte.weight": [1.0]}, protocol=2))


def _renamed(folder: Path) -> None:
    (folder / PICKLE).rename(folder / WEIGHTS)


FAULTS = {
    "safetensors: empty": Fault(cut(WEIGHTS, 0), (*_UNREADABLE, "may be truncated", "0 bytes")),
    "safetensors: 7 bytes": Fault(content(WEIGHTS, b"\x10" * 7), (*_UNREADABLE, "it has 7 bytes")),
    "safetensors: cut in the header": Fault(cut(WEIGHTS, 0.02), (*_UNREADABLE, "its header needs")),
    "safetensors: cut in the data": Fault(
        cut(WEIGHTS, 0.99), (*_UNREADABLE, "may be truncated", "its tensors need")
    ),
    "safetensors: header length 0": Fault(_length(0), _UNREADABLE),
    "safetensors: header length too short": Fault(_length(100), _UNREADABLE),
    "safetensors: header length beyond the file": Fault(
        _length(10**6), (*_UNREADABLE, "its header needs 1,000,008")
    ),
    "safetensors: header length 2^63": Fault(
        _length(2**63), (*_UNREADABLE, "9,223,372,036,854,775,816")
    ),
    "safetensors: header length 2^64 − 1": Fault(_length(2**64 - 1), _UNREADABLE),
    "safetensors: a name twice": Fault(
        _key_twice, (*_UNREADABLE, "it repeats the key 'ln_f.bias'")
    ),
    "safetensors: the last of 300,000 names twice": Fault(
        _many_keys_twice, (*_UNREADABLE, "it repeats the key '299999'")
    ),
    "safetensors: overlapping tensors": Fault(
        header(lambda e: e["ln_f.bias"].update(data_offsets=e["ln_f.weight"]["data_offsets"])),
        _UNREADABLE,
    ),
    "safetensors: a hole": Fault(header(lambda e: e.pop("ln_f.bias")), _UNREADABLE),
    "safetensors: begin after end": Fault(_set("ln_f.bias", data_offsets=[64, 32]), _UNREADABLE),
    "safetensors: data past the end": Fault(
        _set("ln_f.bias", data_offsets=[10**9, 10**9 + 32]),
        (*_UNREADABLE, "its tensors need 1,000,0"),
    ),
    "safetensors: offsets beyond 64 bits": Fault(
        _set("ln_f.bias", data_offsets=[0, 2**70]), _UNREADABLE
    ),
    "safetensors: trailing bytes": Fault(_appended, _UNREADABLE),
    "safetensors: a negative dimension": Fault(_set("ln_f.bias", shape=[-8]), _UNREADABLE),
    "safetensors: a fractional dimension": Fault(_set("ln_f.bias", shape=[8.0]), _UNREADABLE),
    "safetensors: a dimension of 2^62": Fault(_set("ln_f.bias", shape=[2**62]), _UNREADABLE),
    "safetensors: dimensions that overflow to 8": Fault(
        _set("ln_f.bias", shape=[2**61, 8, 8]), _UNREADABLE
    ),
    "safetensors: an unknown data type": Fault(_set("ln_f.bias", dtype="F33"), _UNREADABLE),
    "safetensors: a data type that is a number": Fault(_set("ln_f.bias", dtype=32), _UNREADABLE),
    "safetensors: an entry without offsets": Fault(
        header(lambda e: e["ln_f.bias"].pop("data_offsets")), _UNREADABLE
    ),
    "safetensors: offsets that are words": Fault(
        _set("ln_f.bias", data_offsets=["0", "32"]), _UNREADABLE
    ),
    "safetensors: metadata of numbers": Fault(
        header(lambda e: e.update(__metadata__={"format": 1})), _UNREADABLE
    ),
    "safetensors: header not UTF-8": Fault(_deep(b'{"\xff": 0}'), _UNREADABLE),
    "safetensors: header in UTF-16": Fault(_deep('{"a": 0}'.encode("utf-16")), _UNREADABLE),
    "safetensors: header no JSON": Fault(_deep(b"{wte: F32}"), _UNREADABLE),
    "safetensors: header a list": Fault(_deep(b"[1]"), (*_UNREADABLE, "JSON list", "an object")),
    "safetensors: header nested 100,000 deep": Fault(_deep(b"[" * 100_000), _UNREADABLE),
    "safetensors: header of 50 MB nested": Fault(
        _deep(b"[" * 50_000_000),
        (*_UNREADABLE, "takes 50,000,008 bytes, but may take at most 4,194,304"),
    ),
    "safetensors: header of a million objects": Fault(
        _deep(b"[" + b"{}," * 1_000_000 + b"0]"), (*_UNREADABLE, "more than 200,000 lists")
    ),
    "safetensors: 4 GB of nothing": Fault(sparse(WEIGHTS, 4 << 30), _UNREADABLE),
    "safetensors: a web page": Fault(
        content(WEIGHTS, b"<!DOCTYPE html><html><body>Not Found</body></html>"),
        (*_UNREADABLE, "it is a web page"),
    ),
    "safetensors: a Git LFS pointer": Fault(
        content(
            WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n"
        ),
        (*_UNREADABLE, "Git LFS pointer"),
    ),
    "safetensors: a pickle": Fault(_a_pickle, (*_UNREADABLE, "it is a pickle")),
    "safetensors: a torch.save file": Fault(
        _renamed,
        (*_UNREADABLE, "it is a pickle"),
        layout="bin",
    ),
}
