"""The subcommands, and what they share: help, version, completion, exit codes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import compat
from compat.cli.adapt import adapt_command
from compat.cli.compare import compare_command
from compat.cli.errors import handle_errors, internal_error
from compat.cli.explain import explain_command
from compat.cli.export import export_command
from compat.cli.generate import generate_command
from compat.cli.golden import golden_command
from compat.cli.inspect import inspect_command
from compat.cli.load import load_command
from compat.cli.memory import keep_freed_memory
from compat.cli.output import never_fail_to_encode
from compat.cli.pack import pack_command
from compat.cli.parity import parity_command

app = typer.Typer(
    epilog="Exit codes: 0 ok, 1 no parity, 2 wrong usage, 3 bad checkpoint, config, tokenizer or "
    "model, 4 network, 70 internal error, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "load": load_command,
    "inspect": inspect_command,
    "parity": parity_command,
    "golden": golden_command,
    "compare": compare_command,
    "generate": generate_command,
    "adapt": adapt_command,
    "explain": explain_command,
    "export": export_command,
    "pack": pack_command,
}
for name, command in COMMANDS.items():
    # Each paragraph on one line: typer would keep the docstring's line breaks.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=text)(handle_errors(command))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gpt2-compat {compat.__version__}")
        raise typer.Exit


@app.callback(
    help="Load Hugging Face GPT-2 checkpoints, prove parity, generate text, adapt models."
)
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def run(argv: list[str]) -> None:
    """Run a command and exit."""
    never_fail_to_encode()
    keep_freed_memory()
    try:
        app(args=argv, prog_name="gpt2-compat")
    except Exception as error:  # raised outside the commands, for example while options are parsed
        sys.exit(internal_error(error))
