"""`generate --prompt-file`: prompts from a file, results as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import typer

import compat
from compat.cli.output import note, to_json
from compat.errors import GenerationError, short_repr


def read_prompts(path: str) -> list[str]:
    """Read one prompt from each line of a file, or of stdin for "-". Blank lines are skipped.

    If the first line is a JSON string, or begins an object, every line has to be a JSON string or
    an object with the key "prompt". Otherwise every line is plain text.

    Raises:
        typer.BadParameter: the file cannot be read.
        GenerationError: it has no prompts, is not UTF-8, or a line is not the expected JSON.
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
            f"{path}, line {line}: byte {error.start} is not UTF-8 ({error.reason}). Save the file "
            "as UTF-8."
        ) from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise GenerationError(f"{path} has no prompts. Write one prompt on each line.")
    first = numbered[0][1]
    if not first.startswith("{") and _from_json(first) is None:
        return [line for _, line in numbered]
    prompts = []
    for i, line in numbered:
        prompt = _from_json(line)
        if prompt is None:
            raise GenerationError(
                f"{path}, line {i} is {short_repr(line)}, but the first line is JSON. Write every "
                'line as a JSON string or as an object with the key "prompt".'
            )
        prompts.append(prompt)
    return prompts


def _from_json(line: str) -> str | None:
    """Return the prompt in a line of JSON, or None."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    return prompt if isinstance(prompt, str) else None


def write_results(
    generate: Callable[[list[str]], Iterator[compat.Completion]],
    prompts: list[str],
    n: int,
    out: Path | None,
    resume: bool,
) -> None:
    """Write every result as soon as it is generated, in the order of the prompts.

    Args:
        generate: yields `n` completions for each prompt.
        prompts: all prompts.
        n: texts for each prompt.
        out: the file to write, or None for stdout.
        resume: keep the results that the file has, and generate the others.

    Raises:
        typer.BadParameter: the file cannot be written, or has content although `resume` is False.
        GenerationError: the file has results of other prompts.
    """
    done = size = 0
    if out is not None and out.exists() and out.stat().st_size:
        if not resume:
            raise typer.BadParameter(f"{out} exists. Pass --resume to continue it.")
        done, size = _finished(out, prompts, n)
    completions = generate(prompts[done:])  # refuse bad prompts before the file is opened
    start, found = time.perf_counter(), list[compat.Completion]()
    encoding = sys.stdout.encoding if out is None else "utf-8"
    with _opened(out, size) as file, _progress(len(prompts) * n, out) as advance:
        advance(done * n)
        for completion in completions:
            if completion.finish_reason == "interrupted":
                raise KeyboardInterrupt  # without this text, writing later ones would leave a gap
            index, sample = divmod(done * n + len(found), n)
            line = {"index": index, "sample": sample, **completion.to_json()}
            file.write(to_json(line, encoding).encode() + b"\n")
            file.flush()
            found.append(completion)
            advance(1)
    note_on(found, time.perf_counter() - start)


def _finished(out: Path, prompts: list[str], n: int) -> tuple[int, int]:
    """Return how many prompts have all their results in a file, and the size of these in bytes."""
    lines = out.read_bytes().split(b"\n")[:-1]  # the rest after the last newline is incomplete
    for number, line in enumerate(lines):
        try:
            value: Any = json.loads(line)
            found = value["index"], value["sample"], value["prompt"]
        except (ValueError, RecursionError, TypeError, LookupError):
            raise GenerationError(
                f"{out}, line {number + 1} is not the result of a prompt. Pass another --out."
            ) from None
        index, sample = divmod(number, n)
        expected = (index, sample, prompts[index] if index < len(prompts) else None)
        if found != expected:
            raise GenerationError(
                f"{out}, line {number + 1} is the result of prompt {found[0]}, text {found[1]}, "
                f"{short_repr(found[2])}, but must be that of prompt {index}, text {sample}, "
                f"{short_repr(expected[2])}. Resume with the same prompt file and the same --n."
            )
    done = len(lines) // n
    return done, sum(len(line) + 1 for line in lines[: done * n])


@contextmanager
def _opened(out: Path | None, size: int) -> Iterator[BinaryIO]:
    """Yield a file truncated to its first `size` bytes, or stdout."""
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
    """Show a progress bar on stderr, if that is a terminal to which no results are printed."""
    from rich.console import Console
    from rich.progress import Progress

    shown = sys.stderr.isatty() and (out is not None or not sys.stdout.isatty())
    console = Console(stderr=True)
    with Progress(console=console, disable=not shown, redirect_stdout=False) as bar:
        task = bar.add_task("texts", total=total)
        yield lambda count: bar.advance(task, count)


def note_on(completions: list[compat.Completion], seconds: float) -> None:
    """Note the number of tokens, the speed, and the tokens dropped from a full context."""
    tokens = sum(len(completion.new_ids) for completion in completions)
    note(f"{tokens:,} tokens, {tokens / seconds:.1f} tokens/s")
    if dropped := [completion.dropped for completion in completions if completion.dropped]:
        texts = f" of {len(dropped)} texts" if len(completions) > 1 else ""
        note(
            f"note: the context was full. Its oldest {sum(dropped):,} tokens{texts} were dropped, "
            "and the text continued without them."
        )
