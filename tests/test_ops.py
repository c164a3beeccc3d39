"""Operations on parameters of any shape: loading and saving are inverse, bit by bit."""

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
    """A tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def there_and_back(op: Rearrange | Fused | Rows, tensor: Tensor) -> tuple[Tensor, ...]:
    made = op.load(tensor)
    assert all(part.is_contiguous() for part in made)
    back = op.save(made)
    assert back.is_contiguous()
    check_identical({"tensor": back}, {"tensor": tensor})
    return made


# Rearrange.


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
def test_patterns(
    pattern: str, sizes: dict[str, int], expected: Callable[[Tensor], Tensor]
) -> None:
    [made] = there_and_back(Rearrange(pattern, tuple(sizes.items())), numbered(6, 4))
    assert torch.equal(made, expected(numbered(6, 4)))


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
    [made] = there_and_back(op, tensor)
    plain = tensor.reshape(h, d, c).permute(["hdc".index(x) for x in order])
    assert torch.equal(made.reshape(plain.shape), plain)


def test_its_text_is_its_pattern() -> None:
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
def test_a_shape_that_does_not_fit_the_pattern(
    op: Rearrange, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(NameMapError, match=re.escape(words)):
        op.load(torch.zeros(shape))


# Fused.

ORDERS = ["".join(order) for order in permutations("qkv")]


@given(
    order=st.sampled_from(ORDERS),
    axes=st.permutations("cqhd"),
    cut=st.integers(0, 3),
    n_head=SIZE,
    d=SIZE,
    channels=SIZE,
)
def test_one_fused_parameter_in_any_order_of_axes(
    order: str, axes: list[str], cut: int, n_head: int, d: int, channels: int
) -> None:
    groups = [" ".join(axes[:cut]), " ".join(axes[cut:])]
    pattern = " ".join(f"({group})" for group in groups if group)
    op = Fused(n_head, (Part(order, pattern),))
    # The channels and the head size cannot both be inferred from the length of one axis.
    assume(not any({"c", "d"} <= set(group) for group in (axes[:cut], axes[cut:])))
    tensor = numbered(channels, 3 * n_head * d)
    [made] = there_and_back(op, tensor)
    parts = tensor.reshape(channels, 3, n_head, d)[:, ["qkv".index(x) for x in order]]
    plain = parts.permute(["cqhd".index(x) for x in axes])
    assert torch.equal(made.reshape(plain.shape), plain)


@given(n_head=SIZE, d=SIZE, channels=SIZE, fused=st.booleans())
def test_separate_parameters_and_one_per_head(
    n_head: int, d: int, channels: int, fused: bool
) -> None:
    tensor = numbered(channels, 3 * n_head * d)
    whole = tensor.reshape(channels, 3, n_head, d)
    if fused:
        parts = tuple(Part(x, "(h d) c") for x in "qkv")
        made = there_and_back(Fused(n_head, parts), tensor)
        for place, weight in enumerate(made):
            assert torch.equal(weight, whole[:, place].reshape(channels, -1).mT)
    else:
        parts = tuple(Part(x, "d c", (head,)) for head in range(n_head) for x in "qkv")
        made = there_and_back(Fused(n_head, parts), tensor)
        for place, weight in enumerate(made):
            assert torch.equal(weight, whole[:, place % 3, place // 3].mT)


@given(n_head=SIZE, d=SIZE)
def test_biases_have_no_channels(n_head: int, d: int) -> None:
    tensor = numbered(3 * n_head * d)
    [made] = there_and_back(Fused(n_head, (Part("vkq", "h d q"),)), tensor)
    assert torch.equal(made, tensor.reshape(3, n_head, d).flip(0).permute(1, 2, 0))


def test_parts_without_a_parameter_are_saved_as_zeros() -> None:
    op, tensor = Fused(2, (Part("q", "(h d)"), Part("v", "(h d)"))), numbered(12) + 1
    made = op.load(tensor)
    assert [part.tolist() for part in made] == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert op.save(made).tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 9, 10, 11, 12]


def test_a_fused_tensor_that_cannot_be_split() -> None:
    words = "shape [4, 10] cannot be split into q, k and v of 2 heads"
    with pytest.raises(NameMapError, match=re.escape(words)):
        Fused(2, (Part("qkv", "(q h d) c"),)).load(torch.zeros(4, 10))


def test_the_text_of_a_fused_op_names_its_parts() -> None:
    op = Fused(2, (Part("qk", "(q h d) c"), Part("v", "d c", (1,))))
    assert str(op) == "qk: (q h d) c; v[1]: d c"


# Rows.


@given(found=SIZE, wanted=SIZE, columns=SIZE, turned=st.booleans())
def test_rows_are_truncated_or_padded_with_zeros(
    found: int, wanted: int, columns: int, turned: bool
) -> None:
    op = Rows(found, wanted, "r c -> c r" if turned else "r c -> r c")
    tensor = numbered(found, columns) + 1
    [made] = op.load(tensor)
    rows, shared = (made.mT if turned else made), min(found, wanted)
    assert rows.shape == (wanted, columns)
    assert torch.equal(rows[:shared], tensor[:shared])
    assert not rows[shared:].any()
    assert torch.equal(op.save([made]), tensor[:shared])


def test_the_text_of_rows() -> None:
    assert str(Rows(50257, 1000)) == "first 1000 rows"
    assert str(Rows(50257, 50304)) == "50257 rows, then 47 of zeros"
