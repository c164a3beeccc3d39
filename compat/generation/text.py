"""Generation of text: many prompts in batches, or one prompt as a stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from compat.decoding import HasDecoder, decoder_of
from compat.dialects import Model
from compat.errors import GenerationError, TokenizerError, short_repr
from compat.generation.checks import check_integer, check_room, check_token_ids, is_integer
from compat.generation.decode_loop import decode_loop
from compat.generation.sampling import Sampling
from compat.generation.stopping import NewText
from compat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int]
Overflow = Literal["error", "slide"]
FinishReason = Literal["length", "stop", "eos", "interrupted"]

DEFAULT_NEW_TOKENS = 100


class TextOptions(TypedDict, total=False):
    """The optional arguments that `generate_text` and `stream_text` share."""

    max_new_tokens: int | None
    sampling: Sampling
    stop: Sequence[str]
    stop_ids: Collection[int] | None
    seed: int | None
    logprobs: bool
    overflow: Overflow


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation.

    Args:
        prompt: its text.
        new_text: the continuation, without the stop string or end-of-text.
        prompt_ids: token ids of the prompt; the end-of-text token where the prompt was empty.
        new_ids: all chosen token ids, including those of the stop string or end-of-text.
        finish_reason: "length" (the requested length was reached), "stop" (a stop string or id),
            "eos" (the config's end-of-text id), or "interrupted".
        logprobs: log-probabilities of the new tokens in nats by the model's own distribution,
            before repetition penalty, temperature and truncation. None if they were not requested.
        dropped: number of the oldest tokens that were dropped from the context; 0 unless `overflow`
            is "slide".
    """

    prompt: str
    new_text: str
    prompt_ids: list[int]
    new_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None = None
    dropped: int = 0

    @property
    def text(self) -> str:
        """The prompt and its continuation."""
        return self.prompt + self.new_text

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, and the whole text; `logprobs` only if they were requested."""
        found = {"prompt": self.prompt, "text": self.text, **vars(self)}
        return {name: value for name, value in found.items() if value is not None}


def generate_text(
    model: Model | HasDecoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    n: int = 1,
    batch_size: int = 8,
    **options: Unpack[TextOptions],
) -> Iterator[Completion]:
    """Continue every prompt n times; the completions come in the order of the prompts.

    A text ends at a stop id, a stop string or its length. The completion of a prompt does not
    depend on the other prompts: all have the same seed, and sample j of a prompt uses seed + j.
    Equal prompts therefore have equal completions; pass `n` for different ones.

    Args:
        model: a dialect's model in eval mode, `PlainBlocks` of one, or an `Engine`.
        tokenizer: the checkpoint's tokenizer.
        prompts: texts, or token ids. An empty text starts from the end-of-text token.
        n: samples of each prompt.
        batch_size: texts that are decoded together.
        max_new_tokens: upper limit for each text. None means 100, or as many as the context has
            room for.
        sampling: how tokens are chosen. Tokens without text are never chosen.
        stop: strings before which a completion ends, even across token boundaries. Only the new
            text is searched for them.
        stop_ids: token ids that end a text. None means the config's `eos_token_id`; () never stops.
        seed: seed of the random numbers. The first sample of a prompt is the one that
            `transformers` draws for this prompt alone. None: a different seed in every call.
        logprobs: keep the log-probability of each new token.
        overflow: what happens when the context is full. "error" raises an error beforehand.
            "slide" drops the oldest half and computes the newest half again from position 0. The
            dropped tokens no longer influence the logits, but the repetition penalty still counts
            them.

    Raises:
        GenerationError: the request cannot be met (raised before anything is generated), or the
            logits are non-finite.
        KeyboardInterrupt: Ctrl-C was pressed. The completions of the current batch are yielded
            first; those that had not ended have the finish reason "interrupted".
    """
    check_integer("n", n, least=1)
    check_integer("batch_size", batch_size, least=1)
    if isinstance(prompts, str):
        raise GenerationError(
            f"prompts is one text, but must be a list. Pass [{short_repr(prompts)}]."
        )
    writer = _Writer(model, tokenizer, **options)
    for i, prompt in enumerate(prompts, 1):
        try:
            writer.begin(prompt)
        except GenerationError as error:
            place = f"prompt {i} of {len(prompts)}, {short_repr(prompt)}: "
            where = place if len(prompts) > 1 else ""
            raise GenerationError(f"{where}{error}") from error
    texts = (writer.begin(prompt, sample) for prompt in prompts for sample in range(n))
    return _completions(writer, texts, batch_size)


def _completions(
    writer: _Writer, texts: Iterator[_GrowingText], batch_size: int
) -> Iterator[Completion]:
    while batch := list(islice(texts, batch_size)):
        interrupted = None
        try:
            for _ in writer.decode(batch):
                pass
        except KeyboardInterrupt as error:
            interrupted = error
        for text in batch:
            yield text.completion(writer.logprobs)
        if interrupted is not None:
            raise interrupted


class TextStream:
    """Iterates over the new text of one prompt, piece by piece.

    A piece is held back while it may be the beginning of a stop string. After an interruption, by
    Ctrl-C for example, `completion` has the text so far.
    """

    def __init__(self, writer: _Writer, text: _GrowingText) -> None:
        self._writer, self._text = writer, text

    def __iter__(self) -> Iterator[str]:
        yielded = 0
        for _ in self._writer.decode([self._text]):
            final = self._text.new_text.final
            if len(final) > yielded:
                yield final[yielded:]
                yielded = len(final)

    @property
    def completion(self) -> Completion:
        """The text so far; its finish reason is "interrupted" until the end is reached."""
        return self._text.completion(self._writer.logprobs)


def stream_text(
    model: Model | HasDecoder, tokenizer: Tokenizer, prompt: Prompt, **options: Unpack[TextOptions]
) -> TextStream:
    """Continue one prompt; arguments and errors as in `generate_text`."""
    writer = _Writer(model, tokenizer, **options)
    return TextStream(writer, writer.begin(prompt))


@dataclass
class _GrowingText:
    """One text and its own state of generation, so that it does not depend on its batch.

    Args:
        prompt: the prompt's text.
        ids: the token ids of the prompt, at least one, to which the new ones are appended.
        new_text: decodes the new tokens.
        limit: maximum number of new tokens.
        seed: seed of its random numbers; None for a different seed every time.
    """

    prompt: str
    ids: list[int]
    new_text: NewText
    limit: int
    seed: int | None

    def __post_init__(self) -> None:
        self.n_prompt, self.dropped = len(self.ids), 0
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None if self.limit else "length"
        self._generator: torch.Generator | None = None

    @property
    def context(self) -> list[int]:
        """The tokens that the model reads: all but the dropped ones."""
        return self.ids[self.dropped :]

    def slide(self, n_positions: int) -> None:
        """Keep the newest half of a context that is too long for the model."""
        if len(self.context) > n_positions:
            self.dropped = len(self.ids) - max(1, n_positions // 2)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the text's own random number generator."""
        if self._generator is None:
            self._generator = torch.Generator(device)
            if self.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.seed)
        return self._generator

    def add(self, token_id: int, reason: FinishReason | None) -> None:
        """Add a token. With a reason it ends the text and is not part of it."""
        self.ids.append(token_id)
        if reason is None:
            self.new_text.add(token_id)
            if self.new_text.stopped:
                reason = "stop"
            elif len(self.ids) - self.n_prompt >= self.limit:
                reason = "length"
        if reason is not None:
            self.new_text.end()
        self.finish_reason = reason

    def completion(self, logprobs: bool) -> Completion:
        """Return the text so far."""
        return Completion(
            prompt=self.prompt,
            new_text=self.new_text.so_far,
            prompt_ids=self.ids[: self.n_prompt],
            new_ids=self.ids[self.n_prompt :],
            finish_reason=self.finish_reason or "interrupted",
            logprobs=self.logprobs[: len(self.ids) - self.n_prompt] if logprobs else None,
            dropped=self.dropped,
        )


