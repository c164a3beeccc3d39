"""`inspect`: what a source is, and whether it would load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from compat.cli.common import (
    BAD_INPUT,
    JsonOption,
    NHeadOption,
    RevisionOption,
    console,
    handle_errors,
    print_json,
)
from compat.cli.tables import wrapped
from compat.inspection import Inspection, inspect_checkpoint


@handle_errors
def inspect_command(
    source: Annotated[
        str, typer.Argument(help="demo, a hub id such as gpt2, a folder, or a weights file.")
    ],
    revision: RevisionOption = None,
    n_head: NHeadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is and whether it would load, without loading it.

    Of safetensors only headers are read. A .bin or .pt file has no header and
    is read whole; a hub id is downloaded. Values are not looked at: loading also refuses NaN and
    infinity.

    Exit code 0: it would load. 3: it would not; the report says why. 4: no
    network. 70: a bug in compat.
    """
    found = inspect_checkpoint(source, n_head=n_head, revision=revision)
    if as_json:
        print_json(found.to_json())
    else:
        show(found, console())
    raise typer.Exit(0 if found.loads else BAD_INPUT)


def show(found: Inspection, out: Console) -> None:
    """The verdict, then a line for each thing that is known."""
    verdict = Text("✓ would load", "bold green") if found.loads else Text("✗ would not load", "red")
    out.print(Text.assemble((found.source, "bold"), "  ", verdict), soft_wrap=True)
    for label, text in _lines(found):
        for line in _in_lines(text, out):
            out.print(Text.assemble((f"  {label:10}  ", "cyan"), line), soft_wrap=True)
            label = ""


def _in_lines(text: str, out: Console) -> Iterator[str]:
    """In lines that fit beside the label; whole where no person reads it."""
    for line in text.split("\n"):
        fitting = wrapped(Text(line), out.width - 14) if out.is_terminal else [Text(line)]
        yield from (part.plain for part in fitting)


def _lines(found: Inspection) -> Iterator[tuple[str, str]]:
    """What is known, a label and a text each."""
    if found.format:
        yield "format", found.format
    if found.weights:
        yield "weights", f"{found.weights}, {_size(found.bytes)}"
    if found.config:
        yield "config", " · ".join(_fields(found))
    if found.layout:
        yield "layout", f"projections {found.layout}, {_prefixes(found)}"
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


def _fields(found: Inspection) -> Iterator[str]:
    words = {
        "n_layer": "layers",
        "n_head": "heads",
        "n_embd": "channels",
        "n_positions": "positions",
    }
    for name, value in found.config.items():
        if type(value) is int and name in words:
            yield f"{value:,} {words[name]}"
        elif type(value) is int and name == "vocab_size":
            yield f"vocabulary of {value:,}"
        elif name == "tie_word_embeddings":
            yield "head tied to the embedding" if value else "head of its own"
        else:
            yield str(value) if name == "activation_function" else f"{name} {value}"


def _prefixes(found: Inspection) -> str:
    given = [prefix for prefix in found.prefixes if prefix]
    return f"names begin with {' or '.join(given)}" if given else "names without prefix"


def _counts(found: Inspection) -> str:
    """124,439,808 in 148 tensors of float32."""
    alone = len(found.dtypes) == 1
    dtypes = [name if alone else f"{count} of {name}" for name, count in found.dtypes.items()]
    total = f"{found.parameters:,} in {found.tensors:,} tensors"
    return f"{total}{' of' if alone else ':'} {', '.join(dtypes)}"


def _tokenizer(found: Inspection) -> str:
    files, tokens = found.tokenizer["files"], found.tokenizer.get("tokens")
    if found.tokenizer.get("error"):
        return f"cannot be used: {found.tokenizer['error']}"
    if not found.loads:
        return ", ".join(files) or "no files"
    if not files:
        return (
            "no files; GPT-2's own, from tiktoken"
            if tokens
            else "no files; text needs them, ids do not"
        )
    free = found.config["vocab_size"] - tokens
    return f"{', '.join(files)}; {tokens:,} tokens" + (f", {free:,} ids without text" * bool(free))


def _size(count: int) -> str:
    """3.8 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
