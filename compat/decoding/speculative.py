"""Speculative decoding: one forward pass computes the logits of several draft tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compat.decoding.decoder import Choose, PreviewSampling
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Cache, Transformer

# Proposes draft tokens. Arguments: the tokens so far, the number of draft tokens, the model's cache
# of all tokens except the last, and a function that chooses tokens from logits.
Draft = Callable[[list[int], int, Cache, Choose], list[int]]

LOOKUP_LENGTH = 3  # tokens that must match; what followed two of them is seldom what follows again
INITIAL_RATE = 0.7  # share of accepted draft tokens that is assumed before any is known


class DraftSource:
    """Proposes draft tokens, and tracks their acceptance rate and cost.

    Args:
        draft: proposes the tokens.
        patience: the number of tokens, of all texts, before its first draft. A source that takes
            long to set up does not delay short texts then.
    """

    MAX_TOKENS = 15  # 16 with the token before them, which one pass reads nearly as fast as one

    def __init__(self, draft: Draft, patience: int = 0) -> None:
        self.draft, self.patience, self.waited = draft, patience, 0
        self.rate, self.seconds = INITIAL_RATE, 0.0
        self.is_warm = False

    def propose(self, ids: list[int], count: int, cache: Cache, choose: Choose) -> list[int]:
        """Propose up to `count` draft tokens, and measure their cost."""
        start = time.perf_counter()
        tokens = self.draft(ids, count, cache, choose)
        if tokens and self.is_warm:
            cost = (time.perf_counter() - start) / len(tokens)
            self.seconds = moving_average(self.seconds or cost, cost, 0.1)
        self.is_warm = self.is_warm or bool(tokens)  # the first draft packs the draft's weights
        return tokens

    def observe(self, accepted: bool) -> None:
        """Update the acceptance rate with a draft token whose predecessors were all accepted."""
        self.rate = moving_average(self.rate, float(accepted))

    def decay(self) -> None:
        """Move the acceptance rate towards its initial value while this source is not used.

        The text may have become easier to predict.
        """
        self.rate = moving_average(self.rate, INITIAL_RATE, 0.02)

    def best(self, pass_seconds: float) -> tuple[float, int]:
        """Return the highest expected tokens per second, and the number of draft tokens for it.

        With k draft tokens at acceptance rate r, 1 + r + … + r^k tokens are expected from a forward
        pass (Leviathan et al. 2023, §3.1).
        """
        # A pass of more tokens takes a little longer, even if draft tokens cost nothing.
        cost = max(self.seconds or pass_seconds / 4, pass_seconds / 40)
        expected, best = 0.0, (0.0, 0)
        for count in range(self.MAX_TOKENS + 1):
            expected += self.rate**count
            best = max(best, (expected / (pass_seconds + count * cost), count))
        return best


def moving_average(average: float, value: float, weight: float = 0.05) -> float:
    """Return the exponential moving average after a new value."""
    return average + weight * (value - average)


class SpeculativeDecoder(StaticDecoder):
    """Decodes one sequence, and verifies several draft tokens in each forward pass.

    A batch of several sequences is decoded without draft tokens.

    The logits after an accepted draft token are already computed. Cache entries of rejected draft
    tokens are overwritten. Tokens are always chosen from the model's own logits, so the output is
    the same as without speculation, greedy or sampled: there is no acceptance test that could
    change the distribution. To predict sampled tokens, a draft model samples with the same random
    numbers.

    Args:
        transformer: computes the logits.
        sources: the sources of draft tokens, whose acceptance rates carry over to the next text. If
            two have the same expected gain, the first is used.
        max_batch: the largest number of sequences, or None for any number.
    """

    def __init__(
        self, transformer: Transformer, sources: Sequence[DraftSource], max_batch: int | None = None
    ) -> None:
        super().__init__(transformer, max_batch)
        self.sources = sources
        self.pass_seconds = 0.0

    def start(
        self, prompts: Sequence[Sequence[int]], preview_sampling: PreviewSampling | None = None
    ) -> Tensor:
        logits = super().start(prompts)
        self.is_single = len(prompts) == 1
        self.ids = list(prompts[0])
        self.preview_sampling = preview_sampling or (lambda: greedy)
        self.verified: list[tuple[int, Tensor]] = []  # draft tokens, and the logits after each
        return logits

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        if not self.is_single:
            return super().step(ids)
        self.ids.append(int(ids))
        for source in self.sources:
            source.waited += 1
        if self.verified:
            token, logits = self.verified.pop(0)
            self.source.observe(token == self.ids[-1])
            if token == self.ids[-1]:
                return logits
        drafts = self._propose()
        start = time.perf_counter()
        tokens = torch.tensor([[self.ids[-1], *drafts]], device=self.transformer.device)
        hidden = self.transformer(tokens, self.cache.kv, len(self.ids) - 1)
        logits = self.transformer.logits(hidden[0])  # (1 + drafts, V)
        seconds = time.perf_counter() - start
        self.pass_seconds = moving_average(self.pass_seconds or seconds, seconds, 0.1)
        self.verified = [(token, logits[None, j]) for j, token in enumerate(drafts, start=1)]
        return logits[None, 0]

    def _propose(self) -> list[int]:
        """Return the draft tokens of the source with the highest expected gain that has any.

        Before the first forward pass was timed, there are none. Sources that still wait have none.
        """
        if not self.pass_seconds:
            return []
        room = self.config.n_positions - len(self.ids)
        ready = [source for source in self.sources if source.waited > source.patience]
        options = [(*source.best(self.pass_seconds), source) for source in ready]
        for _, count, source in sorted(options, key=lambda option: -option[0]):
            count = min(count, room)
            if count and (
                tokens := source.propose(self.ids, count, self.cache, self.preview_sampling())
            ):
                self.source = source
                return tokens
        for source in self.sources:
            source.decay()
        return []


def greedy(logits: Tensor, ids: Sequence[int]) -> int:
    """Return the most likely token."""
    return int(logits.argmax())


def prompt_lookup(ids: list[int], count: int, *_: object) -> list[int]:
    """Propose the tokens that followed the previous occurrence of the last tokens of the text.

    Source: Saxena 2023, "Prompt lookup decoding".
    """
    tail = ids[-LOOKUP_LENGTH:]
    for at in range(len(ids) - 1, LOOKUP_LENGTH - 1, -1):
        if ids[at - LOOKUP_LENGTH : at] == tail:
            text = list(ids)
            for step in range(count):  # beyond the end of `ids`, repeat the draft
                text.append(text[at + step])
            return text[len(ids) :]
    return []
