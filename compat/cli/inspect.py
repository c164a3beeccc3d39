"""`inspect`: describe a source, and whether it would load."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

import compat
from compat.cli import options
from compat.cli.errors import BAD_INPUT
from compat.cli.output import console, print_json, print_wrapped
from compat.summary import properties


def inspect_command(
    source: options.RequiredSource = None,
    model: options.Model = None,
    revision: options.Revision = None,
    n_head: options.NHead = None,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint is and whether it would load, without loading it.

    Only the headers of safetensors files are read. A .bin or .pt file has no header and is read
    completely. A hub id is downloaded. Values are not checked, whereas loading also refuses NaN and
    infinity.

    Exit code 0: it would load. 3: it would not, and the report says why. 4: no network. 70: a bug
    in compat.
    """
    found = compat.inspect_checkpoint(
        options.choose_source(source, model, default=None), n_head=n_head, revision=revision
    )
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, console())
    raise typer.Exit(0 if found.loads else BAD_INPUT)


def _show(found: compat.Inspection, out: Console) -> None:
    """Print the verdict, then one labelled paragraph for each known property."""
    verdict = Text("✓ would load", "bold green") if found.loads else Text("✗ would not load", "red")
    out.print(Text.assemble((found.source, "bold"), "  ", verdict), soft_wrap=True)
    width = out.width if out.is_terminal else 100_000
    for label, text in properties(found):
        print_wrapped(out, Text(text), Text(f"  {label:10}  ", "cyan"), " " * 14, width)
