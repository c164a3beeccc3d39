"""Timings: bench.py COMMAND. Every run is a fresh process, with the files in the system's cache."""

import typer
from benchmarks.adapt import adapt_command
from benchmarks.evaluate import evaluate_command
from benchmarks.generate import generate_command
from benchmarks.load import load_command
from benchmarks.quality import quality_command

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command("load")(load_command)
app.command("adapt")(adapt_command)
app.command("evaluate")(evaluate_command)
app.command("generate")(generate_command)
app.command("quality")(quality_command)

if __name__ == "__main__":
    app()
