"""The contents of the pages and their order, filled into page.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compat.adaptation import Adaptation, Finding
from compat.golden_files import Golden, GoldenReport
from compat.html_report import drawings
from compat.inspection import Inspection
from compat.parity import ParityReport
from compat.summary import (
    GRADIENT_COLUMNS,
    INPUT_COLUMNS,
    INPUT_NOTE,
    KINDS,
    SEVERITY,
    Layer,
    further_places,
    gradient_rows,
    input_rows,
    layers,
    limits,
    number,
    properties,
    sensitivity,
)
from compat.user_code import place

KIND_TITLES = {
    "accumulated": "Accumulated: both models run from the input ids",
    "local": "Local: every piece of the model runs on the reference's input for that piece",
}
DRAWN = (
    "Each mark is the error at one tap, in execution order and on a log scale: the RMS of the "
    "error over the RMS of the reference's tensor. Bit-identical taps are drawn below the scale. "
)
CALIBRATED = DRAWN + (
    "The error is measured against a float64 run of the reference. Errors within the band pass. It "
    "extends to twice the reference's own error against float64, or to twice the rounding error if "
    "that is larger."
)
UNCALIBRATED = DRAWN + (
    "There was no float64 run, so the error is the difference from the reference, and only local "
    "differences are judged. Errors within the band pass. It extends to four rounding errors of "
    "one piece."
)
GOLDEN_TITLES = {
    "accumulated": "Accumulated: each array compared with the golden one",
    "local": "Local: each array compared with GPT-2's formula on the candidate's own arrays",
}
GOLDEN = DRAWN + (
    "The error is the difference from the golden array, or from the formula in float64. Errors "
    "within the band pass. The verdict depends only on accumulated differences."
)
RATIO = "× ref: our error over the reference's own, both against float64."
GOLDEN_RATIO = "× ref: the difference over the reference's own rounding error."
LAYER_COLUMNS = [
    *("Layer", "In bounds"),
    *(f"{kind.capitalize()} {name}" for kind in KINDS for name in ("error", "× ref", "max|Δ|")),
    *("Identical, accumulated", "Identical, local"),
]

LOADS = ("Would load", "Would not load")
COMPATIBLE, PARITY = ("Compatible", "Not compatible"), ("Parity", "No parity")


def page_of(result: ParityReport | Adaptation | Inspection | Golden) -> str:
    """Return a result as a page."""
    if isinstance(result, Golden):
        return recorded_page(result)
    if isinstance(result, ParityReport):
        return parity_page(result)
    return adapt_page(result) if isinstance(result, Adaptation) else inspection_page(result)


def inspection_page(found: Inspection) -> str:
    """Describe a source as a page."""
    sentence = found.error or "Every name and every shape is as expected."
    return _page(
        title=found.source,
        kicker="Description of a checkpoint",
        inspection={
            "verdict": _verdict(found.loads, LOADS, sentence),
            "properties": [(label, text) for label, text in properties(found) if label != "error"],
        },
    )


def table_page(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as a page."""
    return _page(
        title=title,
        kicker="Weight compatibility with Hugging Face GPT-2: your own models",
        summary={"columns": columns, "rows": rows},
    )


def parity_page(*reports: ParityReport) -> str:
    """Return one or more reports on one checkpoint as a page."""
    names, first = " and ".join(report.model_name for report in reports), reports[0]
    kicker = (
        "Golden arrays of Hugging Face GPT-2, compared with another implementation"
        if isinstance(first, GoldenReport)
        else "Weight compatibility with Hugging Face GPT-2: parity, layer by layer"
    )
    return _page(
        title=f"{names} and transformers on {first.source}",
        kicker=kicker,
        reports=[_parity(r, f"{r.model_name}, {r.dtype}", r.headline) for r in reports],
        versions=first.versions,
    )


def recorded_page(golden: Golden) -> str:
    """Describe golden arrays as a page."""
    B, T = golden.ids.shape
    columns = ["Array", "Shape", "Largest difference", "Meaning"]
    rows = []
    for name in golden.judged:
        tap = golden.metadata["taps"].get(name, {})
        array, bound = golden.arrays[name], golden.bound(name, golden.dtype)
        shape = " × ".join(map(str, array.shape)) or "scalar"
        rows.append([name, shape, f"{number(bound.rms)} of its RMS", tap.get("meaning", "")])
    return _page(
        title=f"{golden.source}, {golden.metadata['dtype']}, {B} × {T} ids",
        kicker="Golden arrays of Hugging Face GPT-2",
        summary={"columns": columns, "rows": rows},
        versions=golden.metadata["versions"],
    )


def adapt_page(adaptation: Adaptation) -> str:
    """Return what `adapt` found as a page."""
    report, sentence = adaptation.parity, _sentence(adaptation)
    # The page begins with a verdict; the same sentence is not repeated in the parity section.
    own = None if report is None or report.headline == sentence else report.headline
    return _page(
        title=f"{adaptation.model} on {adaptation.source}",
        kicker="Weight compatibility with Hugging Face GPT-2: your own model",
        adaptation={
            "verdict": _verdict(adaptation.compatible, COMPATIBLE, sentence),
            "findings": [_finding(finding) for finding in adaptation.findings],
            "facts": _adaptation_facts(adaptation),
            "unmatched": adaptation.unmatched,
            "rows": adaptation.name_map.rows,
            "layers": f"0 … {adaptation.n_layer - 1}",
        },
        reports=[] if report is None else [_parity(report, "Parity", own)],
        versions={} if report is None else report.versions,
        seconds=adaptation.seconds,
    )


# Sections of a page that has no other content for them.
ABSENT: dict[str, Any] = {
    "adaptation": None, "inspection": None, "summary": None, "reports": [],
    "seconds": {},
}  # fmt: skip


