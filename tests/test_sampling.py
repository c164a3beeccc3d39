"""One draw from the logits against transformers' warpers with the same seed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compat import GenerationError
from compat.generation.sampling import check_settings, next_ids

Settings = tuple[float, int | None, float | None]

SETTINGS: list[Settings] = [
    (1.0, None, None),
    (0.7, None, None),
    (3.0, None, None),
    (1.0, 1, None),
    (1.0, 5, None),
    (1.0, 10_000, None),
    (1.0, None, 0.9),
    (1.0, None, 0.3),
    (1.0, None, 1.0),
    (0.8, 20, 0.95),
    (1.7, 3, 0.5),
    (0.05, 7, 0.999),
]


def theirs(logits: Tensor, setting: Settings, seed: int) -> Tensor:
    """What `transformers.generate` does with the logits (B, V) of the last position."""
    temperature, top_k, top_p = setting
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))
    probs = warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.float()).softmax(-1)
    torch.manual_seed(seed)
    return torch.multinomial(probs, num_samples=1).squeeze(1)


def ours(logits: Tensor, setting: Settings, seed: int | None) -> Tensor:
    """With a generator of its own, or with torch's global one where there is no seed."""
    temperature, top_k, top_p = setting
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return next_ids(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)


def random_logits(seed: int, B: int = 64, V: int = 97) -> Tensor:
    """Logits (B, V) with the spread that GPT-2's have."""
    return 3 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed)) - 30


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_seed_draws_what_transformers_draws(setting: Settings, seed: int) -> None:
    logits = random_logits(seed)
    expected = theirs(logits, setting, seed)
    assert torch.equal(ours(logits, setting, seed), expected)
    torch.manual_seed(seed)
    assert torch.equal(ours(logits, setting, None), expected)


LOGIT = st.one_of(
    st.sampled_from([-100.0, -1.0, 0.0, 0.5, 0.5, 2.0]), st.floats(-120, 120, width=32)
)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    rows=st.integers(1, 12).flatmap(
        lambda V: st.lists(st.lists(LOGIT, min_size=V, max_size=V), min_size=1, max_size=3)
    ),
    temperature=st.floats(0.01, 10),
    top_k=st.one_of(st.none(), st.integers(1, 14)),
    top_p=st.one_of(st.none(), st.sampled_from([0.25, 0.5]), st.floats(1e-6, 1)),
    seed=st.integers(0, 2**31),
)
def test_any_logits_with_ties_draw_what_transformers_draws(
    rows: list[list[float]],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> None:
    logits, setting = torch.tensor(rows), (temperature, top_k, top_p)
    assert torch.equal(ours(logits, setting, seed), theirs(logits, setting, seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_data_type_are_drawn_in_float32(dtype: torch.dtype) -> None:
    logits, setting = random_logits(3).to(dtype), (0.9, 30, 0.9)
    assert torch.equal(ours(logits, setting, 5), theirs(logits, setting, 5))


def test_the_seed_matters_and_is_repeatable() -> None:
    logits = random_logits(0)
    first, again, other = (ours(logits, (1.0, None, None), seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_logits(0)
    before = logits.clone()
    ours(logits, (0.7, 5, 0.5), 0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "setting",
    [(0, None, None), (0.0, 50, 0.9), (1.0, 1, None), (1.0, None, 1e-9), (1e-3, None, None)],
)
def test_greedy_and_its_limits_are_the_argmax(setting: Settings) -> None:
    """Of temperature, top_k and top_p; the rows of these logits have one largest value each."""
    logits = random_logits(4)
    top = logits.topk(2).values
    assert (top[:, 0] > top[:, 1] + 0.02).any()
    logits = logits[top[:, 0] > top[:, 1] + 0.02]
    for seed in range(5):
        assert torch.equal(ours(logits, setting, seed), logits.argmax(-1))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert ours(logits, (0.0, None, None), 0).tolist() == [1, 0]


def drawn(logits: Tensor, setting: Settings) -> set[int]:
    """The ids that 4000 draws bring up."""
    return set(ours(logits.expand(4000, -1), setting, 0).tolist())


PROBS = torch.tensor([[0.15, 0.5, 0.05, 0.3]])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4, {1}), (0.6, {1, 3}), (0.78, {1, 3}), (0.9, {0, 1, 3}), (0.97, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: set[int]) -> None:
    assert drawn(PROBS.log(), (1.0, None, top_p)) == kept


def test_a_set_that_reaches_p_exactly_suffices() -> None:
    """Two of four equals for a half: exact in binary, so "<" for "<=" shows."""
    assert len(drawn(torch.zeros(1, 4), (1.0, None, 0.5))) == 2
    setting = (1.0, None, 0.5)
    same = torch.zeros(64, 4)
    assert torch.equal(ours(same, setting, 0), theirs(same, setting, 0))


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {0, 1, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_k_likeliest(top_k: int, kept: set[int]) -> None:
    assert drawn(PROBS.log(), (1.0, top_k, None)) == kept


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    assert drawn(torch.tensor([[1.0, 3.0, 1.0, -5.0]]), (1.0, 2, None)) == {0, 1, 2}


def test_top_p_is_taken_of_what_temperature_and_top_k_left() -> None:
    """Of 0.5 and 0.3 alone the first has 0.625 and suffices; of all four it would not."""
    assert drawn(PROBS.log(), (1.0, None, 0.6)) == {1, 3}
    assert drawn(PROBS.log(), (1.0, 2, 0.6)) == {1}
    assert drawn(PROBS.log(), (0.5, None, 0.6)) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value: float, temperature: float) -> None:
    logits = random_logits(0, B=2)
    logits[1, 3] = value
    with pytest.raises(GenerationError, match="not finite"):
        ours(logits, (temperature, None, None), 0)


def test_a_temperature_too_small_for_float32_is_greedy_or_refused() -> None:
    """1e-45 is a float32, but a logit over it is none."""
    logits = random_logits(0)
    try:
        check_settings(1e-45, None, None)
        found = ours(logits, (1e-45, None, None), 0)
    except GenerationError:
        return
    assert torch.equal(found, logits.argmax(-1))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ((-1.0, None, None), "temperature is -1.0"),
        ((math.nan, None, None), "temperature is nan"),
        ((math.inf, None, None), "temperature is inf"),
        ((1.0, 0, None), "top_k is 0"),
        ((1.0, -1, None), "top_k is -1"),
        ((1.0, None, 0.0), "top_p is 0.0"),
        ((1.0, None, 1.5), "top_p is 1.5"),
        ((1.0, None, -0.1), "top_p is -0.1"),
        ((1.0, None, math.nan), "top_p is nan"),
        ((0.0, 0, None), "top_k is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name_and_value(
    setting: Settings, named: str
) -> None:
    with pytest.raises(GenerationError) as caught:
        check_settings(*setting)
    assert str(caught.value).startswith(named + ";")


@pytest.mark.parametrize("setting", [*SETTINGS, (0, None, None), (1, 1, 1)])
def test_settings_that_mean_something_are_accepted(setting: Settings) -> None:
    check_settings(*setting)
