"""Bars of decoding speed as plain SVG: one panel per model, and one group per precision."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LABELS, BAR, GAP, TITLE = 760, 170, 16, 6, 34
SCALE = WIDTH - LABELS - 90  # pixels of the longest bar; the rest is for its number
COLOURS = {"ours": "#2f6fb0", "peer": "#9aa5b1", "limit": "#c0392b"}


def svg(results: list[dict[str, Any]]) -> str:
    """Return all panels, one below the other."""
    parts, y = [], 10
    for result in results:
        panel, y = draw_model(result, y)
        parts += panel
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
            f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{y}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def draw_model(result: dict[str, Any], y: int) -> tuple[list[str], int]:
    rows = [row for row in result["rows"] if "decode" in row]
    limits = {row["precision"]: result["limits"][row["precision"]] for row in rows}
    highest = max([row["decode"]["high"] for row in rows] + [*limits.values(), 1])
    heading = f"{result['model']}: tokens per second, one sequence, greedy"
    parts = [text(10, y + 16, heading, weight="bold")]
    y += TITLE
    for precision, limit in limits.items():
        group = [row for row in rows if row["precision"] == precision]
        bottom = y + TITLE // 2 + len(group) * (BAR + GAP)
        x = LABELS + SCALE * limit / highest
        parts.append(text(10, y + 10, precision, weight="bold"))
        parts.append(line(x, y + 14, x, bottom, COLOURS["limit"], dashed=True))
        parts.append(text(x, y + 10, f"memory limit {limit:.0f}", "middle", COLOURS["limit"]))
        for number, row in enumerate(group):
            parts += draw_bar(row, y + TITLE // 2 + number * (BAR + GAP), SCALE / highest)
        y = bottom + TITLE // 2
    return parts, y


def draw_bar(row: dict[str, Any], y: int, scale: float) -> list[str]:
    """Return the median as a bar, the spread of the runs as a line over its end."""
    median, low, high = (row["decode"][key] for key in ("median", "low", "high"))
    colour = COLOURS["ours" if row["ours"] else "peer"]
    middle, end = y + BAR / 2, LABELS + scale * high
    return [
        text(LABELS - 8, middle + 4, row["name"], "end"),
        f'<rect x="{LABELS}" y="{y}" width="{scale * median:.1f}" height="{BAR}" fill="{colour}"/>',
        line(LABELS + scale * low, middle, end, middle, "black"),
        text(max(LABELS + scale * median, end) + 6, middle + 4, f"{median:.0f}"),
    ]


def text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "black", weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{bold}>'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )
