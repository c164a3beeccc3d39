"""From a source (a hub id, a folder, a file, "demo") to a checked checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.checks import (
    check_depth,
    check_family,
    check_tensors,
    config_of,
    drop_extra_tensors,
    not_finite,
    note_ids,
    resolve_head,
)
from compat.checkpoint.contents import Contents, Stored, open_contents
from compat.checkpoint.files import ALL, TensorInfo, read_json
from compat.checkpoint.find import find_weights
from compat.checkpoint.foreign import HUGGING_FACE, PACKED, is_hugging_face, kind_of, translate
from compat.checkpoint.layout import CONFIG, HEAD, most_bytes
from compat.checkpoint.packed import PackedFile
from compat.config import GPT2Config
from compat.errors import CheckpointError, ConfigError, lines, listed, short_repr


@dataclass
class Checkpoint:
    """A GPT-2 on disk whose tensors have the names, shapes and data types that its config requires.

    Args:
        source: the source that was opened.
        weights: the weights file or index of shards; other files lie in the same folder.
        kind: the program that wrote it: "Hugging Face", "nanoGPT", "minGPT" (or makemore) or
            "packed" for a file of `pack_checkpoint`.
        config: the configuration; its `tie_word_embeddings` is that of the tensors.
        infos: shape and data type of every tensor of a GPT-2, the head included even if tied.
        notes: accepted deviations, as sentences.
        packed: the file, if `pack_checkpoint` wrote it.
        mmap: whether tensors share the pages of the file instead of being copied.
        check_finite: whether reading a tensor searches it for NaN and infinity.
    """

    source: str
    weights: Path
    kind: str
    config: GPT2Config
    infos: dict[str, TensorInfo]
    notes: list[str]
    _stored: dict[str, Stored]
    packed: PackedFile | None = None
    mmap: bool = True
    check_finite: bool = True

    @property
    def folder(self) -> Path:
        return self.weights.parent

    @property
    def names(self) -> list[str]:
        """The names of the tensors, without a head that is tied to the embedding."""
        tied = self.config.tie_word_embeddings
        return [name for name in self.infos if not (tied and name == HEAD)]

    @property
    def files(self) -> list[Path]:
        """The weights file, or the index and its shards in the order of their names."""
        if self.weights.suffix != ".json":
            return [self.weights]
        shards = set(read_json(self.weights)["weight_map"].values())
        return [self.weights, *(self.folder / name for name in sorted(shards))]

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the tensors, or the one that all of them promote to."""
        dtypes = {info.dtype for info in self.infos.values() if isinstance(info.dtype, torch.dtype)}
        return reduce(torch.promote_types, dtypes)

    @property
    def is_mapped(self) -> bool:
        """Whether tensors are views of the file's pages, which only safetensors allows."""
        return self.mmap and ".safetensors" in self.weights.name

    def checked_before(self) -> Checkpoint:
        """Return the same checkpoint for reading again: mapped, and not searched for NaN."""
        return replace(self, mmap=True, check_finite=False)

    def read(self, name: str) -> Tensor:
        """Return one tensor, in its own memory or, with `mmap`, in the file's pages.

        Args:
            name: its Hugging Face name, without `transformer.`, such as "h.0.attn.c_attn.weight".
                The tensor has Hugging Face's layout and its own data type.

        Raises:
            CheckpointError: The tensor has NaN or infinite values.
        """
        tensor, fault = self.take(name)
        if fault:
            raise self.not_finite([fault])
        return tensor

    def take(self, name: str, rows: slice = ALL) -> tuple[Tensor, str | None]:
        """Return one tensor and a description of its NaN and infinite values, if it has any.

        Args:
            name: as in `read`.
            rows: the rows, along the first axis, to which both refer. Safetensors files read no
                others.
        """
        tensor = self._stored[name].read(self.mmap, rows)
        fault = not_finite(tensor) if self.check_finite else None
        return tensor, fault and f"{name} has {fault}"

    def not_finite(self, faults: list[str]) -> CheckpointError:
        """Return the error that reports the faults of `take`."""
        headline = f"{self.weights} has non-finite weights:"
        next_step = (
            "\nDownload or export it again. In Python, check_finite=False loads it unchanged."
        )
        return CheckpointError(lines(headline, faults) + next_step)


Source = str | Path | Checkpoint


