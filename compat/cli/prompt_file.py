"""`generate --prompt-file`: many prompts in, a JSON line for every text out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import typer
from rich.console import Console
from rich.progress import Progress

from compat.cli.encoding import to_json
from compat.cli.show_text import note_on
from compat.errors import GenerationError, short_repr
from compat.generation import Completion

Generate = Callable[[list[str]], Iterator[Completion]]


def read_prompts(path: str) -> list[str]:
    """The prompts of a file, a line each; "-" is stdin. Blank lines are none.

    The first line says how the others are written: as JSON, a string or an object with "prompt", or
    as plain text.

    Raises:
        typer.BadParameter: the file cannot be read.
        GenerationError: it has no prompts, is no UTF-8, or a line is none of these.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    try:
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise GenerationError(
            f"{path}, line {line}: byte {error.start} is no UTF-8 ({error.reason})"
        ) from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise GenerationError(f"{path} has no prompts; expected one a line")
    first = numbered[0][1]
    if not first.startswith("{") and _from_json(first) is None:
        return [line for _, line in numbered]
    prompts = []
    for i, line in numbered:
        prompt = _from_json(line)
        if prompt is None:
            raise GenerationError(
                f"{path}, line {i} is {short_repr(line)}; expected a JSON string or an object with "
                '"prompt", as the first line begins so'
            )
        prompts.append(prompt)
    return prompts


def _from_json(line: str) -> str | None:
    """The prompt in a line of JSON, None if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    return prompt if isinstance(prompt, str) else None


def write_results(
    generate: Generate, prompts: list[str], n: int, out: Path | None, resume: bool
) -> None:
    """The results of all prompts, in their order, to a file or stdout, each as soon as it is there.

    Raises:
        typer.BadParameter: the file cannot be written, or has results and is not to be resumed.
        GenerationError: the file has other prompts' results.
    """
    done = size = 0
    if out is not None and out.exists() and out.stat().st_size:
        if not resume:
            raise typer.BadParameter(f"{out} exists; --resume goes on with it")
        done, size = _finished(out, prompts, n)
    completions = generate(prompts[done:])  # refuses bad prompts before the file is touched
    start, found = time.perf_counter(), list[Completion]()
    encoding = sys.stdout.encoding if out is None else "utf-8"
    with _opened(out, size) as file, _progress(len(prompts) * n, out) as advance:
        advance(done * n)
        for completion in completions:
            if completion.finish_reason == "interrupted":
                raise KeyboardInterrupt  # a text after it would leave a gap
            index, sample = divmod(done * n + len(found), n)
            line = {"index": index, "sample": sample, **completion.to_json()}
            file.write(to_json(line, encoding).encode() + b"\n")
            file.flush()
            found.append(completion)
            advance(1)
    note_on(found, time.perf_counter() - start)


def _finished(out: Path, prompts: list[str], n: int) -> tuple[int, int]:
    """How many prompts have all their results in a file, and how many bytes these are."""
    lines = out.read_bytes().split(b"\n")[:-1]  # what follows the last newline is half a line
    for number, line in enumerate(lines):
        try:
            value: Any = json.loads(line)
            found = value["index"], value["sample"], value["prompt"]
        except (ValueError, RecursionError, TypeError, LookupError):
            raise GenerationError(f"{out}, line {number + 1} is no result of a prompt") from None
        index, sample = divmod(number, n)
        expected = (index, sample, prompts[index] if index < len(prompts) else None)
        if found != expected:
            raise GenerationError(
                f"{out}, line {number + 1} is of prompt {found[0]}, text {found[1]}, "
                f"{short_repr(found[2])}; expected prompt {index}, text {sample}, "
                f"{short_repr(expected[2])}; "
                "--resume needs the same prompt file and the same --n"
            )
    done = len(lines) // n
    return done, sum(len(line) + 1 for line in lines[: done * n])


@contextmanager
def _opened(out: Path | None, size: int) -> Iterator[BinaryIO]:
    """A file from which all but its first `size` bytes are cut off, or stdout."""
    if out is None:
        yield sys.stdout.buffer
        return
    try:
        with out.open("ab") as file:
            file.truncate(size)
            yield file
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error.strerror}") from None


@contextmanager
def _progress(total: int, out: Path | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal which results do not fill."""
    shown = sys.stderr.isatty() and (out is not None or not sys.stdout.isatty())
    console = Console(stderr=True)
    with Progress(console=console, disable=not shown, redirect_stdout=False) as bar:
        task = bar.add_task("texts", total=total)
        yield lambda count: bar.advance(task, count)
