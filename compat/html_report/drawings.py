"""The positions of all elements of the drawings, which page.html turns into SVG.

There are two drawings: the error at every tap on a log scale, and a heat map of taps by layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from compat.parity import Difference, TapResult
from compat.summary import Kind, layer_of, number

SMALLEST, LARGEST = -12, 12  # decades; values outside are drawn at the edge
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# The error chart: its size, the ends of the log scale, and the rows above and below the scale.
WIDTH, HEIGHT, LEFT, RIGHT = 1080, 245, 66, 10
TOP, BOTTOM = 40, 195
CEILING, FLOOR = 8, 223
INFINITE, IDENTICAL = 24, 212

# The heat map: its size, the height of a row, and the gap between cells.
MAP_WIDTH, MAP_LEFT, ROW, GAP = 560, 66, 18, 1
MAP_NAMES = 22  # height of the row of names below it

NAME_ROOM = 34  # width of a block's name

# Classes of cells and their meaning, from the best to the worst.
LEVELS = {
    "c-same": "bit-identical",
    "c-low": "up to ¾ of the bound",
    "c-high": "up to the bound",
    "c-over": "up to 10 × the bound",
    "c-far": "up to 1,000 × the bound",
    "c-most": "over 1,000 × the bound",
    "c-nan": "NaN or ∞",
    "c-free": "not judged",
}
FAILING = {"c-over", "c-far", "c-most", "c-nan"}


def differences(results: Sequence[TapResult], kind: Kind) -> dict[str, Difference]:
    """Return the differences of one kind by tap; a local one needs a separate piece."""
    return {r.tap: found for r in results if (found := getattr(r, kind)) is not None}


@dataclass(frozen=True)
class Group:
    """The taps of one block, or one tap outside the blocks, between `x` and `x + width`."""

    layer: str
    taps: list[str]
    x: float
    width: float

    @property
    def is_block(self) -> bool:
        return self.taps[0] != self.layer

    @property
    def step(self) -> float:
        return self.width / len(self.taps)


def place_groups(taps: Collection[str], x: float, width: float, single: float) -> list[Group]:
    """Divide the width in execution order; a tap outside the blocks gets `single` of it."""
    blocks = sum(layer_of(tap) != tap for tap in taps)
    singles = len(taps) - blocks
    single = single if blocks else width / max(singles, 1)
    step = (width - singles * single) / max(blocks, 1)
    groups = []
    for layer, found in groupby(taps, layer_of):
        group = list(found)
        used = single if group == [layer] else step * len(group)
        groups.append(Group(layer, group, x, used))
        x += used
    return groups


def _names(groups: Sequence[Group]) -> list[tuple[str, float, str]]:
    """Return text, x and class of the names below: taps outside blocks, and every n-th block."""
    blocks = [group for group in groups if group.is_block]
    narrowest = min((group.width for group in blocks), default=NAME_ROOM)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 10**9) if n * narrowest >= NAME_ROOM)
    found = [
        (group.layer, group.x + group.width / 2, "middle")
        for group in groups
        if every == 1 or not group.is_block
    ]
    if every > 1:  # from the left edge of the block
        end = blocks[-1].x + blocks[-1].width
        shown = [group for group in blocks[::every] if group.x + NAME_ROOM <= end]
        found += [(group.layer, group.x, "start") for group in shown]
    return found


@dataclass(frozen=True)
class LogScale:
    """Decades from `low` at the bottom of the chart to `high` at its top."""

    low: int
    high: int

    @classmethod
    def around(cls, found: Sequence[Difference]) -> LogScale:
        """Return whole decades around all errors and bounds that have a logarithm."""
        values = [d.error for d in found if not d.bit_identical]
        values += [d.bound for d in found if d.bound is not None]
        logs = [math.log10(v) for v in values if v > 0 and math.isfinite(v)] or [-8.0, -6.0]
        low = max(SMALLEST, min(math.floor(min(logs)), LARGEST - 1))
        return cls(low, max(low + 1, min(math.ceil(max(logs)), LARGEST)))

    def y(self, value: float) -> float:
        """Return the height of a positive value, at an edge if it lies outside the scale."""
        if not math.isfinite(value):
            return TOP
        decade = min(max(math.log10(value), self.low), self.high) if value > 0 else self.low
        return BOTTOM + (TOP - BOTTOM) * (decade - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[str, float]]:
        """Return label and height of at most seven decades, at even distances."""
        step = -(-(self.high - self.low) // 6)
        decades = range(self.low, self.high + 1, step)
        return [(f"10{str(n).translate(SUPERSCRIPT)}", self.y(10.0**n)) for n in decades]


def error_chart(found: Mapping[str, Difference], kind: Kind, scale: LogScale) -> dict[str, Any]:
    """Draw one column for each tap, with a mark at its error, over a band up to its bound."""
    groups = place_groups(found, LEFT, WIDTH - LEFT - RIGHT, single=56)
    axis = [*scale.ticks(), ("identical", IDENTICAL)]
    if not all(math.isfinite(d.error) for d in found.values()):
        axis.append(("NaN, ∞", INFINITE))
    columns, dots, crosses, first = [], [], [], None
    for group in groups:
        for i, tap in enumerate(group.taps):
            d, x = found[tap], group.x + i * group.step
            columns.append((x, group.step, describe(tap, kind, d)))
            middle, y, r = x + group.step / 2, _height(d, scale), 3.2 if group.step > 4 else 1.8
            if d.within:
                style = "same" if d.bit_identical else "free" if d.bound is None else "pass"
                dots.append((middle, y, r, style))
                continue
            crosses.append(_cross(middle, y, r + 0.8))
            if first is None:
                room = 4.0 * len(tap)  # half of the name's width
                first = (tap, min(middle, WIDTH - room), y - 9)
    identical = sum(d.bit_identical for d in found.values())
    failed = sum(not d.within for d in found.values())
    return {
        "label": f"Chart of the {kind} error at {len(found)} taps: {identical} bit-identical, "
        f"{failed} out of bounds",
        "stripes": [(group.x, group.width) for group in groups[::2]],
        "band": _band(groups, found, scale),
        "axis": axis,
        "columns": columns,
        "dots": dots,
        "crosses": crosses,
        "names": _names(groups),
        "first": first,
    }


def describe(tap: str, kind: Kind, found: Difference) -> str:
    """Return the tooltip: all numbers of one tap."""
    error = "bit-identical" if found.bit_identical else f"error {number(found.error)}"
    text = f"{tap}, {kind}: {error}"
    if found.bound is None:
        return f"{text}, max|Δ| {number(found.max_abs)}: not judged"
    verdict = "in bounds" if found.within else "OUT OF BOUNDS"
    return f"{text}, bound {number(found.bound)}, max|Δ| {number(found.max_abs)}: {verdict}"


def _height(found: Difference, scale: LogScale) -> float:
    """Return a mark's height: on the scale, or in the row of identical or non-finite values."""
    if found.bit_identical:
        return IDENTICAL
    return scale.y(found.error) if math.isfinite(found.error) else INFINITE


