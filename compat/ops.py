"""Operations of a name map: how a Hugging Face tensor becomes parameters of a model, and back.

`Same`, `Transpose` and `Split` cover models whose parameters have the usual shapes. `Rearrange`,
`Fused` and `Rows` name axes as einops does, and cover parameters of any arrangement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from compat.errors import NameMapError


class Op(Protocol):
    """How one Hugging Face tensor becomes parameters; `save` is the bit-exact inverse of `load`."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Hugging Face's tensor → parameters, contiguous."""
        ...

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        """Parameters → Hugging Face's tensor, as a view if possible."""
        ...


def views(op: Op, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the result of `op.load`, without copying the tensor if the operation has a `view`."""
    view: Callable[[Tensor], tuple[Tensor, ...]] = getattr(op, "view", op.load)
    return view(tensor)


@dataclass(frozen=True)
class Same:
    """The tensor, unchanged."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.contiguous(),)

    def view(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def __str__(self) -> str:
        return "same"


@dataclass(frozen=True)
class Transpose:
    """`[in, out]` of Conv1D ↔ `[out, in]` of nn.Linear."""

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        # Contiguous: as a view, the weight of nn.Linear is slow, and wrong on some backends.
        return (tensor.t().contiguous(),)

    def view(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.t(),)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t()

    def __str__(self) -> str:
        return "transpose"


@dataclass(frozen=True)
class Split:
    """Equal parts along one axis, optionally transposed.

    Along the last axis these are fused q, k and v; along the first, the heads of an output
    projection.
    """

    parts: int
    transpose: bool = False
    dim: int = -1

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in self.view(tensor))

    def view(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if tensor.shape[self.dim] % self.parts:
            raise NameMapError(
                f"shape {list(tensor.shape)} cannot be split into {self.parts} equal parts"
            )
        parts = tensor.chunk(self.parts, dim=self.dim)
        return tuple(part.t() if self.transpose else part for part in parts)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.t() if self.transpose else t for t in tensors], dim=self.dim)

    def __str__(self) -> str:
        by_rows = " by rows" if self.dim == 0 else ""
        return f"split in {self.parts}{by_rows}" + (", transpose" if self.transpose else "")


@dataclass(frozen=True)
class Rearrange:
    """One tensor with axes split, merged or reordered: `"(h d) c -> h d c"` with 12 for h.

    Letters are axes, parentheses hold merged axes, and 1 is an axis of length 1.

    Args:
        pattern: axes of Hugging Face's tensor -> axes of the parameter.
        sizes: pairs (axis, length), for all merged axes of the left side except one in each group.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        left, right = self.pattern.split("->")
        return (rearrange(tensor, left, right, dict(self.sizes)),)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        left, right = self.pattern.split("->")
        return rearrange(tensors[0], right, left, dict(self.sizes))

    def __str__(self) -> str:
        return self.pattern


@dataclass(frozen=True)
class Part:
    """The part of the fused q, k and v that one parameter holds.

    Args:
        qkv: which of the three, in this order, such as "q" or "vkq".
        axes: the axes of the parameter: c input channels, q which of the three, h heads, d head
            size.
        heads: indices of the heads; None means all.
    """

    qkv: str
    axes: str
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fused:
    """Hugging Face's fused q, k and v, `"c (q h d)"`, distributed over parameters.

    Parts that no parameter holds, such as the bias of k, are ignored by `load` and zero in the
    result of `save`.
    """

    n_head: int
    parts: tuple[Part, ...]

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if tensor.shape[-1] % (3 * self.n_head):
            raise NameMapError(
                f"shape {list(tensor.shape)} cannot be split into q, k and v of {self.n_head} heads"
            )
        C = tensor.shape[0] if tensor.ndim == 2 else 1
        fused = tensor.reshape(C, 3, self.n_head, -1)
        loaded = []
        for part in self.parts:
            which, heads = self._selected(part)
            left = "c q h d" if "c" in part.axes else "1 q h d"
            loaded.append(rearrange(fused[:, which][:, :, heads], left, part.axes, {}))
        return tuple(loaded)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        is_matrix = "c" in self.parts[0].axes
        sizes = self._sizes(self.parts[0], tensors[0])
        C, D = sizes.get("c", 1), sizes["d"]
        fused = tensors[0].new_zeros(C, 3, self.n_head, D)
        for part, tensor in zip(self.parts, tensors, strict=True):
            right = "c q h d" if is_matrix else "q h d"
            value = rearrange(tensor, part.axes, right, self._sizes(part, tensor))
            which, heads = self._selected(part)
            value = value.reshape(C, len(which), len(heads), D)
            for position, index in enumerate(which):
                fused[:, index, heads] = value[:, position]
        return fused.reshape(C, -1) if is_matrix else fused.reshape(-1)

    def _selected(self, part: Part) -> tuple[list[int], list[int]]:
        """Return indices on the axes q and h."""
        heads = range(self.n_head) if part.heads is None else part.heads
        return ["qkv".index(letter) for letter in part.qkv], list(heads)

    def _sizes(self, part: Part, tensor: Tensor) -> dict[str, int]:
        """Return the lengths of a parameter's axes; those of c and d follow from its shape."""
        which, heads = self._selected(part)
        known = {"q": len(which), "h": len(heads)}
        for group, size in zip(axis_groups(part.axes), tensor.shape, strict=True):
            unknown = [axis for axis in group if axis not in known]
            if len(unknown) == 1:
                known[unknown[0]] = size // prod(known[x] for x in group if x != unknown[0])
        known.setdefault("d", 1)
        return known

    def __str__(self) -> str:
        return "; ".join(
            f"{part.qkv}{'' if part.heads is None else list(part.heads)}: {part.axes}"
            for part in self.parts
        )


