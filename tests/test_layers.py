"""Activations equal the formulas of transformers and torch; and the KV cache."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from compat import ConfigError, GPT2Config
from compat.layers import ACTIVATIONS, GELU, KVCache, activation, position_ids


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """Return a fine grid around zero, large values, zeros of both signs and random values."""
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 3e4, -3e4])
    return torch.cat([torch.linspace(-12, 12, 4801), 3 * torch.randn(4000), special]).to(dtype)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that the values are equal, including the sign of zeros."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.signbit(), theirs.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_bit_identical_to_that_of_transformers(
    name: str, dtype: torch.dtype
) -> None:
    x = inputs(dtype)
    assert_same_bits(activation(name)(x.clone()), ACT2FN[name](x.clone()))


def test_gelu_new_is_our_gelu() -> None:
    assert isinstance(activation("gelu_new"), GELU)


def test_gelu_is_the_tanh_formula() -> None:
    """The expected values are computed in float64 with Python's tanh."""
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    expected = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        for v in x.tolist()
    ]
    assert torch.allclose(GELU()(x), x.new_tensor(expected), rtol=1e-13, atol=1e-15)
    assert torch.allclose(GELU()(x), F.gelu(x, approximate="tanh"), rtol=1e-13, atol=1e-15)


def test_the_tanh_gelu_differs_from_the_exact_one_by_5e_4() -> None:
    """The difference is at most 4.7e-4, near |x| = 2.7, which is far above rounding errors."""
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    difference = (GELU()(x) - F.gelu(x)).abs()
    assert 4.7e-4 < difference.max() < 4.8e-4
    assert x[difference.argmax()].abs() == pytest.approx(2.7, abs=0.1)


@pytest.mark.parametrize("name", ["gelu_fast", "GELU_NEW", "", "relu2"])
def test_an_unknown_activation_is_refused_and_the_known_ones_are_listed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        activation(name)
    assert repr(name) in str(caught.value)
    assert "activation_function" in str(caught.value)
    assert all(known in str(caught.value) for known in ACTIVATIONS)


def kv(T: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys and values of shape (2, 3, T, 4)."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 2, 3, T, 4, generator=generator).to(dtype)
    return k, v


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 1, 2], [1, 4], [2, 3]])
def test_the_cache_returns_all_that_was_appended_in_order(lengths: list[int]) -> None:
    cache, keys, values = KVCache(7), [], []
    for step, T in enumerate(lengths):
        k, v = kv(T, step)
        keys.append(k)
        values.append(v)
        all_keys, all_values = cache.append(k, v)
        assert torch.equal(all_keys, torch.cat(keys, dim=2))
        assert torch.equal(all_values, torch.cat(values, dim=2))
        assert cache.length == sum(lengths[: step + 1])
    assert cache.capacity == 7


def test_the_cache_is_filled_to_its_capacity_in_place() -> None:
    cache = KVCache(4)
    cache.append(*kv(3, 0))
    buffer = cache.keys
    k, v = cache.append(*kv(1, 1))
    assert cache.keys is buffer
    assert k.shape == v.shape == buffer.shape == (2, 3, 4, 4)


def test_the_cache_copies_what_is_appended() -> None:
    cache, (k, v) = KVCache(4), kv(2, 0)
    before = k.clone()
    cache.append(k, v)
    k.zero_()
    assert torch.equal(cache.append(*kv(1, 1))[0][:, :, :2], before)


def test_the_cache_has_the_data_type_of_the_first_keys() -> None:
    k, v = KVCache(4).append(*kv(2, 0, torch.bfloat16))
    assert k.dtype == v.dtype == torch.bfloat16


def test_a_full_cache_refuses_further_keys() -> None:
    cache = KVCache(3)
    cache.append(*kv(2, 0))
    with pytest.raises(RuntimeError):
        cache.append(*kv(2, 1))


def caches(length: int) -> list[KVCache]:
    """Return the caches of two layers that hold `length` positions."""
    cache = [KVCache(10), KVCache(10)]
    for layer in cache:
        if length:
            layer.append(*kv(length, 0))
    return cache


@pytest.mark.parametrize(("past", "T"), [(0, 1), (0, 4), (3, 1), (5, 2)])
def test_positions_continue_after_the_cached_ones(past: int, T: int) -> None:
    found = position_ids(torch.zeros(2, T, dtype=torch.long), caches(past), None)
    assert found.tolist() == list(range(past, past + T))


def test_positions_start_at_zero_without_a_cache() -> None:
    assert position_ids(torch.zeros(2, 3, dtype=torch.long), None, None).tolist() == [0, 1, 2]


MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_positions_do_not_count_masked_tokens(dtype: torch.dtype) -> None:
    found = position_ids(torch.zeros(3, 5, dtype=torch.long), None, MASK.to(dtype))
    unmasked = [row[mask.bool()].tolist() for row, mask in zip(found, MASK, strict=True)]
    assert unmasked == [[0, 1, 2, 3, 4], [0, 1, 2], [0]]
    assert found.dtype == torch.long


def test_positions_of_padding_are_within_the_embedding() -> None:
    found = position_ids(torch.zeros(3, 5, dtype=torch.long), None, MASK)
    assert found.min() >= 0
    assert found.max() < GPT2Config().n_positions


@pytest.mark.parametrize("past", [1, 3, 4])
def test_positions_with_a_mask_and_a_cache_are_the_last_of_those_without_a_cache(past: int) -> None:
    complete = position_ids(torch.zeros(3, 5, dtype=torch.long), None, MASK)
    rest = position_ids(torch.zeros(3, 5 - past, dtype=torch.long), caches(past), MASK)
    assert torch.equal(rest, complete[:, past:])
    assert rest[:, -1].tolist() == [4, 2, 0]
