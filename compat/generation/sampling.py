"""Sampling: from logits to the next tokens, with the semantics of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from compat.checkpoint.checks import all_finite
from compat.decoding import Choose, NotFiniteError
from compat.decoding.cuda_graphs import capture_lock
from compat.errors import GenerationError, short_repr
from compat.generation.checks import check_token_ids, is_finite, is_integer


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    suppress_tokens: Sequence[int]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, in the order and the arithmetic of `transformers` 5.

    Repetition penalty, suppressed tokens, temperature, top-k, top-p, min-p, then one draw from the
    softmax, all in float32, so that the same seed draws the same tokens. Greedy decoding
    (temperature 0) applies only the first two.

    Args:
        temperature: 0 is greedy; values below 1 sharpen the distribution, values above 1 flatten
            it.
        top_k: sample from the k most likely tokens, and from those that tie with the last of them.
        top_p: sample from the smallest set of most likely tokens whose probabilities reach p.
        min_p: sample from the tokens at least p times as likely as the most likely one.
        repetition_penalty: values above 1 make tokens that occur in the text less likely: positive
            logits are divided by it, negative logits multiplied (Keskar et al. 2019, §4.1). 1 and
            None disable it.
        suppress_tokens: token ids that are never chosen, such as those of a padded vocabulary.

    Raises:
        GenerationError: a setting is out of range; the message has its value and the expected
            range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    suppress_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        t, k, p, m = self.temperature, self.top_k, self.top_p, self.min_p
        penalty = self.repetition_penalty
        checks = [
            ("temperature", is_finite(t) and t >= 0, "0 (greedy) or a number above it"),
            (
                "top_k",
                k is None or (is_integer(k) and k >= 1),
                "an integer of at least 1, or None for all tokens",
            ),
            ("top_p", p is None or (is_finite(p) and 0 < p <= 1), "above 0 and up to 1"),
            ("min_p", m is None or (is_finite(m) and 0 <= m <= 1), "from 0 to 1"),
            (
                "repetition_penalty",
                penalty is None or (is_finite(penalty) and penalty > 0),
                "a number above 0, or 1 for none",
            ),
        ]
        for name, valid, expected in checks:
            if not valid:
                raise GenerationError(
                    f"{name} is {short_repr(getattr(self, name))}, but must be {expected}"
                )
        suppressed = check_token_ids("suppress_tokens", self.suppress_tokens)
        object.__setattr__(self, "suppress_tokens", suppressed)

    def scores(self, logits: Tensor, seen: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Convert logits (B, V) to float32 scores (B, V) to draw from, −∞ for excluded tokens.

        Args:
            logits: the logits of the last position.
            seen: token ids of each row's prompt and continuation, without padding, for the
                repetition penalty.

        Raises:
            GenerationError: the logits are non-finite (`NotFiniteError`), the temperature is too
                small or the penalty too large for float32, or no token is left to choose.
        """
        logits = logits.float()
        scores = logits
        if self.repetition_penalty not in (None, 1):
            scores = _penalized(scores, seen, float(self.repetition_penalty or 1))
        if self.temperature > 0:
            scores = scores / float(self.temperature)
        if not all_finite(scores):
            self._raise_not_finite(logits)
        if self.suppress_tokens:
            scores = scores.index_fill(1, self._suppressed(scores), -math.inf)
        if self.temperature == 0:
            return scores
        if self.top_k is not None:
            scores = _top_k(scores, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            scores = _top_p(scores, self.top_p)
        return scores if self.min_p is None else _min_p(scores, self.min_p)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Convert scores (B, V) to the probabilities (B, V) of `draw`, 0 and 1 if greedy."""
        if self.temperature == 0:
            most_likely = scores.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(scores).scatter(1, most_likely, 1.0)
        return scores.softmax(dim=-1)

    def draw(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one token id per row (B,) from scores (B, V). None is torch's global generator."""
        if self.temperature == 0:
            if scores.is_cpu:  # NumPy's argmax is ten times as fast as torch's
                return torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
            return scores.argmax(dim=-1)
        with capture_lock if scores.is_cuda else nullcontext():
            drawn = torch.multinomial(self.probabilities(scores), 1, generator=generator)
        return drawn.squeeze(1)

    def preview(self, generator: torch.Generator | None = None) -> Choose:
        """Return a function that chooses tokens as `draw` will, with a copy of the generator.

        For equal logits it chooses the same tokens, and for similar logits it mostly does.
        """
        original = torch.default_generator if generator is None else generator
        copy = original.clone_state() if self.temperature else None

        def choose(logits: Tensor, ids: Sequence[int]) -> int:
            return int(self.draw(self.scores(logits, [ids]), copy))

        return choose

    def _suppressed(self, scores: Tensor) -> Tensor:
        V, ids = scores.shape[-1], set(self.suppress_tokens)
        if unknown := [token_id for token_id in ids if not 0 <= token_id < V]:
            raise GenerationError(
                f"suppress_tokens has {unknown[0]}, but the vocabulary has ids 0 to {V - 1}"
            )
        if len(ids) == V:
            raise GenerationError(
                f"suppress_tokens has all {V} ids of the vocabulary, but at least one must be left"
            )
        return torch.tensor(sorted(ids), device=scores.device)

    def _raise_not_finite(self, logits: Tensor) -> None:
        if not all_finite(logits):
            raise NotFiniteError("the model's logits are not finite")
        if self.repetition_penalty in (None, 1):
            raise GenerationError(
                f"temperature is {self.temperature}, which is too small to divide the logits by. "
                "Pass 0 for greedy decoding."
            )
        raise GenerationError(
            f"temperature {self.temperature} and repetition_penalty {self.repetition_penalty} "
            "move the logits out of the range of float32. Pass numbers closer to 1."
        )


def _penalized(scores: Tensor, seen: Sequence[Sequence[int]] | Tensor, penalty: float) -> Tensor:
    """Make the tokens that a row has seen less likely, however often it has seen them."""
    hit = torch.zeros_like(scores, dtype=torch.bool)
    for row, ids in zip(hit, seen, strict=True):
        row[torch.as_tensor(ids, dtype=torch.long, device=scores.device)] = True
    return torch.where(hit, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _top_k(scores: Tensor, k: int) -> Tensor:
    lowest_kept = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < lowest_kept, -math.inf)


def _top_p(scores: Tensor, p: float) -> Tensor:
    ascending, order = scores.sort(dim=-1)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    dropped[:, -1] = False  # the most likely token always stays
    return scores.masked_fill(dropped.scatter(1, order, dropped), -math.inf)


def _min_p(scores: Tensor, p: float) -> Tensor:
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < p * probs.amax(dim=-1, keepdim=True), -math.inf)