class _Writer:
    """A model, its tokenizer and the checked options of a request, as in `generate_text`."""

    def __init__(
        self,
        model: Model | HasDecoder,
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        overflow: Overflow = "error",
    ) -> None:
        self.decoder, self.tokenizer = decoder_of(model), tokenizer
        self.config = self.decoder.config
        V = self.config.vocab_size
        if isinstance(stop, str) or not all(stop):
            raise GenerationError(
                f"stop is {short_repr(stop)}, but must be a list of nonempty strings"
            )
        ids = self.config.stop_ids if stop_ids is None else check_token_ids("stop_ids", stop_ids)
        if stop_ids is not None and (unknown := [i for i in ids if not 0 <= i < V]):
            raise GenerationError(
                f"stop_ids has {unknown[0]}, but the vocabulary has ids 0 to {V - 1}"
            )
        if overflow not in get_args(Overflow):
            raise GenerationError(
                f"overflow is {short_repr(overflow)}, but must be 'error' or 'slide'"
            )
        if max_new_tokens is not None:
            check_integer("max_new_tokens", max_new_tokens, least=0)
        if seed is not None and not is_integer(seed):
            raise GenerationError(f"seed is {short_repr(seed)}, but must be an integer or None")
        sampling = sampling or Sampling()
        silent = (*sampling.suppress_tokens, *tokenizer.ids_without_text(V))
        self.sampling = replace(sampling, suppress_tokens=silent)
        self.finish_reasons: dict[int, FinishReason] = {
            token_id: "eos" if token_id in self.config.stop_ids else "stop" for token_id in ids
        }
        self.stop, self.max_new_tokens, self.seed = stop, max_new_tokens, seed
        self.logprobs, self.overflow = logprobs, overflow

    def begin(self, prompt: Prompt, sample: int = 0) -> _GrowingText:
        """Return the text of a sample before its first new token; sample j uses seed + j.

        Raises:
            GenerationError: the prompt cannot be encoded, or leaves no room for the new tokens.
        """
        if isinstance(prompt, str):
            text, ids = prompt, self._encoded(prompt)
            new = NewText(self.tokenizer, self.stop)
        else:
            ids = self._checked(prompt)
            new = NewText(self.tokenizer, self.stop, ids)
            text = new.prompt
        seed = None if self.seed is None else self.seed + sample
        return _GrowingText(text, ids, new, self._limit(len(ids)), seed)

    def decode(self, texts: Sequence[_GrowingText]) -> Iterator[None]:
        """Decode the texts together, one token in every step, until all have ended.

        A text whose context has become too long leaves the batch. Its newest half starts again from
        position 0 once the others have ended.
        """
        while waiting := [text for text in texts if text.finish_reason is None]:
            for text in waiting:
                text.slide(self.config.n_positions)
            yield from self._decode_batch(waiting)

    def _decode_batch(self, texts: list[_GrowingText]) -> Iterator[None]:
        contexts = [text.context for text in texts]
        steps = decode_loop(
            self.decoder,
            contexts,
            choose=lambda logits, live: self._choose(logits, [texts[i] for i in live]),
            ends=lambda i, _: (
                texts[i].finish_reason is not None or len(contexts[i]) > self.config.n_positions
            ),
            preview_sampling=lambda: self.sampling.preview(texts[0].generator(torch.device("cpu"))),
        )
        for found in steps:
            for i, token_id in found.items():
                texts[i].add(token_id, self.finish_reasons.get(token_id))
            yield

    def _choose(self, logits: Tensor, live: list[_GrowingText]) -> Tensor:
        """Return the next token of every text (B,), drawn from the text's own generator."""
        scores = self.sampling.scores(logits, [text.ids for text in live])
        if self.sampling.temperature == 0:
            ids = self.sampling.draw(scores)
        else:
            draws = [
                self.sampling.draw(row[None], text.generator(logits.device))
                for row, text in zip(scores, live, strict=True)
            ]
            ids = torch.cat(draws)
        if self.logprobs:
            chosen = logits.float().log_softmax(dim=-1).gather(1, ids[:, None])
            for text, value in zip(live, chosen[:, 0].tolist(), strict=True):
                text.logprobs.append(value)
        return ids

    def _limit(self, T: int) -> int:
        """Return the number of new tokens for a prompt of T tokens."""
        n, limit = self.config.n_positions, self.max_new_tokens
        if limit is None:
            limit = DEFAULT_NEW_TOKENS
            if self.overflow == "error":
                limit = max(1, min(limit, n - T))
        check_room(T, limit, n if self.overflow == "error" else T + max(0, limit))
        return limit

    def _encoded(self, prompt: str) -> list[int]:
        """Encode a text. An empty one starts from end-of-text, as GPT-2's training texts do."""
        try:
            ids = self.tokenizer.encode(prompt)
        except TokenizerError as error:  # the prompt is at fault, not the tokenizer
            raise GenerationError(f"the prompt cannot be encoded: {error}") from error
        if not ids and self.tokenizer.end_of_text is None:
            raise GenerationError(
                "the prompt is empty, and the vocabulary has no end-of-text token to start from. "
                "Pass a prompt of at least one character."
            )
        return ids or [self.tokenizer.end_of_text or 0]

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        try:
            self.tokenizer.decode_bytes(prompt)
        except TokenizerError as error:
            raise GenerationError(f"the prompt cannot be decoded: {error}") from error
        if not prompt:
            raise GenerationError(
                "the prompt has no tokens, but at least one is required. Start from the "
                "end-of-text token."
            )
        return list(prompt)
