"""The effect of each sampling setting, and the values that are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compat import GenerationError
from compat.generation import Sampling
from tests.test_sampling import SETTINGS, random_logits, sample, some_ids, their_scores


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_data_type_are_sampled_in_float32(dtype: torch.dtype) -> None:
    setting = {"temperature": 0.9, "top_k": 30, "top_p": 0.9}
    logits, seen = random_logits(3).to(dtype), some_ids(3)
    scores = Sampling(**setting).scores(logits, seen)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, their_scores(logits, seen, setting))


def test_samples_depend_only_on_the_seed() -> None:
    first, again, other = (sample(random_logits(0), {}, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_logits_are_not_modified() -> None:
    logits = random_logits(0)
    before = logits.clone()
    everything = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1}
    Sampling(**everything, repetition_penalty=2.0, suppress_tokens=(1,)).scores(logits, some_ids(0))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_k": 50, "top_p": 0.9},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-3},
    ],
    ids=str,
)
def test_greedy_decoding_and_extreme_settings_select_the_argmax(setting: dict[str, Any]) -> None:
    """Each row of these logits has a unique largest value."""
    logits = random_logits(4)
    top = logits.topk(2).values
    assert (top[:, 0] > top[:, 1] + 0.02).any()
    logits = logits[top[:, 0] > top[:, 1] + 0.02]
    for seed in range(5):
        assert torch.equal(sample(logits, setting, seed), logits.argmax(-1))


def test_greedy_chooses_the_first_of_tied_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert sample(logits, {"temperature": 0}).tolist() == [1, 0]


def sampled_ids(logits: Tensor, setting: dict[str, Any]) -> set[int]:
    """Return the ids that occur among 4000 samples."""
    return set(sample(logits.expand(4000, -1), setting).tolist())


PROBS = torch.tensor([[0.15, 0.5, 0.05, 0.3]])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4, {1}), (0.6, {1, 3}), (0.78, {1, 3}), (0.9, {0, 1, 3}), (0.97, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: set[int]) -> None:
    assert sampled_ids(PROBS.log(), {"top_p": top_p}) == kept


def test_top_p_stops_at_a_set_that_reaches_p_exactly() -> None:
    """Two of four equal probabilities are exactly one half in binary, so `<` and `<=` differ."""
    assert len(sampled_ids(torch.zeros(1, 4), {"top_p": 0.5})) == 2


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {0, 1, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_k_most_likely_ids(top_k: int, kept: set[int]) -> None:
    assert sampled_ids(PROBS.log(), {"top_k": top_k}) == kept


def test_top_k_keeps_ids_that_tie_with_the_last_one() -> None:
    assert sampled_ids(torch.tensor([[1.0, 3.0, 1.0, -5.0]]), {"top_k": 2}) == {0, 1, 2}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.05, {0, 1, 2, 3}), (0.2, {0, 1, 3}), (0.5, {1, 3}), (0.7, {1})]
)
def test_min_p_is_relative_to_the_most_likely_id(min_p: float, kept: set[int]) -> None:
    assert sampled_ids(PROBS.log(), {"min_p": min_p}) == kept


def test_min_p_keeps_ids_exactly_at_the_threshold() -> None:
    assert sampled_ids(torch.tensor([[0.0, 0.0, -9.0]]), {"min_p": 1.0}) == {0, 1}


def test_each_filter_uses_the_result_of_the_previous_one() -> None:
    """After top_k, the probability 0.5 is 0.625 of the rest, which suffices for top_p; else not."""
    assert sampled_ids(PROBS.log(), {"top_p": 0.6}) == {1, 3}
    assert sampled_ids(PROBS.log(), {"top_k": 2, "top_p": 0.6}) == {1}
    assert sampled_ids(PROBS.log(), {"temperature": 0.5, "top_p": 0.6}) == {1}
    assert sampled_ids(PROBS.log(), {"temperature": 0.5, "min_p": 0.5}) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_refused(value: float, temperature: float) -> None:
    logits = random_logits(0, B=2)
    logits[1, 3] = value
    with pytest.raises(GenerationError, match="not finite"):
        sample(logits, {"temperature": temperature})


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"temperature": 1e-45}, "temperature is 1e-45, which is too small"),
        ({"repetition_penalty": 1e38}, r"repetition_penalty 1e\+38"),
    ],
    ids=str,
)
def test_settings_beyond_float32_are_refused(setting: dict[str, Any], named: str) -> None:
    """1e-45 can be represented in float32, but a logit divided by it cannot."""
    sampling, logits = Sampling(**setting), random_logits(0, B=2)
    with pytest.raises(GenerationError, match=named):
        sampling.scores(logits, [[0], [1]])


def test_suppressing_all_ids_or_an_invalid_id_is_refused() -> None:
    logits = torch.zeros(1, 3)
    with pytest.raises(GenerationError, match="has all 3 ids"):
        Sampling(suppress_tokens=(0, 1, 2, 1)).scores(logits, [[]])
    for invalid in (3, -1):
        with pytest.raises(GenerationError, match=f"has {invalid}, .* 0 to 2"):
            Sampling(suppress_tokens=(0, invalid)).scores(logits, [[]])


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_p": -0.1}, "top_p is -0.1"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"min_p": 1.1}, "min_p is 1.1"),
    ({"min_p": math.nan}, "min_p is nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"temperature": 0.0, "top_k": 0}, "top_k is 0"),
]


@pytest.mark.parametrize(("setting", "named"), REFUSED, ids=str)
def test_invalid_settings_are_refused_by_name_and_value(
    setting: dict[str, Any], named: str
) -> None:
    with pytest.raises(GenerationError) as caught:
        Sampling(**setting)
    assert str(caught.value).startswith(named + ",")


@pytest.mark.parametrize("setting", [*SETTINGS, {"temperature": 0}, {"top_k": 1, "top_p": 1}])
def test_valid_settings_are_accepted(setting: dict[str, Any]) -> None:
    Sampling(**setting)
