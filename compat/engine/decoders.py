"""Batches that grow by an id each at a time: `compat.generation.decoding.Decoder` on an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from compat.config import GPT2Config
from compat.engine.transformer import Transformer
from compat.errors import GenerationError
from compat.generation.not_finite import why_not_finite

Draft = Callable[[list[int], int], list[int]]  # ids so far, how many → guesses of the next ones


class _Decoder:
    """What both have: the transformer, and where its values are at fault."""

    transformer: Transformer

    @property
    def config(self) -> GPT2Config:
        return self.transformer.config

    def why_not_finite(self, context: Sequence[int]) -> str:
        """Where the first value comes up that is not finite, in words."""
        found = self.transformer.first_not_finite(context)
        return why_not_finite(found, self.transformer.dtype, context)


class StaticDecoder(_Decoder):
    """Sequences of any lengths side by side, padded on the right, where nothing looks at it."""

    def __init__(self, transformer: Transformer, max_batch: int) -> None:
        self.transformer, self.max_batch = transformer, max_batch

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, V) of the id after each prompt."""
        check_batch(prompts, self.max_batch)
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        self.cache = self.transformer.new_cache(len(prompts))
        hidden = self.transformer(ids, self.cache, 0)
        self.lengths = torch.tensor(lengths)
        return self.transformer.logits(hidden[torch.arange(len(prompts)), self.lengths - 1])

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (B, V) of the id after these, (B,)."""
        first = int(self.lengths[0])
        alike = bool((self.lengths == first).all())
        hidden = self.transformer(ids[:, None], self.cache, first if alike else self.lengths)
        self.lengths = self.lengths + 1
        return self.transformer.logits(hidden[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.cache.keep(rows)
        self.lengths = self.lengths[rows]


class SpeculativeDecoder(_Decoder):
    """One sequence, of which the logits of several guessed ids are computed in one pass.

    A guess that turns out right finds its logits ready; after a wrong one the cache is taken back.
    Whoever chooses ids sees the model's own logits only, so that greedy and drawn ids are those
    without guesses: there is no acceptance test that could shift the distribution.

    Args:
        transformer: computes the logits.
        draft: guesses ids.
    """

    MOST = 8

    def __init__(self, transformer: Transformer, draft: Draft) -> None:
        self.transformer, self.draft = transformer, draft
        self.length_of_draft, self.guessed, self.right = 4, 0, 0

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits (1, V) of the id after the prompt."""
        check_batch(prompts, 1)
        self.ids = list(prompts[0])
        self.cache = self.transformer.new_cache(1)
        self.ready: list[tuple[int, Tensor]] = []  # guesses, and the logits after each
        hidden = self.transformer(torch.tensor([self.ids]), self.cache, 0)
        return self.transformer.logits(hidden[:, -1])

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (1, V) of the id after this one, (1,)."""
        self.ids.append(int(ids))
        if self.ready:
            guess, logits = self.ready.pop(0)
            if guess == self.ids[-1]:
                self.right += 1
                if not self.ready:  # all were right: guess further
                    self.length_of_draft = min(self.length_of_draft + 1, self.MOST)
                return logits
            # Those behind a wrong one are as good as wrong.
            self.length_of_draft = max(self.length_of_draft - 1 - len(self.ready) // 2, 1)
        return self._read_ahead()

    def _read_ahead(self) -> Tensor:
        start = len(self.ids) - 1
        room = self.config.n_positions - len(self.ids)
        guesses = self.draft(self.ids, min(self.length_of_draft, room)) if room > 0 else []
        self.guessed += len(guesses)
        hidden = self.transformer(torch.tensor([[self.ids[-1], *guesses]]), self.cache, start)
        logits = self.transformer.logits(hidden[0])  # (1 + guesses, V)
        self.ready = [(guess, logits[None, j]) for j, guess in enumerate(guesses, start=1)]
        return logits[None, 0]

    def keep(self, rows: Tensor) -> None:
        """There is one row."""


class ModelDraft:
    """Guesses by a less exact model, greedily; it reads only what is new to it."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer, self.cache = transformer, transformer.new_cache(1)
        self.read: list[int] = []  # the ids that the cache holds

    def __call__(self, ids: list[int], count: int) -> list[int]:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.read, strict=False))
        known = min(len(list(same)), len(ids) - 1)  # the last is read again, for its logits
        self.read, context = ids[:known], ids[known:]
        guesses: list[int] = []
        for _ in range(count):
            hidden = self.transformer(torch.tensor([context]), self.cache, len(self.read))
            self.read += context
            guesses.append(int(self.transformer.logits(hidden[:, -1]).argmax()))
            context = guesses[-1:]
        return guesses


def lookup(ids: list[int], count: int, longest: int = 3) -> list[int]:
    """Guesses from the text itself: what followed its last few ids when they stood there before."""
    for size in range(min(longest, len(ids) - 1), 0, -1):
        tail = ids[-size:]
        for at in range(len(ids) - size - 1, -1, -1):
            if ids[at : at + size] == tail:
                return ids[at + size : at + size + count]
    return []


def check_batch(prompts: Sequence[Sequence[int]], most: int) -> None:
    """Refuse an empty batch, an empty prompt, and more prompts than there is room for.

    Raises:
        GenerationError: one of these.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise GenerationError("a prompt is empty; start from the end-of-text id instead")
    if len(prompts) > most:
        raise GenerationError(f"{len(prompts)} prompts at once; this engine has room for {most}")
