"""Prompts and large batches in native.c, and the memory of the weights that it reads."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.decoding import matrices
from compat.decoding.matrices import Int8, Pack
from compat.decoding.native import (
    FEW_ROWS,
    NativeInt8,
    NativeInt8Prompts,
    NativeLinear,
    NativeTransformer,
)
from compat.decoding.native_model import ROWS_AT_ONCE, NativeModel
from compat.decoding.transformer import Transformer
from tests.conftest import MakeCheckpoint
from tests.generation_common import relative
from tests.native_common import (
    ERROR_LIMIT,
    by_torch,
    each_prompt_kernel,
    needs_compiler,
    needs_vnni,
    plant_outliers,
    transformer_with,
)

pytestmark = needs_compiler

# Most of these lengths and sizes are not multiples of the sizes of native.c's blocks.
LENGTHS = (17, 22, 67, 1030)
SIZES = {"n_positions": 1100, "n_embd": 102, "n_head": 3, "n_inner": 67, "n_layer": 2}
TEXT = torch.randint(97, (1030,), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**SIZES)


@torch.inference_mode()
def logits_of(transformer: Transformer, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits (B, T, V) of texts of equal length, computed in one pass."""
    cache, ids = transformer.new_cache(len(texts)), torch.tensor(texts)
    return transformer.logits(transformer(ids, cache.kv, 0))


@pytest.fixture
def native_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each pass in native.c."""
    rows: list[int] = []
    decode = NativeModel._decode

    def count(self: NativeModel, batch: Any, x: Tensor, logits: Tensor | None) -> None:
        rows.append(len(x))
        decode(self, batch, x, logits)

    monkeypatch.setattr(NativeModel, "_decode", count)
    return rows


@each_prompt_kernel
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_prompts_match_those_of_torch(
    source: Path, native_rows: list[int], dtype: str, pack: Pack, length: int
) -> None:
    texts = [TEXT[:length].tolist()]
    transformer, exact = (
        transformer_with(pack, source, dtype),
        logits_of(by_torch(source, "float64"), texts),
    )
    bound = ERROR_LIMIT[dtype] * relative(
        logits_of(by_torch(source, dtype, Emulated), texts), exact
    )
    assert relative(logits_of(transformer, texts), exact) < bound
    assert native_rows == [length, length]
    transformer.wpe = transformer.wpe.roll(1, 0)
    assert relative(logits_of(transformer, texts), exact) > 1.5 * bound


class Emulated(Int8):
    """An int8 product that quantizes activations as native.c does for prompts.

    The activations are quantized in blocks of 64. They have 8 bits, or 16 in blocks in which one is
    `outliers` times as large as their mean.
    """

    outliers = 10.0

    def forward(self, x: Tensor) -> Tensor:
        M, K = x.shape
        blocks = nn.functional.pad(x, (0, -K % 64)).view(M, -1, 64)
        most, mean = blocks.abs().amax(-1, keepdim=True), blocks.abs().mean(-1, keepdim=True)
        scale = (most / 127).clamp(min=1e-30).double()
        exact = blocks.double() / scale
        high = exact.round()
        low = (256 * (exact - high)).clamp(-127, 127).round() / 256
        low *= most > self.outliers * mean
        rounded = ((high + low) * scale).view(M, -1)[:, :K]
        return (rounded @ self.qweight.double().t() * self.scale + self.bias).float()


class OneTerm(Emulated):
    outliers = torch.inf


@needs_vnni
def test_activations_have_8_bits_and_those_with_outliers_16(
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint(**SIZES)
    plant_outliers(folder)
    texts = [TEXT[:33].tolist()]
    # The cache has float32, because torch would also round queries to a bfloat16 cache's precision.
    expected = logits_of(transformer_with(Emulated, folder, "float32"), texts)
    found = logits_of(transformer_with(NativeInt8Prompts, folder, "float32"), texts)
    assert relative(found, expected) < 1e-5
    assert relative(logits_of(transformer_with(OneTerm, folder, "float32"), texts), expected) > 0.1


@each_prompt_kernel
@pytest.mark.usefixtures("restored_threads")
def test_logits_of_prompts_do_not_depend_on_threads_or_other_texts(
    source: Path, dtype: str, pack: Pack
) -> None:
    transformer = transformer_with(pack, source, dtype)
    texts = TEXT[: 3 * 230].view(3, 230).tolist()  # more than native.c computes at once
    assert 3 * 230 > ROWS_AT_ONCE
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.append(logits_of(transformer, texts))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for text, logits in zip(texts, found[0], strict=True):
        assert torch.equal(logits_of(transformer, [text])[0], logits)
    assert torch.equal(logits_of(transformer, [texts[0][:101]])[0], found[0][0, :101])


@each_prompt_kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_reach_all_later_positions(
    source: Path, dtype: str, pack: Pack, value: float
) -> None:
    transformer = transformer_with(pack, source, dtype)
    transformer.wpe[22, 100] = value
    finite = logits_of(transformer, [TEXT[:33].tolist()])[0].isfinite()
    assert finite[:22].all() and not finite[22:].any()


@each_prompt_kernel
def test_torch_computes_prompts_whose_activation_native_c_does_not_vectorize(
    make_checkpoint: MakeCheckpoint, native_rows: list[int], dtype: str, pack: Pack
) -> None:
    transformer = transformer_with(
        pack, make_checkpoint(**SIZES, activation_function="gelu"), dtype
    )
    assert isinstance(transformer, NativeTransformer)
    logits_of(transformer, [TEXT[: FEW_ROWS + 1].tolist()])
    assert native_rows == []
    logits_of(transformer, [TEXT[:FEW_ROWS].tolist()])
    assert native_rows == [FEW_ROWS, FEW_ROWS]


# The memory of the weights


def memory_flags(address: int) -> set[str]:
    """Return the flags of the mapping that contains an address, from /proc/self/smaps."""
    contains = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            contains = start <= address < end
        elif contains and first == "VmFlags:":
            return set(rest)
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
@pytest.mark.parametrize("pack", [NativeLinear, NativeInt8])
def test_small_weights_share_blocks_in_huge_pages(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "_of_thread", threading.local())  # no block is allocated yet
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    by_output = weight.t().contiguous().t()  # the layout of an embedding that is also the head
    first, second = pack(weight, None), pack(by_output, None)
    one, other = (getattr(p, "weight", None) for p in (first, second))
    if pack is NativeInt8:
        one, other = first.qweight, second.qweight
    assert one is not None and other is not None and torch.equal(one, other)
    assert "hg" in memory_flags(one.data_ptr())
    assert "hg" not in memory_flags(weight.data_ptr())
    assert other.data_ptr() - one.data_ptr() == one.nbytes  # both sizes are multiples of 64
    block = matrices._of_thread.block
    assert block() is not None
    del first, second, one, other
    gc.collect()
    assert block() is None
