"""Loading and saving with ops are inverse bit by bit, for parameters of any shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from compat import Fused, NameMapError, Part, Rearrange, Rows
from tests.loading_common import check_identical

SIZE = st.integers(1, 4)


def numbered(*shape: int) -> Tensor:
    """Return a tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def round_trip(op: Rearrange | Fused | Rows, tensor: Tensor) -> tuple[Tensor, ...]:
    """Load and save the tensor, check that it is restored, and return the loaded parts."""
    loaded = op.load(tensor)
    assert all(part.is_contiguous() for part in loaded)
    restored = op.save(loaded)
    assert restored.is_contiguous()
    check_identical({"tensor": restored}, {"tensor": tensor})
    return loaded


# Rearrange


@pytest.mark.parametrize(
    ("pattern", "sizes", "expected"),
    [
        ("i o -> o i", {}, lambda t: t.mT),
        ("i o -> o i 1", {}, lambda t: t.mT[..., None]),
        ("r c -> 1 r c", {}, lambda t: t[None]),
        ("(h d) c -> h d c", {"h": 2}, lambda t: t.reshape(2, 3, 4)),
        ("(h d) c -> h c d", {"d": 3}, lambda t: t.reshape(2, 3, 4).mT),
        ("(h d) c -> (d h) c", {"h": 3}, lambda t: t.view(3, 2, 4).transpose(0, 1).flatten(0, 1)),
        ("(h d) c -> c (h d)", {"h": 2}, lambda t: t.mT),
    ],
)
def test_a_pattern_rearranges_the_axes(
    pattern: str, sizes: dict[str, int], expected: Callable[[Tensor], Tensor]
) -> None:
    [loaded] = round_trip(Rearrange(pattern, tuple(sizes.items())), numbered(6, 4))
    assert torch.equal(loaded, expected(numbered(6, 4)))


@given(data=st.data(), sizes=st.tuples(SIZE, SIZE, SIZE))
def test_any_order_and_merging_of_axes_is_inverted(
    data: st.DataObject, sizes: tuple[int, int, int]
) -> None:
    order = data.draw(st.permutations("hdc"))
    cut = data.draw(st.integers(0, 2))
    merged = f"({order[cut]} {order[cut + 1]})" if cut < 2 else None
    right = order if merged is None else [*order[:cut], merged, *order[cut + 2 :]]
    right = [*right, *data.draw(st.lists(st.just("1"), max_size=2))]
    h, d, c = sizes
    op = Rearrange(f"(h d) c -> {' '.join(right)}", (("h", h), ("d", d)))
    tensor = numbered(h * d, c)
    [loaded] = round_trip(op, tensor)
    plain = tensor.reshape(h, d, c).permute(["hdc".index(x) for x in order])
    assert torch.equal(loaded.reshape(plain.shape), plain)


def test_a_rearrangement_is_described_by_its_pattern() -> None:
    assert str(Rearrange("(h d) c -> h d c", (("h", 4),))) == "(h d) c -> h d c"


