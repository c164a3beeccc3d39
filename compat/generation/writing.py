"""Texts in the making: what a prompt asks for, and a batch of drafts that grow until all are done.

A draft knows its prompt, its own source of randomness and what ends it, so that its text does not
depend on the others in its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from compat.decoding import Choose, HasDecoder, decoder_of
from compat.dialects import Model
from compat.errors import GenerationError, TokenizerError, short_repr
from compat.generation.checks import is_whole, token_ids, whole_number
from compat.generation.decode_loop import rounds
from compat.generation.generate import check_room
from compat.generation.sampling import Sampling
from compat.generation.stopping import NewText
from compat.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Overflow = Literal["error", "slide"]
FinishReason = Literal["length", "stop", "eos", "interrupted"]

DEFAULT_NEW_TOKENS = 100


@dataclass(frozen=True)
class Completion:
    """A prompt and what the model made of it.

    Args:
        prompt: its text.
        new_text: what follows, without stop string and end-of-text.
        prompt_ids: of the prompt; end-of-text where it was empty.
        new_ids: every id that was chosen, those of the stop string or end-of-text included.
        finish_reason: "length" of the request, "stop" string or id, "eos" of the model's config, or
            "interrupted".
        logprobs: of the new ids, by the model's own distribution: before penalty, temperature and
            the like. None if they were not asked for.
        dropped: how many of the oldest ids had left the context at the end; 0 unless it slides.
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
        """The prompt and what follows."""
        return self.prompt + self.new_text

    def to_json(self) -> dict[str, Any]:
        """All of it under its names; `logprobs` only where there are some."""
        found = {"prompt": self.prompt, "text": self.text, **vars(self)}
        return {name: value for name, value in found.items() if value is not None}


class Draft:
    """One text in the making.

    Args:
        prompt: its text, None for that of its ids.
        prompt_ids: at least one.
        text: takes the new ids.
        limit: of the new ids.
        seed: of its draws; None for another one every time.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: Sequence[int],
        text: NewText,
        limit: int,
        seed: int | None,
    ) -> None:
        self.prompt = text.prompt if prompt is None else prompt
        self.ids, self.text = list(prompt_ids), text
        self.n_prompt, self.limit, self.seed = len(prompt_ids), limit, seed
        self.dropped = 0
        self.logprobs: list[float] = []
        self.reason: FinishReason | None = None if limit else "length"
        self._generator: torch.Generator | None = None

    @property
    def context(self) -> list[int]:
        """What the model reads: all ids but those that slid out."""
        return self.ids[self.dropped :]

    def slide(self, n_positions: int) -> None:
        """Keep the newest half of a context that is too long for the model."""
        if len(self.context) > n_positions:
            self.dropped = len(self.ids) - max(1, n_positions // 2)

    def generator(self, device: torch.device) -> torch.Generator:
        """The draft's own source of randomness."""
        if self._generator is None:
            self._generator = torch.Generator(device)
            if self.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.seed)
        return self._generator

    def add(self, token_id: int, reason: FinishReason | None) -> None:
        """One more id; with a reason it is no part of the text, and the last one."""
        self.ids.append(token_id)
        if reason is None:
            self.text.add(token_id)
            if self.text.stopped:
                reason = "stop"
            elif len(self.ids) - self.n_prompt >= self.limit:
                reason = "length"
        if reason is not None:
            self.text.end()
        self.reason = reason

    def completion(self, logprobs: bool) -> Completion:
        """As far as it is."""
        return Completion(
            prompt=self.prompt,
            new_text=self.text.so_far,
            prompt_ids=self.ids[: self.n_prompt],
            new_ids=self.ids[self.n_prompt :],
            finish_reason=self.reason or "interrupted",
            logprobs=self.logprobs[: len(self.ids) - self.n_prompt] if logprobs else None,
            dropped=self.dropped,
        )


