"""Faults of paths, folders and shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.faults.builder import build
from tests.faults.fault import WEIGHTS, Fault, content, sparse, values, without

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{k}-of-00002.safetensors" for k in (1, 2))


def _map(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Change the map from tensors to shards."""

    def breaks(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return breaks


def _replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Replace a file with something else."""

    def breaks(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return breaks


def _opened(name: str, make: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Replace a file with something else, and open its path."""

    def breaks(folder: Path) -> Path:
        _replaced(name, make)(folder)
        return folder / name

    return breaks


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _moved(folder: Path) -> None:
    """Move a tensor to a shard other than the index states."""
    first, second = load_file(folder / FIRST), load_file(folder / SECOND)
    name = next(iter(first))
    save_file({**second, name: first.pop(name)}, folder / SECOND)
    save_file(first, folder / FIRST)


def _twice(folder: Path) -> None:
    first, second = load_file(folder / FIRST), load_file(folder / SECOND)
    save_file({**second, next(iter(first)): next(iter(first.values()))}, folder / SECOND)


def _both(folder: Path) -> None:
    build(folder, "shards")


def _linked(folder: Path) -> None:
    """Replace files with links to another path, as in the hub's cache."""
    blob = folder / "blob"
    (folder / WEIGHTS).rename(blob)
    (folder / WEIGHTS).symlink_to(blob)


def _shards(breaks: Callable[[Path], Any], *says: str) -> Fault:
    return Fault(breaks, says, layout="shards")


def _index(**fields: Any) -> Fault:
    return _shards(values(INDEX, **fields), INDEX, "has no 'weight_map'", "tensor names")


_OUTSIDE = ("../a.safetensors", "/etc/passwd", "sub/a.safetensors", "C:a.safetensors")
_INVALID = ("", ".", "..", "a\\b.safetensors", "a\0b", "a\x1b[2J", "\ud800")

FAULTS = {
    "folder: nothing there": Fault(
        lambda folder: folder / "nowhere", ("nowhere does not exist", "is not a hub id")
    ),
    "folder: no weights": Fault(without(WEIGHTS), ("holds no weights", WEIGHTS)),
    "folder: a file of another kind": Fault(
        lambda folder: (folder / WEIGHTS).rename(folder / "model.gguf"),
        ("model.gguf", "ends in .safetensors"),
    ),
    "folder: weights that are a folder": Fault(
        _replaced(WEIGHTS, Path.mkdir), ("holds no weights",)
    ),
    "folder: weights that are a pipe": Fault(_replaced(WEIGHTS, os.mkfifo), ("holds no weights",)),
    "folder: a pipe is opened": Fault(_opened(WEIGHTS, os.mkfifo), (WEIGHTS, "neither a folder")),
    "folder: an endless device is opened": Fault(
        _opened(WEIGHTS, _zeros), (WEIGHTS, "neither a folder")
    ),
    "folder: a link that leads nowhere": Fault(
        _replaced(WEIGHTS, lambda path: path.symlink_to("lost")), ("holds no weights",)
    ),
    "folder: a link out of it loads": Fault(_linked, (), None),
    "folder: a single file and shards load": Fault(
        _both, ("model.safetensors is used", INDEX, "is not"), None
    ),
    "config: missing": Fault(
        without("config.json"), ("config.json is missing", "beside the weights")
    ),
    "config: a folder": Fault(_replaced("config.json", Path.mkdir), ("config.json", "directory")),
    "config: a pipe": Fault(_replaced("config.json", os.mkfifo), ("config.json", "is a pipe")),
    "config: an endless device": Fault(
        _replaced("config.json", _zeros), ("config.json", "a device")
    ),
    "config: 4 GB of nothing": Fault(
        sparse("config.json", 4 << 30),
        ("config.json has 4,294,967,296 bytes, but may have at most",),
    ),
    "shards: one missing": _shards(without(SECOND), f"lacks {SECOND}, 1 of the 2"),
    "shards: all missing": _shards(
        without(FIRST, SECOND), FIRST, SECOND, "2 of the 2", "Download them"
    ),
    "shards: one that is a pipe": _shards(_replaced(SECOND, os.mkfifo), "lacks", SECOND),
    "shards: one that is an endless device": _shards(_replaced(SECOND, _zeros), "lacks", SECOND),
    "shards: one that is damaged": _shards(
        content(SECOND, b"\0" * 9), SECOND, "cannot be read as safetensors"
    ),
    **{
        f"shards: one at {name!r}": _shards(
            _map(lambda m, name=name: m.update({"transformer.wte.weight": name})),
            INDEX,
            "shards must lie beside the index",
        )
        for name in (*_OUTSIDE, *_INVALID)
    },
    "shards: a tensor in another one": _shards(
        _moved, INDEX, "1 not in the shard it names", "Download or export"
    ),
    "shards: a tensor in two": _shards(_twice, "a second time"),
    "shards: a tensor in none": _shards(
        _map(lambda m: m.update({"transformer.extra": FIRST})),
        INDEX,
        "1 not in the shard it names: transformer.extra",
    ),
    "shards: a tensor that the index does not tell": _shards(
        _map(lambda m: m.pop("transformer.ln_f.bias")),
        INDEX,
        "1 in a shard but not in the index: transformer.ln_f.bias",
    ),
    "index: without a map": _shards(content(INDEX, b"{}"), INDEX, "has no 'weight_map'"),
    "index: a map that is null": _index(weight_map=None),
    "index: of 1 GB": _shards(sparse(INDEX, 1 << 30), INDEX, "has 1,073,741,824 bytes, but may"),
    "index: a map that is a list": _index(weight_map=[]),
    "index: a map to numbers": _index(weight_map={"wte.weight": 1}),
    "index: a map that is empty": _shards(
        values(INDEX, weight_map={}), INDEX, "has 0 tensors, fewer than"
    ),
    "index: empty": _shards(content(INDEX, b""), INDEX, "cannot be read as JSON", "Download"),
    "index: no JSON": _shards(content(INDEX, b"{"), INDEX, "cannot be read as JSON"),
    "index: a list": _shards(content(INDEX, b"[]"), INDEX, "JSON list, but must hold an object"),
    "shards: of safetensors load": Fault(lambda folder: None, (), None, layout="shards"),
    "shards: of pickles load": Fault(lambda folder: None, (), None, layout="bin shards"),
}
