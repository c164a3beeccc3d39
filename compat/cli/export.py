"""`export`: a checkpoint through our blocks and back to Hugging Face's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from compat.checkpoint import open_checkpoint
from compat.checkpoint.layout import has_tokenizer
from compat.cli.common import (
    DialectName,
    DialectOption,
    DtypeOption,
    JsonOption,
    NHeadOption,
    RevisionOption,
    VerifyOption,
    console,
    handle_errors,
    note,
    print_json,
)
from compat.cli.tables import print_table
from compat.errors import ConfigError
from compat.loading import load_pretrained
from compat.saving import save_pretrained
from compat.saving.shards import parse_size


def _is_size(text: str) -> str:
    """Refuse at once what would be refused after loading."""
    try:
        parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@handle_errors
def export_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="demo, a hub id, a folder, or a weights file.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="The folder; it may be SRC.")],
    dialect: DialectOption = DialectName.linear,
    dtype: DtypeOption = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Of one weights file: 5GB, 200MB.", callback=_is_size)
    ] = "5GB",
    revision: RevisionOption = None,
    verify: VerifyOption = False,
    n_head: NHeadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint into the blocks and write it as a folder that transformers opens."""
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    model = load_pretrained(checkpoint, dialect.value, dtype=dtype.torch if dtype else None)
    tokenizer = checkpoint if has_tokenizer(checkpoint.folder) else None
    notes = list(checkpoint.notes)
    if tokenizer is None:
        notes.append(f"{checkpoint.folder} has no tokenizer files, so none were written")
    files = save_pretrained(model, folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
    sizes = {path.name: path.stat().st_size for path in files}
    count = sum(parameter.numel() for parameter in model.parameters())
    stored_as = str(next(model.parameters()).dtype).removeprefix("torch.")
    if as_json:
        found = {
            "source": source,
            "folder": str(folder),
            "dialect": dialect.value,
            "dtype": stored_as,
            "parameters": count,
            "files": sizes,
            "notes": notes,
        }
        print_json(found)
        return
    lines = [[name, f"{size:,} bytes"] for name, size in sizes.items()]
    print_table(console(), [_table(sizes)], lines)
    print(f"{source} → {folder}: {count:,} values in {stored_as}, through {dialect.value} blocks")
    for line in notes:
        note(f"note: {line}")


def _table(files: dict[str, int]) -> Table:
    table = Table("file")
    table.add_column("bytes", justify="right")
    for name, size in files.items():
        table.add_row(name, f"{size:,}")
    return table
