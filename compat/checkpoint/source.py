"""From what a user names (a hub id, a folder, a file, "demo") to a checked checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.checks import (
    check_depth,
    check_family,
    check_tensors,
    drop_masks,
    drop_other_heads,
    not_finite,
    note_ids,
    settle_head,
)
from compat.checkpoint.contents import by_name, model_args_of, open_files
from compat.checkpoint.files import Stored, TensorFile, TensorInfo, config_of, read_json
from compat.checkpoint.find import find_weights
from compat.checkpoint.foreign import HUGGING_FACE, is_hugging_face, kind_of, translated
from compat.checkpoint.layout import most_bytes
from compat.checkpoint.names import CONFIG
from compat.config import GPT2Config
from compat.errors import CheckpointError, ConfigError, lines, short_repr


@dataclass
class Checkpoint:
    """A GPT-2 on disk whose names, shapes and data types are those its config asks for.

    Args:
        source: what the user named.
        weights: the file or index that the tensors come from; what else there is lies beside it.
        kind: whose file it is: "Hugging Face", "nanoGPT" or "minGPT" (which includes makemore).
        config: the configuration, with `tie_word_embeddings` as the tensors have it.
        infos: shape and data type of every tensor of a GPT-2, the head included even if tied.
        notes: what was found and passed over, in words.
        mmap: whether tensors share the pages of the file instead of being copied.
        check_finite: whether values that are read are searched for NaN and infinity.
    """

    source: str
    weights: Path
    kind: str
    config: GPT2Config
    infos: dict[str, TensorInfo]
    notes: list[str]
    mmap: bool
    check_finite: bool
    _stored: dict[str, Stored]

    @property
    def folder(self) -> Path:
        return self.weights.parent

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the tensors, or the widest where they differ."""
        dtypes = {info.dtype for info in self.infos.values() if isinstance(info.dtype, torch.dtype)}
        return reduce(torch.promote_types, dtypes)

    @property
    def can_be_mapped(self) -> bool:
        """Whether it is of a format whose files can be."""
        return ".safetensors" in self.weights.name

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own, or with `mmap` in the file's pages.

        Raises:
            CheckpointError: it has a NaN or an infinity.
        """
        tensor, fault = self.take(name)
        if fault:
            raise self.not_finite([fault])
        return tensor

    def take(self, name: str) -> tuple[Tensor, str | None]:
        """One tensor, and in words which of its values are not finite, if any."""
        tensor = self._stored[name].read(self.mmap)
        fault = not_finite(tensor) if self.check_finite else None
        return tensor, fault and f"{name} has {fault}"

    def not_finite(self, faults: list[str]) -> CheckpointError:
        """The error for what `take` found."""
        headline = f"{self.weights} has weights that are not finite:"
        next_step = "\nFetch or export it again; in Python, check_finite=False loads it as it is."
        return CheckpointError(lines(headline, faults) + next_step)


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    *,
    verify: bool = False,
    mmap: bool = False,
    check_finite: bool | None = None,
    n_head: int | None = None,
) -> Checkpoint:
    """Find a checkpoint and check it against its config; of safetensors only headers are read.

    Args:
        source: "demo" for the embedded checkpoint, a folder, a weights file with its `config.json`
            beside it, or a hub id such as `gpt2` or `org/name`. Files of nanoGPT, minGPT and
            makemore are known by what is in them, and need no config.
        revision: branch, tag or commit on the hub.
        verify: compare every file with the checksum that the hub states for it.
        mmap: let tensors share the pages of a safetensors file instead of copying them. Fast, and
            several models of one file take its memory once; but a file that is cut short while it
            is in use ends the process.
        check_finite: search the values for NaN and infinity when they are read; None does so
            unless they are mapped, when nothing is read on loading.
        n_head: the number of heads, for a minGPT or makemore file without a config; where there is
            one the two must agree.

    Raises:
        CheckpointError: nothing there, unreadable, or tensors missing, left over, of the wrong
            shape or data type; all of them listed, the first ten by name.
        HubError: the hub could not be reached or lacks it.
        ConfigError: the config is not understood, or it does not say enough.
    """
    notes: list[str] = []
    weights = find_weights(source, revision, verify, notes)
    beside = config_beside(weights)
    files = open_files(weights, most_unpacked(beside))
    checkpoint = checked(str(source), weights, beside, files, notes, n_head)
    checkpoint.mmap = mmap
    checkpoint.check_finite = not mmap if check_finite is None else check_finite
    return checkpoint


# The steps of it, which `inspect_checkpoint` takes one by one.


def config_beside(weights: Path) -> dict[str, Any] | None:
    """The config.json in the weights' folder, if there is one."""
    path = weights.parent / CONFIG
    return read_json(path) if path.exists() else None


def most_unpacked(beside: Mapping[str, Any] | None) -> int:
    """The bytes that a pickle may unpack to by its config; 0 where that does not say so."""
    known = beside is not None and is_hugging_face(beside)
    try:
        return most_bytes(GPT2Config.from_dict(beside)) if beside is not None and known else 0
    except ConfigError:
        return 0  # it is told when the config is needed


def checked(
    source: str,
    weights: Path,
    beside: Mapping[str, Any] | None,
    files: dict[Path, TensorFile],
    notes: list[str],
    n_head: int | None = None,
) -> Checkpoint:
    """The checkpoint in files that are open, once it has proved to be one."""
    if n_head is not None and type(n_head) is not int:
        raise ConfigError(f"n_head is {short_repr(n_head)}; expected an integer of 1 or more")
    stored, model_args = by_name(files), model_args_of(files)
    kind = kind_of(model_args, beside, stored)
    check_family(weights, stored, facts_known=kind == HUGGING_FACE and beside is not None)
    if kind == HUGGING_FACE:
        config = _hugging_face_config(weights, beside, n_head)
    else:
        config, stored = translated(kind, weights, stored, model_args, beside, n_head, notes)
    check_depth(weights, config, len(stored))
    drop_masks(stored, config, notes)
    drop_other_heads(stored, notes)
    config = settle_head(config, stored, notes)
    note_ids(config, notes)
    infos = check_tensors(weights, config, stored)
    if len({info.dtype for info in infos.values()}) > 1:
        notes.append("the tensors have several data types; all are loaded in the widest")
    return Checkpoint(source, weights, kind, config, infos, notes, False, True, stored)


def _hugging_face_config(
    weights: Path, beside: Mapping[str, Any] | None, n_head: int | None
) -> GPT2Config:
    if beside is None:
        path = weights.parent / CONFIG
        raise CheckpointError(f"{path} is missing; it belongs beside the weights")
    config = config_of(beside, weights.parent / CONFIG)
    if n_head not in (None, config.n_head):
        raise ConfigError(
            f"n_head is given as {n_head}, but {weights.parent / CONFIG} has {config.n_head}; "
            "leave out n_head (--n-head)"
        )
    return config
