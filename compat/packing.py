"""Packing a checkpoint: its weights in the precision of an engine, in one file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.checkpoint.checks import not_finite
from compat.checkpoint.foreign import PROJECTIONS
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS
from compat.checkpoint.packed import (
    ALIGNMENT,
    METADATA,
    OUTLIER_WEIGHT,
    OUTLIERS,
    PRECISIONS,
    SCALE,
    checksum,
)
from compat.decoding.matrices import quantize
from compat.decoding.outliers import inputs_with_outliers
from compat.errors import CheckpointError, ConfigError, described, short_repr
from compat.saving.atomic import replacing_file


def pack_checkpoint(
    source: Source,
    file: str | Path,
    *,
    dtype: Literal["int8", "bfloat16"] | torch.dtype = "int8",
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
) -> Path:
    """Write a checkpoint's weights to one file in the precision of an engine; return its path.

    `Engine.from_pretrained(file)` then reads a quarter (int8) or half (bfloat16) of the bytes, and
    does not quantize. The file holds the config, the SHA-256 of the checkpoint's weights, and that
    of each of its own tensors, which is verified when the tensor is read. All other functions
    accept it as a source too, and get the rounded values. It has no tokenizer: keep the tokenizer's
    files beside it.

    Args:
        source: a checkpoint of any kind.
        file: the path to write, which must end with ".safetensors". An existing file is replaced as
            a whole.
        dtype: "int8": the matrices in 8 bits, with a scale for each output, embeddings in bfloat16
            and the rest in float32. "bfloat16": everything in bfloat16. A torch.dtype also works.
        revision, verify, n_head: see `open_checkpoint`.

    Raises:
        ConfigError: The data type or the file's suffix is not one of these.
        CheckpointError: The source is a packed file or has values beyond the range of the data
            type, or the file cannot be written; see also `open_checkpoint`.
    """
    precision = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ConfigError(f"dtype is {short_repr(dtype)}; expected 'int8' or 'bfloat16'.")
    if not isinstance(file, str | os.PathLike) or Path(file).suffix != ".safetensors":
        raise ConfigError(f"file is {described(file)}; expected a path that ends in .safetensors.")
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    if checkpoint.packed:
        raise CheckpointError(
            f"{checkpoint.weights} is already packed. Pack {checkpoint.packed.source} instead, "
            "from which it was made."
        )
    tensors = _packed(checkpoint, precision)
    # The head of an int8 model is quantized, and its embedding is not.
    tied = checkpoint.config.tie_word_embeddings and precision == "bfloat16"
    fields = {**checkpoint.config.to_hf_dict(), "tie_word_embeddings": tied}
    metadata = {
        "precision": precision,
        "source": checkpoint.source,
        "source_sha256": _sha256(checkpoint.files),
        "config": fields,
        "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    with replacing_file(file) as temporary:
        try:
            _save(tensors, temporary, json.dumps(metadata))
        except SafetensorError as error:  # it wraps errors of the system
            raise OSError(str(error)) from error
    return Path(file)


def _save(tensors: dict[str, Tensor], file: Path, metadata: str) -> None:
    """Write the file; if its data is not aligned, again with a longer header."""
    save_file(tensors, file, {"format": "pt", METADATA: metadata})
    with file.open("rb") as written:
        start = 8 + int.from_bytes(written.read(8), "little")
    if padding := -start % ALIGNMENT:
        save_file(tensors, file, {"format": "pt", METADATA: metadata + " " * padding})


def _packed(checkpoint: Checkpoint, dtype: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    outliers = _outliers(checkpoint) if dtype == "int8" else {}
    for name in checkpoint.infos:
        tied = name == HEAD and checkpoint.config.tie_word_embeddings
        if dtype == "int8" and name.endswith((*PROJECTIONS, HEAD)):
            weight = checkpoint.read(EMBEDDING if tied else name)
            by_input = weight.t() if name == HEAD else weight
            tensors[name], tensors[name + SCALE], exact = quantize(by_input, outliers.get(name))
            if exact is not None:
                tensors[name + OUTLIERS], tensors[name + OUTLIER_WEIGHT] = exact
        elif not tied:
            wide = dtype == "int8" and name not in (EMBEDDING, POSITIONS)
            tensor = checkpoint.read(name)
            tensors[name] = tensor.to(torch.float32 if wide else torch.bfloat16).contiguous()
            if fault := not_finite(tensors[name]):
                raise CheckpointError(f"in {tensors[name].dtype}, {name} has {fault}.")
    return tensors


def _outliers(checkpoint: Checkpoint) -> dict[str, Tensor]:
    embedding = (
        checkpoint.read(EMBEDDING).to(torch.bfloat16),
        checkpoint.read(POSITIONS).to(torch.bfloat16),
    )
    return inputs_with_outliers(checkpoint.config, embedding, lambda name: [checkpoint.read(name)])


def _sha256(files: list[Path]) -> str:
    """The SHA-256 of the bytes of all files, one after another."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    return found.hexdigest()
