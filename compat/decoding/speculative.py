"""Guessing ahead: the logits of several guessed ids are computed in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compat.decoding.decoder import Choose, Rehearse, check_prompts
from compat.decoding.not_finite import NotFiniteError
from compat.decoding.static import TransformerDecoder
from compat.decoding.transformer import Cache, Transformer

# The ids so far, of which the cache holds all but the last; how many ids to guess; how the model's
# logits will be chosen from. → the guesses.
Draft = Callable[[list[int], int, Cache, Choose], list[int]]
TAIL = 3  # ids that have to be the same for a lookup; what follows two is seldom the same


class Guesser:
    """A source of guesses, and what is known of it: how many come true, and what one costs.

    Args:
        draft: makes the guesses.
    """

    MOST = 15  # with the id before them 16, which a pass reads nearly as fast as one

    def __init__(self, draft: Draft) -> None:
        self.draft, self.rate, self.seconds = draft, 0.7, 0.0

    def guess(self, ids: list[int], count: int, cache: Cache, choose: Choose) -> list[int]:
        """Up to `count` guesses, timed."""
        start = time.perf_counter()
        guesses = self.draft(ids, count, cache, choose)
        if guesses:
            taken = (time.perf_counter() - start) / len(guesses)
            self.seconds = mixed(self.seconds or taken, taken, 0.1)
        return guesses

    def learn(self, right: bool) -> None:
        """Whether a guess came true whose predecessors had."""
        self.rate = mixed(self.rate, float(right))

    def forget(self) -> None:
        """Nothing was guessed for a while, for its rate; a text may have become easier."""
        self.rate = mixed(self.rate, 0.7, 0.02)

    def best(self, read: float) -> tuple[float, int]:
        """The most ids a second, and the number of guesses for it, if a pass takes `read` seconds.

        Of k guesses, 1 + rate + … + rate^k ids are expected to come.
        """
        seconds = max(self.seconds or read / 4, read / 40)  # a longer pass takes longer, a little
        ids, best = 0.0, (0.0, 0)
        for count in range(self.MOST + 1):
            ids += self.rate**count
            best = max(best, (ids / (read + count * seconds), count))
        return best


def mixed(before: float, now: float, share: float = 0.05) -> float:
    """A mean in which what is long ago counts less."""
    return before + share * (now - before)


class SpeculativeDecoder(TransformerDecoder):
    """One sequence, whose next ids are guessed and read together.

    A guess that turns out right finds its logits ready; what follows a wrong one is overwritten.
    Whoever chooses ids sees the model's own logits only, so that greedy and drawn ids are those
    without guesses: there is no acceptance test that could shift the distribution. To guess what
    will be drawn, a draft draws from its own logits by the same random numbers.

    Args:
        transformer: computes the logits.
        guessers: they learn from one text for the next; at equal gain the first is asked first.
    """

    def __init__(self, transformer: Transformer, guessers: Sequence[Guesser]) -> None:
        self.transformer, self.guessers = transformer, guessers
        self.seconds = 0.0  # of a pass

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], rehearse: Rehearse | None = None) -> Tensor:
        """Logits (1, V) of the id after the prompt."""
        check_prompts(prompts, 1)
        self.ids = list(prompts[0])
        self.rehearse = rehearse or (lambda: greedy)
        self.cache = self.transformer.new_cache(1)
        self.ready: list[tuple[int, Tensor]] = []  # guesses, and the logits after each
        hidden = self.read_prompts([self.ids], self.cache)
        return self.transformer.logits(hidden[:, -1])

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (1, V) of the id after this one, (1,)."""
        self.ids.append(int(ids))
        if self.ready:
            guess, logits = self.ready.pop(0)
            self.guesser.learn(guess == self.ids[-1])
            if guess == self.ids[-1]:
                return logits
        guesses = self._guesses()
        start = time.perf_counter()
        read = torch.tensor([[self.ids[-1], *guesses]], device=self.transformer.device)
        hidden = self.transformer(read, self.cache, len(self.ids) - 1)
        logits = self.transformer.logits(hidden[0])  # (1 + guesses, V)
        taken = time.perf_counter() - start
        self.seconds = mixed(self.seconds or taken, taken, 0.1)
        self.ready = [(guess, logits[None, j]) for j, guess in enumerate(guesses, start=1)]
        return logits[None, 0]

    def keep(self, rows: Tensor) -> None:
        """There is one row."""

    def _guesses(self) -> list[int]:
        """From the source that promises most and has any; none while no pass was timed."""
        if not self.seconds:
            return []
        room = self.config.n_positions - len(self.ids)
        options = [(*guesser.best(self.seconds), guesser) for guesser in self.guessers]
        for _, count, guesser in sorted(options, key=lambda option: -option[0]):
            count = min(count, room)
            guesses = guesser.guess(self.ids, count, self.cache, self.rehearse()) if count else []
            if guesses:
                self.guesser = guesser
                return guesses
        for guesser in self.guessers:
            guesser.forget()
        return []


def greedy(logits: Tensor, ids: Sequence[int]) -> int:
    """The likeliest id."""
    return int(logits.argmax())


class ModelDraft:
    """Guesses by a less exact model with a cache of the same kind.

    It writes the keys and values of what it guesses where the exact ones come right after.
    """

    def __init__(self, transformer: Transformer) -> None:
        self.transformer = transformer

    def __call__(self, ids: list[int], count: int, cache: Cache, choose: Choose) -> list[int]:
        ids = list(ids)
        n = len(ids)
        while len(ids) < n + count:
            try:
                last = torch.tensor(ids[-1:], device=self.transformer.device)
                logits = self.transformer.next_logits(last, cache, len(ids) - 1)
                ids.append(choose(logits, ids))
            # NaN, which some products of whole numbers refuse: the model itself will tell better.
            except (NotFiniteError, RuntimeError):
                break
        return ids[n:]


def lookup(ids: list[int], count: int, *_: object) -> list[int]:
    """Guesses from the text itself: what followed its last ids when they stood there before."""
    tail = ids[-TAIL:]
    for at in range(len(ids) - 1, TAIL - 1, -1):
        if ids[at - TAIL : at] == tail:
            text = list(ids)
            for step in range(count):  # beyond what stands there, as a text that repeats itself
                text.append(text[at + step])
            return text[len(ids) :]
    return []
