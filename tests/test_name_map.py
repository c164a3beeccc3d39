"""Name maps: ops are inverted bit by bit, and names are expanded for every layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compat import NameMap, NameMapError, Row, Same, Split, Transpose
from compat.dialects import DIALECTS
from compat.errors import listed
from compat.export_view import HFTensor
from compat.ops import Op

sizes = st.integers(min_value=1, max_value=7)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


def bits(tensor: Tensor) -> bytes:
    """Return the bits of the values, which distinguish −0.0 from 0.0 and NaN payloads."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).tolist())


def exact(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    return tensor.shape, tensor.dtype, bits(tensor)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values with random bits, among them −0.0, subnormal numbers, infinities and NaNs."""
    width = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8)
    return raw.view(dtype)


def round_trip(op: Op, tensor: Tensor) -> Tensor:
    return op.save(op.load(tensor))


@given(st.lists(sizes, min_size=1, max_size=3), dtypes)
def test_same_is_inverted_bit_by_bit(shape: list[int], dtype: torch.dtype) -> None:
    tensor = noise(*shape, dtype=dtype)
    restored = round_trip(Same(), tensor)
    assert exact(restored) == exact(tensor)


@given(sizes, sizes, dtypes)
def test_transpose_is_inverted_bit_by_bit(rows: int, columns: int, dtype: torch.dtype) -> None:
    tensor = noise(rows, columns, dtype=dtype)
    (loaded,) = Transpose().load(tensor)
    assert loaded.shape == (columns, rows)
    assert all(
        bits(loaded[j, i]) == bits(tensor[i, j]) for i in range(rows) for j in range(columns)
    )
    restored = Transpose().save([loaded])
    assert exact(restored) == exact(tensor)


@given(sizes, sizes, sizes, st.booleans(), dtypes)
def test_split_of_a_matrix_is_inverted_bit_by_bit(
    rows: int, width: int, parts: int, transpose: bool, dtype: torch.dtype
) -> None:
    tensor = noise(rows, width * parts, dtype=dtype)
    op = Split(parts, transpose)
    loaded = op.load(tensor)
    assert len(loaded) == parts
    for k, piece in enumerate(loaded):
        wanted = tensor[:, k * width : (k + 1) * width]
        wanted = wanted.t() if transpose else wanted
        assert (piece.shape, bits(piece)) == (wanted.shape, bits(wanted))
    restored = op.save(loaded)
    assert exact(restored) == exact(tensor)


@given(sizes, sizes, dtypes)
def test_split_of_a_vector_is_inverted_bit_by_bit(
    width: int, parts: int, dtype: torch.dtype
) -> None:
    tensor = noise(width * parts, dtype=dtype)
    loaded = Split(parts).load(tensor)
    assert [bits(piece) for piece in loaded] == [
        bits(tensor[k * width : (k + 1) * width]) for k in range(parts)
    ]
    assert bits(Split(parts).save(loaded)) == bits(tensor)


OPS = [Same(), Transpose(), Split(3), Split(3, transpose=True)]


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("tensor", [noise(4, 6), noise(6, 4).t()], ids=["contiguous", "view"])
def test_results_of_ops_are_contiguous(op: Op, tensor: Tensor) -> None:
    loaded = op.load(tensor)
    assert all(piece.is_contiguous() for piece in loaded)
    views = [noise(*piece.shape[::-1]).t() for piece in loaded]
    assert HFTensor(list(loaded), op.save).make().is_contiguous()
    assert HFTensor(views, op.save).make().is_contiguous()


@pytest.mark.parametrize("op", [Same(), Transpose()], ids=str)
def test_same_and_transposed_tensors_can_be_views(op: Op) -> None:
    tensor = noise(4, 6)
    view = HFTensor([tensor], op.save).view()
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("op", [Split(3), Split(3, transpose=True)], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 100])
def test_split_refuses_unequal_parts(op: Op, width: int) -> None:
    with pytest.raises(NameMapError, match=rf"\[5, {width}\] cannot be split into 3 equal parts"):
        op.load(torch.zeros(5, width))


def test_ops_are_described_by_their_text() -> None:
    assert [str(op) for op in OPS] == [
        "same",
        "transpose",
        "split in 3",
        "split in 3, transpose",
    ]


SMALL = NameMap(
    (
        Row("wte.weight", ("tok.weight",), Same()),
        Row("h.{i}.w", ("blocks.{i}.q", "blocks.{i}.k"), Split(2)),
        Row("h.{i}.b", ("blocks.{i}.b",), Same()),
    )
)


def test_expand_returns_the_rows_of_every_layer() -> None:
    assert {(row.hf, row.ours, row.op) for row in SMALL.expand(12)} == {
        ("wte.weight", ("tok.weight",), Same()),
        *[(f"h.{i}.w", (f"blocks.{i}.q", f"blocks.{i}.k"), Split(2)) for i in range(12)],
        *[(f"h.{i}.b", (f"blocks.{i}.b",), Same()) for i in range(12)],
    }
    assert len(SMALL.expand(12)) == 1 + 2 * 12


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_map_of_a_dialect_names_each_tensor_of_a_gpt2_once(dialect: str) -> None:
    hf = [row.hf for row in DIALECTS[dialect].name_map.expand(2)]
    assert len(hf) == len(set(hf)) == 5 + 2 * 12
    assert not any("{" in name for name in hf)


@pytest.mark.parametrize(
    ("rows", "twice"),
    [
        ([("wte.weight", ("a",)), ("wte.weight", ("b",))], "wte.weight"),
        ([("wte.weight", ("a",)), ("wpe.weight", ("a",))], "a"),
        ([("h.{i}.w", ("q.{i}",)), ("h.{i}.b", ("q.{i}",))], r"q\.0 and q\.1"),
        ([("h.{i}.w", ("q.{i}",)), ("h.1.w", ("other",))], r"h\.1\.w"),
        ([("h.{i}.w", ("no_layer",))], "no_layer"),
    ],
)
def test_a_name_in_two_rows_is_refused(rows: list[tuple[str, tuple[str]]], twice: str) -> None:
    name_map = NameMap(tuple(Row(hf, ours, Same()) for hf, ours in rows))
    with pytest.raises(NameMapError, match=f"has {twice} in two rows"):
        name_map.expand(2)


@pytest.mark.parametrize("n_layer", [0, 1, 2, 11, 12])
def test_count_layers_finds_all_layers(n_layer: int) -> None:
    names = {name for row in SMALL.expand(n_layer) for name in row.ours}
    assert SMALL.count_layers(names) == n_layer


def test_count_layers_counts_an_incomplete_layer() -> None:
    assert SMALL.count_layers({"blocks.0.b", "blocks.1.q"}) == 2


def test_count_layers_stops_at_the_first_gap() -> None:
    assert SMALL.count_layers({"blocks.0.b", "blocks.2.b", "blocks.10.b"}) == 1


def test_long_lists_of_names_are_shortened() -> None:
    assert listed(["a", "b"]) == "a and b" and listed(["a", "b", "c"]) == "a, b and c"
    assert listed([f"n{i}" for i in range(13)], most=2) == "n0, n1 and 11 more"
