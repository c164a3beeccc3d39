"""The command line: one subcommand, one call of the library, one way of showing the result."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from compat.cli.adapt import adapt_command
from compat.cli.common import internal_error
from compat.cli.encoding import never_fail_to_encode
from compat.cli.export import export_command
from compat.cli.generate import generate_command
from compat.cli.inspect import inspect_command
from compat.cli.load import load_command
from compat.cli.parity import parity_command

__all__ = ["main"]

app = typer.Typer(
    help="GPT-2 weights from Hugging Face in hand-written blocks: load, prove, generate, adapt.",
    epilog="Exit codes: 0 ok, 1 no parity, 2 wrong usage, 3 bad checkpoint, config, tokenizer or "
    "model, 4 network, 70 internal error, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("load")(load_command)
app.command("inspect")(inspect_command)
app.command("parity")(parity_command)
app.command("generate")(generate_command)
app.command("adapt")(adapt_command)
app.command("export")(export_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    Exit codes: 0 ok, 1 no parity, 2 usage, 3 bad input, 4 network, 70 internal error, 130 Ctrl-C.
    """
    never_fail_to_encode()
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="gpt2-compat")
    except Exception as error:  # outside the commands, as where an option is read
        sys.exit(internal_error(error))
