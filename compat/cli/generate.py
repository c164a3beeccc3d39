"""`generate`: text that continues a prompt as it comes, or many prompts from a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.cli.common import (
    DialectName,
    JsonOption,
    ModelOption,
    NHeadOption,
    OwnBlocksOption,
    RevisionOption,
    explained,
)
from compat.cli.generate_options import (
    BatchSizeOption,
    InteractiveOption,
    LogprobsOption,
    MaxNewTokensOption,
    MinPOption,
    OutOption,
    OverflowName,
    OverflowOption,
    PenaltyOption,
    PlainOption,
    PrecisionName,
    PrecisionOption,
    PromptArgument,
    PromptFileOption,
    ResumeOption,
    SamplesOption,
    SeedOption,
    SpeculateName,
    SpeculateOption,
    StopIdOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    check_usage,
)
from compat.cli.prompt_file import read_prompts, write_results
from compat.cli.show_text import converse, show, show_samples
from compat.decoding import PlainBlocks
from compat.engine import Engine
from compat.generation import Completion, Sampling, TextStream, generate_text, stream_text
from compat.loading import load_pretrained
from compat.tokenizer import load_tokenizer


@explained
def generate_command(
    prompt: PromptArgument = None,
    model: ModelOption = "demo",
    dialect: OwnBlocksOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    stop: StopOption = None,
    stop_id: StopIdOption = None,
    n: SamplesOption = 1,
    seed: SeedOption = None,
    overflow: OverflowOption = OverflowName.error,
    prompt_file: PromptFileOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    batch_size: BatchSizeOption = None,
    interactive: InteractiveOption = False,
    plain: PlainOption = False,
    dtype: PrecisionOption = None,
    speculate: SpeculateOption = None,
    revision: RevisionOption = None,
    n_head: NHeadOption = None,
    as_json: JsonOption = False,
    logprobs: LogprobsOption = False,
) -> None:
    """Continue a prompt; the text streams to stdout, the speed goes to stderr.

    Ctrl-C keeps what there is. A prompt file's results are JSON lines.
    """
    plain = plain or dialect is not None
    for_engine = dtype is not None or speculate is not None
    check_usage(
        prompt, prompt_file, interactive, out, resume, logprobs, n, as_json, plain, for_engine,
        batch_size, speculate is not None,
    )  # fmt: skip
    prompts = [] if prompt_file is None else read_prompts(prompt_file)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    checkpoint = open_checkpoint(model, revision, n_head=n_head)
    tokenizer = load_tokenizer(checkpoint)
    texts = 8 if batch_size is None else batch_size  # at a time
    if speculate or (prompt_file is None and n == 1):
        texts = 1  # speculation decodes one text at a time; without a file or --n there is one
    runs = (
        PlainBlocks(load_pretrained(checkpoint, (dialect or DialectName.linear).value))
        if plain
        else _engine(checkpoint, dtype, speculate, max(1, texts))
    )
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop": stop or (),
        "stop_ids": stop_id or (),
        "seed": seed,
        "overflow": overflow.value,
        "logprobs": logprobs,
    }

    def one(prompt: str) -> TextStream:
        return stream_text(runs, tokenizer, prompt, **settings)

    def many(prompts: list[str]) -> Iterator[Completion]:
        return generate_text(runs, tokenizer, prompts, n=n, batch_size=texts, **settings)

    if prompt_file is not None:
        write_results(many, prompts, n, out, resume)
    elif interactive:
        converse(one)
    elif n == 1:
        show(one(prompt or ""), as_json)
    else:
        show_samples(many([prompt or ""]), n, as_json)


def _engine(
    checkpoint: Checkpoint,
    dtype: PrecisionName | None,
    speculate: SpeculateName | None,
    max_batch: int,
) -> Engine:
    checkpoint.mmap = checkpoint.can_be_mapped  # it is read once, to be packed
    return Engine(
        checkpoint,
        dtype=dtype.value if dtype else "float32",
        max_batch=max_batch,
        speculate=speculate.value if speculate else None,
    )
