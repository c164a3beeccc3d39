"""Draft sources choose the best number of draft tokens, and prompt lookup finds drafts."""

from __future__ import annotations

import pytest

from compat.decoding.speculative import DraftSource, prompt_lookup


@pytest.mark.parametrize(
    ("rate", "seconds", "count"),
    [
        (1.0, 0.1, DraftSource.MAX_TOKENS),  # all are accepted, so draft as many as allowed
        # 5.217 tokens in 2.5 s are 2.087 per second; 5 draft tokens give 2.083, 7 give 2.071.
        (0.9, 0.25, 6),
        (0.5, 0.25, 1),  # 1.5 tokens in 1.25 s; two draft tokens give 1.75 in 1.5 s
        (0.2, 0.25, 0),
        (0.0, 0.1, 0),
    ],
)
def test_the_number_of_draft_tokens_maximizes_tokens_per_second(
    rate: float, seconds: float, count: int
) -> None:
    source = DraftSource(prompt_lookup)
    source.rate, source.seconds = rate, seconds
    gain, found = source.best(1.0)
    values = {
        k: sum(rate**i for i in range(k + 1)) / (1 + k * seconds)
        for k in range(DraftSource.MAX_TOKENS + 1)
    }
    assert gain == pytest.approx(max(values.values()))
    assert values[found] == pytest.approx(gain)
    assert found == count


def test_the_acceptance_rate_follows_observations_and_decays_toward_its_initial_value() -> None:
    source = DraftSource(prompt_lookup)
    for _ in range(60):
        source.observe(False)
    assert source.rate < 0.05
    for _ in range(60):
        source.decay()
    assert 0.4 < source.rate < 0.7
    for _ in range(60):
        source.observe(True)
    assert source.rate > 0.97


@pytest.mark.parametrize(
    ("ids", "count", "tokens"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3, 9, 1, 2, 3, 9]),  # the draft repeats the text
        ([2, 2, 3, 7, 2, 2, 3, 8, 5, 2, 2, 3], 1, [8]),  # the last occurrence is used
        ([5, 6, 6, 6, 6], 3, [6, 6, 6]),
        ([5, 6, 6], 3, []),  # a match of two tokens is too short
        ([1, 2, 3], 2, []),
        ([1], 2, []),
        ([1, 1], 0, []),
    ],
)
def test_prompt_lookup_continues_the_last_match(
    ids: list[int], count: int, tokens: list[int]
) -> None:
    assert prompt_lookup(ids, count, None, None) == tokens