@pytest.mark.parametrize(
    ("op", "shape", "words"),
    [
        (Rearrange("i o -> o i"), (2, 3, 4), "shape [2, 3, 4] does not have the axes 'i o'"),
        (Rearrange("(h d) c -> h d c"), (6, 4), "shape [6, 4] does not fit '(h d) c'"),
        (
            Rearrange("(h d) c -> h d c", (("h", 4),)),
            (6, 4),
            "shape [6, 4] does not fit '(h d) c' with lengths {'h': 4}",
        ),
        (Rearrange("i o -> o i", (("i", 3),)), (2, 3), "shape [2, 3] does not fit 'i o'"),
        (Rearrange("i i -> i"), (2, 3), "shape [2, 3] does not fit 'i i'"),
    ],
)
def test_a_shape_that_does_not_fit_the_pattern_is_refused(
    op: Rearrange, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(NameMapError, match=re.escape(words)):
        op.load(torch.zeros(shape))


# Fused

ORDERS = ["".join(order) for order in permutations("qkv")]


@given(
    order=st.sampled_from(ORDERS),
    axes=st.permutations("cqhd"),
    cut=st.integers(0, 3),
    n_head=SIZE,
    d=SIZE,
    channels=SIZE,
)
def test_a_fused_parameter_with_any_order_of_axes_is_inverted(
    order: str, axes: list[str], cut: int, n_head: int, d: int, channels: int
) -> None:
    groups = [" ".join(axes[:cut]), " ".join(axes[cut:])]
    pattern = " ".join(f"({group})" for group in groups if group)
    op = Fused(n_head, (Part(order, pattern),))
    # The channels and the head size cannot both be inferred from the length of one axis.
    assume(not any({"c", "d"} <= set(group) for group in (axes[:cut], axes[cut:])))
    tensor = numbered(channels, 3 * n_head * d)
    [loaded] = round_trip(op, tensor)
    parts = tensor.reshape(channels, 3, n_head, d)[:, ["qkv".index(x) for x in order]]
    plain = parts.permute(["cqhd".index(x) for x in axes])
    assert torch.equal(loaded.reshape(plain.shape), plain)


@given(n_head=SIZE, d=SIZE, channels=SIZE, fused=st.booleans())
def test_separate_parameters_and_one_per_head_are_inverted(
    n_head: int, d: int, channels: int, fused: bool
) -> None:
    tensor = numbered(channels, 3 * n_head * d)
    split = tensor.reshape(channels, 3, n_head, d)
    if fused:
        parts = tuple(Part(x, "(h d) c") for x in "qkv")
        loaded = round_trip(Fused(n_head, parts), tensor)
        for index, weight in enumerate(loaded):
            assert torch.equal(weight, split[:, index].reshape(channels, -1).mT)
    else:
        parts = tuple(Part(x, "d c", (head,)) for head in range(n_head) for x in "qkv")
        loaded = round_trip(Fused(n_head, parts), tensor)
        for index, weight in enumerate(loaded):
            assert torch.equal(weight, split[:, index % 3, index // 3].mT)


@given(n_head=SIZE, d=SIZE)
def test_biases_have_no_channels(n_head: int, d: int) -> None:
    tensor = numbered(3 * n_head * d)
    [loaded] = round_trip(Fused(n_head, (Part("vkq", "h d q"),)), tensor)
    assert torch.equal(loaded, tensor.reshape(3, n_head, d).flip(0).permute(1, 2, 0))


def test_parts_without_a_parameter_are_saved_as_zeros() -> None:
    op, tensor = Fused(2, (Part("q", "(h d)"), Part("v", "(h d)"))), numbered(12) + 1
    loaded = op.load(tensor)
    assert [part.tolist() for part in loaded] == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert op.save(loaded).tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 9, 10, 11, 12]


def test_a_fused_tensor_that_cannot_be_split_is_refused() -> None:
    words = "shape [4, 10] cannot be split into q, k and v of 2 heads"
    with pytest.raises(NameMapError, match=re.escape(words)):
        Fused(2, (Part("qkv", "(q h d) c"),)).load(torch.zeros(4, 10))


def test_the_text_of_a_fused_op_names_its_parts() -> None:
    op = Fused(2, (Part("qk", "(q h d) c"), Part("v", "d c", (1,))))
    assert str(op) == "qk: (q h d) c; v[1]: d c"


# Rows


@given(found=SIZE, wanted=SIZE, columns=SIZE, transposed=st.booleans())
def test_rows_are_truncated_or_padded_with_zeros(
    found: int, wanted: int, columns: int, transposed: bool
) -> None:
    op = Rows(found, wanted, "r c -> c r" if transposed else "r c -> r c")
    tensor = numbered(found, columns) + 1
    [loaded] = op.load(tensor)
    rows, shared = (loaded.mT if transposed else loaded), min(found, wanted)
    assert rows.shape == (wanted, columns)
    assert torch.equal(rows[:shared], tensor[:shared])
    assert not rows[shared:].any()
    assert torch.equal(op.save([loaded]), tensor[:shared])


def test_rows_are_described_by_their_numbers() -> None:
    assert str(Rows(50257, 1000)) == "first 1000 rows"
    assert str(Rows(50257, 50304)) == "50257 rows, then 47 of zeros"
