"""`generate`: continue a prompt as a stream of text, or many prompts from a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import compat
from compat.cli import options
from compat.cli.output import note, print_json
from compat.cli.prompt_file import note_on, read_prompts, write_results
from compat.errors import GenerationError

# Options of these panels of the help.
prompting = partial(typer.Option, rich_help_panel="Prompts")
limits = partial(typer.Option, rich_help_panel="Length and stopping")
sampler = partial(typer.Option, rich_help_panel="Sampling")
execution = partial(typer.Option, rich_help_panel="Execution")

DEFAULT_NEW_TOKENS = 100


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    model: Annotated[str, options.checkpoint(metavar="SOURCE", help=options.SOURCE)] = "demo",
    revision: options.Revision = None,
    n_head: options.NHead = None,
    prompt_file: Annotated[
        str | None,
        prompting(
            metavar="FILE",
            help="One prompt on each line, as text or JSON; - is stdin. Prints JSON lines.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        prompting(
            metavar="FILE",
            dir_okay=False,
            help="With --prompt-file: write the results here, not to stdout.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        prompting("--resume", help="With --out: keep the results in FILE and generate the others."),
    ] = False,
    interactive: Annotated[
        bool,
        prompting("--interactive", help="Read prompts from the terminal until Ctrl-D."),
    ] = False,
    n: Annotated[int, prompting("--n", metavar="N", help="Number of texts for each prompt.")] = 1,
    max_new_tokens: Annotated[
        int | None,
        limits(
            metavar="N",
            help="Maximum number of new tokens. "
            f"Default: {DEFAULT_NEW_TOKENS}, or as many as fit into the context.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        limits("--stop", metavar="TEXT", help="Stop before this text; can be repeated."),
    ] = None,
    stop_id: Annotated[
        list[int] | None,
        limits("--stop-id", metavar="ID", help="Stop at this token id; can be repeated."),
    ] = None,
    overflow: Annotated[
        Literal["error", "slide"],
        limits(
            help="If the context is full: exit with an error, or drop its older half and continue."
        ),
    ] = "error",
    temperature: Annotated[
        float, sampler(metavar="X", help="0 is greedy; 1 leaves the logits unchanged.")
    ] = 0.8,
    top_k: Annotated[
        int | None, sampler(metavar="K", help="Sample from the k most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        sampler(
            metavar="P",
            help="Sample from the most likely tokens that together reach probability p.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        sampler(
            metavar="P",
            help="Sample from tokens at least p times as likely as the most likely one.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        sampler(metavar="X", help="Values above 1 make tokens that already occur less likely."),
    ] = None,
    seed: Annotated[
        int | None,
        sampler(metavar="N", callback=options.check_seed, help="Seed of the random numbers."),
    ] = None,
    dtype: Annotated[
        options.Precision | None,
        execution(
            metavar="DTYPE",
            help="Precision of the engine: float32, bfloat16, or int8 for 8-bit weights. "
            "Default: float32, or that of a packed file.",
        ),
    ] = None,
    speculate: Annotated[
        Literal["auto", "int8", "lookup", "off"] | None,
        execution(
            help="Draft with 8-bit weights, or by prompt lookup. The token ids stay the same. "
            "Default: auto, which is int8 for one text in float32 or bfloat16."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, execution(metavar="N", help="Texts that are generated together. Default: 8.")
    ] = None,
    plain: Annotated[
        bool, execution("--plain", help="Run the readable blocks instead of the engine.")
    ] = False,
    dialect: Annotated[
        options.DialectName | None,
        execution(help="The set of readable blocks; implies --plain."),
    ] = None,
    as_json: options.Json = False,
    logprobs: Annotated[
        bool,
        options.output("--logprobs", help="With --json: add log-probabilities of the new tokens."),
    ] = False,
) -> None:
    """Continue a prompt. The text is streamed to stdout, the speed is printed to stderr.

    The checkpoint is passed as --model, because the positional argument is the prompt. Ctrl-C keeps
    the text so far. The results of a prompt file are JSON lines.
    """
    plain = plain or dialect is not None
    one_by_one = speculate in ("int8", "lookup")
    inputs = [prompt is not None, prompt_file is not None, interactive]
    for wrong, fault in (
        (not any(inputs), "Pass a prompt, --prompt-file or --interactive."),
        (sum(inputs) > 1, "A prompt, --prompt-file and --interactive exclude each other."),
        (out is not None and prompt_file is None, "--out needs --prompt-file."),
        (resume and out is None, "--resume needs --out."),
        (logprobs and not as_json and prompt_file is None, "--logprobs needs --json."),
        (interactive and as_json, "--interactive cannot print --json."),
        (plain and (dtype or speculate), "--dtype and --speculate need the engine, not --plain."),
        (interactive and n != 1, "--interactive generates one text for a prompt. Leave out --n."),
        (
            batch_size is not None and prompt_file is None and n == 1,
            "--batch-size is for several texts. Pass --prompt-file or --n with it.",
        ),
        (
            batch_size is not None and one_by_one,
            "--speculate generates one text at a time. Leave out --batch-size.",
        ),
    ):
        if wrong:
            raise typer.BadParameter(fault)
    prompts = [] if prompt_file is None else read_prompts(prompt_file)
    sampling = compat.Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    checkpoint = compat.open_checkpoint(model, revision=revision, n_head=n_head)
    tokenizer = compat.load_tokenizer(checkpoint)
    texts = 8 if batch_size is None else batch_size
    if one_by_one or (prompt_file is None and n == 1):
        texts = 1  # speculation decodes one text at a time, and without a file or --n there is one
    runs: compat.PlainBlocks | compat.Engine
    if plain:
        runs = compat.PlainBlocks(compat.load_pretrained(checkpoint, dialect or "linear"))
    else:  # without a precision or a kind of speculation, it has its own defaults
        how: dict[str, Any] = {"dtype": dtype} if dtype else {}
        if speculate is not None:
            how["speculate"] = None if speculate == "off" else speculate
        runs = compat.Engine.from_pretrained(checkpoint, max_batch=max(1, texts), **how)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop": stop or (),
        "stop_ids": (*checkpoint.config.stop_ids, *(stop_id or ())),
        "seed": seed,
        "overflow": overflow,
        "logprobs": logprobs,
    }

    def one(prompt: str) -> compat.TextStream:
        return compat.stream_text(runs, tokenizer, prompt, **settings)

    def many(prompts: list[str]) -> Iterator[compat.Completion]:
        return compat.generate_text(runs, tokenizer, prompts, n=n, batch_size=texts, **settings)

    if prompt_file is not None:
        write_results(many, prompts, n, out, resume)
    elif interactive:
        _converse(one)
    elif n == 1:
        _show(one(prompt or ""), as_json)
    else:
        _show_samples(many([prompt or ""]), n, as_json)


def _show(stream: compat.TextStream, as_json: bool) -> None:
    """Print a text as it is generated, or as JSON; after Ctrl-C, the text so far."""
    start, printed, interrupted = time.perf_counter(), 0, False
    try:
        if not as_json:
            print(stream.completion.prompt, end="", flush=True)
        for piece in stream:
            if not as_json:
                printed += len(piece)  # counted first, so that Ctrl-C cannot print it twice
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    completion, seconds = stream.completion, time.perf_counter() - start
    if as_json:
        rate = round(len(completion.new_ids) / seconds, 1)
        print_json({**completion.to_json(), "tokens_per_second": rate})
    else:
        print(completion.new_text[printed:], flush=True)
    note_on([completion], seconds)
    if interrupted:
        raise KeyboardInterrupt


def _show_samples(completions: Iterator[compat.Completion], n: int, as_json: bool) -> None:
    """Print the n texts of a prompt, each with a title on stderr, or all as one JSON list."""
    start, found = time.perf_counter(), list[compat.Completion]()
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


def _converse(answer: Callable[[str], compat.TextStream]) -> None:
    """Continue every line of stdin. Ctrl-C ends the current text or, at the prompt, the command."""
    while line := _read_line():
        prompt = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        try:
            _show(answer(prompt), as_json=False)
        except GenerationError as error:
            note(f"error: {error}")
        except KeyboardInterrupt:
            note("stopped. Press Ctrl-C again or Ctrl-D to leave")
    note("")


def _read_line() -> bytes:
    """Read the next line; b"" at the end. The prompt sign goes to stderr, texts to stdout."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.buffer.readline()
