"""Faults of `.safetensors` files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.fault import PICKLE, WEIGHTS, Fault, content, cut, header, sparse, write_header

_UNREADABLE = (WEIGHTS, "cannot be read as safetensors", "export it again")


def _fault(breaks: Callable[[Path], Any], *says: str, layout: str = "safetensors") -> Fault:
    return Fault(breaks, (*_UNREADABLE, *says), layout=layout)


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
    "safetensors: empty": _fault(cut(WEIGHTS, 0), "may be truncated", "0 bytes"),
    "safetensors: 7 bytes": _fault(content(WEIGHTS, b"\x10" * 7), "it has 7 bytes"),
    "safetensors: cut in the header": _fault(cut(WEIGHTS, 0.02), "its header needs"),
    "safetensors: cut in the data": _fault(
        cut(WEIGHTS, 0.99), "may be truncated", "its tensors need"
    ),
    "safetensors: header length 0": _fault(_length(0)),
    "safetensors: header length too short": _fault(_length(100)),
    "safetensors: header length beyond the file": _fault(
        _length(10**6), "its header needs 1,000,008"
    ),
    "safetensors: header length 2^63": _fault(_length(2**63), "9,223,372,036,854,775,816"),
    "safetensors: header length 2^64 − 1": _fault(_length(2**64 - 1)),
    "safetensors: a name twice": _fault(_key_twice, "it repeats the key 'ln_f.bias'"),
    "safetensors: the last of 300,000 names twice": _fault(
        _many_keys_twice, "it repeats the key '299999'"
    ),
    "safetensors: overlapping tensors": _fault(
        header(lambda e: e["ln_f.bias"].update(data_offsets=e["ln_f.weight"]["data_offsets"]))
    ),
    "safetensors: a hole": _fault(header(lambda e: e.pop("ln_f.bias"))),
    "safetensors: begin after end": _fault(_set("ln_f.bias", data_offsets=[64, 32])),
    "safetensors: data past the end": _fault(
        _set("ln_f.bias", data_offsets=[10**9, 10**9 + 32]), "its tensors need 1,000,0"
    ),
    "safetensors: offsets beyond 64 bits": _fault(_set("ln_f.bias", data_offsets=[0, 2**70])),
    "safetensors: trailing bytes": _fault(_appended),
    "safetensors: a negative dimension": _fault(_set("ln_f.bias", shape=[-8])),
    "safetensors: a fractional dimension": _fault(_set("ln_f.bias", shape=[8.0])),
    "safetensors: a dimension of 2^62": _fault(_set("ln_f.bias", shape=[2**62])),
    "safetensors: dimensions that overflow to 8": _fault(_set("ln_f.bias", shape=[2**61, 8, 8])),
    "safetensors: an unknown data type": _fault(_set("ln_f.bias", dtype="F33")),
    "safetensors: a data type that is a number": _fault(_set("ln_f.bias", dtype=32)),
    "safetensors: an entry without offsets": _fault(
        header(lambda e: e["ln_f.bias"].pop("data_offsets"))
    ),
    "safetensors: offsets that are words": _fault(_set("ln_f.bias", data_offsets=["0", "32"])),
    "safetensors: metadata of numbers": _fault(
        header(lambda e: e.update(__metadata__={"format": 1}))
    ),
    "safetensors: header not UTF-8": _fault(_deep(b'{"\xff": 0}')),
    "safetensors: header in UTF-16": _fault(_deep('{"a": 0}'.encode("utf-16"))),
    "safetensors: header no JSON": _fault(_deep(b"{wte: F32}")),
    "safetensors: header a list": _fault(_deep(b"[1]"), "JSON list", "an object"),
    "safetensors: header nested 100,000 deep": _fault(_deep(b"[" * 100_000)),
    "safetensors: header of 50 MB nested": _fault(
        _deep(b"[" * 50_000_000), "takes 50,000,008 bytes, but may take at most 4,194,304"
    ),
    "safetensors: header of a million objects": _fault(
        _deep(b"[" + b"{}," * 1_000_000 + b"0]"), "more than 200,000 lists"
    ),
    "safetensors: 4 GB of nothing": _fault(sparse(WEIGHTS, 4 << 30)),
    "safetensors: a web page": _fault(
        content(WEIGHTS, b"<!DOCTYPE html><html><body>Not Found</body></html>"), "it is a web page"
    ),
    "safetensors: a Git LFS pointer": _fault(
        content(
            WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n"
        ),
        "Git LFS pointer",
    ),
    "safetensors: a pickle": _fault(_a_pickle, "it is a pickle"),
    "safetensors: a torch.save file": _fault(_renamed, "it is a pickle", layout="bin"),
}
