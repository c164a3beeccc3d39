"""From logits to the next ids, with `transformers`' semantics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compat.checkpoint.checks import all_finite
from compat.decoding import Choose, NotFiniteError
from compat.errors import GenerationError, shown
from compat.generation.checks import is_finite, is_whole, token_ids


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen, in the order and the arithmetic of `transformers` 5.

    Repetition penalty, suppressed ids, temperature, top-k, top-p, min-p, then one draw from the
    softmax, all in float32, so that the same seed draws the same ids. Greedy choice (temperature 0)
    looks at the first two alone.

    Args:
        temperature: 0 is greedy, below 1 sharper, above 1 flatter.
        top_k: draw from the k likeliest ids only, and those that tie with the last.
        top_p: draw from the smallest set of likeliest ids whose probabilities reach p.
        min_p: draw from the ids at least p times as likely as the likeliest.
        repetition_penalty: above 1 makes ids less likely that the text has already: positive logits
            are divided by it, negative ones multiplied (Keskar et al. 2019, §4.1). 1 or None: off.
        suppress_tokens: ids never to be chosen, such as those of a padded vocabulary.

    Raises:
        GenerationError: a setting that means nothing, with its value and what is expected.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    suppress_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        t, k, p, m = self.temperature, self.top_k, self.top_p, self.min_p
        if not (is_finite(t) and t >= 0):
            raise GenerationError(
                f"temperature is {shown(t)}; expected 0 (greedy) or a number above it"
            )
        if k is not None and not (is_whole(k) and k >= 1):
            raise GenerationError(
                f"top_k is {shown(k)}; expected an integer, at least 1, or None for all ids"
            )
        if p is not None and not (is_finite(p) and 0 < p <= 1):
            raise GenerationError(f"top_p is {shown(p)}; expected above 0 and up to 1")
        if m is not None and not (is_finite(m) and 0 <= m <= 1):
            raise GenerationError(f"min_p is {shown(m)}; expected 0 to 1")
        penalty = self.repetition_penalty
        if penalty is not None and not (is_finite(penalty) and penalty > 0):
            raise GenerationError(
                f"repetition_penalty is {shown(penalty)}; expected a number above 0, 1 for none"
            )
        object.__setattr__(
            self, "suppress_tokens", token_ids("suppress_tokens", self.suppress_tokens)
        )

    def scores(self, logits: Tensor, seen: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """What ids are drawn by: logits (B, V) → float32 scores (B, V), −∞ where none may be.

        Args:
            logits: of the last position.
            seen: the ids of each row's prompt and continuation, without padding; the repetition
                penalty alone looks at them.

        Raises:
            GenerationError: logits that are not finite (`NotFiniteError`), or not after so small a
                temperature or so large a penalty; no id that could be chosen.
        """
        logits = logits.float()
        scores = logits
        if self.repetition_penalty not in (None, 1):
            scores = _penalised(scores, seen, float(self.repetition_penalty or 1))
        if self.temperature > 0:
            scores = scores / float(self.temperature)
        if not all_finite(scores):
            self._explain(logits)
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
        """What `draw` draws from: scores (B, V) → (B, V) that add up to 1; one 1 where greedy."""
        if self.temperature == 0:
            likeliest = scores.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(scores).scatter(1, likeliest, 1.0)
        return scores.softmax(dim=-1)

    def draw(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One id per row, scores (B, V) → (B,); None is torch's global source of randomness."""
        if self.temperature == 0:
            return scores.max(dim=-1).indices  # several times as fast as argmax
        drawn = torch.multinomial(self.probabilities(scores), 1, generator=generator)
        return drawn.squeeze(1)

    def rehearsal(self, generator: torch.Generator | None = None) -> Choose:
        """Chooses as will be chosen with this generator, which stays as it is.

        Equal logits therefore give equal ids, and similar ones mostly.
        """
        given = torch.default_generator if generator is None else generator
        copy = given.clone_state() if self.temperature else None

        def choose(logits: Tensor, ids: Sequence[int]) -> int:
            return int(self.draw(self.scores(logits, [ids]), copy))

        return choose

    def _suppressed(self, scores: Tensor) -> Tensor:
        V, ids = scores.shape[-1], set(self.suppress_tokens)
        if strange := [token_id for token_id in ids if not 0 <= token_id < V]:
            raise GenerationError(
                f"suppress_tokens has {strange[0]}; the vocabulary has ids 0 to {V - 1}"
            )
        if len(ids) == V:
            raise GenerationError("suppress_tokens has every id of the vocabulary; none is left")
        return torch.tensor(sorted(ids), device=scores.device)

    def _explain(self, logits: Tensor) -> None:
        if not all_finite(logits):
            raise NotFiniteError("the model's logits are not finite")
        if self.repetition_penalty in (None, 1):
            raise GenerationError(
                f"temperature {self.temperature} is too small to divide by; 0 is greedy"
            )
        raise GenerationError(
            f"temperature {self.temperature} and repetition_penalty {self.repetition_penalty} take "
            "the logits beyond float32; expected numbers nearer to 1"
        )


def _penalised(scores: Tensor, seen: Sequence[Sequence[int]] | Tensor, penalty: float) -> Tensor:
    """Ids that a row has seen made less likely, once however often it has seen them."""
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
    dropped[:, -1] = False  # the likeliest id always stays
    return scores.masked_fill(dropped.scatter(1, order, dropped), -math.inf)


def _min_p(scores: Tensor, p: float) -> Tensor:
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < p * probs.amax(dim=-1, keepdim=True), -math.inf)
