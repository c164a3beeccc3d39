"""What `adapt` found: the findings with the author's source, and the mapping."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent

from compat.adaptation import Adaptation, Finding
from compat.html_report.markup import Markup, code, count, el, join, table
from compat.html_report.parts import tiles, verdict

SEVERITY = {
    "breaks": "✗ breaks parity",
    "drifts": "≈ drifts in bounds",
    "limit": "? limit of the proof",
    "info": "· style",
}


def adapt_verdict(adaptation: Adaptation) -> Markup:
    good = adaptation.compatible
    return verdict(good, "Compatible" if good else "Not compatible", sentence(adaptation))


def sentence(adaptation: Adaptation) -> str:
    """What decides: tensors without a place, the parity check, or the findings."""
    if adaptation.unmatched:
        found = count(len(adaptation.unmatched), "tensor")
        return f"{adaptation.model} has no place for {found} of {adaptation.source}."
    if adaptation.parity is None:
        return f"{adaptation.model} could not be run, so that nothing was compared."
    if adaptation.parity.passed and not adaptation.compatible:
        return (
            "Every tap is in bounds, but a finding breaks parity: " + adaptation.findings[0].message
        )
    return adaptation.parity.headline


def adapt_facts(adaptation: Adaptation) -> Markup:
    """How much was mapped and found, and how long it took."""
    mapped = adaptation.tensors - len(adaptation.unmatched)
    facts: list[tuple[str, object]] = [("Tensors mapped", f"{mapped:,} of {adaptation.tensors:,}")]
    facts.append(("Layers", adaptation.n_layer))
    for severity, words in SEVERITY.items():
        n = sum(finding.severity == severity for finding in adaptation.findings)
        facts.append((words[2:].capitalize(), count(n, "finding")))
    facts += [(f"Time: {step}", f"{spent:.1f} s") for step, spent in adaptation.seconds.items()]
    return tiles(facts)


def findings(found: Sequence[Finding]) -> Markup:
    """A card each, with the author's line of source."""
    none = el("p", "No deviation from GPT-2 was found.", class_="card")
    return join([el("h2", f"Findings ({len(found)})"), *([_finding(f) for f in found] or [none])])


def _finding(finding: Finding) -> Markup:
    where = [" at ", code(finding.tap)] if finding.tap else []
    badge = el("span", SEVERITY.get(finding.severity, finding.severity), class_="badge")
    return el(
        "article",
        el("header", el("h3", code(finding.code), *where), badge),
        el("p", finding.message),
        _source(finding),
        el(
            "dl",
            *(el("dt", "Fix"), el("dd", finding.fix)),
            *(el("dt", "Evidence"), el("dd", finding.evidence)),
        ),
        class_=f"card finding {finding.severity}",
    )


def _source(finding: Finding) -> Markup:
    """The place, and the line itself; nothing where no line could be named."""
    if finding.file is None:
        return Markup()
    place = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
    if finding.source_line is None:
        return el("p", code(place), class_="note")
    gutter = el("span", finding.line or "", class_="line")
    text = dedent(finding.source_line).strip("\r\n")
    return join([el("p", code(place), class_="note"), el("pre", gutter, code(text))])


def mapping(adaptation: Adaptation) -> Markup:
    """Which tensor went where, a row of the name map each; then those without a place."""
    layers = f"0 … {adaptation.n_layer - 1}"
    rows = [
        (
            code(row.hf),
            layers if "{i}" in row.hf else "–",
            row.op,
            join(el("div", code(name)) for name in row.ours),
        )
        for row in adaptation.name_map.rows
    ]
    label = "Which tensor went where"
    headings = ("Hugging Face tensor", "Layers {i}", "Operation", "Parameters")
    found = el("div", table(headings, rows, label), class_="card")
    return join([el("h2", "Mapping"), found, _homeless(adaptation.unmatched)])


def _homeless(names: Sequence[str]) -> Markup:
    if not names:
        return Markup()
    items = el("ul", *(el("li", code(name)) for name in names))
    return el("div", el("h3", "Tensors without a place"), items, class_="card")
