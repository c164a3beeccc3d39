"""Exceptions as one message on stderr and an exit code."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from compat.cli import INTERRUPTED, ctrl_c_raises
from compat.cli.output import note
from compat.errors import CompatError, GenerationError, HubError

BAD_REQUEST, BAD_INPUT, NETWORK, INTERNAL = 2, 3, 4, 70


def handle_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception into one message on stderr and the exit code of its kind."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            import_module("torch")  # while Ctrl-C still ends the process at once
            with ctrl_c_raises():
                command(*args, **kwargs)
        except CompatError as error:
            note(f"error: {error}")
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            note("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (SystemExit, typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BaseException as error:  # a panic of an extension in Rust is not an Exception
            raise typer.Exit(internal_error(error)) from None

    return run


def exit_code(error: CompatError) -> int:
    """Return 4 for the network, 2 for a request that cannot be met, 3 for other bad input."""
    if isinstance(error, HubError):
        return NETWORK
    return BAD_REQUEST if isinstance(error, GenerationError) else BAD_INPUT


def internal_error(error: BaseException) -> int:
    """Report an exception that no input should cause on one line, and return its exit code.

    With COMPAT_TRACEBACK set, the traceback is printed before it.
    """
    from compat.user_code import COMPAT, exception_report

    if os.environ.get("COMPAT_TRACEBACK"):
        note("".join(traceback.format_exception(error)).rstrip())
    what = " ".join(exception_report(error, lambda file: file.startswith(COMPAT)).split())
    note(
        f"error: this is a bug in compat: {CompatError(what)}. Please report it with the "
        "traceback, which is printed when the environment variable COMPAT_TRACEBACK=1 is set."
    )
    return INTERNAL