def _page(*, versions: Mapping[str, str] | None = None, **content: Any) -> str:
    """Fill in the document. Characters that UTF-8 cannot encode are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = drawings.px
    made = ", ".join(f"{name} {version}" for name, version in (versions or {}).items())
    template = environment.get_template("page.html")
    page = template.render(versions=made, draw=drawings, **{**ABSENT, **content})
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _verdict(good: bool, words: tuple[str, str], sentence: str) -> dict[str, Any]:
    """Return the verdict: a sign, one of two words, and a sentence."""
    return {"good": good, "word": words[0] if good else words[1], "sentence": sentence}


def _sentence(adaptation: Adaptation) -> str:
    """Return the reason for the verdict: unmatched tensors, the parity check, or a finding."""
    if n := len(adaptation.unmatched):
        tensors = f"{n:,} tensor{'s' * (n > 1)}"
        return f"{adaptation.model} has no parameter for {tensors} of {adaptation.source}."
    if adaptation.parity is None:
        return f"{adaptation.model} could not be run, so nothing was compared."
    if adaptation.parity.passed and not adaptation.compatible:
        message = adaptation.findings[0].message
        return f"Every tap is in bounds, but a finding breaks parity: {message}"
    return adaptation.parity.headline


def _adaptation_facts(adaptation: Adaptation) -> list[tuple[str, str]]:
    mapped = adaptation.tensors - len(adaptation.unmatched)
    facts = [
        ("Tensors mapped", f"{mapped:,} of {adaptation.tensors:,}"),
        ("Layers", str(adaptation.n_layer)),
    ]
    for severity, (_, words) in SEVERITY.items():
        n = sum(finding.severity == severity for finding in adaptation.findings)
        facts.append((words.capitalize(), f"{n:,} finding{'s' * (n != 1)}"))
    return facts


def _finding(finding: Finding) -> dict[str, Any]:
    source = finding.source_line
    return {
        "finding": finding,
        "badge": " ".join(SEVERITY.get(finding.severity, (finding.severity,))),
        "place": place(finding.file, finding.line) if finding.file is not None else None,
        "also": further_places(finding.also),
        "source": None if source is None else dedent(source).strip("\r\n"),
    }


def _parity(report: ParityReport, heading: str, headline: str | None) -> dict[str, Any]:
    """Return the verdict, the facts, the limits of the comparison, the drawings and the tables."""
    golden = isinstance(report, GoldenReport)
    # Gradients are in the tables only: the drawings follow the forward pass.
    taps = [tap for tap in report.taps if not tap.tap.startswith("grad.")]
    found = {kind: each for kind in KINDS if (each := drawings.differences(taps, kind))}
    every = [difference for each in found.values() for difference in each.values()]
    titles = GOLDEN_TITLES if golden else KIND_TITLES
    judged = CALIBRATED if report.calibrated else UNCALIBRATED
    scale = drawings.LogScale.around(every)  # one for both charts, so that they can be compared
    reach = [sensitivity(report), *limits(report), *report.notes]
    return {
        "heading": heading,
        "verdict": _verdict(report.passed, PARITY, headline) if headline else None,
        "findings": [_finding(each) for each in getattr(report, "findings", [])],
        "facts": _parity_facts(report),
        "reach": [line for line in reach if line is not None],
        "drawn": GOLDEN if golden else judged,
        "ratio_note": GOLDEN_RATIO if golden else RATIO,
        "mark_legend": drawings.mark_legend(every),
        "charts": [
            (titles[kind], drawings.error_chart(each, kind, scale)) for kind, each in found.items()
        ],
        "cell_legend": drawings.cell_legend(every),
        "maps": [
            (kind.capitalize(), drawings.heat_map(each, kind)) for kind, each in found.items()
        ],
        "layer_columns": LAYER_COLUMNS,
        "layer_rows": [_layer_row(layer) for layer in layers(report.taps)],
        "gradient_columns": [name.removeprefix(">") for name in GRADIENT_COLUMNS],
        "gradient_rows": gradient_rows(report),
        "input_columns": [name.removeprefix(">") for name in INPUT_COLUMNS],
        "input_rows": input_rows(report),
        "input_note": INPUT_NOTE,
    }


def _parity_facts(report: ParityReport) -> list[tuple[str, str]]:
    B, T = report.input_shape
    total, what = f"{len(report.taps):,}", "Arrays" if isinstance(report, GoldenReport) else "Taps"
    identical = [
        sum(found.bit_identical for found in drawings.differences(report.taps, kind).values())
        for kind in KINDS
    ]
    facts = [
        (f"{what} in bounds", f"{sum(result.passed for result in report.taps):,} of {total}"),
        ("Identical, accumulated", f"{identical[0]:,} of {total}"),
        ("Identical, local", f"{identical[1]:,} of {total}"),
        *([("max|Δlogits|", number(report.max_abs_diff))] if report.logits.inputs else []),
        ("Data type", report.dtype),
        ("Input", f"{B} × {T} ids"),
    ]
    if report.first_divergence is not None:
        facts.insert(1, ("First out of bounds", report.first_divergence))
    return facts


def _layer_row(layer: Layer) -> list[str]:
    """Return one row of LAYER_COLUMNS."""
    sign = "✓" if layer.passed == layer.taps else "✗"
    numbers = [
        text
        for worst in (layer.accumulated, layer.local)
        for text in (worst.error, worst.ratio, worst.max_abs)
    ]
    identical = [
        f"{n} of {layer.taps}" for n in (layer.accumulated.identical, layer.local.identical)
    ]
    return [layer.name, f"{sign} {layer.passed} of {layer.taps}", *numbers, *identical]
