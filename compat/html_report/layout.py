"""Where things stand in the drawings: taps from left to right, errors on a log scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from compat.html_report.markup import Markup, el, join, px
from compat.parity import Difference, TapResult

Kind = Literal["accumulated", "local"]
KINDS: tuple[Kind, Kind] = ("accumulated", "local")
SMALLEST, LARGEST = -12, 12  # decades; what lies outside is drawn at the edge


def measured(result: TapResult, kind: Kind) -> Difference:
    return result.accumulated if kind == "accumulated" else result.local


def layer_of(tap: str) -> str:
    """The block of a tap, h.3 of h.3.act; a tap outside the blocks as it is."""
    return tap.rpartition(".")[0] or tap


@dataclass(frozen=True)
class Group:
    """The taps of one block, or one tap outside the blocks, between `x` and `x + width`."""

    layer: str
    results: list[TapResult]
    x: float
    width: float

    @property
    def is_block(self) -> bool:
        return self.results[0].tap != self.layer

    @property
    def step(self) -> float:
        return self.width / len(self.results)


def place(results: Sequence[TapResult], x: float, width: float, single: float) -> list[Group]:
    """Share out the width in execution order: `single` to a tap outside the blocks, at most."""
    found = [(layer, list(group)) for layer, group in groupby(results, lambda r: layer_of(r.tap))]
    blocks = sum(len(group) for layer, group in found if group[0].tap != layer)
    singles = sum(group[0].tap == layer for layer, group in found)
    single = single if blocks else width / max(singles, 1)
    step = (width - singles * single) / max(blocks, 1)
    groups = []
    for layer, group in found:
        taken = single if group[0].tap == layer else step * len(group)
        groups.append(Group(layer, group, x, taken))
        x += taken
    return groups


def names(groups: Sequence[Group], y: float, room: float) -> Markup:
    """The names under the groups: all singles', and as many blocks' as there is room for."""
    blocks = [group for group in groups if group.is_block]
    narrowest = min((group.width for group in blocks), default=room)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 10**9) if n * narrowest >= room)
    end = blocks[-1].x + blocks[-1].width if blocks else 0
    found = [_centred(group, y) for group in groups if not group.is_block or every == 1]
    if every > 1:  # from the left edge of the first of every few blocks
        found += [
            el("text", group.layer, x=px(group.x), y=px(y))
            for group in blocks[::every]
            if group.x + room <= end
        ]
    return join(found)


def _centred(group: Group, y: float) -> Markup:
    return el("text", group.layer, x=px(group.x + group.width / 2), y=px(y), class_="middle")


@dataclass(frozen=True)
class LogScale:
    """Decades `low` … `high` between the heights `bottom` and `top`."""

    low: int
    high: int
    top: float
    bottom: float

    @classmethod
    def around(cls, values: Iterable[float], top: float, bottom: float) -> LogScale:
        """Whole decades around all values that have a logarithm."""
        logs = [math.log10(v) for v in values if v > 0 and math.isfinite(v)] or [-8.0, -6.0]
        low = max(SMALLEST, min(math.floor(min(logs)), LARGEST - 1))
        return cls(low, max(low + 1, min(math.ceil(max(logs)), LARGEST)), top, bottom)

    def y(self, value: float) -> float:
        """The height of a value above 0, at an edge where it lies outside."""
        if not math.isfinite(value):
            return self.top
        decade = min(max(math.log10(value), self.low), self.high) if value > 0 else self.low
        return self.bottom + (self.top - self.bottom) * (decade - self.low) / (self.high - self.low)

    def ticks(self) -> list[int]:
        """At most seven decades, at even distances."""
        step = -(-(self.high - self.low) // 6)
        return list(range(self.low, self.high + 1, step))
