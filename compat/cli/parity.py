"""`parity`: compare a model with transformers, as a table by layer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.text import Text

import compat
from compat import summary
from compat.cli import options
from compat.cli.output import (
    console,
    print_json,
    print_line,
    print_rows,
    print_table,
    table,
    verdict,
    write_page,
)

NUMBERS = ("max|Δ|", "Δ/RMS", "× ref")


def parity_command(
    source: options.Source = None,
    dialect: options.DefaultDialect = None,
    every: Annotated[bool, typer.Option("--all", help="Check both dialects.")] = False,
    engine: Annotated[
        options.Precision | None,
        typer.Option(
            metavar="DTYPE",
            help="Check an Engine in float32, bfloat16 or int8 instead: prefill and decode steps.",
        ),
    ] = None,
    parallel: Annotated[
        Literal["tensor", "fsdp"] | None,
        typer.Option(
            metavar="KIND",
            help="Divide the model among the processes of torchrun: tensor or fsdp.",
        ),
    ] = None,
    dtype: options.Dtype = None,
    gradients: Annotated[
        bool,
        typer.Option("--gradients", help="Also compare the gradient of every parameter."),
    ] = False,
    text: options.InputText = None,
    seed: options.Seed = None,
    batch: options.Batch = None,
    length: Annotated[
        int | None,
        options.inputs(
            metavar="N",
            min=1,
            help="Number of ids in a sequence. Default: 128, or 32 from 500M parameters on.",
        ),
    ] = None,
    model: options.Model = None,
    revision: options.Revision = None,
    verify: options.Verify = False,
    n_head: options.NHead = None,
    html: options.Html = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Prove, layer by layer, that the blocks compute what transformers computes.

    Exit code 0: they do. 1: they do not, and the table shows from which layer on.
    """
    source = options.choose_source(source, model)
    options.exclude({"--text": text}, {"--seed": seed, "--batch": batch, "--length": length})
    of_blocks = {"--all": every, "--dialect": dialect, "--dtype": dtype, "--gradients": gradients}
    options.exclude({"--engine": engine}, of_blocks)
    options.exclude({"--all": every, "--dialect": dialect})
    options.exclude({"--engine": engine, "--parallel": parallel})
    options.exclude({"--json": as_json, "--quiet": quiet})
    checkpoint = compat.open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    if length is not None and length > (context := checkpoint.config.n_positions):
        raise typer.BadParameter(
            f"{length} ids exceed the context of {context} positions of {source}. Pass at most "
            f"{context}.",
            param_hint="--length",
        )
    if parallel is not None:
        from compat.sharding import mesh_of_torchrun

        mesh = mesh_of_torchrun()
        if mesh.get_rank() > 0:  # all ranks have the same report
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
    from compat.parity import check_dialects, random_ids

    input_ids = random_ids(checkpoint, seed or 0, batch or 2, length) if text is None else None
    dialects: Sequence[options.DialectName] = (
        get_args(options.DialectName) if every else [dialect or "linear"]
    )
    models: Iterable[Any] = dialects
    if engine is not None:
        models = [compat.Engine.from_pretrained(checkpoint, dtype=engine)]
    elif parallel is not None:
        load = partial(compat.load_pretrained, mesh=mesh, parallel=parallel, dtype=dtype)
        models = (load(checkpoint, name) for name in dialects)
    asked: dict[str, Any] = {
        "input_ids": input_ids, "text": text, "dtype": dtype, "gradients": gradients
    }  # fmt: skip
    checked: Iterable[compat.ParityReport]
    if every and parallel is None:
        checked = check_dialects(dialects, checkpoint, **asked)
    else:
        checked = (compat.check_parity(model, checkpoint, **asked) for model in models)
    reports = []
    for report in checked:
        reports.append(report)
        if not as_json:
            _show(report, quiet)
    if as_json:
        found = [report.to_json(full=True) for report in reports]
        print_json(found if every else found[0])
    if html is not None and (parallel is None or mesh.get_rank() == 0):
        from compat.html_report import parity_page

        write_page(html, parity_page(*reports))
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def _show(report: compat.ParityReport, quiet: bool) -> None:
    """Print the tables, the reach of the comparison, and the verdict in one sentence."""
    out = console()
    if not quiet:
        if report.taps:
            show_layers(report, out)
        if not report.taps or not report.logits.passed:
            title = f"logits of {report.model_name} and transformers on {report.source}"
            print_line(out, title, "italic")
            print_rows(out, summary.INPUT_COLUMNS, summary.input_rows(report))
            print_line(out, summary.INPUT_NOTE, "dim italic")
        if rows := summary.gradient_rows(report):
            print_rows(out, summary.GRADIENT_COLUMNS, rows)
        show_reach(report, out)
    show_verdict(report, out)


