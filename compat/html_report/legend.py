"""What the marks and the colours of the drawings mean."""

from __future__ import annotations

from collections.abc import Iterable

from compat.html_report.markup import Markup, el, join
from compat.parity import Difference

BAND = join(
    [
        el("rect", x=0, y=3, width=16, height=13, class_="band"),
        el("path", d="M0 3h16", class_="edge"),
    ]
)
CROSS = el("path", d="M4 4l8 8m0 -8l-8 8", class_="fail")


def dot(name: str) -> Markup:
    return el("circle", cx=8, cy=8, r=4, class_=name)


def legend(entries: Iterable[tuple[Markup, str]]) -> Markup:
    """A list of signs, each 16 × 16, and what they mean."""
    return el(
        "ul",
        *(
            el("li", el("svg", sign, viewBox="0 0 16 16", aria_hidden="true"), text)
            for sign, text in entries
        ),
        class_="legend",
    )


def mark_legend(found: list[Difference]) -> Markup:
    """Of the marks that occur in the charts."""
    judged = [d for d in found if d.bound is not None]
    entries = [
        (bool(judged), BAND, "what passes"),
        (any(d.within and not d.bit_identical for d in judged), dot("pass"), "in bounds"),
        (not all(d.within for d in judged), CROSS, "out of bounds"),
        (any(d.bit_identical for d in found), dot("same"), "bit-identical"),
        (any(d.bound is None and not d.bit_identical for d in found), dot("free"), "not judged"),
    ]
    return legend((sign, text) for there, sign, text in entries if there)
