"""The contents of a golden file: names of arrays, metadata, and the meaning of every tap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from compat.checkpoint import Checkpoint
from compat.checkpoint.safetensors_file import tensor_bytes
from compat.config import HALF, GPT2Config, dtype_name
from compat.errors import ParityError, listed, short_repr
from compat.golden_files.pieces import split_name
from compat.parity.transformers_gpt2 import translation_notes, versions
from compat.tap import BLOCK_TAPS, tap_names

FORMAT, FORMAT_VERSION = "gpt2-compat golden", 1
IDS, LOSS, DECODE_IDS, DECODE_LOGITS = "input_ids", "loss", "decode.input_ids", "decode.logits"
WEIGHT, BOUND, GRADIENT = "weight.", "bound.", "grad."  # prefixes
# The columns of the array `bound.NAME`; its rows after the first are those of `HALF`.
COLUMNS = ("own", "rms", "worst", "local")

# Axes: B batch, T time, C channels, H heads, D head size, S keys, F inner width, V vocabulary.
AXES = {"probs": "B H T S", "fc": "B T F", "act": "B T F", "logits": "B T V"}
MEANING = {
    "embed": "token embedding + position embedding, which enters the first block",
    "ln_1": "the first norm of the block, with weight and bias",
    "q": "the queries of all heads side by side, not scaled",
    "k": "the keys of all heads side by side",
    "v": "the values of all heads side by side",
    "probs": "the softmax of the scaled and masked scores; 0 where the key is later than the query",
    "heads": "the results of all heads side by side, before the output projection",
    "attn": "attention after its output projection, before the residual sum",
    "resid_mid": "the residual stream after attention",
    "ln_2": "the second norm of the block, with weight and bias",
    "fc": "the first projection of the MLP, before the activation",
    "act": "the activation of the MLP",
    "mlp": "the second projection of the MLP, before the residual sum",
    "out": "the residual stream after the block, before any norm",
    "ln_f": "the final norm, with weight and bias",
    "logits": "the product with the token embedding",
}


def sizes_of(config: GPT2Config, B: int, T: int) -> dict[str, int]:
    """Return the size of every axis of a tap for ids (B, T)."""
    return {
        "B": B, "T": T, "S": T, "C": config.n_embd, "H": config.n_head, "D": config.d_head,
        "F": config.d_inner, "V": config.vocab_size,
    }  # fmt: skip


def shape_of(tap: str, config: GPT2Config, B: int, T: int) -> tuple[int, ...]:
    """Return the shape of a tap for ids (B, T)."""
    return tuple(sizes_of(config, B, T)[axis] for axis in axes_of(tap).split())


def axes_of(tap: str) -> str:
    """Return the axes of a tap, such as "B T C"."""
    return AXES.get(split_name(tap)[1], "B T C")


def select_taps(pattern: str, n_layer: int) -> list[str]:
    """Return the taps that "all", "layers" or patterns such as "h.0.*,logits" select.

    Raises:
        ParityError: a pattern does not match any tap.
    """
    names = tap_names(n_layer)
    if pattern == "all":
        return names
    if pattern == "layers":
        return [name for name in names if not name.startswith("h.") or name.endswith(".out")]
    selected: set[str] = set()
    for part in pattern.split(","):
        found = [name for name in names if fnmatchcase(name, part.strip())]
        if not found:
            raise ParityError(
                f"no tap matches {short_repr(part)}. Pass all, layers, or a pattern of names such "
                f"as 'h.0.*'. A block has the taps {listed(BLOCK_TAPS, 20)}."
            )
        selected.update(found)
    return [name for name in names if name in selected]


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of all tensors, which does not depend on the file format.

    The name, data type, shape and bytes of each tensor are hashed, in alphabetical order of the
    names.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint.names):
        tensor = checkpoint.read(name)
        digest.update(f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def metadata_of(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    shape: tuple[int, int],
    taps: Iterable[str],
) -> dict[str, Any]:
    """Return the metadata for the header of a golden file."""
    name = dtype_name(dtype)
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "source": checkpoint.source,
        "checkpoint_sha256": checkpoint_hash(checkpoint),
        "config": checkpoint.config.to_hf_dict(),
        "dtype": name,
        "input_shape": list(shape),
        "bounds": {
            "rows": [name, *map(dtype_name, HALF)],
            "columns": list(COLUMNS),
        },
        "taps": {
            tap: {
                "shape": list(shape_of(tap, checkpoint.config, *shape)),
                "axes": axes_of(tap),
                "meaning": MEANING[split_name(tap)[1]],
            }
            for tap in taps
        },
        "notes": translation_notes(checkpoint),
        "versions": versions(),
    }
