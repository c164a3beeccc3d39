"""The options of `generate`, and which of them go together."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from compat.cli.common import MAX_SEED, refuse
from compat.generation.writing import DEFAULT_NEW_TOKENS


class OverflowName(str, Enum):
    """The choices of --overflow."""

    error = "error"
    slide = "slide"


PromptArgument = Annotated[str | None, typer.Argument(help="The text to continue.")]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(help=f"Default: {DEFAULT_NEW_TOKENS}, or as many as the context has room for."),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy, 1 the model's own odds.")]
TopKOption = Annotated[int | None, typer.Option(help="Draw from the k likeliest only.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw from the likeliest that reach p.")]
MinPOption = Annotated[
    float | None, typer.Option(help="Draw from those at least p times as likely as the likeliest.")
]
PenaltyOption = Annotated[
    float | None, typer.Option(help="Above 1: what the text has already becomes less likely.")
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; can be repeated."),
]
StopIdOption = Annotated[
    list[int] | None, typer.Option("--stop-id", help="End at this id; can be repeated.")
]
SamplesOption = Annotated[int, typer.Option("--n", help="Texts a prompt.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Makes the draws repeatable.", min=0, max=MAX_SEED)
]
OverflowOption = Annotated[
    OverflowName,
    typer.Option(help="When the context is full: refuse, or drop its oldest half and go on."),
]
LogprobsOption = Annotated[
    bool, typer.Option("--logprobs", help="With --json: log-probabilities of the new ids.")
]
PromptFileOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A prompt a line, as text or JSON; - is stdin. Results are JSON lines.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", dir_okay=False, help="With --prompt-file: where results go, not stdout."
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="With --out: go on after the results that FILE has.")
]
BatchSizeOption = Annotated[int | None, typer.Option(help="Texts at a time; default 8.")]
InteractiveOption = Annotated[
    bool, typer.Option("--interactive", help="Ask for one prompt after another, until Ctrl-D.")
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="Run the readable blocks, which --dialect also does.")
]


class PrecisionName(str, Enum):
    """The choices of --dtype for the engine."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


class SpeculateName(str, Enum):
    """The choices of --speculate."""

    int8 = "int8"
    lookup = "lookup"


PrecisionOption = Annotated[
    PrecisionName | None,
    typer.Option("--dtype", help="Of the engine; int8 is for the weights. Default: float32."),
]
SpeculateOption = Annotated[
    SpeculateName | None,
    typer.Option(help="Guess ahead, by 8-bit weights or by the text; the ids stay the same."),
]


def check_usage(
    prompt: str | None,
    prompt_file: str | None,
    interactive: bool,
    out: Path | None,
    resume: bool,
    logprobs: bool,
    n: int,
    as_json: bool,
    plain: bool,
    for_engine: bool,
    batch_size: int | None,
    speculates: bool,
) -> None:
    """Refuse options that contradict each other, or do nothing without another.

    Raises:
        typer.BadParameter: naming them.
    """
    given = [prompt is not None, prompt_file is not None, interactive]
    faults = [
        (not any(given), "give a prompt, --prompt-file or --interactive"),
        (sum(given) > 1, "a prompt, --prompt-file and --interactive exclude each other"),
        (out is not None and prompt_file is None, "--out needs --prompt-file"),
        (resume and out is None, "--resume needs --out"),
        (logprobs and not as_json and prompt_file is None, "--logprobs needs --json"),
        (interactive and as_json, "--interactive prints text, not --json"),
        (plain and for_engine, "--dtype and --speculate are for the engine, not for --plain"),
        (interactive and n != 1, "--interactive makes one text a prompt, not --n of them"),
        (
            batch_size is not None and prompt_file is None and n == 1,
            "--batch-size is for several texts; give --prompt-file or --n with it",
        ),
        (
            batch_size is not None and speculates,
            "--speculate writes one text at a time, so --batch-size would do nothing",
        ),
    ]
    refuse(faults)