def _band(
    groups: Sequence[Group], found: Mapping[str, Difference], scale: LogScale
) -> tuple[str, str] | None:
    """Return paths of the area below the bounds and of its upper edge, or None if not judged."""
    steps = []
    for group in groups:
        for i, tap in enumerate(group.taps):
            bound = found[tap].bound
            if bound is None:
                return None
            y = FLOOR if math.isnan(bound) else scale.y(bound)
            steps.append(f"V{px(y)}H{px(group.x + (i + 1) * group.step)}")
    start = steps[0].partition("H")[0][1:]
    return f"M{LEFT} {FLOOR}{''.join(steps)}V{FLOOR}Z", f"M{LEFT} {start}{''.join(steps)}"


def heat_map(found: Mapping[str, Difference], kind: Kind) -> dict[str, Any]:
    """Draw layers from left to right, taps from top to bottom. Taps outside blocks are columns."""
    groups = place_groups(found, MAP_LEFT, MAP_WIDTH - MAP_LEFT, single=60)
    names = [tap.rpartition(".")[2] for group in groups if group.is_block for tap in group.taps]
    rows = {name: i for i, name in enumerate(dict.fromkeys(names))}
    height = ROW * max(len(rows), 3)
    cells = []
    for group in groups:
        for tap in group.taps:
            d = found[tap]
            title = describe(tap, kind, d)
            if group.is_block:
                y = ROW * rows[tap.rpartition(".")[2]]
                cells.append(cell(group.x, y, group.width, ROW, level(d), title))
            else:
                cells.append(cell(group.x + 3, 0, group.width - 6, height, level(d), title))
    out = [tap for tap, d in found.items() if not d.within]
    verdict = f"{len(out)} out of bounds, first {out[0]}" if out else "all pass"
    return {
        "label": f"Heat map of the {kind} error by tap and layer: {verdict}",
        "height": height,
        "rows": [(name, ROW * i + 13) for name, i in rows.items()],
        "cells": cells,
        "names": _names(groups),
    }


def level(found: Difference) -> str:
    """Return the class of a cell. The verdict distinguishes passing from failing ones."""
    if found.bit_identical:
        return "c-same"
    if not math.isfinite(found.error):
        return "c-nan"
    if found.bound is None:
        return "c-free"
    share = found.error / found.bound if found.bound > 0 else math.inf
    if found.within:
        return "c-low" if share <= 0.75 else "c-high"
    return "c-over" if share <= 10 else "c-far" if share <= 1000 else "c-most"


def cell(x: float, y: float, width: float, height: float, name: str, title: str) -> dict[str, Any]:
    """Draw one cell. A failing one has a cross, so that colour alone does not show the verdict."""
    width, height = width - GAP, height - GAP
    cross = _cross(x + width / 2, y + height / 2, min(width, height, 12) / 3)
    return {
        "x": x,
        "y": y,
        "width": width,
        "height": height,
        "class": name,
        "title": title,
        "cross": cross if name in FAILING else None,
    }


def cell_legend(found: Sequence[Difference]) -> list[tuple[dict[str, Any], str]]:
    """Return the cells that occur, and their meaning."""
    occurring = {level(d) for d in found}
    return [(cell(0, 0, 17, 17, name, ""), text) for name, text in LEVELS.items()
            if name in occurring]  # fmt: skip


def mark_legend(found: Sequence[Difference]) -> list[tuple[str, str]]:
    """Return the marks that occur in the charts, and their meaning."""
    judged = [d for d in found if d.bound is not None]
    entries = [
        (bool(judged), "band", "passes"),
        (any(d.within and not d.bit_identical for d in judged), "pass", "in bounds"),
        (not all(d.within for d in judged), "fail", "out of bounds"),
        (any(d.bit_identical for d in found), "same", "bit-identical"),
        (any(d.bound is None and not d.bit_identical for d in found), "free", "not judged"),
    ]
    return [(sign, text) for occurs, sign, text in entries if occurs]


def _cross(x: float, y: float, r: float) -> str:
    """Return the path of a cross around a point."""
    return (
        f"M{px(x - r)} {px(y - r)}l{px(2 * r)} {px(2 * r)}m0 {px(-2 * r)}l{px(-2 * r)} {px(2 * r)}"
    )


def px(value: float) -> str:
    """Return a coordinate with one decimal."""
    return f"{value:.1f}".removesuffix(".0")