def open_checkpoint(
    source: Source,
    *,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
    mmap: bool = True,
    check_finite: bool = True,
) -> Checkpoint:
    """Find a checkpoint and check it against its config; of safetensors only headers are read.

    Args:
        source: "demo" for the embedded checkpoint, a folder, a weights file beside its
            `config.json`, or a hub id such as `gpt2` or `org/name`. Files of nanoGPT, minGPT and
            makemore are recognised by their contents and need no config. A Checkpoint is returned
            as it is.
        revision: branch, tag or commit on the hub.
        verify: compare every file with the hash that the hub states for it.
        n_head: the number of heads, for a minGPT or makemore file without a config.
        mmap: let tensors share the pages of a safetensors file. This is fast, and models loaded
            from one file share its memory. Replacing the file, as `save_pretrained` does, leaves
            them intact, but truncating it while it is in use kills the process. False copies the
            tensors instead, as other formats always do.
        check_finite: search tensors for NaN and infinity when they are read.

    Raises:
        CheckpointError: The source does not exist or cannot be read, or tensors are missing,
            unexpected or of the wrong shape or data type. All of them are counted, and the first
            ten are named.
        HubError: The hub could not be reached or does not have the source.
        ConfigError: The config is malformed or incomplete, or contradicts the tensors or `n_head`.
    """
    if isinstance(source, Checkpoint):
        options = {"revision": revision, "verify": verify, "n_head": n_head, "mmap": not mmap}
        if late := [name for name, value in options.items() if value]:
            raise CheckpointError(
                f"{source.source} is already open. Pass {listed(late)} to open_checkpoint."
            )
        return source
    notes: list[str] = []
    weights = find_weights(source, revision, verify, notes)
    raw_config = read_config(weights)
    contents = open_contents(weights, max_unpacked(raw_config))
    checkpoint = check(str(source), contents, raw_config, notes, n_head)
    return replace(checkpoint, mmap=mmap, check_finite=check_finite)


# The steps of `open_checkpoint`, which `inspect_checkpoint` takes one by one.


def read_config(weights: Path) -> dict[str, Any] | None:
    """Return the fields of the config.json beside the weights, if there is one."""
    path = weights.parent / CONFIG
    return read_json(path) if path.exists() else None


def max_unpacked(raw_config: Mapping[str, Any] | None) -> int:
    """Return an upper bound on the bytes of a model with this config; 0 if it states no sizes."""
    if raw_config is None or not is_hugging_face(raw_config):
        return 0
    try:
        return most_bytes(GPT2Config.from_dict(raw_config))
    except ConfigError:
        return 0  # reported when the config is needed


def check(
    source: str,
    contents: Contents,
    raw_config: Mapping[str, Any] | None,
    notes: list[str],
    n_head: int | None = None,
) -> Checkpoint:
    """Return the checkpoint in these files, provided that it is a GPT-2."""
    if n_head is not None and type(n_head) is not int:
        raise ConfigError(f"n_head is {short_repr(n_head)}, but must be an integer of 1 or more.")
    weights, stored = contents.weights, contents.tensors()
    packed = contents.packed
    kind = kind_of(contents, raw_config)
    is_foreign = kind not in (HUGGING_FACE, PACKED)
    check_family(weights, stored, has_config=not is_foreign and raw_config is not None)
    path = weights if packed else weights.parent / CONFIG
    if packed:
        config = config_of(packed.config, path)
        notes.append(f"packed in {packed.precision} from {packed.source}")
    elif is_foreign:
        config, stored = translate(kind, contents, raw_config, n_head, notes)
    else:
        if raw_config is None:
            raise CheckpointError(f"{path} is missing. Put it beside the weights.")
        config = config_of(raw_config, path)
    if not is_foreign and n_head not in (None, config.n_head):
        raise ConfigError(
            f"n_head is passed as {n_head}, but {path} has {config.n_head}. Leave out n_head "
            "(--n-head)."
        )
    check_depth(weights, config, len(stored))
    drop_extra_tensors(stored, config, notes)
    config = resolve_head(config, stored, notes)
    note_ids(config, notes)
    infos = check_tensors(weights, config, stored)
    if not packed and len({info.dtype for info in infos.values()}) > 1:
        notes.append("the tensors have several data types, and all are loaded in the widest")
    return Checkpoint(source, weights, kind, config, infos, notes, stored, packed)
