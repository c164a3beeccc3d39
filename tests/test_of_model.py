"""Which decoder a model gets: the fast one, unless only its own blocks know what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import GenerationError, PlainBlocks, generate, load_pretrained
from compat.decoding import PlainDecoder, decoder_of
from compat.decoding.of_model import FastBlocks, transformer_of
from compat.dialects import Model, linear
from tests.conftest import MakeCheckpoint
from tests.generation_common import each_dialect

IDS = [[5, 17, 60, 8, 1, 90, 33], [44], [9, 0, 0, 71]]


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(n_positions=64)


def logits(model: Model | PlainBlocks) -> Tensor:
    decoder = decoder_of(model)
    first = decoder.start(IDS)
    return torch.stack([first, decoder.step(torch.tensor([3, 1, 4]))])


@each_dialect
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-13)]
)
def test_it_computes_what_the_blocks_compute(
    source: Path, dialect: str, dtype: torch.dtype, bound: float
) -> None:
    model = load_pretrained(source, dialect).to(dtype)
    assert isinstance(decoder_of(model), FastBlocks)
    expected = logits(PlainBlocks(model))
    assert (logits(model) - expected).norm() < bound * expected.norm()


@each_dialect
def test_weights_are_used_where_the_model_has_them(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    theirs = {p.untyped_storage().data_ptr() for p in model.parameters()}
    fast = transformer_of(model)
    packed = [fast.head, *(block.mlp_proj for block in fast.blocks)]
    packed += [block.c_fc for block in fast.blocks]
    assert {matrix.weight.untyped_storage().data_ptr() for matrix in packed} <= theirs


@each_dialect
def test_a_change_of_the_weights_counts_at_once(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    before = logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.roll(1, 0)
    expected = logits(PlainBlocks(model))
    assert (logits(model) - expected).norm() < 1e-5 * expected.norm()
    assert (before - expected).norm() > 0.1 * expected.norm()


@pytest.fixture
def no_hooks_left() -> Iterator[None]:
    """Hooks on all modules would outlast the test."""
    yield
    nn.modules.module._global_forward_hooks.clear()


class _Doubled(linear.FeedForward):
    """Somebody's own part, which changes what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _replaced(model: Model) -> None:
    part = _Doubled(model.config)
    part.load_state_dict(model.trf_blocks[1].feedforward.state_dict())
    model.trf_blocks[1].feedforward = part


def _hooked(model: Model) -> None:
    model.trf_blocks[1].feedforward.register_forward_hook(lambda _, args, output: 2 * output)


def _hooked_before(model: Model) -> None:
    model.trf_blocks[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))


def _hooked_everywhere(model: Model) -> None:
    part = model.trf_blocks[1].feedforward
    nn.modules.module.register_module_forward_hook(
        lambda module, _, output: 2 * output if module is part else output
    )


def _patched(model: Model) -> None:
    part = model.trf_blocks[1].feedforward
    forward = part.forward
    part.forward = lambda x: 2 * forward(x)


def _parametrized(model: Model) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(
        model.trf_blocks[1].attention.out_proj, "bias", Twice()
    )


@pytest.mark.parametrize(
    "change", [_replaced, _hooked, _hooked_before, _hooked_everywhere, _patched, _parametrized]
)
@pytest.mark.usefixtures("no_hooks_left")
def test_a_model_that_was_changed_runs_its_own_blocks(
    source: Path, change: Callable[[Model], None]
) -> None:
    model = load_pretrained(source, "linear").eval()
    before = logits(model)
    change(model)
    model.eval()
    assert isinstance(decoder_of(model), PlainDecoder)
    assert (logits(model) - before).norm() > 1e-3 * before.norm()


def test_a_model_in_training_mode_is_refused(source: Path) -> None:
    with pytest.raises(GenerationError, match="training mode"):
        decoder_of(load_pretrained(source).train())


@each_dialect
def test_a_nan_that_fast_attention_hides_is_found(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    att = model.trf_blocks[1].attention.W_query if dialect == "linear" else model.h[1].attn.c_attn
    att.bias.data[0] = torch.nan
    with pytest.raises(GenerationError, match=r"h\.1\.q is the first hidden state with NaN"):
        generate(model, torch.tensor(IDS[:1]), max_new_tokens=1, temperature=0)