@dataclass(frozen=True)
class Rows:
    """The first rows of a longer tensor, or a longer parameter that is padded with rows of zeros.

    `save` returns the rows that both have.

    Args:
        found: rows of the checkpoint's tensor.
        wanted: rows of the parameter.
        pattern: a `Rearrange` pattern that is applied to the rows.
        start: number of zero rows before them, as for positions that are counted from 2.
    """

    found: int
    wanted: int
    pattern: str = "r c -> r c"
    start: int = 0

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        rows = tensor[: self.wanted - self.start]
        if self.wanted > len(rows):
            filled = rows.new_zeros(self.wanted, *rows.shape[1:])
            filled[self.start : self.start + len(rows)] = rows
            rows = filled
        return Rearrange(self.pattern).load(rows)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return Rearrange(self.pattern).save(tensors)[self.start : self.start + self.found]

    def __str__(self) -> str:
        if self.start:
            return f"{self.start} rows of zeros, then {self.found} rows"
        if self.wanted < self.found:
            return f"first {self.wanted} rows"
        return f"{self.found} rows, then {self.wanted - self.found} of zeros"


@dataclass(frozen=True)
class Affine:
    """A weight that the model computes as `factor · parameter + offset`, such as `1 + gain`."""

    factor: float = 1.0
    offset: float = 0.0

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return ((tensor - self.offset) / self.factor,)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] * self.factor + self.offset

    def __str__(self) -> str:
        parts = [f"minus {self.offset:g}"] if self.offset else []
        return ", ".join(parts + ([f"divided by {self.factor:g}"] if self.factor != 1 else []))


@dataclass(frozen=True)
class WeightNorm:
    """A weight that the model computes as `g · v / ‖v‖`, as `torch.nn.utils.weight_norm` does.

    The parameters are g, the norms over all axes but `dim`, and v, which gets the weight itself.
    """

    dim: int = 0

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self._norm(tensor), tensor.contiguous()

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        g, v = tensors
        return v * (g / self._norm(v))

    def _norm(self, v: Tensor) -> Tensor:
        if self.dim == -1:  # torch's own convention for one norm of the whole weight
            return v.square().sum().sqrt()
        axes = [axis for axis in range(v.ndim) if axis != self.dim]
        return v.square().sum(axes, keepdim=True).sqrt()

    def __str__(self) -> str:
        return "norm and direction"


@dataclass(frozen=True)
class Reparametrized:
    """An operation whose results the model computes from parameters of another form.

    Args:
        op: turns Hugging Face's tensor into the weights with which the model computes.
        parts: for each of these weights its `Affine` or `WeightNorm`, or None for a parameter.
    """

    op: Op
    parts: tuple[Affine | WeightNorm | None, ...]

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self.op.load(tensor), self.parts, strict=True)
        return tuple(t for made, part in pairs for t in (part.load(made) if part else (made,)))

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        rest, made = list(tensors), []
        for part in self.parts:
            count = 2 if isinstance(part, WeightNorm) else 1
            mine, rest = rest[:count], rest[count:]
            made.append(part.save(mine) if part else mine[0])
        return self.op.save(made)

    def __str__(self) -> str:
        return ", then ".join(dict.fromkeys(map(str, [self.op, *filter(None, self.parts)])))


def axis_groups(axes: str) -> list[list[str]]:
    """Return the axes that each dimension of a tensor merges: "(h d) c 1" → [[h, d], [c], []]."""
    found = re.findall(r"\(([^)]*)\)|(\w)", axes)
    return [merged.split() if merged else [] if axis == "1" else [axis] for merged, axis in found]


def rearrange(tensor: Tensor, left: str, right: str, known: Mapping[str, int]) -> Tensor:
    """Return the tensor with the axes of `left` arranged as in `right`, contiguous.

    Args:
        tensor: the tensor, whose dimensions are those of `left`.
        left, right: axes, such as "(h d) c". One that occurs on one side only has length 1.
        known: the lengths of all axes but one in each dimension of the tensor.

    Raises:
        NameMapError: the shape does not fit `left`.
    """
    before, after, sizes = axis_groups(left), axis_groups(right), dict(known)
    if len(before) != tensor.ndim:
        raise NameMapError(f"shape {list(tensor.shape)} does not have the axes {left.strip()!r}")
    for group, size in zip(before, tensor.shape, strict=True):
        unknown = [axis for axis in group if axis not in sizes]
        product = prod(sizes[axis] for axis in group if axis in sizes)
        if len(unknown) > 1 or not product or size % product or (not unknown and size != product):
            raise NameMapError(
                f"shape {list(tensor.shape)} does not fit {left.strip()!r} with lengths {sizes}"
            )
        sizes.update(dict.fromkeys(unknown, size // product))
    wanted = [axis for group in after for axis in group]
    axes = [axis for group in before for axis in group if axis in wanted]
    order = [axes.index(axis) for axis in wanted if axis in axes]
    split = tensor.reshape([sizes[axis] for axis in axes]).permute(order)
    return split.reshape([prod(sizes.get(x, 1) for x in group) for group in after]).contiguous()
