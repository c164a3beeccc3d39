"""From what a user names (a hub id, a folder, a file, "demo") to a checked checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from compat.checkpoint.files import TensorFile, TensorInfo, open_file, read_json, shards_of
from compat.checkpoint.hub import fetch
from compat.checkpoint.layout import EMBEDDING, HEAD, PREFIX, expected_shapes, mask_buffers
from compat.config import GPT2Config
from compat.errors import CheckpointError, lines, listed

Stored = dict[str, tuple[TensorFile, str]]  # name → its file, and the name it has in there

DEMO = Path(__file__).parent.parent / "demo"

HUB_ID = r"[\w.-]+(/[\w.-]+)?"

# In the order in which they are looked for: safetensors first, as one file or in shards.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass
class Checkpoint:
    """A GPT-2 on disk whose names, shapes and data types are those its config asks for.

    Args:
        source: what the user named.
        weights: the file or index that the tensors come from; `config.json` lies beside it.
        config: the configuration, with `tie_word_embeddings` as the tensors have it.
        infos: shape and data type of every tensor of a GPT-2, the head included even if tied.
        notes: what was found and passed over, in words.
    """

    source: str
    weights: Path
    config: GPT2Config
    infos: dict[str, TensorInfo]
    notes: list[str]
    _files: Stored

    @property
    def folder(self) -> Path:
        return self.weights.parent

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the tensors, or the widest where they differ."""
        dtypes = {info.dtype for info in self.infos.values() if isinstance(info.dtype, torch.dtype)}
        return reduce(torch.promote_types, dtypes)

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            CheckpointError: it has a NaN or an infinity.
        """
        file, stored = self._files[name]
        tensor = file.read(stored)
        if not torch.isfinite(tensor).all():
            bad = (~torch.isfinite(tensor)).nonzero()
            raise CheckpointError(
                f"{self.weights}: {name} has {len(bad)} NaN or infinite values, the first at "
                f"{bad[0].tolist()}; weights must be finite, fetch or export the file again"
            )
        return tensor


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and check it against its config; of safetensors only headers are read.

    Args:
        source: "demo" for the embedded checkpoint, a folder, a weights file with its `config.json`
            beside it, or a hub id such as `gpt2` or `org/name`.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: nothing there, unreadable, or tensors missing, left over, of the wrong
            shape or data type; the first ten of each are named, the rest counted.
        HubError: the hub could not be reached or lacks it.
        ConfigError: the config is not understood.
    """
    weights = find_weights(source, revision)
    config = GPT2Config.from_dict(read_json(weights.parent / "config.json"))
    paths = shards_of(weights) if weights.name.endswith(".index.json") else [weights]
    files: Stored = {}
    for path in paths:
        file = open_file(path)
        for stored in file.infos:
            name = stored.removeprefix(PREFIX)
            if name in files:
                raise CheckpointError(
                    f"{path} holds {name} a second time (as {stored}); each belongs once"
                )
            files[name] = file, stored
    return _checked(str(source), weights, config, files)


def find_weights(source: str | Path, revision: str | None) -> Path:
    """The weights file, or index of shards, that a source means."""
    path = DEMO if source == "demo" else Path(source)
    if isinstance(source, str) and not path.exists() and re.fullmatch(HUB_ID, source):
        path = fetch(source, revision)
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{source} is neither a folder, a file nor a hub id; expected something like "
            "'gpt2', a folder with config.json and weights, or 'demo'"
        )
    for name in WEIGHT_FILES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")


def _checked(source: str, weights: Path, config: GPT2Config, files: Stored) -> Checkpoint:
    """Compare the set of tensors with the set that the config asks for."""
    if config.n_layer > len(files):  # before a million names are written out
        raise CheckpointError(
            f"{weights} has {len(files)} tensors, fewer than the {config.n_layer} layers (n_layer) "
            "of its config.json; check that the two belong together"
        )
    notes = []
    masks = files.keys() & mask_buffers(config)
    if masks:
        notes.append(
            f"ignored {len(masks)} causal-mask buffers (attn.bias, attn.masked_bias): no weights"
        )
    files = {name: file for name, file in files.items() if name not in masks}
    config = _settle_head(config, files, notes)
    expected = expected_shapes(config)
    infos = {name: file.infos[stored] for name, (file, stored) in files.items()}

    faults = []
    if missing := [name for name in expected if name not in infos]:
        faults.append(f"{len(missing)} missing: {listed(missing)}")
    if unexpected := [name for name in infos if name not in expected]:
        faults.append(f"{len(unexpected)} left over: {listed(unexpected)}")
    faults += [
        _shape_fault(name, infos[name].shape, expected[name])
        for name in expected
        if name in infos and infos[name].shape != expected[name]
    ]
    if faults:
        headline = f"{weights} does not hold the tensors that its config.json asks for:"
        raise CheckpointError(
            lines(headline, faults)
            + "\nCheck that the two belong together and its sizes are right."
        )
    if strange := [
        f"{name} ({infos[name].dtype})" for name in expected if not _is_float(infos[name])
    ]:
        raise CheckpointError(
            f"{weights}: {listed(strange)}; weights must be floating-point numbers"
        )
    if len({info.dtype for info in infos.values()}) > 1:
        notes.append("the tensors have several data types; all are loaded in the widest")
    infos = {name: infos[name] for name in expected}
    return Checkpoint(source, weights, config, infos, notes, files)


def _settle_head(config: GPT2Config, files: Stored, notes: list[str]) -> GPT2Config:
    """An absent tied head is the embedding; a stored one is compared with it."""
    if not config.tie_word_embeddings or EMBEDDING not in files:
        return config
    if HEAD not in files:
        files[HEAD] = files[EMBEDDING]
        return config
    (head_file, head_name), (file, name) = files[HEAD], files[EMBEDDING]
    if torch.equal(head_file.read(head_name), file.read(name)):
        notes.append(f"{HEAD} is stored, and equal to {EMBEDDING}, as tie_word_embeddings says")
        return config
    notes.append(
        f"{HEAD} differs from {EMBEDDING} although the config says tie_word_embeddings; "
        "the stored head is used, untied, as transformers does"
    )
    return replace(config, tie_word_embeddings=False)


def _shape_fault(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    looks = " looks transposed:" if found == expected[::-1] and len(found) == 2 else ""
    return f"{name}:{looks} found {list(found)}, expected {list(expected)}"


def _is_float(info: TensorInfo) -> bool:
    return info.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
