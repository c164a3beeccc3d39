"""`parity`: the proof, as a table by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compat.checkpoint import open_checkpoint
from compat.cli.common import (
    MAX_SEED,
    DialectName,
    DtypeOption,
    JsonOption,
    MmapOption,
    ModelOption,
    NHeadOption,
    OwnBlocksOption,
    RevisionOption,
    VerifyOption,
    console,
    handle_errors,
    note,
    print_json,
    refuse,
)
from compat.cli.generate_options import PrecisionName
from compat.cli.tables import print_table
from compat.engine import Engine
from compat.html_report import parity_page
from compat.parity import Difference, ParityReport, TapResult, check_parity, random_ids
from compat.parity.compare import count_identical


def in_a_folder(path: Path | None) -> Path | None:
    """Refuse at once what could not be written after minutes of work."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder")
    return path


HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Also write a page for the browser.",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=in_a_folder,
    ),
]


@handle_errors
def parity_command(
    model: ModelOption = "demo",
    dialect: OwnBlocksOption = None,
    every: Annotated[bool, typer.Option("--all", help="Check both dialects.")] = False,
    engine: Annotated[
        PrecisionName | None,
        typer.Option(help="Check an Engine of this precision instead: prefill and decode steps."),
    ] = None,
    dtype: DtypeOption = None,
    text: Annotated[str | None, typer.Option(help="Compare on this text.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the random ids; default 0.", min=0, max=MAX_SEED)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of random ids; default 2.", min=1)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Ids a sequence; default 128, or 32 from 500M parameters on.", min=1),
    ] = None,
    revision: RevisionOption = None,
    verify: VerifyOption = False,
    n_head: NHeadOption = None,
    mmap: MmapOption = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the headline only.")] = False,
) -> None:
    """Prove, layer by layer, that the blocks compute what transformers computes.

    Exit code 0: they do. 1: they do not, and the table says from where on.
    """
    checkpoint = open_checkpoint(model, revision=revision, verify=verify, mmap=mmap, n_head=n_head)
    if length is not None and length > (context := checkpoint.config.n_positions):
        raise typer.BadParameter(
            f"{length} ids are longer than the context of {context} positions that {model} has; "
            f"give at most {context}",
            param_hint="--length",
        )
    input_ids = random_ids(checkpoint, seed or 0, batch or 2, length) if text is None else None
    dialects = list(DialectName) if every else [dialect or DialectName.linear]
    models: list[str | Engine] = [one.value for one in dialects]
    if engine is not None:
        models = [Engine(checkpoint, dtype=engine.value)]
    reports = []
    for one in models:
        report = check_parity(
            one, checkpoint, input_ids=input_ids, text=text, dtype=dtype.torch if dtype else None
        )
        reports.append(report)
        if not as_json:
            show(report, quiet)
    if as_json:
        found = [report.to_json() for report in reports]
        print_json(found if every else found[0])
    if html is not None:
        write_page(html, parity_page(*reports))
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def write_page(path: Path, page: str) -> None:
    """The page, and a word on where it is; a path that cannot be written is wrong usage."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    note(f"wrote {path}")


def show(report: ParityReport, quiet: bool = False) -> None:
    """The tables, how far the comparison reaches, and the verdict in one sentence."""
    out = console()
    if not quiet:
        if report.taps:
            _show_table(report, out)
        if not report.taps or not report.logits.passed:
            _show_inputs(report, out)
        _show_reach(report, out)
    mark, style = ("✓", "bold green") if report.passed else ("✗", "bold red")
    out.print(Text(f"{mark} {report.headline}", style=style), soft_wrap=True)


def _show_reach(report: ParityReport, out: Console) -> None:
    """How far the comparison reaches."""
    if report.passed:
        words = f"A relative error of {report.smallest_detectable:.1g} at the logits of one "
        out.print(Text(f"{words}position would have failed.", style="dim italic"), soft_wrap=True)
    for limit in report.limits:
        place = f"{limit.file}:{limit.line}: " if limit.file else ""
        out.print(Text(f"? {place}{limit.message}", style="magenta"), soft_wrap=True)
    for line in report.notes:
        out.print(Text(f"· {line}", style="cyan"), soft_wrap=True)


def _show_inputs(report: ParityReport, out: Console) -> None:
    """The logits on every input: the error of the worst position and its bound."""
    title = f"logits of {report.dialect} and transformers on {report.model}"
    rows = []
    for result in report.logits.inputs:
        B, T = result.input_shape
        found = result.logits
        numbers = ["-"] * 3
        if found is not None:
            bound = "-" if found.bound is None else _number(found.bound)
            numbers = [_number(found.max_abs), _number(found.error), bound]
        rows.append([result.name, f"{B} × {T}", *numbers, "✓" if result.passed else "✗"])
    table = Table("input", "ids")
    for number in INPUT_NUMBERS:
        table.add_column(number, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(*row)
    labelled = (
        [row[0], row[1], *map(" ".join, zip(INPUT_NUMBERS, row[2:5], strict=True)), row[5]]
        for row in rows
    )
    out.print(Text(title, style="italic"), soft_wrap=True)
    print_table(out, [table], labelled)
    caption = "error and bound: at the worst position, over the norm of its logits"
    out.print(Text(caption, style="dim italic"), soft_wrap=True)


def _show_table(report: ParityReport, out: Console) -> None:
    """What was compared, the numbers by layer, and what they mean."""
    B, T = report.input_shape
    title = f"{report.dialect} and transformers on {report.model}, {report.dtype}, {B} × {T} ids"
    calibrated = "× ref: our error over the reference's own, both against float64; up to 2 passes"
    caption = calibrated if report.calibrated else "no float64 run: local differences are judged"
    rows = [_row(layer, list(group)) for layer, group in groupby(report.taps, key=_layer)]
    out.print(Text(title, style="italic"), soft_wrap=True)
    print_table(out, [_table(rows), _narrow_table(rows)], _stacked(rows))
    out.print(Text(caption, style="dim italic"), soft_wrap=True)


@dataclass(frozen=True)
class _Row:
    """What the table says of a layer; numbers are the largest of its taps.

    Args:
        accumulated, local: max|Δ|, relative RMS, and error as a multiple of the reference's own.
        identical: how many taps are bit-identical, accumulated and local.
        taps: how many there are.
    """

    layer: str
    accumulated: list[str]
    local: list[str]
    identical: tuple[int, int]
    taps: int
    verdict: Text


def _row(layer: str, results: list[TapResult]) -> _Row:
    failed = [result.tap.removeprefix(layer + ".") for result in results if not result.passed]
    return _Row(
        layer,
        _worst([result.accumulated for result in results]),
        _worst([result.local for result in results]),
        count_identical(results),
        len(results),
        Text(f"✗ from {failed[0]}", style="red") if failed else Text("✓", style="green"),
    )


NUMBERS = ("max|Δ|", "Δ/RMS", "× ref")
INPUT_NUMBERS = ("max|Δ|", "error", "bound")


def _table(rows: list[_Row]) -> Table:
    """A line for each layer."""
    table = Table("layer")
    for name in ("accumulated", "local"):
        for number in NUMBERS:
            heading = name if number == NUMBERS[0] else ""
            table.add_column(f"{heading}\n{number}", justify="right")
    table.add_column("bit-identical")
    table.add_column("verdict")
    for row in rows:
        far, near = row.identical
        identical = f"{far}/{row.taps}"
        if not far == near == row.taps:
            identical += f", local {near}/{row.taps}"
        table.add_row(row.layer, *row.accumulated, *row.local, identical, row.verdict)
    return table


def _narrow_table(rows: list[_Row]) -> Table:
    """Two lines for each layer, the accumulated error above the local one."""
    table = Table("layer", "error", show_edge=False, pad_edge=False)
    for number in (*NUMBERS, "identical"):
        table.add_column(number, justify="right")
    table.add_column("verdict")
    for row in rows:
        numbers = map("\n".join, zip(row.accumulated, row.local, strict=True))
        identical = "\n".join(f"{count}/{row.taps}" for count in row.identical)
        table.add_row(row.layer, "accumulated\nlocal", *numbers, identical, row.verdict)
    return table


def _stacked(rows: list[_Row]) -> Iterator[list[str]]:
    for row in rows:
        yield [row.layer, row.verdict.plain]
        for name, numbers, identical in (
            ("accumulated", row.accumulated, row.identical[0]),
            ("local", row.local, row.identical[1]),
        ):
            labelled = [f"{what} {x}" for what, x in zip(NUMBERS, numbers, strict=True)]
            yield [f"  {name}", *labelled, f"identical {identical}/{row.taps}"]


def _layer(result: TapResult) -> str:
    """The block of a tap, h.3 of h.3.act; a tap outside the blocks as it is."""
    return result.tap.rpartition(".")[0] or result.tap


def _worst(found: list[Difference]) -> list[str]:
    """The largest max|Δ|, relative RMS, and error as a multiple of the reference's own."""
    ratios = [d.ratio for d in found if d.ratio is not None]
    return [
        _number(max(d.max_abs for d in found)),
        _number(max(d.rel_rms for d in found)),
        f"{max(ratios):.2f}" if ratios else "-",
    ]


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
