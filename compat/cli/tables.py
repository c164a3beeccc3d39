"""Tables that lose nothing on a narrow terminal: the widest form that fits, else stacked cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Stacked = Iterable[Sequence[str]]


def print_table(out: Console, tables: Iterable[Table], stacked: Stacked) -> None:
    """Print the first table that fits; if none does, the stacked form.

    Args:
        tables: the same content, the widest table first.
        stacked: for every line of the stacked form its cells, none of which is ever broken.
    """
    for table in tables:
        if _width(table) <= out.width:
            out.print(table)
            return
    for cells in stacked:
        for line in flowed(cells, out.width):
            out.print(Text(line), soft_wrap=True)


def _width(table: Table) -> int:
    """The columns that a table takes if nothing in it is wrapped or cut."""
    unlimited = Console(width=100_000)
    return Measurement.get(unlimited, unlimited.options, table).maximum


def flowed(cells: Sequence[str], width: int) -> Iterator[str]:
    """The cells side by side, two spaces apart, in as many lines as they need; none is broken."""
    line, *others = cells
    for cell in others:
        if cell_len(f"{line}  {cell}") <= width:
            line = f"{line}  {cell}"
        else:
            yield line
            line = f"    {cell}"
    yield line


def wrapped(text: Text, width: int) -> list[Text]:
    """The text in lines of this width, broken between words only: a long name stays whole."""
    width = max(width, 20)
    found: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        breaks: list[int] = []
        start = 0
        for word in re.finditer(r"\S+", line.plain):
            before = line.plain[start : word.start()]
            if before.strip() and cell_len(line.plain[start : word.end()]) > width:
                start = word.start()
                breaks.append(start)
        found += line.divide(breaks)
    for line in found:
        line.rstrip()
    return found
