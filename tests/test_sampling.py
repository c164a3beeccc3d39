"""Sampling from logits equals transformers' processors with the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compat.generation import Sampling

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 0.5, "temperature": 2.0},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"repetition_penalty": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.7, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.05, "top_k": 7, "top_p": 0.999},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.97, "min_p": 0.02, "repetition_penalty": 1.8},
    {"suppress_tokens": (0, 3, 50), "top_k": 4, "repetition_penalty": 3.0},
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


def their_scores(logits: Tensor, seen: Tensor, setting: dict[str, Any]) -> Tensor:
    """Return the scores that `transformers.generate` computes from logits (B, V).

    The processors are applied in the order of `_get_logits_processor`. `seen` is (B, T), without
    padding.
    """
    processors = LogitsProcessorList()
    if "repetition_penalty" in setting:
        processors.append(RepetitionPenaltyLogitsProcessor(setting["repetition_penalty"]))
    if "suppress_tokens" in setting:
        processors.append(SuppressTokensLogitsProcessor(setting["suppress_tokens"]))
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        # Transformers omits it.
        if name in setting and not (name == "top_p" and setting[name] >= 1):
            processors.append(warper(setting[name]))
    return processors(seen, logits.float())


def random_logits(seed: int, B: int = 64, V: int = 97, mean: float = -30) -> Tensor:
    """Return logits (B, V) with the standard deviation of GPT-2's."""
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed)) + mean


def some_ids(seed: int, B: int = 64, V: int = 97) -> Tensor:
    return torch.randint(V, (B, 9), generator=torch.Generator().manual_seed(seed))


def sample(logits: Tensor, setting: dict[str, Any], seed: int = 0) -> Tensor:
    """Sample with a new generator and without previous ids."""
    sampling = Sampling(**setting)
    scores = sampling.scores(logits, [[]] * len(logits))
    return sampling.draw(scores, torch.Generator().manual_seed(seed))


@each_setting
@pytest.mark.parametrize("mean", [-30, 0])
def test_scores_and_samples_equal_those_of_transformers(
    setting: dict[str, Any], mean: float
) -> None:
    """With logits around 0, a penalty multiplies some and divides others; the rest is negative."""
    for seed in range(3):
        logits, seen = random_logits(seed, mean=mean), some_ids(seed)
        expected = their_scores(logits, seen, setting)
        sampling = Sampling(**setting)
        assert torch.equal(sampling.scores(logits, seen), expected)
        torch.manual_seed(seed)
        ids = torch.multinomial(expected.softmax(-1), num_samples=1).squeeze(1)
        found = sampling.draw(expected, torch.Generator().manual_seed(seed))
        assert torch.equal(found, ids)
        torch.manual_seed(seed)
        assert torch.equal(sampling.draw(expected), ids)


LOGIT = st.one_of(
    st.sampled_from([-100.0, -1.0, 0.0, -0.0, 0.5, 0.5, 2.0]), st.floats(-120, 120, width=32)
)


def optional(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(st.just({}), values.map(lambda value: {name: value}))


def setting_of(V: int) -> st.SearchStrategy[dict[str, Any]]:
    parts = (
        optional("temperature", st.floats(0.01, 10)),
        optional("top_k", st.integers(1, 14)),
        optional("top_p", st.one_of(st.sampled_from([0.25, 0.5]), st.floats(1e-6, 1))),
        optional("min_p", st.one_of(st.sampled_from([0.25, 0.5, 1.0]), st.floats(0, 1))),
        optional("repetition_penalty", st.one_of(st.just(2.0), st.floats(0.1, 10))),
        optional(
            "suppress_tokens",
            st.lists(st.integers(0, V - 1), min_size=1, unique=True).filter(lambda x: len(x) < V),
        )
        if V > 1
        else st.just({}),
    )
    return st.tuples(*parts).map(lambda found: {k: v for part in found for k, v in part.items()})


CASES = st.tuples(st.integers(1, 12), st.integers(1, 3)).flatmap(
    lambda size: st.tuples(
        st.lists(
            st.lists(LOGIT, min_size=size[0], max_size=size[0]), min_size=size[1], max_size=size[1]
        ),
        st.lists(
            st.lists(st.integers(0, size[0] - 1), min_size=4, max_size=4),
            min_size=size[1],
            max_size=size[1],
        ),
        setting_of(size[0]),
    )
)


@settings(deadline=None, max_examples=500, derandomize=True)
@given(case=CASES, seed=st.integers(0, 2**31))
@example(case=([[-100.0] * 8, [*[-100.0] * 7, -1.0]], [[0], [0]], {"top_p": 1.0}), seed=0)
def test_tied_logits_are_sampled_as_in_transformers(
    case: tuple[list[list[float]], list[list[int]], dict[str, Any]], seed: int
) -> None:
    rows, seen, setting = case
    logits, sampling = torch.tensor(rows), Sampling(**setting)
    scores, expected = (
        sampling.scores(logits, seen),
        their_scores(logits, torch.tensor(seen), setting),
    )
    assert torch.equal(scores, expected)
    torch.manual_seed(seed)
    ids = torch.multinomial(expected.softmax(-1), num_samples=1).squeeze(1)
    assert torch.equal(sampling.draw(scores, torch.Generator().manual_seed(seed)), ids)


def test_the_penalty_applies_once_to_each_id_of_a_row() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0], [2.0, -2.0, 4.0]])
    scores = Sampling(temperature=0, repetition_penalty=2.0).scores(logits, [[1, 0, 1, 1], [2]])
    assert scores.tolist() == [[1.0, -4.0, 4.0], [2.0, -2.0, 2.0]]


def test_a_greedy_choice_uses_the_penalty_but_no_sampling_settings() -> None:
    logits = torch.tensor([[3.0, 2.9, 1.0]])
    sampling = Sampling(temperature=0, top_k=1, top_p=0.1, min_p=1.0, repetition_penalty=1.5)
    scores = sampling.scores(logits, [[0]])
    assert torch.equal(scores, torch.tensor([[2.0, 2.9, 1.0]]))
    assert sampling.draw(scores).tolist() == [1]


@each_setting
def test_probabilities_are_those_of_sampling(setting: dict[str, Any]) -> None:
    sampling = Sampling(**setting)
    scores = sampling.scores(random_logits(0), some_ids(0))
    probabilities = sampling.probabilities(scores)
    assert torch.allclose(probabilities.sum(-1), torch.ones(64))
    assert torch.equal(probabilities == 0, scores.softmax(-1) == 0)
    greedy = Sampling(**{**setting, "temperature": 0})
    one_hot = greedy.probabilities(scores)
    assert torch.equal(one_hot.sum(-1), torch.ones(64))
    assert torch.equal(one_hot.argmax(-1), greedy.draw(scores))
    assert set(one_hot.unique().tolist()) == {0.0, 1.0}
