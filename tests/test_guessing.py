"""Sources of guesses: how many are worth their time, and what a text has had before."""

from __future__ import annotations

import pytest

from compat.decoding.speculative import Guesser, lookup


@pytest.mark.parametrize(
    ("rate", "seconds", "count"),
    [
        (1.0, 0.1, Guesser.MOST),  # all come true: as many as fit
        (0.9, 0.25, 6),  # 5.217 ids for 2.5: 2.087 a second; 5 guesses bring 2.083, 7 2.071
        (0.5, 0.25, 1),  # 1.5 ids for 1.25; two guesses bring 1.75 for 1.5
        (0.2, 0.25, 0),
        (0.0, 0.1, 0),
    ],
)
def test_the_number_of_guesses_brings_most_ids_a_second(
    rate: float, seconds: float, count: int
) -> None:
    guesser = Guesser(lookup)
    guesser.rate, guesser.seconds = rate, seconds
    gain, found = guesser.best(1.0)
    values = {
        k: sum(rate**i for i in range(k + 1)) / (1 + k * seconds) for k in range(Guesser.MOST + 1)
    }
    assert gain == pytest.approx(max(values.values()))
    assert values[found] == pytest.approx(gain)
    assert found == count


def test_a_rate_follows_what_comes_true_and_recovers() -> None:
    guesser = Guesser(lookup)
    for _ in range(60):
        guesser.learn(False)
    assert guesser.rate < 0.05
    for _ in range(60):
        guesser.forget()
    assert 0.4 < guesser.rate < 0.7
    for _ in range(60):
        guesser.learn(True)
    assert guesser.rate > 0.97


@pytest.mark.parametrize(
    ("ids", "count", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3, 9, 1, 2, 3, 9]),  # and so on
        ([2, 2, 3, 7, 2, 2, 3, 8, 5, 2, 2, 3], 1, [8]),  # where they stood last
        ([5, 6, 6, 6, 6], 3, [6, 6, 6]),
        ([5, 6, 6], 3, []),  # two are not enough
        ([1, 2, 3], 2, []),
        ([1], 2, []),
        ([1, 1], 0, []),
    ],
)
def test_lookup(ids: list[int], count: int, guesses: list[int]) -> None:
    assert lookup(ids, count, None, None) == guesses
