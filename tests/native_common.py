"""Helpers of the native.c tests: hardware requirements, and transformers built on each kernel."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compat.checkpoint import open_checkpoint
from compat.decoding import kernels
from compat.decoding.matrices import Blas, Int8TwoTerm, Pack
from compat.decoding.native import (
    NativeInt8,
    NativeInt8Prompts,
    NativeLinear,
    NativePrompts,
    transformer_class,
)
from compat.decoding.transformer import Transformer

WITH_COMPILER = shutil.which("cc") is not None
needs_compiler = pytest.mark.skipif(not WITH_COMPILER, reason="no C compiler")
# native.c multiplies many rows on these processors only.
needs_vnni = pytest.mark.vnni
PROMPT_KERNELS = [
    pytest.param("float32", NativePrompts, marks=needs_vnni),
    pytest.param("bfloat16", NativePrompts, marks=needs_vnni),
    pytest.param("int8", NativeInt8Prompts, marks=needs_vnni),
]
KERNELS = [
    ("float32", NativeLinear),
    ("bfloat16", NativeLinear),
    ("int8", NativeInt8),
    *PROMPT_KERNELS,
]


def _name(value: Any) -> str:
    return getattr(value, "__name__", value)


each_kernel = pytest.mark.parametrize(("dtype", "pack"), KERNELS, ids=_name)
each_prompt_kernel = pytest.mark.parametrize(("dtype", "pack"), PROMPT_KERNELS, ids=_name)
# The largest error of the kernels, as a multiple of the error of torch's products of the same
# precision, both against float64. In float32 both round differently; a position that is off by one
# increases the error by a factor of a hundred thousand.
ERROR_LIMIT = {"float32": 2, "bfloat16": 1.3, "int8": 1.3}


def transformer_with(pack: Pack, folder: Path, dtype: str) -> Any:
    """Return the transformer with products of this kind."""
    checkpoint = open_checkpoint(folder)
    stored = getattr(torch, dtype) if dtype.startswith("float") else torch.bfloat16
    embedding = checkpoint.read("wte.weight").to(stored), checkpoint.read("wpe.weight").to(stored)

    def read(name: str) -> list[Tensor]:
        return [checkpoint.read(name)]

    activations = kernels.ACTIVATIONS.get(dtype, torch.float64)
    return transformer_class(pack, torch.device("cpu"))(
        checkpoint.config, embedding, read, pack, activations
    )


def by_torch(folder: Path, dtype: str = "float32", int8: Pack = Int8TwoTerm) -> Transformer:
    """Return the transformer with torch's products of the same precision, or of float64."""
    transformer: Transformer = transformer_with(int8 if dtype == "int8" else Blas, folder, dtype)
    return transformer


def plant_outliers(folder: Path) -> dict[str, list[int]]:
    """Make a few inputs of three products hundreds of times as large as the others.

    The inputs that come from norms do not change what the model computes, because their weights
    shrink by the same factor. Two units of each MLP are shifted by 1,000 and scaled.

    Returns:
        The indices of these inputs for each weight, by name.
    """
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name in [
        name for name in tensors if name.endswith(("attn.c_attn.weight", "mlp.c_fc.weight"))
    ]:
        layer, norm = name.rsplit(".", 3)[0], "ln_1" if "attn" in name else "ln_2"
        for parameter in (f"{layer}.{norm}.weight", f"{layer}.{norm}.bias"):
            tensors[parameter][[3, 17]] *= 300
        tensors[name][[3, 17]] /= 300
        found[name.removeprefix("transformer.")] = [3, 17]
    for name in [name for name in tensors if name.endswith("mlp.c_proj.weight")]:
        into = name.replace("c_proj.weight", "c_fc")
        tensors[f"{into}.weight"][:, [7, 50]] *= 30
        tensors[f"{into}.bias"][[7, 50]] += 1000
        tensors[name.replace("weight", "bias")] -= 1000 * tensors[name][[7, 50]].sum(0)
        found[name.removeprefix("transformer.")] = [7, 50]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return found
