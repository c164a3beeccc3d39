"""`pack`: write a checkpoint's weights in the precision of an engine to one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import compat
from compat.cli import options
from compat.cli.output import print_json, print_notes


def pack_command(
    out: Annotated[
        Path,
        options.output("--out", metavar="FILE", help="The .safetensors file to write."),
    ],
    source: options.RequiredSource = None,
    model: options.Model = None,
    dtype: Annotated[
        Literal["int8", "bfloat16"],
        typer.Option("--dtype", help="int8 for 8-bit weights with scales, or bfloat16."),
    ] = "int8",
    revision: options.Revision = None,
    verify: options.Verify = False,
    n_head: options.NHead = None,
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint's weights in the precision of the engine to one file.

    `generate --model FILE` then reads a quarter (int8) or half (bfloat16) of the bytes.
    """
    source = options.choose_source(source, model, default=None)
    checkpoint = compat.open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    file = compat.pack_checkpoint(checkpoint, out, dtype=dtype)
    before = sum(path.stat().st_size for path in checkpoint.files)
    after = file.stat().st_size
    from compat.checkpoint.layout import has_tokenizer

    notes = list(checkpoint.notes)
    if not has_tokenizer(file.parent):
        notes.append(f"{file.parent} has no tokenizer files, which generating text requires")
    if as_json:
        print_json(
            {"source": source, "file": str(file), "dtype": dtype, "bytes": after, "notes": notes}
        )
        return
    print(f"{source} → {file}: {after:,} bytes in {dtype}, {after / before:.2f} × the checkpoint")
    print_notes(notes)
