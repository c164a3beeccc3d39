"""Benchmarks of compat and of the libraries beside it.

Every run is a fresh process, and the checkpoint's files are in the page cache.
"""

import typer
from benchmarks.adapt import adapt_command
from benchmarks.evaluate import evaluate_command
from benchmarks.generate import generate_command
from benchmarks.load import load_command
from benchmarks.quality import quality_command

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the help of the commands has lists
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("load")(load_command)
app.command("adapt")(adapt_command)
app.command("evaluate")(evaluate_command)
app.command("generate")(generate_command)
app.command("quality")(quality_command)

if __name__ == "__main__":
    app()
