"""Building blocks of faulty `.bin` and `.pt` files: payloads, archives, hand-made pickles."""

from __future__ import annotations

import builtins
import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.builder import nanogpt, state
from tests.faults.fault import PICKLE, content

MARK = "a payload was run"


class Malice:
    """An object that creates a folder next to the weights when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder / MARK,)


class MaliceByEval:
    """The same by builtins.eval, which pickles can call like any other function."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.eval, (f"__import__('os').mkdir({str(self.folder / MARK)!r})",)


def plain_pickle(folder: Path) -> None:
    (folder / PICKLE).write_bytes(pickle.dumps({"wte.weight": Malice(folder)}, protocol=2))


def zip_around(pickle_bytes: bytes, **more: bytes) -> Callable[[Path], None]:
    """Write an archive like that of torch.save with any pickle."""

    def breaks(folder: Path) -> None:
        with zipfile.ZipFile(folder / PICKLE, "w") as archive:
            archive.writestr("archive/data.pkl", pickle_bytes)
            archive.writestr("archive/version", b"3\n")
            for name, data in more.items():
                archive.writestr(f"archive/{name}", data)

    return breaks


def compressed(folder: Path, **more: bytes) -> None:
    """Compress the archive, with further entries."""
    with zipfile.ZipFile(folder / PICKLE) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / PICKLE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (entries | more).items():
            archive.writestr(name, data)


def bomb(folder: Path) -> None:
    compressed(folder, **{"archive/data/99": bytes(200_000_000)})


def two_ends(folder: Path) -> None:
    """Write an archive in which Python's reader and PyTorch's find different directories."""
    hidden = io.BytesIO()
    with zipfile.ZipFile(hidden, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + bytes(50_000_000))
    contents, shown = hidden.getvalue(), io.BytesIO()
    with zipfile.ZipFile(shown, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    seen = shown.getvalue()
    at = struct.unpack("<L", contents[-6:-2])[0]
    (folder / PICKLE).write_bytes(contents[:-22] + seen[:-6] + struct.pack("<L", at) + seen[-2:])


def old_style(first: bytes, keys: bytes = b"]", data: bytes = b"") -> Callable[[Path], None]:
    """Write a legacy file (before torch 1.6) with any pickle of tensors."""
    start = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    return content(PICKLE, start + first + b"\x80\x02" + keys + b"." + data)


def storage(count: bytes, shape: bytes, stride: bytes, view: bytes = b"") -> bytes:
    """Pickle {"wte.weight": tensor} like torch.save, with any shape and stride."""
    name, storage, key, place = (_text(t) for t in (b"wte.weight", b"storage", b"0", b"cpu"))
    stored = b"(" + storage + b"ctorch\nFloatStorage\n" + key + place + count + view + b"tQ"
    rest = b"K\0" + shape + stride + b"\x89ccollections\nOrderedDict\n)RtRs."
    return b"\x80\x02}" + name + b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + rest


def _text(word: bytes) -> bytes:
    return b"X" + struct.pack("<L", len(word)) + word


def int(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def wte(of: Callable[[torch.Tensor], Any]) -> Callable[[Path], Any]:
    return lambda folder: {**state(), "wte.weight": of(state()["wte.weight"])}


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors warn that they are a prototype
        return torch.nested.nested_tensor([tensor, tensor[:2]])


def cut_to(size: int) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        (folder / PICKLE).write_bytes((folder / PICKLE).read_bytes()[:size])

    return breaks


def trailing(folder: Path) -> None:
    with (folder / PICKLE).open("ab") as file:
        file.write(b"\0")


def keys_as(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Write a legacy file that lists other storage keys; the data is complete."""

    def breaks(folder: Path) -> None:
        data, start = (folder / PICKLE).read_bytes(), b"\x80\x02]q\x00("
        at = data.index(start)
        keys = pickle.loads(data[at:])
        length = len(pickle.dumps(keys, protocol=2))
        other = pickle.dumps(change(keys), protocol=2)
        (folder / PICKLE).write_bytes(data[:at] + other + data[at + length :])

    return breaks


def flagged(folder: Path) -> None:
    """Mark an archive member as a folder, although it is a file."""
    data = (folder / PICKLE).read_bytes()
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/3")) + 38
    (folder / PICKLE).write_bytes(data[:at] + b"\x10" + data[at + 1 :])


def nano(**changes: Any) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        saved = nanogpt()
        torch.save({**saved, **changes}, folder / "ckpt.pt")

    return breaks
