"""`golden`: the reference's arrays as a file, for ports in any language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import compat
from compat.cli import options
from compat.cli.output import note


def golden_command(
    out: Annotated[
        Path,
        options.output(
            "--out",
            metavar="FILE",
            dir_okay=False,
            callback=options.in_a_folder,
            help="The file to write: .safetensors or .npz.",
        ),
    ],
    source: options.Source = None,
    taps: Annotated[
        str,
        typer.Option(
            metavar="TAPS",
            help="all, layers (the residual stream after each block), or patterns such as "
            "'h.0.*,logits'.",
        ),
    ] = "all",
    dtype: options.Dtype = None,
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients",
            help="Also write the loss, and its gradients at all taps and of all parameters.",
        ),
    ] = False,
    decode: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Also write the logits of N greedy decode steps through the KV cache.",
        ),
    ] = 0,
    text: options.InputText = None,
    ids: Annotated[
        str | None,
        options.inputs(
            metavar="IDS", help="Run on these ids, such as '15496,11,995'; ';' separates sequences."
        ),
    ] = None,
    seed: options.Seed = None,
    batch: options.Batch = None,
    length: Annotated[
        int | None,
        options.inputs(metavar="N", min=1, help="Number of ids in a sequence. Default: 64."),
    ] = None,
    model: options.Model = None,
    revision: options.Revision = None,
    verify: options.Verify = False,
    n_head: options.NHead = None,
) -> None:
    """Write what transformers computes to a file that other implementations are compared with.

    For each array, the file also has the largest difference that a correct port may have.
    """
    source = options.choose_source(source, model)
    chosen_ids = {"--text": text, "--ids": ids}
    options.exclude(chosen_ids, {"--seed": seed, "--batch": batch, "--length": length})
    options.exclude(chosen_ids)
    if out.suffix not in (".safetensors", ".npz"):
        raise typer.BadParameter(
            f"{out} has the suffix {out.suffix!r}. Pass a name that ends in .safetensors or .npz.",
            param_hint="--out",
        )
    from compat.golden_files import golden
    from compat.parity import random_ids

    checkpoint = compat.open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    rows: object = None if ids is None else _parsed(ids)
    if text is None and rows is None:
        length = min(64, checkpoint.config.n_positions) if length is None else length
        rows = random_ids(checkpoint, seed or 0, batch or 2, length)
    written = golden(
        checkpoint,
        out,
        input_ids=rows,
        text=text,
        taps=taps,
        dtype=dtype,
        gradients=gradients,
        decode=decode,
    )
    B, T = written.ids.shape
    size = out.stat().st_size / 1e6
    note(
        f"wrote {out}: {len(written.judged):,} arrays with bounds for {B} × {T} ids, {size:,.1f} MB"
    )


def _parsed(ids: str) -> list[list[int]]:
    """Return the sequences of --ids."""
    try:
        rows = [[int(token) for token in row.split(",")] for row in ids.split(";")]
    except ValueError:
        raise typer.BadParameter(
            f"{ids!r} is not a list of ids. Pass numbers such as '15496,11,995'.",
            param_hint="--ids",
        ) from None
    if len({len(row) for row in rows}) > 1:
        raise typer.BadParameter(
            "the sequences have different lengths. Pass sequences of one length.",
            param_hint="--ids",
        )
    return rows
