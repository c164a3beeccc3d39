"""Speculative decoding: one forward pass computes the logits of several draft tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compat.decoding.decoder import Choose, PreviewSampling, check_prompts
from compat.decoding.not_finite import NotFiniteError
from compat.decoding.transformer import Cache, Transformer

# Proposes draft tokens. Arguments: the tokens so far, the number of drafts, the model's cache,
# which holds all tokens but the last, and the function that will choose tokens from logits.
Draft = Callable[[list[int], int, Cache, Choose], list[int]]

LOOKUP_LENGTH = 3  # tokens that must match; what followed two of them is seldom what follows again
INITIAL_RATE = 0.7  # of acceptance


class DraftSource:
    """Proposes draft tokens, and tracks their acceptance rate and what one of them costs.

    Args:
        draft: proposes the tokens.
    """

    MAX_TOKENS = 15  # 16 with the token before them, which one pass reads nearly as fast as one

    def __init__(self, draft: Draft) -> None:
        self.draft, self.rate, self.seconds = draft, INITIAL_RATE, 0.0

    def propose(self, ids: list[int], count: int, cache: Cache, choose: Choose) -> list[int]:
        """Up to `count` draft tokens, whose cost is measured."""
        start = time.perf_counter()
        tokens = self.draft(ids, count, cache, choose)
        if tokens:
            cost = (time.perf_counter() - start) / len(tokens)
            self.seconds = moving_average(self.seconds or cost, cost, 0.1)
        return tokens

    def observe(self, accepted: bool) -> None:
        """Count a draft token whose predecessors were all accepted."""
        self.rate = moving_average(self.rate, float(accepted))

    def decay(self) -> None:
        """Move the rate toward its initial value while this source is not used.

        The text may have become easier to predict.
        """
        self.rate = moving_average(self.rate, INITIAL_RATE, 0.02)

    def best(self, pass_seconds: float) -> tuple[float, int]:
        """The highest expected tokens per second, and the number of draft tokens that gives it.

        With k draft tokens at acceptance rate r, 1 + r + … + r^k tokens are expected from a forward
        pass (Leviathan et al. 2023, §3.1).
        """
        # A longer pass takes a little longer, even where drafts are free.
        cost = max(self.seconds or pass_seconds / 4, pass_seconds / 40)
        expected, best = 0.0, (0.0, 0)
        for count in range(self.MAX_TOKENS + 1):
            expected += self.rate**count
            best = max(best, (expected / (pass_seconds + count * cost), count))
        return best


def moving_average(average: float, value: float, weight: float = 0.05) -> float:
    """The exponential moving average after a new value."""
    return average + weight * (value - average)


class SpeculativeDecoder:
    """One sequence, of which several tokens are drafted and then verified in one forward pass.

    The logits of an accepted draft token are already computed; cache entries of rejected ones are
    overwritten. Tokens are always chosen from the model's own logits, so that greedy and sampled
    tokens are those without speculation: there is no acceptance test that could shift the
    distribution. To predict a sampled token, a draft model samples with the same random numbers.

    Args:
        transformer: computes the logits.
        sources: of draft tokens. What they learn from one text helps with the next one. At equal
            expected gain the first is used.
    """

    def __init__(self, transformer: Transformer, sources: Sequence[DraftSource]) -> None:
        self.transformer, self.config = transformer, transformer.config
        self.sources = sources
        self.pass_seconds = 0.0

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], preview_sampling: PreviewSampling | None = None
    ) -> Tensor:
        check_prompts(prompts, 1)
        self.ids = list(prompts[0])
        self.preview_sampling = preview_sampling or (lambda: greedy)
        self.cache = self.transformer.new_cache(1)
        self.verified: list[tuple[int, Tensor]] = []  # draft tokens, and the logits after each
        hidden = self.transformer.prefill([self.ids], self.cache)
        return self.transformer.logits(hidden[:, -1])

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        self.ids.append(int(ids))
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

    def keep(self, rows: Tensor) -> None:
        """There is only one row."""

    def why_not_finite(self, context: Sequence[int]) -> str:
        return self.transformer.why_not_finite(context)

    def _propose(self) -> list[int]:
        """Draft tokens of the source with the highest expected gain that has any.

        There are none until a forward pass was timed.
        """
        if not self.pass_seconds:
            return []
        room = self.config.n_positions - len(self.ids)
        options = [(*source.best(self.pass_seconds), source) for source in self.sources]
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
    """The most likely token."""
    return int(logits.argmax())


class ModelDraft:
    """Draft tokens of a less exact model that shares the cache.

    Its keys and values of the draft tokens are overwritten by the exact ones right after.
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
            # Some int8 kernels refuse NaN. The model itself will raise the better error.
            except (NotFiniteError, RuntimeError):
                break
        return ids[n:]


def prompt_lookup(ids: list[int], count: int, *_: object) -> list[int]:
    """Draft tokens from the text itself: what followed the last occurrence of its last tokens.

    Source: Saxena 2023, "Prompt lookup decoding".
    """
    tail = ids[-LOOKUP_LENGTH:]
    for at in range(len(ids) - 1, LOOKUP_LENGTH - 1, -1):
        if ids[at - LOOKUP_LENGTH : at] == tail:
            text = list(ids)
            for step in range(count):  # beyond the end of `ids`, the text repeats itself
                text.append(text[at + step])
            return text[len(ids) :]
    return []
