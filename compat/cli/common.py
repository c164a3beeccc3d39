"""What the subcommands share: options, exit codes, consoles."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
import typer
from rich.console import Console

import compat
from compat.cli.encoding import to_json
from compat.errors import CompatError, GenerationError, HubError

P = ParamSpec("P")
R = TypeVar("R")

MAX_SEED = 2**63 - 1
ROOT = f"{Path(compat.__file__).parents[1]}{os.sep}"  # frames below it are compat's own
BAD_REQUEST, BAD_INPUT, NETWORK, INTERNAL, INTERRUPTED = 2, 3, 4, 70, 130


class DialectName(str, Enum):
    """The choices of --dialect."""

    linear = "linear"
    conv1d = "conv1d"


class DtypeName(str, Enum):
    """The choices of --dtype."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.value)
        return found


ModelOption = Annotated[
    str, typer.Option("--model", help="demo, a hub id such as gpt2, a folder, or a weights file.")
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Compare what came from the hub with its checksums.")
]
NHeadOption = Annotated[
    int | None,
    typer.Option("--n-head", min=1, help="Heads, for a minGPT or makemore file without a config."),
]
MmapOption = Annotated[
    bool, typer.Option("--mmap", help="Share the pages of the file instead of copying it.")
]
DialectOption = Annotated[DialectName, typer.Option("--dialect", help="The set of blocks.")]
OwnBlocksOption = Annotated[
    DialectName | None, typer.Option("--dialect", help="The set of readable blocks.")
]
DtypeOption = Annotated[
    DtypeName | None, typer.Option("--dtype", help="Default: the checkpoint's data type.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn an exception into one message on stderr and the exit code of its kind."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except CompatError as error:
            note(f"error: {error}")
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            note("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (SystemExit, typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BaseException as error:  # a panic of an extension in Rust is not an Exception
            raise typer.Exit(internal_error(error)) from None

    return run


def internal_error(error: BaseException) -> int:
    """Report an exception that no input should cause, in one line; the exit code for it.

    With COMPAT_TRACEBACK set, its traceback is printed as well.
    """
    if os.environ.get("COMPAT_TRACEBACK"):
        note("".join(traceback.format_exception(error)).rstrip())
    said = next(iter(str(error).splitlines()), "")
    what = CompatError(f"{type(error).__name__}: {said}".removesuffix(": "))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(ROOT)]
    where = f" at {frames[-1].filename.removeprefix(ROOT)}:{frames[-1].lineno}" if frames else ""
    note(
        f"error: this is a bug in compat: {what}{where}; please report it with the traceback, "
        "which is printed when the environment variable COMPAT_TRACEBACK=1 is set"
    )
    return INTERNAL


def exit_code(error: CompatError) -> int:
    """4 for the network, 2 for a request that cannot be met, 3 for all other bad input."""
    if isinstance(error, HubError):
        return NETWORK
    return BAD_REQUEST if isinstance(error, GenerationError) else BAD_INPUT


def refuse(faults: Iterable[tuple[bool, str]]) -> None:
    """Options that contradict or ignore one another.

    Args:
        faults: whether it is so, and in words what.

    Raises:
        typer.BadParameter: the first that is.
    """
    for wrong, fault in faults:
        if wrong:
            raise typer.BadParameter(fault)


def console() -> Console:
    """Stdout, as wide as the terminal or COLUMNS says; else wide enough for most tables."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    out = Console(width=None if known else 140, highlight=False)
    return out if out.width else Console(width=80, highlight=False)  # rich prints nothing at 0


def print_json(value: Any) -> None:
    """Data for programs, on stdout."""
    print(to_json(value, sys.stdout.encoding, indent=2))


def note(text: str) -> None:
    """A word for people, on stderr."""
    print(text, file=sys.stderr)
