"""HTML elements; every string that is not markup already is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

VOID = {"meta"}


class Markup(str):
    """Text that is HTML already."""


def el(name: str, *children: object, **attributes: object) -> Markup:
    """An element; `class_` and `aria_label` stand for class and aria-label, None leaves out.

    Children are markup, or anything else, which is shown as its string.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Markup as it is, all else escaped, one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children))


def table(headings: Iterable[object], rows: Iterable[Iterable[object]], label: str) -> Markup:
    """A table whose first column heads its rows, in a box in which it scrolls."""
    head = el("tr", *(el("th", heading, scope="col") for heading in headings))
    body = []
    for first, *rest in rows:
        cells = [el("td", cell) for cell in rest]
        body.append(el("tr", el("th", first, scope="row"), *cells))
    found = el("table", el("thead", head), el("tbody", *body))
    return el("div", found, class_="scroll", role="region", aria_label=label, tabindex=0)


def code(text: object) -> Markup:
    return el("code", text)


def number(value: float) -> str:
    """Two digits, as 1.2e-07."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞"
    return f"{value:.2g}"


def count(n: int, noun: str) -> str:
    """1 tap, 2 taps."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def px(value: float) -> str:
    """A coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")
