"""`adapt`: somebody's own GPT-2 mapped, loaded and proved, or what differs and on which line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from compat import user_code
from compat.adaptation import Adaptation, Finding, adapt
from compat.adaptation.emit import to_python
from compat.checkpoint import open_checkpoint
from compat.cli.common import (
    JsonOption,
    ModelOption,
    NHeadOption,
    RevisionOption,
    console,
    handle_errors,
    note,
    print_json,
)
from compat.cli.parity import HtmlOption, write_page
from compat.cli.tables import wrapped
from compat.errors import collapse_layers
from compat.html_report import adapt_page
from compat.user_models import construct, load_class, resized

# The mark, its colour, and what a finding does at its tap.
SEVERITY = {
    "breaks": ("✗", "red", "breaks"),
    "drifts": ("≈", "yellow", "drifts in bounds"),
    "limit": ("?", "magenta", "limit of the proof"),
    "info": ("·", "cyan", "info"),
}


@handle_errors
def adapt_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:Class",
            help="Or FILE.ipynb:Class, or package.module:Class; a lone model needs no :Class.",
        ),
    ],
    model: ModelOption = "demo",
    kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Arguments of the constructor, over those worked out."),
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A config of the file to build with, as it is."),
    ] = None,
    revision: RevisionOption = None,
    n_head: NHeadOption = None,
    emit_map: Annotated[
        bool, typer.Option("--emit-map", help="Print the name map as Python to paste.")
    ] = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint into a GPT-2 that somebody wrote; prove or diagnose.

    The class is built in the checkpoint's sizes, its parameters are told by
    what the code does with them, and its hidden states are compared with those
    of transformers. Each deviation is shown with its line and what to change.

    The model's code is imported and run, as if you ran it yourself; nothing of
    the checkpoint is run.

    Exit code 0: it computes what transformers computes. 1: it does not.
    2: wrong usage. 3: it cannot be imported, built, run or read as a GPT-2, or
    the checkpoint is bad. 4: no network. 70: a bug in compat.
    """
    given = _arguments(kwargs)
    _at_most_one({"--kwargs": kwargs is not None, "--config-name": config_name is not None})
    _at_most_one({"--json": as_json, "--emit-map": emit_map})
    with contextlib.redirect_stdout(sys.stderr):  # what somebody's code prints is no data of ours
        cls = load_class(target)
        checkpoint = open_checkpoint(model, revision=revision, n_head=n_head)
        # It turns on a terminal only, and is of characters that every terminal has.
        status = Console(stderr=True).status("tracing and comparing …", spinner="line")
        with status, user_code.handle_errors(cls):
            built = construct(cls, checkpoint.config, kwargs=given, config_name=config_name)
            with resized(cls, checkpoint.config):  # forward may read them, too
                adaptation = adapt(built, checkpoint)
    for line in checkpoint.notes:
        note(f"note: {line}")
    if as_json:
        print_json(adaptation.to_json())
    elif emit_map:
        print(to_python(adaptation.name_map), end="")
        note("  ".join(part.plain for part in _headline(adaptation)))
    else:
        show(adaptation, console())
    if html is not None:
        write_page(html, adapt_page(adaptation))
    raise typer.Exit(0 if adaptation.compatible else 1)


def _arguments(kwargs: str | None) -> dict[str, Any] | None:
    """The JSON object of --kwargs."""
    if kwargs is None:
        return None
    example = """such as '{"dropout": 0.0}'"""
    try:
        found = json.loads(kwargs)
    except ValueError as error:
        raise typer.BadParameter(
            f"{kwargs!r} is not JSON ({error}); expected an object {example}",
            param_hint="--kwargs",
        ) from None
    if not isinstance(found, dict):
        raise typer.BadParameter(
            f"{kwargs} is no JSON object; expected one {example}", param_hint="--kwargs"
        )
    return found


def _at_most_one(options: dict[str, bool]) -> None:
    if all(options.values()):
        raise typer.BadParameter(f"{' and '.join(options)} exclude each other; give one of them")


# What a person sees.


