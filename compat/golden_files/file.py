"""Golden arrays in a file or in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.config import DTYPES, GPT2Config, dtype_name
from compat.display import HtmlPage
from compat.errors import ConfigError, ParityError, short_repr
from compat.golden_files.arrays import Arrays, open_arrays, writable, writing
from compat.golden_files.backward import readers_of
from compat.golden_files.bounds import Bound
from compat.golden_files.contents import (
    BOUND,
    DECODE_LOGITS,
    FORMAT,
    FORMAT_VERSION,
    GRADIENT,
    IDS,
    LOSS,
    WEIGHT,
    checkpoint_hash,
)
from compat.golden_files.pieces import KEPT, MissingWeightError, Weights
from compat.tap import tap_names

if TYPE_CHECKING:
    from compat.golden_files.report import GoldenReport

# A file or folder, arrays by name, or a function that takes the ids.
CandidateSource = str | Path | Mapping[str, object] | Callable[[Any], object]
Rename = Mapping[str, str | None]  # from a candidate's names to taps; None ignores an array


@dataclass(repr=False)
class Golden(HtmlPage):
    """What `transformers` computes for some ids: taps, gradients and decode steps, with bounds.

    Args:
        metadata: the metadata in the header, see the README of `compat.golden_files`.
        arrays: the arrays by name, which are read on demand.
        path: the file, or None for arrays in memory.
    """

    _height = 480

    metadata: dict[str, Any]
    arrays: Arrays
    path: Path | None = None

    @classmethod
    def open(cls, path: str | Path) -> Golden:
        """Open a golden file, .safetensors or .npz, and read its header.

        Raises:
            ParityError: the file is missing, damaged, or not a golden file.
        """
        path = Path(path)
        arrays = open_arrays(path)
        stored = arrays.pop("metadata", None)
        text = None
        if path.suffix == ".safetensors":
            text = SafetensorsFile(path).metadata.get("golden")
        elif stored is not None:
            text = stored.load().numpy().tobytes().decode(errors="replace")
        golden = cls(_parsed(path, text), arrays, path)
        golden._check_complete()
        return golden

    def _check_complete(self) -> None:
        """Raise an error unless the file contains every array and its bounds."""
        try:
            B, T = self.metadata["input_shape"]
            taps = {name: tuple(tap["shape"]) for name, tap in self.metadata["taps"].items()}
            rows, columns = (len(self.metadata["bounds"][x]) for x in ("rows", "columns"))
            self.dtype  # noqa: B018
            self.config  # noqa: B018
        except (LookupError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise ParityError(
                f"{self.path} has incomplete metadata: {short_repr(error)}. Write the file again "
                "with gpt2-compat golden."
            ) from None
        expected: dict[str, tuple[int, ...]] = {IDS: (B, T)}
        for name, shape in taps.items():
            expected |= {name: shape, BOUND + name: (rows, columns)}
        for name, shape in expected.items():
            found = self.arrays.get(name)
            if found is None or found.shape != shape:
                what = "no array" if found is None else f"an array of shape {list(found.shape)} as"
                raise ParityError(
                    f"{self.path} has {what} {name}, but must have one of shape {list(shape)}. "
                    "Write the file again with gpt2-compat golden."
                )

    @cached_property
    def config(self) -> GPT2Config:
        """The configuration of the checkpoint."""
        return GPT2Config.from_dict(self.metadata["config"])

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the reference."""
        return DTYPES[self.metadata["dtype"]]

    @property
    def source(self) -> str:
        """The name of the checkpoint from which the arrays were recorded."""
        return str(self.metadata["source"])

    @cached_property
    def ids(self) -> Tensor:
        """The token ids (B, T)."""
        return self.read(IDS)

    @property
    def taps(self) -> list[str]:
        """The recorded taps in execution order."""
        return list(self.metadata["taps"])

    @cached_property
    def judged(self) -> list[str]:
        """The arrays that have bounds: taps, loss, gradients in backward order, decode steps."""
        bounded = [name.removeprefix(BOUND) for name in self.arrays if name.startswith(BOUND)]
        backward = [name for name in bounded if name.startswith(GRADIENT)]
        names = [*self.taps, LOSS, *sorted(backward, key=self._backward_order), DECODE_LOGITS]
        return [name for name in names if name in bounded]

    def _backward_order(self, name: str) -> tuple[int, str]:
        """Return a key that sorts gradients from the logits to the embedding.

        The gradients of a piece's parameters follow that of the tap it computes. The gradient of
        the tied embedding comes last.
        """
        own, order = name.removeprefix(GRADIENT), tap_names(self.config.n_layer)
        if own in order:
            return -order.index(own), ""
        return -min(order.index(reader) for reader in readers_of(own, self.config)), own

    def read(self, name: str) -> Tensor:
        """Read one array, in its own shape and data type, such as "h.0.act" (B, T, 4C)."""
        return self.arrays[name].load()

    def bound(self, name: str, dtype: torch.dtype) -> Bound:
        """Return the bounds of an array for a candidate of a data type.

        Args:
            name: the array, one of `judged`.
            dtype: torch.float16 or torch.bfloat16 selects the bounds for this type, and any other
                type those for the reference's.
        """
        rows: list[str] = self.metadata["bounds"]["rows"]
        narrow = dtype_name(dtype)
        row = rows.index(narrow) if narrow in rows[1:] and dtype != self.dtype else 0
        return Bound(*self.read(BOUND + name)[row].tolist())

    def open_model(self, source: Source) -> Checkpoint:
        """Open a checkpoint and verify that the golden arrays were recorded from its tensors.

        Raises:
            ParityError: the arrays were recorded from another checkpoint.
            CompatError: the checkpoint cannot be opened.
        """
        # The diagnosis reads the weights many times. The hash already verifies their values.
        checkpoint = open_checkpoint(source).checked_before()
        if checkpoint_hash(checkpoint) != self.metadata["checkpoint_sha256"]:
            raise ParityError(
                f"the golden arrays were recorded from {self.source}, but the tensors of "
                f"{checkpoint.source} differ from it. Pass the same checkpoint, or none."
            )
        return checkpoint

    def weights(self, checkpoint: Checkpoint | None) -> Weights:
        """Return the weights of the pieces, from the arrays or else from the checkpoint."""

        def read(name: str) -> Tensor:
            if WEIGHT + name in self.arrays:
                return self.read(WEIGHT + name)
            if checkpoint is None:
                raise MissingWeightError(name)
            return checkpoint.read(name)

        return Weights(self.config, self.ids, lru_cache(KEPT)(read))

    def __repr__(self) -> str:
        B, T = self.ids.shape
        extra = "".join(
            f", {words}"
            for name, words in ((LOSS, "gradients"), (DECODE_LOGITS, "decode steps"))
            if name in self.arrays
        )
        place = "in memory" if self.path is None else str(self.path)
        return (
            f"<Golden {place}: {self.source}, {self.metadata['dtype']}, {B} × {T} ids, "
            f"{len(self.taps)} taps{extra}>"
        )

    def to_json(self, *, full: bool = False) -> dict[str, Any]:
        """Return the metadata as plain values.

        Args:
            full: include the shape, axes and meaning of every tap instead of its name only.
        """
        return {**self.metadata, "taps": self.metadata["taps"] if full else self.taps}

    def save(self, path: str | Path) -> None:
        """Write the arrays to a file, .safetensors or .npz.

        Raises:
            ParityError: the suffix is another one, or NumPy lacks a data type.
            CheckpointError: the file cannot be written.
        """
        shapes = {
            name: (array.shape, DTYPES.get(array.dtype, torch.int64))
            for name, array in self.arrays.items()
        }
        path = writable(path, (dtype for _, dtype in shapes.values()))
        with writing(path, shapes, json.dumps(self.metadata)) as write:
            for name in self.arrays:
                write(name, self.read(name))

    def check(
        self,
        candidate: CandidateSource,
        *,
        model: Source | None = None,
        rename: Rename | None = None,
    ) -> GoldenReport:
        """Compare a candidate's arrays with these, and name the deviations.

        Args:
            candidate: a file (.safetensors, .npz) or a folder of .npy files; arrays by name, from
                NumPy, torch or any library with `__array__` or `__dlpack__`; or a function that
                takes the ids as a NumPy array (B, T) and returns logits or arrays by name.
            model: the checkpoint from which these arrays were recorded. If it is passed, pieces
                with matrices are also compared on the candidate's own inputs.
            rename: maps names of the candidate's arrays to taps; `{i}` stands for the layer, and
                None ignores an array.

        Returns:
            The report, which is true if every array of the candidate is within its bounds.

        Raises:
            ParityError: an array cannot be read, has an unknown name or the wrong shape, or was
                computed from other ids.
        """
        from compat.golden_files.check import check  # only comparisons need these imports

        return check(self, candidate, model, rename)


def _parsed(path: Path, text: str | None) -> dict[str, Any]:
    """Parse the metadata of a golden file."""
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ParityError(
            f"{path} is not a golden file. Write one with gpt2-compat golden --model SOURCE "
            "--out FILE."
        )
    if found.get("version") != FORMAT_VERSION:
        raise ParityError(
            f"{path} has version {short_repr(found.get('version'))} of the golden format, but must "
            f"have version {FORMAT_VERSION}. Write the file again, or update compat."
        )
    return found
