"""`generate`: text that continues a prompt, as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import torch
import typer

from compat.checkpoint import open_checkpoint
from compat.cli.common import (
    MAX_SEED,
    DialectName,
    DialectOption,
    JsonOption,
    ModelOption,
    explained,
    note,
    print_json,
)
from compat.errors import GenerationError, TokenizerError
from compat.generation import stream
from compat.loading import load_pretrained
from compat.tokenizer import Tokenizer, load_tokenizer

DEFAULT_NEW_TOKENS = 100


@explained
def generate_command(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelOption = "demo",
    dialect: DialectOption = DialectName.linear,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Default: {DEFAULT_NEW_TOKENS}, or as many as the context has room for."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy, 1 the model's own odds.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest that reach p.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes the draws repeatable.", min=0, max=MAX_SEED)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt; the text streams to stdout, the speed goes to stderr."""
    checkpoint = open_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    prompt_ids = _prompt_ids(tokenizer, prompt)
    if max_new_tokens is None:
        room = checkpoint.config.n_positions - len(prompt_ids)
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    steps = stream(
        load_pretrained(checkpoint, dialect.value),
        torch.tensor([prompt_ids]),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        suppress_tokens=tokenizer.ids_without_text(checkpoint.config.vocab_size),
        generator=generator,
    )
    new_ids: list[int] = []
    start = time.perf_counter()
    pieces = chain(
        [prompt], tokenizer.stream(_until_stop(steps, checkpoint.config.stop_ids, new_ids))
    )
    if as_json:
        text = "".join(pieces)
    else:
        for piece in chain(pieces, "\n"):
            print(piece, end="", flush=True)
    rate = len(new_ids) / (time.perf_counter() - start)
    if as_json:
        found = {"prompt": prompt, "text": text, "prompt_ids": prompt_ids, "new_ids": new_ids}
        print_json({**found, "tokens_per_second": round(rate, 1)})
    note(f"{len(new_ids)} tokens, {rate:.1f} tokens/s")


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's ids; an empty prompt starts from end-of-text, as GPT-2's training texts do."""
    try:
        ids = tokenizer.encode(prompt)
    except TokenizerError as error:  # the prompt is at fault, not the tokenizer
        raise GenerationError(f"the prompt cannot be encoded: {error}") from error
    if not ids and tokenizer.end_of_text is None:
        raise GenerationError(
            "the prompt is empty, and the vocabulary has no end-of-text to start from"
        )
    return ids or [tokenizer.end_of_text or 0]


def _until_stop(
    steps: Iterator[torch.Tensor], stop_ids: tuple[int, ...], new_ids: list[int]
) -> Iterator[int]:
    """The ids that have text, all but a final stop id; `new_ids` collects every one."""
    for step in steps:
        new_ids.append(int(step))
        if new_ids[-1] not in stop_ids:
            yield new_ids[-1]
