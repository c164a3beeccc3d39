"""Packed checkpoints: one safetensors file with its config, checksums and, for int8, scales.

A quantized matrix is stored as int8 values [out, in] under its own name, and as one float32 scale
for each output under that name with `.scale`. If some of its inputs have outliers, their indices
stand under that name with `.outliers`, and their float32 weights with `.outlier_weight`. The file's
metadata has the config and the checksums, as JSON.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compat.checkpoint.files import ALL, TensorInfo
from compat.checkpoint.layout import HEAD
from compat.checkpoint.safetensors_file import SafetensorsFile, header_of, tensor_bytes
from compat.errors import CheckpointError

METADATA, SCALE = "compat", ".scale"
OUTLIERS, OUTLIER_WEIGHT = ".outliers", ".outlier_weight"
PRECISIONS = ("int8", "bfloat16")
ALIGNMENT = 64  # bytes, as in torch's own tensors; some int8 kernels crash at other addresses


class Outliers(NamedTuple):
    """The indices (K,) of the inputs with outliers, and their weights (K, out) in float32."""

    inputs: Tensor
    weight: Tensor


class Quantized(NamedTuple):
    """A weight [in, out] in 8 bits: int8 values (out, in) times scales (out,).

    The values of inputs with outliers are 0.
    """

    values: Tensor
    scale: Tensor
    outliers: Outliers | None = None

    @property
    def shape(self) -> torch.Size:
        """(in, out)."""
        return self.values.t().shape

    @property
    def is_cpu(self) -> bool:
        return self.values.is_cpu

    def to(self, target: torch.device | torch.dtype) -> Quantized:
        """Return the same weight on a device. A data type, that of the products, has no effect."""
        if isinstance(target, torch.dtype):
            return self
        outliers = self.outliers and Outliers(*(part.to(target) for part in self.outliers))
        return Quantized(self.values.to(target), self.scale.to(target), outliers)


class PackedFile:
    """A packed file, which holds the tensors of a GPT-2; quantized ones are read as float32.

    Every tensor is compared with its checksum when it is read.

    Args:
        path: the file.
        file: the same file, open, with `METADATA` in its metadata.

    Attributes:
        precision: "int8" or "bfloat16".
        config: the fields of the config.
        source, source_sha256: the packed checkpoint, and the SHA-256 of its weights.

    Raises:
        CheckpointError: The metadata is damaged, or does not fit the tensors.
    """

    def __init__(self, path: Path, file: SafetensorsFile) -> None:
        self._path, self._file = path, file
        try:
            fields = json.loads(file.metadata[METADATA])
            self.precision: str = PRECISIONS[PRECISIONS.index(fields["precision"])]
            self.config: dict[str, Any] = dict(fields["config"])
            self.source, self.source_sha256 = str(fields["source"]), str(fields["source_sha256"])
            self._checksums: dict[str, str] = dict(fields["checksums"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(f"its metadata cannot be read ({type(error).__name__})") from error
        if self._checksums.keys() != file.infos.keys():
            raise self._damaged("its checksums are for other tensors")
        self.infos: dict[str, TensorInfo] = {}
        for name, info in file.infos.items():
            if name + SCALE in file.infos:
                self.infos[name] = self._quantized_info(name)
            elif not name.endswith((SCALE, OUTLIERS, OUTLIER_WEIGHT)):
                self.infos[name] = info

    def _quantized_info(self, name: str) -> TensorInfo:
        values, scale = self._file.infos[name], self._file.infos[name + SCALE]
        expected = TensorInfo(values.shape[:1], torch.float32)
        if values.dtype != torch.int8 or len(values.shape) != 2 or scale != expected:
            raise self._damaged(f"the shapes of {name} and its scale do not match")
        if name + OUTLIERS in self._file.infos:
            self._check_outliers(name, *values.shape)
        shape = values.shape if name == HEAD else values.shape[::-1]
        return TensorInfo(shape, torch.float32)

    def _check_outliers(self, name: str, n_out: int, n_in: int) -> None:
        inputs = self._file.infos[name + OUTLIERS]
        weight = self._file.infos.get(name + OUTLIER_WEIGHT)
        n = inputs.shape[0] if len(inputs.shape) == 1 else 0
        expected = TensorInfo((n,), torch.int64), TensorInfo((n, n_out), torch.float32)
        if not 0 < n <= n_in or (inputs, weight) != expected:
            raise self._damaged(f"the shapes of {name} and its outliers do not match")

    def read(self, name: str, rows: slice = ALL, mapped: bool = False) -> Tensor:
        quantized = self.quantized(name, mapped=False)
        if quantized is None:
            return self._checked(name, mapped)[rows]
        weight = quantized.values.float().mul_(quantized.scale[:, None])
        if quantized.outliers is not None:
            weight[:, quantized.outliers.inputs] = quantized.outliers.weight.t()
        return (weight if name == HEAD else weight.t())[rows].contiguous()

    def quantized(self, name: str, mapped: bool) -> Quantized | None:
        """Return a weight as it is stored; None if it is not quantized."""
        if name + SCALE not in self._file.infos:
            return None
        values, scale = self._checked(name, mapped), self._checked(name + SCALE, mapped)
        if name + OUTLIERS not in self._file.infos:
            return Quantized(values, scale)
        inputs = self._checked(name + OUTLIERS, mapped)
        if not ((inputs >= 0) & (inputs < values.shape[1])).all():
            raise self._damaged(f"{name} has other inputs than those with outliers")
        outliers = Outliers(inputs, self._checked(name + OUTLIER_WEIGHT, mapped))
        return Quantized(values, scale, outliers)

    def _checked(self, name: str, mapped: bool) -> Tensor:
        tensor = self._file.read(name, mapped=mapped)
        if checksum(tensor) != self._checksums[name]:
            raise self._damaged(f"{name} does not match its checksum")
        return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: {reason}. Copy it again, or write it again with "
            "`gpt2-compat pack`."
        )


def tensors_of(name: str, weight: Tensor | Quantized) -> dict[str, Tensor]:
    """Return the tensors that a packed file stores for a weight, by their names."""
    if isinstance(weight, Tensor):
        return {name: weight}
    found = {name: weight.values, name + SCALE: weight.scale}
    if weight.outliers is not None:
        found[name + OUTLIERS], found[name + OUTLIER_WEIGHT] = weight.outliers
    return found


def write_packed(
    path: Path, tensors: dict[str, Tensor], fields: dict[str, Any], **metadata: str
) -> None:
    """Write a packed file, in which tensors are aligned as far as their sizes allow.

    Args:
        path: the file.
        tensors: its tensors, contiguous and on the CPU.
        fields: "precision", "source", "source_sha256" and "config", as `PackedFile` reads them.
        metadata: other strings for the file's metadata.
    """
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    described = json.dumps({**fields, "checksums": checksums})

    # A tensor whose size is not a multiple of the alignment shifts all that follow it.
    def place(name: str) -> tuple[bool, int]:
        return tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].itemsize

    order = sorted(tensors, key=place)
    stored = {name: (tuple(tensors[name].shape), tensors[name].dtype) for name in order}
    header, _ = header_of(stored, {"format": "pt", METADATA: described, **metadata}, ALIGNMENT)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            file.write(tensor_bytes(tensors[name]))


def checksum(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()
