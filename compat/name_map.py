"""A name map: a table with one row per Hugging Face tensor, which is used in both directions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compat.errors import NameMapError, described, listed, short_repr
from compat.ops import Op


@dataclass(frozen=True)
class Row:
    """Assigns one Hugging Face tensor to parameters of a model.

    Args:
        hf: name of the tensor, without `transformer.`; `{i}` stands for the layer.
        ours: names of the parameters, in which `{i}` stands for the layer too. `name[{i}]` is a
            slice of a parameter that holds all layers along its first axis.
        op: how the tensor becomes the parameters, such as `Transpose()`; see `compat.ops`.

    Raises:
        NameMapError: A field has another type.
    """

    hf: str
    ours: tuple[str, ...]
    op: Op

    def __post_init__(self) -> None:
        if not isinstance(self.hf, str):
            raise NameMapError(
                f"a Row's hf is {short_repr(self.hf)}, but must be a name such as 'wte.weight'."
            )
        where = f"the Row of {short_repr(self.hf)}:"
        if not _are_names(self.ours) or not self.ours:
            example = (self.ours if isinstance(self.ours, str) else "tok_emb.weight",)
            raise NameMapError(
                f"{where} ours is {short_repr(self.ours)}, but must be a tuple of parameter names "
                f"such as {short_repr(example)}."
            )
        if isinstance(self.op, type) or not (hasattr(self.op, "load") and hasattr(self.op, "save")):
            raise NameMapError(
                f"{where} op is {short_repr(self.op)}, but must be an op such as Same() or "
                "Transpose()."
            )
        object.__setattr__(self, "ours", tuple(self.ours))

    def at(self, layer: int) -> Row:
        """Return the row of one layer."""
        return Row(_at(layer, self.hf), tuple(_at(layer, name) for name in self.ours), self.op)

    def hf_shape(self, parameters: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Return the shape of the Hugging Face tensor, from the shapes of the parameters."""
        ours = [torch.empty(parameters[name].shape, device="meta") for name in self.ours]
        return tuple(self.op.save(ours).shape)


@dataclass(frozen=True)
class NameMap:
    """The rows of a model. Names are written out for every layer and compared as sets, not parsed.

    Args:
        rows: one for each Hugging Face tensor.
        zeros: names of parameters that GPT-2 does not have and that must be zero, such as the bias
            of a head.

    Raises:
        NameMapError: `rows` is not a sequence of Rows, or `zeros` not one of names.
    """

    rows: tuple[Row, ...]
    zeros: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple | list):
            raise NameMapError(
                f"a NameMap's rows is {short_repr(self.rows)}, but must be a tuple of Rows."
            )
        for number, row in enumerate(self.rows):
            if not isinstance(row, Row):
                raise NameMapError(
                    f"a NameMap's row {number} is {short_repr(row)}, but must be a Row."
                )
        if not _are_names(self.zeros):
            raise NameMapError(
                f"a NameMap's zeros is {short_repr(self.zeros)}, but must be a tuple of names."
            )
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "zeros", tuple(self.zeros))

    def expand(self, n_layer: int) -> list[Row]:
        """Return all rows, with those of a layer written out for layers 0 … n_layer − 1.

        Raises:
            NameMapError: A name is in two rows.
        """
        once = [row for row in self.rows if "{i}" not in row.hf]
        rows = once + [row.at(i) for i in range(n_layer) for row in self.rows if "{i}" in row.hf]
        for names in ([row.hf for row in rows], [name for row in rows for name in row.ours]):
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise NameMapError(
                    f"the name map has {listed(repeated)} in two rows. Remove one of them."
                )
        return rows

    def expand_zeros(self, n_layer: int) -> list[str]:
        """Return all names of `zeros`, with a layer's written out for layers 0 … n_layer − 1."""
        once = [name for name in self.zeros if "{i}" not in name]
        return once + [_at(i, z) for i in range(n_layer) for z in self.zeros if "{i}" in z]

    def count_layers(self, parameters: Collection[str]) -> int:
        """Count the consecutive layers, from 0, that have parameters with these names."""
        names = [name for row in self.rows if "{i}" in row.hf for name in row.ours if "{i}" in name]
        n_layer = 0
        while any(_at(n_layer, name) in parameters for name in names):
            n_layer += 1
        return n_layer


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name, each under all of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def names_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of all parameters in rows."""
    return [name for row in rows for name in row.ours]


def whole_of(name: str) -> str | None:
    """Return the parameter that a name is a slice of: "w" for "w[3]", None for other names."""
    return name.rpartition("[")[0] if name.endswith("]") else None


def sliced(parameters: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters with those of which slices are named, such as `w[3]`, cut into slices.

    Such a parameter is replaced by all of its slices along the first axis, which share its memory.
    """
    found = dict(parameters)
    wholes = {whole for n in names if n not in parameters and (whole := whole_of(n))}
    patterns = [re.escape(name).replace(r"\{i\}", r"\d+") for name in wholes]
    slices: dict[int, list[Tensor]] = {}  # by the parameter's id, so that ties are kept
    for name, parameter in parameters.items():
        if parameter.ndim and any(re.fullmatch(pattern, name) for pattern in patterns):
            layers = slices.setdefault(id(parameter), [parameter[i] for i in range(len(parameter))])
            del found[name]
            found |= {f"{name}[{i}]": layer for i, layer in enumerate(layers)}
    return found


def as_name_map(name_map: object) -> NameMap:
    """Return the argument, provided that it is a NameMap.

    Raises:
        NameMapError: The argument is anything else.
    """
    if isinstance(name_map, NameMap):
        return name_map
    raise NameMapError(
        f"name_map is {described(name_map)}, but must be a NameMap. Pass NameMap((Row(…), …)) or "
        "the one that `adapt` returns."
    )


def _are_names(names: object) -> bool:
    return isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)


def _at(layer: int, name: str) -> str:
    """Return the name with the layer's number in place of `{i}`; other braces stay."""
    return name.replace("{i}", str(layer))
