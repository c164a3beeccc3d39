"""What the commands print: notes and JSON, tables and paragraphs that lose nothing on a narrow
terminal, and substitutes for characters that a terminal's encoding lacks."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from compat.display import write_text

# Substitutes for the characters that compat itself prints.
SUBSTITUTES = {
    "✓": "+", "✗": "x", "≈": "~", "·": "-", "→": "->", "Δ": "d", "×": "x", "…": "-",
    "√": "sqrt ", "−": "-", "–": "-", "ᵀ": ".T",
}  # fmt: skip


def never_fail_to_encode() -> None:
    """Let stdout and stderr print a substitute for every character that they cannot encode."""
    codecs.register_error("compat_substitute", _substitute)
    for stream in (sys.stdout, sys.stderr):
        # These are Python's defaults; another handler, such as `replace`, is the user's choice.
        defaults = ("strict", "surrogateescape", "backslashreplace")
        if isinstance(stream, io.TextIOWrapper) and stream.errors in defaults:
            stream.reconfigure(errors="compat_substitute")


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Return an error handler for `codecs`: the substitute of a character, or else its escape."""
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    escaped = character.encode("ascii", "backslashreplace").decode()
    return SUBSTITUTES.get(character, escaped), error.start + 1


def to_json(value: Any, encoding: str | None, indent: int | None = None) -> str:
    """Return JSON for this encoding. Non-ASCII characters are escaped unless it is Unicode."""
    unicode = (encoding or "utf-8").lower().startswith("utf")
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=not unicode)


def print_json(value: Any) -> None:
    """Print data for programs to stdout."""
    print(to_json(value, sys.stdout.encoding, indent=2))


def note(text: str) -> None:
    """Print a message for people to stderr."""
    print(text, file=sys.stderr)


def print_notes(notes: Iterable[str]) -> None:
    """Print each note on a line of stderr."""
    for text in notes:
        note(f"note: {text}")


def write_page(path: Path, page: str) -> None:
    """Write an HTML page and print its path.

    Raises:
        typer.BadParameter: the file cannot be written.
    """
    try:
        write_text(path, page)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    note(f"wrote {path}")


def console() -> Console:
    """Return stdout, with the width of the terminal or of COLUMNS, otherwise 140 columns."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    out = Console(width=None if known else 140, highlight=False)
    return out if out.width else Console(width=80, highlight=False)  # rich prints nothing at 0


def verdict(good: bool, words: str) -> Text:
    """Return words after a green tick or a red cross."""
    mark, colour = ("✓", "green") if good else ("✗", "red")
    return Text(f"{mark} {words}", style=f"bold {colour}")


def print_line(out: Console, text: str, style: str) -> None:
    """Print a text in a style, without breaking it into lines."""
    out.print(Text(text, style=style), soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], **style: Any) -> Table:
    """Return a rich table. A column whose name begins with ">" is aligned to the right."""
    made = Table(**style)
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if right else "left")
    for row in rows:
        made.add_row(*row)
    return made


def print_rows(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table, or stacked, with the names of the right-aligned columns as labels."""
    stacked = (
        [
            f"{n[1:]} {cell}" if n.startswith(">") else cell
            for n, cell in zip(columns, row, strict=True)
        ]
        for row in rows
    )
    print_table(out, [table(columns, rows)], stacked)


def print_table(out: Console, tables: Iterable[Table], stacked: Iterable[Sequence[str]]) -> None:
    """Print the first table that fits; if none does, print the stacked form.

    Args:
        out: where to print.
        tables: the same content in several forms, the widest first.
        stacked: the cells of every line of the stacked form. A cell is never broken.
    """
    unlimited = Console(width=100_000)
    for candidate in tables:
        if Measurement.get(unlimited, unlimited.options, candidate).maximum <= out.width:
            out.print(candidate)
            return
    for cells in stacked:
        for line in _flowed(cells, out.width):
            out.print(Text(line), soft_wrap=True)


def _flowed(cells: Sequence[str], width: int) -> Iterator[str]:
    """Yield the cells side by side, two spaces apart, on as many lines as they need."""
    line, *others = cells
    for cell in others:
        if cell_len(f"{line}  {cell}") <= width:
            line = f"{line}  {cell}"
        else:
            yield line
            line = f"    {cell}"
    yield line


def print_wrapped(
    out: Console, text: Text, first: str | Text = "", others: str = "", width: int | None = None
) -> None:
    """Print a text wrapped to the console's width, or to `width`.

    Lines are broken between words only, so that long names stay whole.

    Args:
        out: where to print.
        text: one paragraph or several lines.
        first: printed before the first line.
        others: printed before every other line.
        width: the width of a line, including what is printed before it.
    """
    lead = Text("").append_text(Text(first) if isinstance(first, str) else first)
    for line in _wrapped(text, (out.width if width is None else width) - cell_len(others)):
        out.print(lead.append_text(line), soft_wrap=True)
        lead = Text(others)


def _wrapped(text: Text, width: int) -> Iterator[Text]:
    width = max(width, 20)
    for line in text.split("\n", allow_blank=True):
        breaks: list[int] = []
        start = 0
        for word in re.finditer(r"\S+", line.plain):
            before = line.plain[start : word.start()]
            if before.strip() and cell_len(line.plain[start : word.end()]) > width:
                start = word.start()
                breaks.append(start)
        for part in line.divide(breaks):
            part.rstrip()
            yield part
