"""Products of many rows by native.c, and the memory of the weights that it reads."""

from __future__ import annotations

import gc
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.decoding import matrices
from compat.decoding.matrices import Blas
from compat.decoding.native import NativeInt8, NativeInt8Products, NativeLinear, NativeProducts
from compat.decoding.native_model import NativeActivation, Unsupported, native_product
from compat.layers import QuickGELU
from tests.generation_common import relative
from tests.native_common import needs_compiler, needs_panels

pytestmark = needs_compiler

# Rows, inputs and outputs, of which few divide what is multiplied at a time.
SHAPES = [(17, 96, 64), (18, 42, 67), (33, 1100, 31), (70, 3, 5), (65, 3072, 77), (1030, 64, 33)]


def drawn(M: int, n_in: int, n_out: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(M)
    x, weight = torch.randn(M, n_in, generator=draw), torch.randn(n_in, n_out, generator=draw)
    return x, weight, torch.randn(n_out, generator=draw)


def quantized_to_8_bits(x: Tensor, outliers: float = 10) -> Tensor:
    """Activations (M, K) as native.c quantizes those of many rows.

    They are in blocks of 64 with a scale each, and have 8 bits, or 15 in a block where one is
    `outliers` times as large as their mean.
    """
    M, K = x.shape
    blocks = nn.functional.pad(x, (0, -K % 64)).view(M, -1, 64)
    most, mean = blocks.abs().amax(-1, keepdim=True), blocks.abs().mean(-1, keepdim=True)
    scale = (most / 127).clamp(min=1e-30)
    exact = blocks.double() * (1 / scale).double()
    high = exact.round()
    low = (256 * (exact - high)).clamp(-127, 127).round() / 256 * (most > outliers * mean)
    return ((high + low) * scale.double()).view(M, -1)[:, :K]


@needs_panels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_rows_are_multiplied_exactly(shape: tuple[int, int, int]) -> None:
    x, weight, bias = drawn(*shape)
    for b in (bias, None):
        expected = x.double() @ weight.double() + (0 if b is None else b.double())
        by_blas = relative(Blas(weight, b)(x).double(), expected)
        assert relative(native_product(x, NativeProducts(weight, b)), expected) < 1.5 * by_blas
    assert relative(native_product(x, NativeProducts(weight, b)), expected + 1e-3) > 10 * by_blas


@needs_panels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_rows_are_multiplied_in_8_bits(shape: tuple[int, int, int]) -> None:
    x, weight, bias = drawn(*shape)
    x[:, 0] *= 100  # the first block of a row has an outlier
    x[-1, 64:] = 0
    pack = NativeInt8Products(weight, bias)
    exact = pack.qweight.double().t() * pack.scale.double()
    expected = quantized_to_8_bits(x) @ exact + bias.double()
    assert relative(pack(x), expected) < 1e-6
    without_low = quantized_to_8_bits(x, outliers=1e9) @ exact + bias.double()
    assert relative(pack(x), without_low) > 1e-4
    assert relative(pack(x), x.double() @ exact + bias.double()) < 0.01


@needs_panels
@pytest.mark.parametrize("pack", [NativeProducts, NativeInt8Products])
def test_products_of_many_rows_depend_on_neither_threads_nor_other_rows(pack: Any) -> None:
    x, weight, bias = drawn(65, 1100, 77)
    product, before = pack(weight, bias), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[0][5:30], product(x[5:30]))


@needs_panels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("pack", [NativeProducts, NativeInt8Products])
def test_products_of_many_rows_keep_what_is_not_finite(pack: Any, value: float) -> None:
    x, weight, bias = drawn(33, 96, 40)
    x[7, 90] = value
    finite = pack(weight, bias)(x).isfinite()
    assert not finite[7].any() and finite.sum() == 32 * 40


@needs_panels
def test_only_tensors_that_fit_are_multiplied_by_c() -> None:
    x, weight, bias = drawn(33, 96, 40)
    product = NativeProducts(weight, bias)
    wide = torch.zeros(33, 192)
    for wrong in (x.double(), x[:, :95], wide[:, ::2], x.t(), x.to("meta")):
        with pytest.raises(Unsupported):
            native_product(wrong, product)
    assert torch.equal(product(wide[:, ::2]), Blas(weight, bias)(wide[:, ::2]))  # by torch
    product.bias = bias[:39]
    with pytest.raises(Unsupported):
        native_product(x, product)
    with pytest.raises(Unsupported, match="bfloat16"):
        native_product(x, NativeLinear(weight.bfloat16(), None))


@pytest.mark.parametrize(
    "module",
    [nn.GELU("tanh"), nn.GELU(), QuickGELU(), nn.ReLU(), nn.SiLU(), nn.Tanh()],
    ids=str,
)
def test_activations_are_those_of_torch(module: nn.Module) -> None:
    x = 4 * torch.randn(7, 333, generator=torch.Generator().manual_seed(0))
    before, expected = x.clone(), module(x.double())
    found = NativeActivation(module)(x)
    assert torch.equal(x, before)
    assert relative(found, expected) < 2e-7 < relative(found, expected + 1e-4)
    strided = x[:, ::2]
    assert torch.equal(NativeActivation(module)(strided), module(strided))


# Memory of the weights.


def flags_of_memory(address: int) -> set[str]:
    """The flags of the mapping that holds an address, as in /proc/self/smaps."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            holds = start <= address < end
        elif holds and first == "VmFlags:":
            return set(rest)
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
@pytest.mark.parametrize("pack", [NativeLinear, NativeInt8])
def test_weights_share_blocks_that_ask_for_huge_pages(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "_of_thread", threading.local())  # no block is in use
    weight = drawn(1, 96, 64)[1]
    first, second = (pack(weight, None) for _ in range(2))
    one, other = (getattr(p, "weight", None) for p in (first, second))
    if pack is NativeInt8:
        one, other = first.qweight, second.qweight
    assert one is not None and other is not None and torch.equal(one, other)
    assert "hg" in flags_of_memory(one.data_ptr())
    assert "hg" not in flags_of_memory(weight.data_ptr())
    assert other.data_ptr() - one.data_ptr() == one.nbytes  # both sizes are multiples of 64
    block = matrices._of_thread.block
    assert block() is not None
    del first, second, one, other
    gc.collect()
    assert block() is None
