"""The error at every tap, on a log scale, with what passes as a band."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compat.html_report.layout import Group, Kind, LogScale, measured, names, place
from compat.html_report.markup import Markup, el, join, number, px
from compat.parity import Difference, TapResult

WIDTH, LEFT, RIGHT = 1080, 66, 10
TOP, BOTTOM = 40, 195  # of the log scale
CEILING, FLOOR, HEIGHT = 8, 223, 245
INFINITE, IDENTICAL = 24, 212  # the rows above and below the scale
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def error_scale(results: Sequence[TapResult]) -> LogScale:
    """One scale for both charts, so that they can be compared."""
    found = [d for r in results for d in (r.accumulated, r.local)]
    errors = [d.error for d in found if not d.bit_identical]
    return LogScale.around([*errors, *(d.bound for d in found if d.bound)], TOP, BOTTOM)


def error_chart(results: Sequence[TapResult], kind: Kind, scale: LogScale) -> Markup:
    """One column a tap: a mark at its error, the band up to its bound, a tooltip."""
    groups = place(results, LEFT, WIDTH - LEFT - RIGHT, single=56)
    return el(
        "svg",
        _stripes(groups),
        _band(groups, kind, scale),
        _axis(scale, any(not math.isfinite(measured(r, kind).error) for r in results)),
        *(_columns(group, kind, scale) for group in groups),
        names(groups, y=HEIGHT - 6, room=34),
        _first_failure(groups, kind, scale),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=_summary(results, kind),
        class_="errors",
    )


def describe(tap: str, kind: Kind, found: Difference) -> str:
    """A tooltip: all the numbers of one place."""
    text = f"{tap}, {kind}: error {number(found.error)}"
    if found.bit_identical:
        text = f"{tap}, {kind}: bit-identical"
    if found.bound is not None:
        text += f", bound {number(found.bound)}"
    verdict = "in bounds" if found.within else "OUT OF BOUNDS"
    return f"{text}, max|Δ| {number(found.max_abs)}: " + (
        "not judged" if found.bound is None else verdict
    )


def _summary(results: Sequence[TapResult], kind: Kind) -> str:
    found = [measured(result, kind) for result in results]
    same, out = sum(d.bit_identical for d in found), sum(not d.within for d in found)
    return (
        f"Chart of the {kind} error at {len(found)} taps: {same} bit-identical, {out} out of bounds"
    )


def _stripes(groups: Sequence[Group]) -> Markup:
    """Every second group on a darker ground."""
    return join(
        el("rect", x=px(g.x), y=CEILING, width=px(g.width), height=FLOOR - CEILING, class_="stripe")
        for g in groups[::2]
    )


def _axis(scale: LogScale, infinite: bool) -> Markup:
    rows = [("10" + str(n).translate(SUPERSCRIPT), scale.y(10.0**n)) for n in scale.ticks()]
    rows.append(("identical", IDENTICAL))
    if infinite:
        rows.append(("NaN, ∞", INFINITE))
    lines = []
    for name, y in rows:
        lines.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=px(y), y2=px(y), class_="grid"))
        lines.append(el("text", name, x=LEFT - 8, y=px(y + 4), class_="end"))
    return join(lines)


def _band(groups: Sequence[Group], kind: Kind, scale: LogScale) -> Markup:
    """Steps from the floor up to the bound of every tap; none where nothing is judged."""
    steps = []
    for group in groups:
        for i, result in enumerate(group.results):
            bound = measured(result, kind).bound
            if bound is None:
                return Markup()
            y = FLOOR if math.isnan(bound) else scale.y(bound)
            steps.append(f"V{px(y)}H{px(group.x + (i + 1) * group.step)}")
    area = f"M{LEFT} {FLOOR}{''.join(steps)}V{FLOOR}Z"
    edge = f"M{LEFT} {steps[0].partition('H')[0][1:]}{''.join(steps)}"
    return join([el("path", d=area, class_="band"), el("path", d=edge, class_="edge")])


def _columns(group: Group, kind: Kind, scale: LogScale) -> Markup:
    parts = []
    for i, result in enumerate(group.results):
        found, x = measured(result, kind), group.x + i * group.step
        parts.append(_column(x, group.step, result.tap, kind, found))
        parts.append(_mark(x + group.step / 2, group.step, found, scale))
    return join(parts)


def _column(x: float, width: float, tap: str, kind: Kind, found: Difference) -> Markup:
    """What the mouse finds: the tooltip, over the whole height."""
    title = el("title", describe(tap, kind, found))
    return el(
        "rect", title, x=px(x), y=CEILING, width=px(width), height=FLOOR - CEILING, class_="hit"
    )


def _height(found: Difference, scale: LogScale) -> float:
    """Of the mark: on the scale, or in the row for no difference, or for no number."""
    if found.bit_identical:
        return IDENTICAL
    return scale.y(found.error) if math.isfinite(found.error) else INFINITE


def _mark(x: float, room: float, found: Difference, scale: LogScale) -> Markup:
    """A dot, or a cross where it fails, smaller where there are many."""
    y, r = _height(found, scale), 3.2 if room > 4 else 1.8
    if found.within:
        kind = "same" if found.bit_identical else "pass" if found.bound is not None else "free"
        return el("circle", cx=px(x), cy=px(y), r=r, class_=kind)
    r += 0.8
    cross = f"M{px(x - r)} {px(y - r)}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
    return el("path", d=cross, class_="fail")


def _first_failure(groups: Sequence[Group], kind: Kind, scale: LogScale) -> Markup:
    """The name of the first tap out of bounds, above its mark."""
    for group in groups:
        for i, result in enumerate(group.results):
            found = measured(result, kind)
            if not found.within:
                x, y = group.x + (i + 0.5) * group.step, _height(found, scale) - 9
                return el("text", result.tap, x=px(x), y=px(y), class_="middle first")
    return Markup()
