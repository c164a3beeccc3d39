"""Tensor files: what they hold, told from the header where there is one, and their tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compat.errors import CheckpointError, listed


@dataclass(frozen=True)
class TensorInfo:
    """Shape and data type of a stored tensor; `dtype` is the file's own word for a rare one."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class TensorFile(Protocol):
    """One file of named tensors."""

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """A contiguous copy in memory: a file that is later cut short must not take it away."""
        ...


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
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))  # its stubs are incomplete
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {_looks_like(path) or error}; "
                "download or export it again"
            ) from error
        self.infos: dict[str, TensorInfo] = {}
        for name in self._file.keys():
            piece = self._file.get_slice(name)
            code = piece.get_dtype()
            self.infos[name] = TensorInfo(tuple(piece.get_shape()), _DTYPES.get(code, code))

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone(memory_format=torch.contiguous_format)


class PickleFile:
    """A `.bin` file of `torch.save`, read with `weights_only=True`: no code in it is ever run."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file makes the unpickler raise nearly anything
            raise CheckpointError(
                f"{path} cannot be read as a PyTorch file of plain tensors: "
                f"{_looks_like(path) or 'damaged, or holding other objects'} "
                f"({type(error).__name__}); download it again, or ask its author for safetensors"
            ) from error
        if not isinstance(self._tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor)
            for name, tensor in self._tensors.items()
        ):
            raise CheckpointError(
                f"{path} holds no plain dictionary of named tensors, as a checkpoint does"
            )
        if strange := [
            name
            for name, tensor in self._tensors.items()
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized
        ]:
            raise CheckpointError(
                f"{path}: {listed(strange)}: no dense tensors with data of their own"
            )
        self.infos: dict[str, TensorInfo] = {
            k: TensorInfo(tuple(v.shape), v.dtype) for k, v in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor.clone(memory_format=torch.contiguous_format)


def open_file(path: Path) -> TensorFile:
    """Open one file of tensors by its ending.

    Raises:
        CheckpointError: it cannot be read, or is of another kind.
    """
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in (".bin", ".pt", ".pth"):
        return PickleFile(path)
    raise CheckpointError(
        f"{path} is no tensor file that compat knows; expected .safetensors or .bin"
    )


def _looks_like(path: Path) -> str | None:
    """What the first bytes say that the file is, where that is another thing than its name says."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError:
        return None
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, saved under this name"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself"
    if path.suffix == ".safetensors" and start.startswith((b"pk\x03\x04", b"\x80")):
        return "it is a pickle of PyTorch's, under the name of safetensors"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, no JSON, or another value than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; it belongs beside the weights") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def shards_of(index: Path) -> list[Path]:
    """The files that a `*.index.json` names, all there and all inside its own folder.

    Raises:
        CheckpointError: the index is malformed, leaves the folder, or a shard is missing.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [
        name for name in names if PurePosixPath(name).name != name or "\\" in name or ":" in name
    ]
    if outside:
        raise CheckpointError(f"{index} names {listed(outside)}; shards must lie beside the index")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {listed(missing)}, {len(missing)} of the {len(names)} shards "
            "that the index names; fetch them"
        )
    return [index.parent / name for name in names]
