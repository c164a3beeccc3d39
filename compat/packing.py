"""Packing a checkpoint: its weights in the precision of an engine, in one file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import torch

from compat.checkpoint import Source, open_checkpoint
from compat.checkpoint.checks import not_finite
from compat.checkpoint.packed import PRECISIONS, write_packed
from compat.config import dtype_name
from compat.decoding.int8_weights import Int8Weights
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
    precision = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ConfigError(f"dtype is {short_repr(dtype)}, but must be 'int8' or 'bfloat16'.")
    if not isinstance(file, str | os.PathLike) or Path(file).suffix != ".safetensors":
        raise ConfigError(
            f"file is {described(file)}, but must be a path that ends in .safetensors."
        )
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    if checkpoint.packed:
        raise CheckpointError(
            f"{checkpoint.weights} is already packed. Pack {checkpoint.packed.source} instead, "
            "from which it was made."
        )
    if precision == "int8":
        tensors = Int8Weights(checkpoint).tensors()
    else:
        tensors = {n: checkpoint.read(n).bfloat16().contiguous() for n in checkpoint.names}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (fault := not_finite(tensor)):
            raise CheckpointError(f"in {tensor.dtype}, {name} has {fault}.")
    # The head of an int8 model is quantized, and its embedding is not.
    tied = checkpoint.config.tie_word_embeddings and precision == "bfloat16"
    fields = {
        "precision": precision,
        "source": checkpoint.source,
        "source_sha256": _sha256(checkpoint.files),
        "config": {**checkpoint.config.to_hf_dict(), "tie_word_embeddings": tied},
    }
    with replacing_file(file) as temporary:
        write_packed(temporary, tensors, fields)
    return Path(file)


def _sha256(files: list[Path]) -> str:
    """Return the SHA-256 of the bytes of all files, one after another."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: found)
    return found.hexdigest()
