"""Options that several commands have, and how a command's source is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

DialectName = Literal["linear", "conv1d"]
DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
Precision = Literal["float32", "bfloat16", "int8"]

SOURCE = "demo (embedded), a hub id such as gpt2, a folder, or a weights file."

# Options of these panels of the help.
checkpoint = partial(typer.Option, rich_help_panel="Checkpoint")
inputs = partial(typer.Option, rich_help_panel="Input")
output = partial(typer.Option, rich_help_panel="Output")

Source = Annotated[str | None, typer.Argument(metavar="SOURCE", help=f"{SOURCE} Default: demo.")]
RequiredSource = Annotated[str | None, typer.Argument(metavar="SOURCE", help=SOURCE)]
Model = Annotated[str | None, checkpoint("--model", metavar="SOURCE", help="Same as SOURCE.")]
Revision = Annotated[
    str | None, checkpoint("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
]
Verify = Annotated[
    bool, checkpoint("--verify", help="Compare downloaded files with the hub's checksums.")
]
NHead = Annotated[
    int | None,
    checkpoint(
        "--n-head",
        metavar="N",
        min=1,
        help="Number of heads, for a minGPT or makemore file without a config.",
    ),
]
Dialect = Annotated[DialectName, typer.Option("--dialect", help="The set of blocks.")]
DefaultDialect = Annotated[
    DialectName | None,
    typer.Option("--dialect", help="The set of blocks. Default: linear."),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float32, float64, bfloat16 or float16. Default: the checkpoint's.",
    ),
]
Json = Annotated[bool, output("--json", help="Print JSON to stdout.")]
Quiet = Annotated[bool, output("--quiet", help="Print only the headline.")]


def check_seed(seed: int | None) -> int | None:
    """Refuse a seed that torch does not accept."""
    if seed is not None and not 0 <= seed < 2**63:
        raise typer.BadParameter(f"the seed is {seed}. Pass a number from 0 to 2**63 - 1.")
    return seed


InputText = Annotated[str | None, inputs("--text", help="Use this text instead of random ids.")]
Seed = Annotated[
    int | None,
    inputs("--seed", metavar="N", callback=check_seed, help="Seed of the random ids. Default: 0."),
]
Batch = Annotated[
    int | None, inputs("--batch", metavar="N", min=1, help="Number of sequences. Default: 2.")
]


def in_a_folder(path: Path | None) -> Path | None:
    """Refuse at once a path that could not be written after minutes of work."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a folder.")
    return path


Html = Annotated[
    Path | None,
    output(
        "--html",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=in_a_folder,
        help="Also write an HTML page.",
    ),
]


def choose_source(source: str | None, model: str | None, default: str | None = "demo") -> str:
    """Return the source of a command, which is its positional argument or --model.

    Raises:
        typer.BadParameter: both are passed and differ, or neither is and there is no default.
    """
    if source is not None and model is not None and source != model:
        raise typer.BadParameter(
            f"SOURCE is {source!r} but --model is {model!r}. Pass only one of them."
        )
    found = next((value for value in (source, model, default) if value is not None), None)
    if found is None:
        raise typer.BadParameter("No source was passed. Pass SOURCE or --model.")
    return found


def exclude(options: Mapping[str, object], others: Mapping[str, object] | None = None) -> None:
    """Refuse options that exclude each other, or that exclude each of `others`.

    Args:
        options: the values by the name of the option; None and False mean that it was not passed.
        others: values like these.

    Raises:
        typer.BadParameter: several were passed; the message names them.
    """
    if others is not None:
        for pair in product(options.items(), others.items()):
            exclude(dict(pair))
        return
    passed = [name for name, value in options.items() if value is not None and value is not False]
    if len(passed) > 1:
        raise typer.BadParameter(f"{' and '.join(passed)} exclude each other. Pass one of them.")
