"""Whole pages: one file each, nothing fetched, no script."""

from __future__ import annotations

from collections.abc import Mapping

from compat.adaptation import Adaptation
from compat.html_report.adapt_parts import adapt_facts, adapt_verdict, findings, mapping, sentence
from compat.html_report.markup import Markup, el, join
from compat.html_report.parity_parts import parity_drawings, parity_facts, parity_verdict
from compat.html_report.style import STYLE
from compat.parity import ParityReport

# Even if a string got through unescaped, the browser would fetch and run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def parity_page(*reports: ParityReport) -> str:
    """One or more reports on one checkpoint as a page."""
    names = " and ".join(report.dialect for report in reports)
    sections = [
        el(
            "section",
            el("h2", f"{report.dialect}, {report.dtype}"),
            parity_verdict(report),
            parity_facts(report),
            parity_drawings(report),
        )
        for report in reports
    ]
    return _page(
        f"{names} and transformers on {reports[0].model}",
        "Weight compatibility with Hugging Face GPT-2: parity, layer by layer",
        join(sections),
        reports[0].versions,
    )


def adapt_page(adaptation: Adaptation) -> str:
    """What `adapt` found as a page."""
    report = adaptation.parity
    parts = [adapt_verdict(adaptation), adapt_facts(adaptation), findings(adaptation.findings)]
    if report is not None:
        # Not the same sentence twice.
        own = [] if sentence(adaptation) == report.headline else [parity_verdict(report)]
        rest = [parity_facts(report), parity_drawings(report)]
        parts.append(el("section", el("h2", "Parity"), *own, *rest))
    parts.append(mapping(adaptation))
    return _page(
        f"{adaptation.model} on {adaptation.source}",
        "Weight compatibility with Hugging Face GPT-2: a model of your own",
        join(parts),
        report.versions if report else {},
    )


def _page(title: str, kicker: str, content: Markup, versions: Mapping[str, str]) -> str:
    """The document; what UTF-8 cannot hold, as in odd file names, is written with backslashes."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name_="color-scheme", content="light dark"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("title", title),
        el("info", Markup(STYLE)),
    )
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    body = el(
        "body",
        el("header", el("p", kicker, class_="kicker"), el("h1", title)),
        el("main", content),
        el("footer", made),
    )
    text = "<!doctype html>\n" + el("html", head, body, lang="en") + "\n"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
