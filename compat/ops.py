"""Ops of a name map for parameters of any shape: axes named, split, reordered, merged, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from compat.errors import NameMapError
from compat.name_map import Op


@dataclass(frozen=True)
class Rearrange:
    """One tensor with its axes in another order, split or merged: `"(h d) c -> h d c"`, h = 12.

    Letters are axes, brackets hold axes that are merged, 1 is an axis of that length. The sizes of
    axes that are merged on the left must be given, all but one of each bracket.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        left, right = self.pattern.split("->")
        return (_arranged(tensor, left, right, dict(self.sizes)),)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        left, right = self.pattern.split("->")
        return _arranged(tensors[0], right, left, dict(self.sizes))

    def __str__(self) -> str:
        return self.pattern


@dataclass(frozen=True)
class Part:
    """What one parameter holds of the fused query, key and value.

    Args:
        qkv: which of the three, in which order, such as "q" or "vkq".
        axes: of the parameter; c channels in, q which of the three, h heads, d head size.
        heads: which heads; None for all.
    """

    qkv: str
    axes: str
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fused:
    """The fused q, k, v of Hugging Face, `"c (q h d)"`, in parameters of any arrangement.

    Parts that no parameter holds, such as the key's missing bias, are lost on loading, and zero
    when written back.
    """

    n_head: int
    parts: tuple[Part, ...]

    def load(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if tensor.shape[-1] % (3 * self.n_head):
            raise NameMapError(
                f"cannot split shape {list(tensor.shape)} into q, k, v of {self.n_head} heads"
            )
        return tuple(self._load(part, tensor) for part in self.parts)

    def save(self, tensors: Sequence[Tensor]) -> Tensor:
        channels = "c" in self.parts[0].axes
        sizes = self._sizes(self.parts[0], tensors[0])
        C = sizes.get("c", 1)
        fused = tensors[0].new_zeros(C, 3, self.n_head, sizes["d"])
        for part, tensor in zip(self.parts, tensors, strict=True):
            left = "c q h d" if channels else "q h d"
            value = _arranged(tensor, part.axes, left, self._sizes(part, tensor))
            which, heads = self._selected(part)
            value = value.reshape(C, len(which), len(heads), sizes["d"])
            for place, one in enumerate(which):
                fused[:, one, heads] = value[:, place]
        return fused.reshape(C, -1) if channels else fused.reshape(-1)

    def _load(self, part: Part, tensor: Tensor) -> Tensor:
        C = tensor.shape[0] if tensor.ndim == 2 else 1
        which, heads = self._selected(part)
        chosen = tensor.reshape(C, 3, self.n_head, -1)[:, which][:, :, heads]
        left = "c q h d" if "c" in part.axes else "1 q h d"
        return _arranged(chosen, left, part.axes, {})

    def _selected(self, part: Part) -> tuple[list[int], list[int]]:
        heads = range(self.n_head) if part.heads is None else part.heads
        return ["qkv".index(letter) for letter in part.qkv], list(heads)

    def _sizes(self, part: Part, tensor: Tensor) -> dict[str, int]:
        """The sizes of the axes of a parameter; the two unknown ones from its shape."""
        which, heads = self._selected(part)
        known = {"q": len(which), "h": len(heads)}
        for group, size in zip(_groups(part.axes), tensor.shape, strict=True):
            unknown = [letter for letter in group if letter not in known]
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
    """The first rows of a longer tensor, or a longer parameter filled up with rows of zeros.

    Written back as the rows that the checkpoint and the parameter share.

    Args:
        found: rows of the checkpoint's tensor.
        wanted: rows of the parameter.
        pattern: of the parameter's axes, as in `Rearrange`.
        start: rows of zeros before the first, as for positions that are counted from 2.
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
    """An op whose results the model computes from parameters of another form.

    Args:
        op: from Hugging Face's tensor to the weights that the model computes with.
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


def _groups(axes: str) -> list[list[str]]:
    """ "(h d) c 1" → [[h, d], [c], []]."""
    tokens = re.findall(r"\(([^)]*)\)|(\w)", axes)
    return [
        merged.split() if merged else [] if single == "1" else [single] for merged, single in tokens
    ]


def _arranged(tensor: Tensor, left: str, right: str, sizes: Mapping[str, int]) -> Tensor:
    """The tensor, whose axes are described on the left, as described on the right; contiguous."""
    before, after, sizes = _groups(left), _groups(right), dict(sizes)
    if len(before) != tensor.ndim:
        raise NameMapError(f"found shape {list(tensor.shape)}, expected axes {left.strip()!r}")
    for group, size in zip(before, tensor.shape, strict=True):
        unknown = [letter for letter in group if letter not in sizes]
        known = prod(sizes[letter] for letter in group if letter in sizes)
        if len(unknown) > 1 or known == 0 or size % known or (not unknown and size != known):
            raise NameMapError(
                f"cannot read shape {list(tensor.shape)} as {left.strip()!r} with {sizes}"
            )
        sizes.update(dict.fromkeys(unknown, size // known))
    wanted = [letter for group in after for letter in group]
    letters = [letter for group in before for letter in group if letter in wanted]
    order = [letters.index(letter) for letter in wanted if letter in letters]
    split = tensor.reshape([sizes[letter] for letter in letters]).permute(order)
    # A letter on one side only is an axis of length 1.
    return split.reshape([prod(sizes.get(x, 1) for x in group) for group in after]).contiguous()
