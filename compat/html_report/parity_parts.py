"""One parity report: verdict, facts, charts, heat maps, numbers."""

from __future__ import annotations

import math
from itertools import groupby

from compat.html_report.errors import error_chart, error_scale
from compat.html_report.heatmap import cell_legend, heat_map
from compat.html_report.layout import KINDS, Kind, layer_of, measured
from compat.html_report.legend import mark_legend
from compat.html_report.markup import Markup, code, el, join, number, table
from compat.html_report.parts import tiles, verdict
from compat.parity import ParityReport, TapResult
from compat.parity.compare import count_identical

SOURCE = {
    "accumulated": "Accumulated: both models run from the input ids",
    "local": "Local: each piece of ours fed the reference's input for that piece",
}


def parity_verdict(report: ParityReport) -> Markup:
    return verdict(report.passed, "Parity" if report.passed else "No parity", report.headline)


def parity_facts(report: ParityReport) -> Markup:
    """The numbers of a report that need no drawing."""
    B, T = report.input_shape
    total, (far, near) = len(report.taps), count_identical(report.taps)
    passed = sum(result.passed for result in report.taps)
    facts: list[tuple[str, object]] = [
        ("Taps in bounds", f"{passed:,} of {total:,}"),
        ("Identical, accumulated", f"{far:,} of {total:,}"),
        ("Identical, local", f"{near:,} of {total:,}"),
        ("max|Δlogits|", number(report.max_abs_diff)),
        ("Data type", report.dtype),
        ("Input", f"{B} × {T} ids"),
    ]
    if report.first_divergence is not None:
        facts.insert(1, ("First out of bounds", code(report.first_divergence)))
    return tiles(facts)


def parity_drawings(report: ParityReport) -> Markup:
    """Charts, heat maps, the same numbers as a table, and the logits on every input."""
    of_taps = [_charts(report), _maps(report), _numbers(report)] if report.taps else []
    return join([*of_taps, _inputs(report), _reach(report)])


def _inputs(report: ParityReport) -> Markup:
    """The logits on every input, as a table."""
    rows = []
    for result in report.logits.inputs:
        B, T = result.input_shape
        found = result.logits
        numbers = ["–", "–", "–"]
        if found is not None:
            bound = "–" if found.bound is None else number(found.bound)
            numbers = [number(found.max_abs), number(found.error), bound]
        verdict = "✓" if result.passed else f"✗ {result.error}".rstrip()
        rows.append([result.name, f"{B} × {T}", *numbers, verdict])
    label = "The logits on every input"
    note = "Error and bound are those of the worst position, over the norm of its logits."
    headings = ["Input", "Ids", "max|Δlogits|", "Error", "Bound", "In bounds"]
    return el(
        "details",
        el("summary", f"{label}, as a table"),
        el("p", note, class_="note"),
        table(headings, rows, label),
        class_="card",
    )


def _reach(report: ParityReport) -> Markup:
    """How far the comparison reaches: what it would have caught, and what it did not try."""
    lines = [
        f"{limit.file}:{limit.line}: {limit.message}" if limit.file else limit.message
        for limit in report.limits
    ]
    smallest = report.smallest_detectable
    if report.passed and math.isfinite(smallest):
        words = (
            f"A relative error of {smallest:.1g} at the logits of one position would have failed."
        )
        lines.insert(0, words)
    lines += report.notes
    if not lines:
        return join([])
    items = [el("li", line) for line in lines]
    return el("div", el("h3", "How far the comparison reaches"), el("ul", *items), class_="card")


def _charts(report: ParityReport) -> Markup:
    scale = error_scale(report.taps)
    charts = [
        part
        for kind in KINDS
        for part in (
            el("h4", SOURCE[kind]),
            el("div", error_chart(report.taps, kind, scale), class_="scroll"),
        )
    ]
    found = [measured(result, kind) for kind in KINDS for result in report.taps]
    return el(
        "div",
        el("h3", "Error at every tap, layer by layer"),
        el("p", _what_is_drawn(report), class_="note"),
        mark_legend(found),
        *charts,
        class_="card",
    )


def _what_is_drawn(report: ParityReport) -> str:
    """What the marks and the band of this report are."""
    text = "From left to right in the order of execution, on a log scale: the RMS of our error "
    text += "over the RMS of the reference's tensor. "
    if report.calibrated:
        return text + (
            "The error is taken against a float64 run of the reference. The band is what passes: "
            "twice the reference's own error against float64, or twice what rounding costs where "
            "that is more. A tap that equals the reference to the bit passes, and stands in the "
            "row below the scale."
        )
    return text + (
        "There was no float64 run: the error is the difference from the reference, and only "
        "local differences are judged. The band is what passes: four roundings of one piece. A "
        "tap that equals the reference to the bit stands in the row below the scale."
    )


def _maps(report: ParityReport) -> Markup:
    maps = [
        el("div", el("h4", kind.capitalize()), _scroll(heat_map(report.taps, kind)))
        for kind in KINDS
    ]
    return el(
        "div",
        el("h3", "Taps by layers"),
        el(
            "p", "Each cell's error as a share of its own bound; × is out of bounds.", class_="note"
        ),
        cell_legend([measured(result, kind) for kind in KINDS for result in report.taps]),
        el("div", *maps, class_="pair"),
        class_="card",
    )


def _scroll(drawing: Markup) -> Markup:
    return el("div", drawing, class_="scroll")


def _numbers(report: ParityReport) -> Markup:
    """The drawings in words: the worst of every layer."""
    headings = ["Layer", "In bounds"]
    for kind in KINDS:
        headings += [f"{kind.capitalize()} error", "× ref", "max|Δ|", "Bit-identical"]
    rows = [
        [layer, *_row(list(group))]
        for layer, group in groupby(report.taps, key=lambda result: layer_of(result.tap))
    ]
    label = "The largest numbers of every layer"
    note = "× ref: our error over the reference's own, both against float64."
    return el(
        "details",
        el("summary", f"{label}, as a table"),
        el("p", note, class_="note"),
        table(headings, rows, label),
        class_="card",
    )


def _row(results: list[TapResult]) -> list[str]:
    passed = sum(result.passed for result in results)
    sign = "✓" if passed == len(results) else "✗"
    numbers = [text for kind in KINDS for text in _worst(results, kind)]
    return [f"{sign} {passed} of {len(results)}", *numbers]


def _worst(results: list[TapResult], kind: Kind) -> list[str]:
    found = [measured(result, kind) for result in results]
    ratios = [d.ratio for d in found if d.ratio is not None]
    return [
        number(_largest([d.error for d in found])),
        f"{_largest(ratios):,.2f}" if ratios else "–",
        number(_largest([d.max_abs for d in found])),
        f"{sum(d.bit_identical for d in found)} of {len(found)}",
    ]


def _largest(values: list[float]) -> float:
    """NaN, where there is one, before all else."""
    return max(values, key=lambda value: (math.isnan(value), value))