class Writer:
    """A model with its tokenizer and the settings of a request; arguments as of `generate_text`."""

    def __init__(
        self,
        model: Model | HasDecoder,
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str],
        stop_ids: Sequence[int],
        seed: int | None,
        logprobs: bool,
        overflow: Overflow,
    ) -> None:
        self.decoder, self.tokenizer = decoder_of(model), tokenizer
        self.config = self.decoder.config
        V = self.config.vocab_size
        if isinstance(stop, str) or not all(stop):
            raise GenerationError(f"stop is {short_repr(stop)}; expected texts, none of them empty")
        stop_ids = token_ids("stop_ids", stop_ids)
        if strange := [token_id for token_id in stop_ids if not 0 <= token_id < V]:
            raise GenerationError(f"stop_ids has {strange[0]}; the vocabulary has ids 0 to {V - 1}")
        if overflow not in get_args(Overflow):
            raise GenerationError(
                f"overflow is {short_repr(overflow)}; expected 'error' or 'slide'"
            )
        if max_new_tokens is not None:
            whole_number("max_new_tokens", max_new_tokens, least=0)
        if seed is not None and not is_whole(seed):
            raise GenerationError(f"seed is {short_repr(seed)}; expected an integer, or None")
        silent = (*sampling.suppress_tokens, *tokenizer.ids_without_text(V))
        self.sampling = replace(sampling, suppress_tokens=silent)
        self.reasons: dict[int, FinishReason] = {
            **dict.fromkeys(stop_ids, "stop"),
            **dict.fromkeys(self.config.stop_ids, "eos"),
        }
        self.stop, self.max_new_tokens, self.seed = stop, max_new_tokens, seed
        self.logprobs, self.overflow = logprobs, overflow

    def draft(self, prompt: Prompt, sample: int = 0) -> Draft:
        """The beginning of a sample's text; sample j draws by seed + j, the first as one alone.

        Raises:
            GenerationError: the prompt cannot be encoded, or leaves no room for the new tokens.
        """
        text = prompt if isinstance(prompt, str) else None
        ids = self._encoded(prompt) if isinstance(prompt, str) else self._checked(prompt)
        limit = self._limit(len(ids))
        new = NewText(self.tokenizer, self.stop, () if text is not None else ids)
        return Draft(text, ids, new, limit, None if self.seed is None else self.seed + sample)

    def rounds(self, drafts: Sequence[Draft]) -> Iterator[None]:
        """Let the drafts grow together, an id each a round; those that are done leave the batch.

        A context that has become too long leaves too; its newest half starts anew, with positions
        from 0, once the others are done.
        """
        while waiting := [draft for draft in drafts if draft.reason is None]:
            for draft in waiting:
                draft.slide(self.config.n_positions)
            yield from self._batch(waiting)

    def _batch(self, drafts: list[Draft]) -> Iterator[None]:
        def ends(i: int, _: int) -> bool:
            return drafts[i].reason is not None or len(contexts[i]) > self.config.n_positions

        def choose(logits: Tensor, live: list[int]) -> Tensor:
            return self._choose(logits, [drafts[i] for i in live])

        def rehearse() -> Choose:
            return self.sampling.rehearsal(drafts[0].generator(torch.device("cpu")))

        contexts = [draft.context for draft in drafts]
        for found in rounds(self.decoder, contexts, choose, ends, rehearse):
            for i, token_id in found.items():
                drafts[i].add(token_id, self.reasons.get(token_id))
            yield

    def _choose(self, logits: Tensor, live: list[Draft]) -> Tensor:
        """Every draft's next id (B,), drawn from its own generator."""
        scores = self.sampling.scores(logits, [draft.ids for draft in live])
        if self.sampling.temperature == 0:
            ids = self.sampling.draw(scores)
        else:
            draws = [
                self.sampling.draw(row[None], draft.generator(logits.device))
                for row, draft in zip(scores, live, strict=True)
            ]
            ids = torch.cat(draws)
        if self.logprobs:
            chosen = logits.float().log_softmax(dim=-1).gather(1, ids[:, None])
            for draft, value in zip(live, chosen[:, 0].tolist(), strict=True):
                draft.logprobs.append(value)
        return ids

    def _limit(self, T: int) -> int:
        """How many new tokens a prompt of T tokens gets."""
        n, asked = self.config.n_positions, self.max_new_tokens
        if asked is None:
            asked = DEFAULT_NEW_TOKENS
            if self.overflow == "error":
                asked = max(1, min(asked, n - T))
        check_room(T, asked, n if self.overflow == "error" else T + max(0, asked))
        return asked

    def _encoded(self, prompt: str) -> list[int]:
        """A text's ids; an empty one starts from end-of-text, as GPT-2's training texts do."""
        try:
            ids = self.tokenizer.encode(prompt)
        except TokenizerError as error:  # the prompt is at fault, not the tokenizer
            raise GenerationError(f"the prompt cannot be encoded: {error}") from error
        if not ids and self.tokenizer.end_of_text is None:
            raise GenerationError(
                "the prompt is empty, and the vocabulary has no end-of-text to start from"
            )
        return ids or [self.tokenizer.end_of_text or 0]

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        try:
            self.tokenizer.decode_bytes(prompt)
        except TokenizerError as error:
            raise GenerationError(f"the prompt cannot be decoded: {error}") from error
        if not prompt:
            raise GenerationError("the prompt has no ids; start from the end-of-text id instead")
        return list(prompt)
