"""The table of bench.py generate: rows by precision, then the targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.targets import Target

HEADINGS = {  # of the columns
    "decode": "decode, tokens/s",
    "batch 8": "batch 8",
    "batch 32": "batch 32",
    "prompt": "prefill, tokens/s",
    "first": "first token, s",
    "growth": "growth",
    "peak": "peak, GB",
}


def show(result: dict[str, Any], targets: list[Target]) -> None:
    """Print one model's table, and below it the targets with ✓ or ✗."""
    rows = result["rows"]
    columns = [key for key in HEADINGS if any(key in row for row in rows)]
    title = f"generating with {result['model']}"
    table = Table("", title=title, caption=caption(result))
    for key in ("decode", "spread", "× transformers", "× best peer", *columns[1:], "same tokens"):
        table.add_column(HEADINGS.get(key, key), justify="right")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        group = [row for row in rows if row["precision"] == precision]
        table.add_section()
        table.add_row(Text(f"{precision}: at most {result['limits'][precision]:.0f}", "bold"))
        for row in group:
            if "decode" in row:
                table.add_row(*cells(row, group, rows, columns, result["new"]))
    console = Console(width=170)
    console.print(table)
    for row in rows:
        if "decode" not in row:
            console.print(f"· {row['name']}: {row.get('absent') or row['error']}", markup=False)
    for target in targets:
        console.print(target.line(), markup=False, highlight=False)


def cells(
    row: dict[str, Any],
    group: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    columns: list[str],
    new: int,
) -> list[str]:
    """Return a row. Ratios are to transformers' decoding at this precision, or else at its best."""
    decode = row["decode"]
    reference = best(group, lambda r: r["family"] == "transformers") or best(
        rows, lambda r: r["family"] == "transformers"
    )
    peer = best(group, lambda r: not r["ours"])
    ratios = [f"{decode['median'] / side:.2f}" if side else "" for side in (reference, peer)]
    numbers = [number(key, row[key]["median"]) if key in row else "" for key in columns[1:]]
    same = f"{row['same_tokens']}/{new}" if "same_tokens" in row else ""
    low_high = f"{decode['low']:.0f} … {decode['high']:.0f}"
    return [row["name"], f"{decode['median']:.1f}", low_high, *ratios, *numbers, same]


def best(rows: list[dict[str, Any]], of: Callable[[dict[str, Any]], bool]) -> float:
    """Return the highest median decoding speed of some rows; 0 if there is none."""
    return max((row["decode"]["median"] for row in rows if "decode" in row and of(row)), default=0)


def number(key: str, value: float) -> str:
    if key == "peak":
        return f"{value / 1e9:.2f}"
    return f"{value:.2f}" if key in ("first", "growth") else f"{value:.0f}"


def caption(result: dict[str, Any]) -> str:
    """Return how the table was measured, and how the memory limit follows."""
    distinct = [row["distinct_tokens"] for row in result["rows"] if "distinct_tokens" in row]
    lines = [
        f"medians of {result['runs']} runs in turns on {result['device']}, "
        f"threads: {result['threads']}; "
        "same tokens: leading ones equal to transformers' in float32",
        f"at most: {result['weights'] / 1e6:.0f} million weights for each token, "
        f"read at {result['bandwidth'] / 1e9:.1f} GB/s, as measured",
    ]
    if distinct:
        lines.append(
            f"the text has {min(distinct)} different tokens among {result['new']}; the more it "
            "repeats itself, the more drafts of prompt lookup are accepted"
        )
    return "\n".join(lines)
