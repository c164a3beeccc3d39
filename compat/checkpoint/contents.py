"""The tensors in a weights file, or in the shards of an index, under Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compat.checkpoint.files import ALL, TensorFile, TensorInfo, read_json
from compat.checkpoint.formats import PICKLES, recognized
from compat.checkpoint.layout import plain_name
from compat.checkpoint.packed import METADATA, PackedFile
from compat.checkpoint.pickle_file import PickleFile
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.errors import CheckpointError, counted, lines, listed


@dataclass(frozen=True)
class Stored:
    """Where a tensor is stored: the file, its name there, and whether it is transposed there."""

    file: TensorFile
    name: str
    transposed: bool = False

    @property
    def info(self) -> TensorInfo:
        """Shape and data type in Hugging Face's layout."""
        info = self.file.infos[self.name]
        return TensorInfo(info.shape[::-1], info.dtype) if self.transposed else info

    def read(self, mapped: bool = False, rows: slice = ALL) -> Tensor:
        """Return the tensor in Hugging Face's layout, or some of its rows, contiguous."""
        if self.transposed:
            return self.file.read(self.name, mapped=mapped).t()[rows].contiguous()
        return self.file.read(self.name, rows, mapped)


@dataclass
class Contents:
    """An open checkpoint that is not yet known to be a GPT-2.

    Args:
        weights: the weights file or index.
        files: the open tensor files, by path.
    """

    weights: Path
    files: dict[Path, TensorFile]

    @property
    def model_args(self) -> object:
        """The arguments that nanoGPT saves beside its tensors; None for other files."""
        args = [file.model_args for file in self.files.values() if isinstance(file, PickleFile)]
        return args[0] if len(args) == 1 else None

    @property
    def packed(self) -> PackedFile | None:
        """The file, if `pack_checkpoint` wrote it."""
        return next((file for file in self.files.values() if isinstance(file, PackedFile)), None)

    def tensors(self) -> dict[str, Stored]:
        """Return every tensor by its name without prefixes of wrappers and of `transformers`.

        Raises:
            CheckpointError: Two tensors have the same name.
        """
        found: dict[str, Stored] = {}
        for path, file in self.files.items():
            for name in file.infos:
                short = plain_name(name)
                if short in found:
                    raise CheckpointError(
                        f"{path} holds {short} a second time, as {name}. Save the checkpoint with "
                        "each tensor once."
                    )
                found[short] = Stored(file, name)
        return found


def open_contents(weights: Path, max_unpacked: int) -> Contents:
    """Open a weights file, or all shards of an index.

    Args:
        weights: the file or index.
        max_unpacked: number of bytes to which a pickle may unpack, if larger than its size on disk.

    Raises:
        CheckpointError: A file cannot be read, or the index contradicts its shards.
    """
    if not weights.name.endswith(".index.json"):
        return Contents(weights, {weights: _open_file(weights, max_unpacked)})
    index = _read_index(weights)
    paths = [weights.parent / name for name in sorted(set(index.values()))]
    files = {path: _open_file(path, max_unpacked) for path in paths}
    _check_index(weights, index, {path.name: file for path, file in files.items()})
    return Contents(weights, files)


def _open_file(path: Path, max_unpacked: int) -> TensorFile:
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        return PackedFile(path, file) if METADATA in file.metadata else file
    if path.suffix in PICKLES:
        return PickleFile(path, max_unpacked)
    found = recognized(path)
    raise CheckpointError(
        f"{path} is not a tensor file. Pass one that ends in .safetensors, "
        f"{', '.join(PICKLES[:-1])} or {PICKLES[-1]}."
        + (f" It is {found.phrase}. {found.advice}" if found else "")
    )


def _read_index(index: Path) -> dict[str, str]:
    """Return the weight map of an index: tensor → shard. All shards exist beside the index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{index} has no 'weight_map' from tensor names to file names. Download it again."
        )
    names = sorted(set(weight_map.values()))
    outside = [
        name
        for name in names
        if name in ("", ".", "..") or set(name) & set("/\\:") or not name.isprintable()
    ]
    if outside:
        raise CheckpointError(
            f"{index} names {listed([repr(name) for name in outside])}, but shards must lie beside "
            "the index. Do not trust its origin."
        )
    if missing := [name for name in names if not os.path.isfile(index.parent / name)]:
        raise CheckpointError(
            f"{index.parent} lacks {listed(missing)}, {len(missing)} of the {len(names)} shards "
            "that the index names. Download them."
        )
    return weight_map


def _check_index(index: Path, weight_map: dict[str, str], shards: Mapping[str, TensorFile]) -> None:
    stored = [name for shard in shards.values() for name in shard.infos]
    elsewhere = [name for name, shard in weight_map.items() if name not in shards[shard].infos]
    unlisted = [name for name in stored if name not in weight_map]
    faults = counted(
        ("not in the shard it names", elsewhere), ("in a shard but not in the index", unlisted)
    )
    if faults:
        headline = f"{index} contradicts what its shards hold:"
        raise CheckpointError(lines(headline, faults) + "\nDownload or export all of it again.")
