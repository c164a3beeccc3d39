"""`compare`: another implementation's arrays against those of a golden file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import compat
from compat.cli import options
from compat.cli.adapt import show_finding
from compat.cli.output import console, print_json, write_page
from compat.cli.parity import show_layers, show_reach, show_verdict
from compat.display import page
from compat.errors import ParityError, described

if TYPE_CHECKING:
    from compat.golden_files import GoldenReport

CAPTION = (
    "accumulated: from the golden array; local: from GPT-2's formula on your own arrays; × ref: "
    "the difference over the reference's own rounding error"
)


def compare_command(
    golden: Annotated[Path, typer.Argument(metavar="GOLDEN", help="A file that golden wrote.")],
    candidate: Annotated[
        Path,
        typer.Argument(
            metavar="CANDIDATE",
            help="Your arrays: a .safetensors or .npz file, or a folder of .npy files.",
        ),
    ],
    rename: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A JSON object from your names to taps: {"blocks.{i}.gelu": "h.{i}.act"}; null '
            "ignores an array.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        options.checkpoint(
            metavar="SOURCE",
            help="The checkpoint of the golden file, so that matrices are checked piece by piece.",
        ),
    ] = None,
    revision: options.Revision = None,
    verify: options.Verify = False,
    n_head: options.NHead = None,
    html: options.Html = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare another implementation's arrays with a golden file, and report deviations.

    Arrays are named after taps; any subset of the taps will do. Exit code 0: every array is within
    its bounds. 1: at least one is not.
    """
    options.exclude({"--json": as_json, "--quiet": quiet})
    from compat.golden_files import Golden

    opened = Golden.open(golden)
    names = None if rename is None else _read_names(rename)
    checkpoint = None
    if model is not None:
        checkpoint = compat.open_checkpoint(model, revision=revision, verify=verify, n_head=n_head)
    report = opened.check(candidate, model=checkpoint, rename=names)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report, console(), quiet)
    if html is not None:
        write_page(html, page(report))
    raise typer.Exit(0 if report.passed else 1)


def _show(report: GoldenReport, out: Console, quiet: bool) -> None:
    """Print the table, what was accepted, the deviations, and the verdict in one sentence."""
    if not quiet:
        show_layers(report, out, CAPTION)
        show_reach(report, out)
        for finding in report.findings:
            out.print()
            show_finding(finding, out)
        if report.findings:
            out.print()
    show_verdict(report, out)


def _read_names(path: Path) -> dict[str, str | None]:
    """Return the map of --rename.

    Raises:
        ParityError: it is not a JSON object of names.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ParityError(f"{path} cannot be read: {error}. Pass a JSON file.") from None
    values = found.values() if isinstance(found, dict) else [found]
    wrong = [value for value in values if not (value is None or isinstance(value, str))]
    if not isinstance(found, dict) or wrong:
        raise ParityError(
            f"{path} holds {described(wrong[0] if wrong else found)}, but must hold a JSON object "
            "from your names to taps or null."
        )
    return found
