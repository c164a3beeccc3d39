"""`explain`: what a deviation is, why it matters for GPT-2's weights, and its fix."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer
from rich.text import Text

from compat.cli.output import console, print_wrapped
from compat.summary import SEVERITY


def explain_command(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="The code of a finding, such as erf_gelu.")
    ],
) -> None:
    """Explain a deviation that adapt or compare reports: what it is, why it matters, and its fix.

    Exit code 0: the code exists. 2: there is no such code.
    """
    from compat.golden_files.codes import CODES, explain

    if code not in CODES:
        close = difflib.get_close_matches(code, list(CODES), 1)
        hint = (
            f"Did you mean {close[0]}?" if close else f"The codes are: {', '.join(sorted(CODES))}."
        )
        raise typer.BadParameter(f"no deviation is called {code!r}. {hint}", param_hint="CODE")
    out = console()
    out.print(Text(f"{code}: {SEVERITY[CODES[code].severity][1]}", "bold"))
    for paragraph in explain(code).split("\n\n"):
        out.print()
        print_wrapped(out, Text(paragraph))
