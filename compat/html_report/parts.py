"""What both pages have: the verdict, and facts side by side."""

from __future__ import annotations

from collections.abc import Sequence

from compat.html_report.markup import Markup, el


def verdict(good: bool, word: str, sentence: str) -> Markup:
    """The answer, as a sign, a word and a sentence."""
    sign = el("span", "✓" if good else "✗", class_="sign", aria_hidden="true")
    text = el("div", el("strong", word), el("p", sentence))
    return el("div", sign, text, class_=f"verdict {'good' if good else 'bad'}")


def tiles(facts: Sequence[tuple[str, object]]) -> Markup:
    """Names and values, side by side."""
    return el("dl", *(el("div", el("dt", k), el("dd", v)) for k, v in facts), class_="tiles")
