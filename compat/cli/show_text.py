"""How `generate` shows texts: one as it comes, several of a prompt, or one for every line typed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from compat.cli.common import note, print_json
from compat.errors import GenerationError
from compat.generation import Completion, TextStream


def show(stream: TextStream, as_json: bool) -> None:
    """A text as it comes, or all of it as JSON; after Ctrl-C what there is of it."""
    start, shown = time.perf_counter(), 0

    def finish() -> None:
        completion, seconds = stream.completion, time.perf_counter() - start
        if as_json:
            rate = round(len(completion.new_ids) / seconds, 1)
            print_json({**completion.to_json(), "tokens_per_second": rate})
        else:
            print(completion.new_text[shown:], flush=True)
        note_on([completion], seconds)

    try:
        if not as_json:
            print(stream.completion.prompt, end="", flush=True)
        for piece in stream:
            if not as_json:
                shown += len(piece)  # first: Ctrl-C while it is written must not print it twice
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        finish()
        raise
    finish()


def show_samples(completions: Iterator[Completion], n: int, as_json: bool) -> None:
    """The n texts of a prompt, with a word before each on stderr; or all in a JSON list."""
    start, found = time.perf_counter(), list[Completion]()
    try:
        for completion in completions:
            found.append(completion)
            if not as_json:
                note(f"text {len(found)} of {n}:")
                print(completion.text, flush=True)
    finally:  # after Ctrl-C too
        if as_json and found:
            print_json([completion.to_json() for completion in found])
    note_on(found, time.perf_counter() - start)


def converse(answer: Callable[[str], TextStream]) -> None:
    """A text for every line of stdin; Ctrl-C ends the text at work, or else the conversation."""
    while line := _typed():
        prompt = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        try:
            show(answer(prompt), as_json=False)
        except GenerationError as error:
            note(f"error: {error}")
        except KeyboardInterrupt:
            note("stopped; Ctrl-C again or Ctrl-D to leave")
    note("")


def _typed() -> bytes:
    """The next line, b"" at the end; the prompt sign goes to stderr, for stdout carries texts."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.buffer.readline()


def note_on(completions: list[Completion], seconds: float) -> None:
    """How many tokens, how fast, and what slid out of the context."""
    tokens = sum(len(completion.new_ids) for completion in completions)
    note(f"{tokens:,} tokens, {tokens / seconds:.1f} tokens/s")
    if slid := [completion.dropped for completion in completions if completion.dropped]:
        whose = f" of {len(slid)} texts" if len(completions) > 1 else ""
        note(
            f"note: the context was full; its oldest {sum(slid):,} tokens{whose} were dropped, and "
            "the text went on as if it began after them"
        )
