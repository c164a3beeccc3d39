"""Every tap of every layer as one cell, coloured by how much of its bound its error takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compat.html_report.errors import describe
from compat.html_report.layout import Group, Kind, measured, names, place
from compat.html_report.legend import legend
from compat.html_report.markup import Markup, el, join, px
from compat.parity import Difference, TapResult

WIDTH, LEFT, ROW, GAP = 540, 52, 18, 1
NAMES = 22  # height of the row of names

# From the least to the worst: class and meaning. Without a bound there is no share of one.
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


def level(found: Difference) -> str:
    """The class of a cell; the verdict decides between passing and failing ones."""
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


def heat_map(results: Sequence[TapResult], kind: Kind) -> Markup:
    """Layers from left to right, taps from top to bottom; taps outside the blocks are columns."""
    groups = place(results, LEFT, WIDTH - LEFT, single=50)
    rows = _rows(groups)
    height = ROW * max(len(rows), 3)
    return el(
        "svg",
        *(el("text", name, x=LEFT - 6, y=ROW * i + 13, class_="end") for name, i in rows.items()),
        *(_column(group, kind, rows, height) for group in groups),
        names(groups, y=height + 15, room=34),
        viewBox=f"0 0 {WIDTH} {height + NAMES}",
        role="img",
        aria_label=_summary(results, kind),
        class_="heat",
    )


def cell_legend(found: list[Difference]) -> Markup:
    """Of the colours that occur."""
    there = {level(d) for d in found}
    return legend((_box(0, 0, 17, 17, name), LEVELS[name]) for name in LEVELS if name in there)


def _summary(results: Sequence[TapResult], kind: Kind) -> str:
    out = [result.tap for result in results if not measured(result, kind).within]
    start = f"Heat map of the {kind} error, taps by layers"
    return f"{start}: {len(out)} out of bounds, first {out[0]}" if out else f"{start}: all pass"


def _rows(groups: Sequence[Group]) -> dict[str, int]:
    """The names of the taps inside a block, in execution order, and their rows."""
    names = [r.tap.rpartition(".")[2] for g in groups if g.is_block for r in g.results]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def _column(group: Group, kind: Kind, rows: dict[str, int], height: float) -> Markup:
    cells = []
    for result in group.results:
        found = measured(result, kind)
        row = rows.get(result.tap.rpartition(".")[2], 0) if group.is_block else 0
        tall, inset = (ROW, 0) if group.is_block else (height, 3)
        title = describe(result.tap, kind, found)
        cells.append(
            _box(group.x + inset, ROW * row, group.width - 2 * inset, tall, level(found), title)
        )
    return join(cells)


def _box(x: float, y: float, width: float, height: float, name: str, title: str = "") -> Markup:
    """One cell; a failing one has a cross, so that colour does not carry the verdict alone."""
    width, height = width - GAP, height - GAP
    tooltip = [el("title", title)] if title else []
    box = el("rect", *tooltip, x=px(x), y=y, width=px(width), height=height, class_=name)
    if name not in FAILING:
        return box
    r, cx, cy = min(width, height, 12) / 3, x + width / 2, y + height / 2
    d = f"M{px(cx - r)} {px(cy - r)}l{px(2 * r)} {px(2 * r)}m0 {px(-2 * r)}"
    return join([box, el("path", d=f"{d}l{px(-2 * r)} {px(2 * r)}", class_=f"x-{name}")])
