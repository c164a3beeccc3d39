"""Which Hugging Face tensor goes where: a table, one row per tensor, read in both directions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compat.errors import NameMapError, described, listed, short_repr


class Op(Protocol):
    """How one Hugging Face tensor becomes ours, and back; the two undo each other to the bit."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Hugging Face's tensor → ours, contiguous."""
        ...

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        """Our tensors → Hugging Face's; a view where one will do."""
        ...


@dataclass(frozen=True)
class Same:
    """The tensor as it is."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.contiguous(),)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def __str__(self) -> str:
        return "same"


@dataclass(frozen=True)
class Transpose:
    """`[in, out]` of Conv1D ↔ `[out, in]` of nn.Linear."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (
            tensor.t().contiguous(),
        )  # a view left in nn.Linear is slow, and wrong on some backends

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t()

    def __str__(self) -> str:
        return "transpose"


@dataclass(frozen=True)
class Split:
    """Equal parts along one axis, each transposed if `transpose` says so.

    Along the last axis these are fused q, k and v; along the first, an output projection by heads.
    """

    parts: int
    transpose: bool = False
    dim: int = -1

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if tensor.shape[self.dim] % self.parts:
            raise NameMapError(
                f"cannot split shape {list(tensor.shape)} into {self.parts} equal parts"
            )
        pieces = tensor.chunk(self.parts, dim=self.dim)
        return tuple((p.t() if self.transpose else p).contiguous() for p in pieces)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.t() if self.transpose else t for t in tensors], dim=self.dim)

    def __str__(self) -> str:
        by_rows = " by rows" if self.dim == 0 else ""
        return f"split in {self.parts}{by_rows}" + (", transpose" if self.transpose else "")


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor (without `transformer.`), the parameters made of it, and how.

    `{i}` in the names stands for the layer.

    Raises:
        NameMapError: a field of another type.
    """

    hf: str
    ours: tuple[str, ...]
    op: Op

    def __post_init__(self) -> None:
        if not isinstance(self.hf, str):
            raise NameMapError(
                f"a Row's hf is {short_repr(self.hf)}; expected a name such as 'wte.weight'"
            )
        if not _are_names(self.ours) or not self.ours:
            example = (self.ours if isinstance(self.ours, str) else "tok_emb.weight",)
            raise NameMapError(
                f"the Row of {short_repr(self.hf)}: ours is {short_repr(self.ours)}; expected a "
                f"tuple of "
                f"parameter names such as {short_repr(example)}"
            )
        if isinstance(self.op, type) or not (hasattr(self.op, "load") and hasattr(self.op, "save")):
            raise NameMapError(
                f"the Row of {short_repr(self.hf)}: op is {short_repr(self.op)}; expected an op "
                f"such as "
                "Same() or Transpose()"
            )
        object.__setattr__(self, "ours", tuple(self.ours))

    def at(self, layer: int) -> Row:
        """The row with its names written out for one layer."""
        return Row(_at(layer, self.hf), tuple(_at(layer, name) for name in self.ours), self.op)


@dataclass(frozen=True)
class NameMap:
    """The table. Names are expanded for every layer and compared as sets, never parsed.

    `zeros` names parameters that GPT-2 does not have and that must be zero, such as a head's bias.

    Raises:
        NameMapError: rows that are not Rows, or zeros that are not names.
    """

    rows: tuple[Row, ...]
    zeros: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple | list):
            raise NameMapError(
                f"a NameMap's rows is {short_repr(self.rows)}; expected a tuple of Rows"
            )
        for number, row in enumerate(self.rows):
            if not isinstance(row, Row):
                raise NameMapError(f"a NameMap's row {number} is {short_repr(row)}; expected a Row")
        if not _are_names(self.zeros):
            raise NameMapError(
                f"a NameMap's zeros is {short_repr(self.zeros)}; expected a tuple of names"
            )
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "zeros", tuple(self.zeros))

    def expand(self, n_layer: int) -> list[Row]:
        """All rows, the per-layer ones written out for layers 0 … n_layer − 1.

        Raises:
            NameMapError: a name stands in two rows.
        """
        once = [row for row in self.rows if "{i}" not in row.hf]
        per_layer = [row.at(i) for i in range(n_layer) for row in self.rows if "{i}" in row.hf]
        rows = once + per_layer
        for names in ([row.hf for row in rows], [name for row in rows for name in row.ours]):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise NameMapError(
                    f"the name map names {listed(twice)} in two rows; each belongs in one"
                )
        return rows

    def expand_zeros(self, n_layer: int) -> list[str]:
        """The names of `zeros`, those with `{i}` written out for layers 0 … n_layer − 1."""
        once = [name for name in self.zeros if "{i}" not in name]
        per_layer = [name for name in self.zeros if "{i}" in name]
        return once + [_at(i, name) for i in range(n_layer) for name in per_layer]

    def count_layers(self, parameters: Collection[str]) -> int:
        """How many layers, from 0 on, the map finds among these parameter names."""
        n_layer = 0
        while any(
            _at(n_layer, name) in parameters
            for row in self.rows
            if "{i}" in row.hf
            for name in row.ours
            if "{i}" in name  # any other would be found in every layer
        ):
            n_layer += 1
        return n_layer


def as_name_map(name_map: object) -> NameMap:
    """The argument, if it is a name map.

    Raises:
        NameMapError: it is anything else.
    """
    if isinstance(name_map, NameMap):
        return name_map
    raise NameMapError(
        f"name_map is {described(name_map)}; expected a NameMap, such as NameMap((Row(…), …)) or "
        "the one that `adapt` returns"
    )


def _are_names(names: object) -> bool:
    return isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)


def _at(layer: int, name: str) -> str:
    """The name with the layer's number written out; other braces stay."""
    return name.replace("{i}", str(layer))
