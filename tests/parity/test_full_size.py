"""Parity with GPT-2's real shapes, noise on every parameter, and 2 × 128 tokens of real text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import check_parity, load_pretrained, load_tokenizer
from compat.dialects import DIALECTS, linear
from tests.conftest import MakeCheckpoint
from tests.parity.gradients import (
    key_bias_gradients,
    our_gradients,
    their_gradients,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("shared_reference")

GPT2 = {"vocab_size": 50257, "n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256}
# The standard deviation of the weights is that of trained models. With larger weights, attention
# amplifies rounding errors so much that they hide the faults to be found.
WIDTH = {"initializer_range": 0.02, "noise": 0.02}
# Most of the time is spent on logits, so only two tests use the complete vocabulary.
NARROW = {"vocab_size": 8192, "n_positions": 256, "bos_token_id": 8191, "eos_token_id": 8191}
SHAPES = {
    "medium": {"n_embd": 1024, "n_head": 16},
    "large": {"n_embd": 1280, "n_head": 20},
    "xl": {"n_embd": 1600, "n_head": 25},
}


@pytest.fixture(scope="module")
def gpt2(make_checkpoint: MakeCheckpoint, shared: Path) -> Path:
    """A checkpoint of the 124M shape with GPT-2's tokenizer."""
    folder = make_checkpoint(**GPT2, **WIDTH, n_embd=768, n_layer=12, n_head=12)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "data/gpt2-tokenizer" / name, folder)
    return folder


@pytest.fixture(scope="module")
def ids(gpt2: Path, shared: Path) -> Tensor:
    """Shakespeare in GPT-2's tokens, (2, 128)."""
    text = (shared / "data/tinyshakespeare.txt").read_text()[:2000]
    return torch.tensor(load_tokenizer(gpt2).encode(text)[:256]).view(2, 128)


def test_conv1d_is_bit_identical_at_every_tap(gpt2: Path, ids: Tensor) -> None:
    report = check_parity("conv1d", gpt2, input_ids=ids)
    assert report.passed and len(report.taps) == 12 * 13 + 3
    assert all(result.accumulated.max_abs == 0.0 for result in report.taps)
    assert all(result.local.max_abs == 0.0 for result in report.taps)
    assert all(r.accumulated.bit_identical and r.local.bit_identical for r in report.taps)


def test_the_error_of_linear_is_at_most_twice_that_of_the_reference(
    gpt2: Path, ids: Tensor
) -> None:
    report = check_parity("linear", gpt2, input_ids=ids)
    assert report.passed and report.calibrated, report.headline
    assert report.smallest_detectable < 1e-4
    assert all(r.accumulated.ratio is not None and r.accumulated.ratio <= 2 for r in report.taps)
    assert all(r.local.ratio is not None and r.local.ratio <= 2 for r in report.taps)
    not_identical = {r.tap.rpartition(".")[2] for r in report.taps if not r.local.bit_identical}
    assert not_identical <= {"ln_1", "ln_2", "ln_f"}


@pytest.fixture(scope="module")
def shallow(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint with the width of 124M, but two layers, a shorter context and fewer ids."""
    return make_checkpoint(**NARROW, **WIDTH, n_embd=768, n_layer=2, n_head=12)


@pytest.fixture(scope="module")
def few_ids() -> Tensor:
    """Ids of the smaller vocabulary, (2, 128)."""
    return torch.randint(8192, (2, 128), generator=torch.Generator().manual_seed(0))


def test_a_mistake_is_found_at_full_width(shallow: Path, few_ids: Tensor) -> None:
    model = load_pretrained(shallow, "linear")
    assert isinstance(model, linear.GPTModel)
    model.trf_blocks[1].feedforward.layers[1] = nn.GELU()
    assert check_parity(model, shallow, input_ids=few_ids).first_divergence == "h.1.act"


@pytest.mark.parametrize(
    ("dialect", "dtype"),
    [
        ("linear", torch.bfloat16),
        ("conv1d", torch.float16),
    ],
)
def test_half_precision_has_parity(
    make_checkpoint: MakeCheckpoint, dialect: str, dtype: torch.dtype
) -> None:
    # Some processors have no products of half precision, so one layer and few ids have to do.
    few = {"vocab_size": 2048, "n_positions": 256, "bos_token_id": 2047, "eos_token_id": 2047}
    folder = make_checkpoint(**few, **WIDTH, n_embd=768, n_layer=1, n_head=12)
    ids = torch.randint(2048, (1, 64), generator=torch.Generator().manual_seed(0))
    report = check_parity(dialect, folder, input_ids=ids, dtype=dtype)
    assert report.passed and report.calibrated, report.headline
    assert report.smallest_detectable < 1e-4


@pytest.mark.parametrize(
    ("shape", "dialect"),
    [("medium", "linear"), ("large", "conv1d"), ("xl", "linear")],
)
def test_two_layers_of_the_larger_models_have_parity(
    make_checkpoint: MakeCheckpoint, shape: str, dialect: str
) -> None:
    folder = make_checkpoint(**NARROW, **WIDTH, **SHAPES[shape], n_layer=2)
    report = check_parity(dialect, folder)
    shutil.rmtree(folder)  # half a gigabyte each
    assert report.passed and report.input_shape == (2, 128), report.headline
    assert report.smallest_detectable < 1e-4
    if dialect == "conv1d":
        assert all(r.accumulated.max_abs == 0.0 == r.local.max_abs for r in report.taps)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_gradients_match_those_of_transformers(
    shallow: Path, few_ids: Tensor, dialect: str, dtype: torch.dtype, bound: float
) -> None:
    ours = our_gradients(load_pretrained(shallow, dialect, dtype=dtype), few_ids)
    theirs = their_gradients(shallow, few_ids, dtype)
    assert len(ours) == 28
    worst, name = worst_difference(ours, theirs)
    assert worst <= bound, name
    assert max(key_bias_gradients(ours)) <= bound
