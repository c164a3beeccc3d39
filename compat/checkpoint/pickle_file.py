"""Files of `torch.save`: read with `weights_only=True`, so that no code in them is ever run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.files import TensorInfo
from compat.checkpoint.formats import looks_like
from compat.checkpoint.pickle_checks import OldStyle, check_pickled
from compat.errors import CheckpointError, listed


class PickleFile:
    """A `.bin`, `.pt` or `.pth` file of named tensors.

    Args:
        path: the file.
        most: bytes that it may unpack to, if that is more than it takes on disk.

    Attributes:
        model_args: what nanoGPT saves beside the tensors, else None.
    """

    def __init__(self, path: Path, most: int = 0) -> None:
        self._path = path
        (content, old_style), self.model_args = _unpickled(path, most), None
        if isinstance(content, dict) and {"model", "model_args"} <= content.keys():  # nanoGPT's
            content, self.model_args = content["model"], content["model_args"]
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise CheckpointError(
                f"{path} holds no plain dictionary of named tensors, as a checkpoint does; "
                "save the model's state_dict() instead"
            )
        if strange := [name for name, tensor in content.items() if not _is_plain(tensor)]:
            raise CheckpointError(
                f"{path}: {listed(strange)}: no dense tensors with data of their own; "
                "save them as contiguous tensors"
            )
        self._tensors: dict[str, Tensor] = content
        _check_data(path, content, old_style, most)
        self.infos = {k: TensorInfo(tuple(v.shape), v.dtype) for k, v in content.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().clone(memory_format=torch.contiguous_format)

    def map(self, name: str) -> Tensor:
        raise CheckpointError(
            f"{self._path} is no safetensors file, and only those can be mapped; "
            "export it as safetensors, or load it without mmap"
        )


def _unpickled(path: Path, most: int) -> tuple[Any, OldStyle | None]:
    """What is in the file, and where an old-style one has its data."""
    try:
        old_style = check_pickled(path, most)
    except Exception as error:  # a damaged archive makes zipfile raise nearly anything
        raise _unreadable(path, str(error)) from error
    try:
        with warnings.catch_warnings():  # torch warns about some damaged files before it refuses
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True), old_style
    except Exception as error:  # and the unpickler too; its texts advise to run the code
        reason = f"damaged, or holding other objects ({type(error).__name__})"
        raise _unreadable(path, reason) from error


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as a PyTorch file of plain tensors: {looks_like(path) or reason}; "
        "download it again, or ask its author for safetensors"
    )


def _check_data(path: Path, tensors: dict[str, Tensor], old: OldStyle | None, most: int) -> None:
    """Tensors have no more bytes than the file; of an old-style file they fill it to its end.

    Raises:
        CheckpointError: there are more, or some of what the file names is not in it.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
    sizes, has = [storage.nbytes() for storage in storages.values()], path.stat().st_size
    need = old.start + sum(8 + size for size in sizes) if old else sum(sizes)
    if need > max(has, most) or (old and (need != has or old.pieces != len(sizes))):
        raise CheckpointError(
            f"{path} has {has:,} bytes and its tensors need {need:,}; download it again"
            if need != has
            else f"{path} does not have the data of all of its tensors; download it again"
        )


def _is_plain(tensor: Tensor) -> bool:
    """Dense, and with as many bytes as its shape says: a repeated view could claim any size."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