def show(adaptation: Adaptation, out: Console) -> None:
    """The two verdicts, what has no place, then each deviation with its line and its remedy."""
    _in_a_line(out, _headline(adaptation))
    if adaptation.unmatched:
        _wrapped(out, Text(f"no place for {', '.join(collapse_layers(adaptation.unmatched))}"), 2)
    matter = [finding for finding in adaptation.findings if finding.severity != "info"]
    for _, on_a_line in groupby(matter, key=_place):
        out.print()
        _show_findings(list(on_a_line), out)
    style = [finding for finding in adaptation.findings if finding.severity == "info"]
    if style:
        out.print()
    for finding in style:
        _show_style(finding, out)


def _headline(adaptation: Adaptation) -> list[Text]:
    """Whether all tensors have a place, and whether the model computes the same."""
    total = adaptation.tensors
    mapped = total - len(adaptation.unmatched)
    return [
        _verdict(mapped == total, f"mapped {mapped:,} of {total:,} tensors"),
        _verdict(adaptation.compatible, _parity(adaptation)),
    ]


def _verdict(good: bool, words: str) -> Text:
    return Text(f"{'✓' if good else '✗'} {words}", style="bold green" if good else "bold red")


def _parity(adaptation: Adaptation) -> str:
    report = adaptation.parity
    if report is None:
        return "parity could not be checked: the logits are of another shape"
    report = report.float32 or report  # of a model in half precision
    taps = f"{len(report.taps):,} of {len(report.taps):,} taps"
    if adaptation.compatible:
        inputs = f"logits on {len(report.logits.inputs)} inputs"
        return f"parity at {taps}, and {inputs}; max|Δlogits| = {report.max_abs_diff:.1g}"
    if all(tap.passed for tap in report.taps):
        return f"no parity, although {taps} agree"
    return f"parity fails from {report.first_divergence} on"


def _show_findings(findings: Sequence[Finding], out: Console) -> None:
    """A line, then of each finding there what it does, what to change, and how that is known."""
    _show_line(findings[0], out)
    for finding in findings:
        mark, colour, does = SEVERITY[finding.severity]
        where = f" at {finding.tap}" if finding.tap else ""
        title = Text.assemble((f"{mark} ", colour), (finding.code, f"bold {colour}"), " · ")
        title.append(f"{does}{where}", style=colour).append(f": {finding.message}")
        _wrapped(out, title, 2)
        out.print(Text.assemble("  ", ("→ ", "bold green"), (finding.fix, "bold")), soft_wrap=True)
        if finding.evidence:
            _wrapped(out, Text(f"  {finding.evidence}", style="dim"), 2)


def _show_style(finding: Finding, out: Console) -> None:
    """The same in short, without the source."""
    mark, colour, _ = SEVERITY[finding.severity]
    place = f" at {_place(finding)}" if finding.file else ""
    title = Text.assemble((f"{mark} {finding.code}", colour), place)
    _wrapped(out, title.append(f": {finding.message} → {finding.fix}"), 0)


def _show_line(finding: Finding, out: Console) -> None:
    """`file:line  source`, never cut, so that both can be copied; in two lines where it is long."""
    if finding.file is None:
        return
    place = Text(_place(finding), style="cyan")
    source = Text((finding.source_line or "").strip(), style="bold")
    fits = place.cell_len + 2 + source.cell_len <= out.width or not out.is_terminal
    out.print(Text("  " if fits else "\n  ").join([place, source]), soft_wrap=True)


def _place(finding: Finding) -> str:
    """`file:line`, the path as seen from the working directory where it lies below it."""
    file = finding.file or ""
    with contextlib.suppress(ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    return file if finding.line is None else f"{file}:{finding.line}"


def _wrapped(out: Console, text: Text, indent: int) -> None:
    """The text, which begins with a mark, in lines of the terminal's width below each other."""
    first, *others = wrapped(text, out.width - indent - 2)
    for line in (first, *(Text("  ").append_text(other) for other in others)):
        out.print(Text(" " * indent).append_text(line), soft_wrap=True)


def _in_a_line(out: Console, parts: Sequence[Text]) -> None:
    """Side by side where they fit, else one below the other."""
    joined = Text("   ").join(parts)
    if joined.cell_len <= out.width:
        out.print(joined, soft_wrap=True)
    else:
        for part in parts:
            _wrapped(out, part, 0)
