"""`export`: load a checkpoint into the blocks and write it as Hugging Face's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import compat
from compat.cli import options
from compat.cli.output import console, print_json, print_notes, print_rows
from compat.errors import ConfigError


def _is_size(text: str) -> str:
    """Refuse at once a size that would be refused after loading."""
    from compat.saving.shards import parse_size

    try:
        parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def export_command(
    source: options.RequiredSource = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DEST", help="The folder to write; it may be SOURCE.")
    ] = None,
    model: options.Model = None,
    dialect: options.Dialect = "linear",
    dtype: options.Dtype = None,
    max_shard_size: Annotated[
        str,
        options.output(
            metavar="SIZE",
            callback=_is_size,
            help="The maximum size of a weights file, such as 200MB.",
        ),
    ] = "5GB",
    revision: options.Revision = None,
    verify: options.Verify = False,
    n_head: options.NHead = None,
    as_json: options.Json = False,
) -> None:
    """Load a checkpoint into the blocks and write it as a folder that transformers opens.

    With --model, the only argument is DEST.
    """
    if folder is None and model is not None and source is not None:
        folder, source = Path(source), None
    if folder is None:
        raise typer.BadParameter("No destination was passed. Pass SOURCE and DEST.")
    source = options.choose_source(source, model, default=None)
    checkpoint = compat.open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    loaded = compat.load_pretrained(checkpoint, dialect, dtype=dtype)
    from compat.checkpoint.layout import has_tokenizer

    tokenizer = checkpoint if has_tokenizer(checkpoint.folder) else None
    notes = list(checkpoint.notes)
    if tokenizer is None:
        notes.append(f"{checkpoint.folder} has no tokenizer files, so none were written")
    files = compat.save_pretrained(
        loaded, folder, tokenizer=tokenizer, max_shard_size=max_shard_size
    )
    sizes = {path.name: path.stat().st_size for path in files}
    count = sum(parameter.numel() for parameter in loaded.parameters())
    stored_as = str(next(loaded.parameters()).dtype).removeprefix("torch.")
    if as_json:
        print_json(
            {
                "source": source,
                "folder": str(folder),
                "dialect": dialect,
                "dtype": stored_as,
                "parameters": count,
                "files": sizes,
                "notes": notes,
            }
        )
        return
    rows = [[name, f"{size:,}"] for name, size in sizes.items()]
    print_rows(console(), ["file", ">bytes"], rows)
    print(f"{source} → {folder}: {count:,} values in {stored_as}, through {dialect} blocks")
    print_notes(notes)
