"""Texts that continue prompts: many at once, or one as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from compat.decoding import HasDecoder
from compat.dialects import Model
from compat.errors import GenerationError, short_repr
from compat.generation.checks import whole_number
from compat.generation.sampling import Sampling
from compat.generation.writing import Completion, Draft, Overflow, Prompt, Writer
from compat.tokenizer import Tokenizer

_OWN_ODDS = Sampling()


def generate_text(
    model: Model | HasDecoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling = _OWN_ODDS,
    n: int = 1,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    seed: int | None = None,
    logprobs: bool = False,
    overflow: Overflow = "error",
    batch_size: int = 8,
) -> Iterator[Completion]:
    """Continue every prompt, n times: completions in the order of the prompts.

    A text ends with the config's `eos_token_id`, a stop id or stop string, or its length. What
    comes of a prompt does not depend on the other prompts: all have the same seed, and sample j of
    a prompt draws by seed + j. Equal prompts therefore have equal texts; for others ask for `n`.

    Args:
        model: a dialect's model in eval mode, or one with a decoder of its own.
        tokenizer: the checkpoint's.
        prompts: texts, or ids; an empty text starts from end-of-text.
        max_new_tokens: of each text; None takes 100, or as many as the context has room for.
        sampling: how ids are chosen. Ids without text are never chosen.
        n: texts a prompt.
        stop: strings before which a text ends, also across the borders of tokens; they are looked
            for in the new text alone.
        stop_ids: ids that end a text, beside the config's.
        seed: of the draws; the first text of a prompt draws what `transformers` draws for a prompt
            alone. None for other draws every time.
        logprobs: keep the log-probability of each new id, by the model's own distribution.
        overflow: what happens when the context is full. "error" refuses beforehand. "slide" drops
            its oldest half and computes the newest half anew, with positions from 0: the model no
            longer knows what was dropped, and goes on as if the text began there. (The repetition
            penalty still counts all ids.)
        batch_size: texts at a time.

    Raises:
        GenerationError: a request that cannot be met, before anything is generated; logits that
            are not finite.
        KeyboardInterrupt: after the completions of the batch that Ctrl-C came upon, those that had
            not ended "interrupted".
    """
    whole_number("n", n, least=1)
    whole_number("batch_size", batch_size, least=1)
    if isinstance(prompts, str):
        raise GenerationError("prompts is one text; expected a sequence of them")
    writer = Writer(
        model,
        tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stop_ids=stop_ids,
        seed=seed,
        logprobs=logprobs,
        overflow=overflow,
    )
    for i, prompt in enumerate(prompts, 1):
        try:
            writer.draft(prompt)
        except GenerationError as error:
            place = f"prompt {i} of {len(prompts)}, {short_repr(prompt)}: "
            where = place if len(prompts) > 1 else ""
            raise GenerationError(f"{where}{error}") from error
    drafts = (writer.draft(prompt, sample) for prompt in prompts for sample in range(n))
    return _completions(writer, drafts, batch_size)


def _completions(writer: Writer, drafts: Iterator[Draft], size: int) -> Iterator[Completion]:
    while batch := list(islice(drafts, size)):
        interrupted = None
        try:
            for _ in writer.rounds(batch):
                pass
        except KeyboardInterrupt as error:
            interrupted = error
        for draft in batch:
            yield draft.completion(writer.logprobs)
        if interrupted is not None:
            raise interrupted


class TextStream:
    """The new text of one prompt, piece by piece; `completion` is what there is at any time.

    A piece is held back while a stop string may begin in it. Whoever stops early, by Ctrl-C for
    example, finds it in the completion.
    """

    def __init__(self, writer: Writer, draft: Draft) -> None:
        self._writer, self._draft = writer, draft

    def __iter__(self) -> Iterator[str]:
        given = 0
        for _ in self._writer.rounds([self._draft]):
            sure = self._draft.text.sure
            if len(sure) > given:
                yield sure[given:]
                given = len(sure)

    @property
    def completion(self) -> Completion:
        """The text so far, "interrupted" where it is not at its end."""
        return self._draft.completion(self._writer.logprobs)


def stream_text(
    model: Model | HasDecoder,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling = _OWN_ODDS,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    seed: int | None = None,
    logprobs: bool = False,
    overflow: Overflow = "error",
) -> TextStream:
    """Continue one prompt; arguments and errors as in `generate_text`."""
    writer = Writer(
        model,
        tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stop_ids=stop_ids,
        seed=seed,
        logprobs=logprobs,
        overflow=overflow,
    )
    return TextStream(writer, writer.draft(prompt))