def show_reach(report: compat.ParityReport, out: Console) -> None:
    """Print the reach of the comparison: the smallest detectable error, limits, and notes."""
    if smallest := summary.sensitivity(report):
        print_line(out, smallest, "dim italic")
    for line in summary.limits(report):
        print_line(out, f"? {line}", "magenta")
    for line in report.notes:
        print_line(out, f"· {line}", "cyan")


def show_verdict(report: compat.ParityReport, out: Console) -> None:
    """Print the verdict in one sentence."""
    out.print(verdict(report.passed, report.headline), soft_wrap=True)


def show_layers(report: compat.ParityReport, out: Console, caption: str | None = None) -> None:
    """Print what was compared, the largest numbers of every layer, and what they mean."""
    B, T = report.input_shape
    title = (
        f"{report.model_name} and transformers on {report.source}, {report.dtype}, {B} × {T} ids"
    )
    found = summary.layers(report.taps)
    wide = []
    for kind in summary.KINDS:
        wide += [f">{kind}\n{NUMBERS[0]}", *(f">\n{name}" for name in NUMBERS[1:])]
    narrow = [f">{name}" for name in (*NUMBERS, "identical")]
    print_line(out, title, "italic")
    print_table(
        out,
        [
            table(["layer", *wide, "bit-identical", "verdict"], map(_wide_row, found)),
            table(
                ["layer", "error", *narrow, "verdict"],
                map(_narrow_row, found),
                show_edge=False,
                pad_edge=False,
            ),
        ],
        _stacked(found),
    )
    calibrated = "× ref: our error over the reference's own, both against float64; up to 2 passes"
    if caption is None:
        caption = (
            calibrated if report.calibrated else "no float64 run: local differences are judged"
        )
    print_line(out, caption, "dim italic")


def _wide_row(layer: summary.Layer) -> list[str | Text]:
    """Return one line for a layer."""
    far, near = layer.accumulated.identical, layer.local.identical
    identical = f"{far}/{layer.taps}"
    if not far == near == layer.taps:
        identical += f", local {near}/{layer.taps}"
    numbers = _numbers(layer)
    return [layer.name, *numbers[0][:3], *numbers[1][:3], identical, _verdict(layer)]


def _narrow_row(layer: summary.Layer) -> list[str | Text]:
    """Return two lines for a layer, the accumulated error above the local one."""
    columns = map("\n".join, zip(*_numbers(layer), strict=True))
    return [layer.name, "\n".join(summary.KINDS), *columns, _verdict(layer)]


def _stacked(found: Sequence[summary.Layer]) -> Iterator[list[str]]:
    """Yield labelled numbers, the accumulated and the local ones below the layer's name."""
    for layer in found:
        yield [layer.name, _verdict(layer).plain]
        for kind, numbers in zip(summary.KINDS, _numbers(layer), strict=True):
            labels = (*NUMBERS, "identical")
            yield [f"  {kind}", *map(" ".join, zip(labels, numbers, strict=True))]


def _numbers(layer: summary.Layer) -> list[list[str]]:
    """Return max|Δ|, Δ/RMS, × ref and the bit-identical taps: accumulated, then local."""
    return [
        [worst.max_abs, worst.rel_rms, worst.ratio, f"{worst.identical}/{layer.taps}"]
        for worst in (layer.accumulated, layer.local)
    ]


def _verdict(layer: summary.Layer) -> Text:
    if layer.first_failed is None:
        return Text("✓", style="green")
    return Text(f"✗ from {layer.first_failed}", style="red")
