"""`inspect`: what a source is, and whether it would load."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.console import Console
from rich.text import Text

import compat
from compat.cli import options
from compat.cli.errors import BAD_INPUT, handle_errors
from compat.cli.output import console, print_json, print_wrapped


@handle_errors
def inspect_command(
    source: options.RequiredSource = None,
    model: options.Model = None,
    revision: options.Revision = None,
    n_head: options.NHead = None,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint is and whether it would load, without loading it.

    Only the headers of safetensors files are read. A .bin or .pt file has no header and is read
    whole. A hub id is downloaded. Values are not checked, whereas loading also refuses NaN and
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
    """The verdict, then one labelled paragraph for each known property."""
    verdict = Text("✓ would load", "bold green") if found.loads else Text("✗ would not load", "red")
    out.print(Text.assemble((found.source, "bold"), "  ", verdict), soft_wrap=True)
    width = out.width if out.is_terminal else 100_000
    for label, text in _properties(found):
        print_wrapped(out, Text(text), Text(f"  {label:10}  ", "cyan"), " " * 14, width)


def _properties(found: compat.Inspection) -> Iterator[tuple[str, str]]:
    """A label and a text for each known property."""
    if found.format:
        yield "format", found.format
    if found.weights:
        yield "weights", f"{found.weights}, {_size(found.bytes)}"
    if found.config:
        yield "config", " · ".join(_fields(found))
    if found.layout:
        prefixes = " or ".join(prefix for prefix in found.prefixes if prefix)
        names = f"names begin with {prefixes}" if prefixes else "names without prefix"
        yield "layout", f"projections {found.layout}, {names}"
    if found.parameters is not None:
        yield "parameters" if found.loads else "values", _counts(found)
    if found.names:
        yield "names", ", ".join(found.names) + ", …"
    if found.weights:
        yield "tokenizer", _tokenizer(found)
    for number, note in enumerate(found.notes):
        yield "" if number else "notes", note
    if found.error:
        yield "error", found.error


def _fields(found: compat.Inspection) -> Iterator[str]:
    """The main fields of the config in words."""
    words = {
        "n_layer": "{:,} layers",
        "n_head": "{:,} heads",
        "n_embd": "{:,} channels",
        "n_positions": "{:,} positions",
        "vocab_size": "vocabulary of {:,}",
    }
    for name, value in found.config.items():
        if type(value) is int and name in words:
            yield words[name].format(value)
        elif name == "tie_word_embeddings":
            yield "head tied to the embedding" if value else "untied head"
        else:
            yield str(value) if name == "activation_function" else f"{name} {value}"


def _counts(found: compat.Inspection) -> str:
    """For example "124,439,808 in 148 tensors of float32"."""
    total = f"{found.parameters:,} in {found.tensors:,} tensors"
    if len(found.dtypes) == 1:
        return f"{total} of {next(iter(found.dtypes))}"
    return f"{total}: " + ", ".join(f"{count} of {name}" for name, count in found.dtypes.items())


def _tokenizer(found: compat.Inspection) -> str:
    """The tokenizer's files and how many tokens it has, or why it cannot be used."""
    files, tokens = found.tokenizer["files"], found.tokenizer.get("tokens")
    if found.tokenizer.get("error"):
        return f"cannot be used: {found.tokenizer['error']}"
    if not found.loads:
        return ", ".join(files) or "no files"
    if not files and tokens:
        return "no files; GPT-2's own from tiktoken is used"
    if not files:
        return "no files; text cannot be encoded or decoded, token ids can be used"
    unused = found.config["vocab_size"] - tokens
    return f"{', '.join(files)}; {tokens:,} tokens" + (
        f", {unused:,} ids without text" * bool(unused)
    )


def _size(count: int) -> str:
    """For example "3.8 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
