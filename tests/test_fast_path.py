"""The choice of a decoder: the fast path for unmodified models, otherwise the model's `forward`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compat import GenerationError, GPT2Config, PlainBlocks, generate, load_pretrained
from compat.decoding import PlainDecoder, decoder_of
from compat.decoding.fast_path import transformer_of
from compat.decoding.static import StaticDecoder
from compat.dialects import Model, conv1d, get_dialect, linear
from tests.conftest import MakeCheckpoint
from tests.generation_common import each_dialect, greedy

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
def test_the_fast_path_computes_what_the_blocks_compute(
    source: Path, dialect: str, dtype: torch.dtype, bound: float
) -> None:
    model = load_pretrained(source, dialect).to(dtype)
    assert isinstance(decoder_of(model), StaticDecoder)
    expected = logits(PlainBlocks(model))
    assert (logits(model) - expected).norm() < bound * expected.norm()


@each_dialect
def test_the_fast_path_uses_the_models_own_memory(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    parameter_storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    fast = transformer_of(model)
    packed = [fast.lm_head, *(block.mlp_proj for block in fast.h)]
    packed += [block.c_fc for block in fast.h]
    assert {matrix.weight.untyped_storage().data_ptr() for matrix in packed} <= parameter_storages


@each_dialect
def test_a_change_of_the_weights_takes_effect_immediately(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    before = logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.roll(1, 0)
    expected = logits(PlainBlocks(model))
    assert (logits(model) - expected).norm() < 1e-5 * expected.norm()
    assert (before - expected).norm() > 0.1 * expected.norm()


class CreatedBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operators create; views are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in inputs:
            self.bytes += out.untyped_storage().nbytes()
        return out


@each_dialect
def test_building_the_fast_path_does_not_copy_weights(dialect: str) -> None:
    config = GPT2Config(vocab_size=300, n_positions=16, n_embd=128, n_layer=4, n_head=4)
    model = get_dialect(dialect).model_class(config).eval()
    with CreatedBytes() as created:
        transformer_of(model)
    assert created.bytes < 0.01 * sum(p.nbytes for p in model.parameters())


def _scaled(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def _scaled_past_version_counter(model: Model) -> None:
    """Scale the weights without an increase of `_version`."""
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def _swapped(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.roll(1, 0)


def _set(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(parameter.roll(1, 0))


def _through_numpy(model: Model) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[:] *= 1.1


def _rolled_state(model: Model) -> dict[str, Tensor]:
    return {name: tensor.roll(1, 0) for name, tensor in model.state_dict().items()}


def _loaded(model: Model) -> None:
    model.load_state_dict(_rolled_state(model))


def _assigned(model: Model) -> None:
    """Assign new parameters, which unties the head."""
    model.load_state_dict(_rolled_state(model), assign=True)


def _trained(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor(IDS[:1])
    nn.functional.cross_entropy(model(ids)[0], ids[0]).backward()
    optimizer.step()
    model.zero_grad()


def _other_parameters(model: Model) -> None:
    for part in model.modules():
        if isinstance(part, nn.Linear | conv1d.Conv1D) and part.bias is not None:
            part.bias = nn.Parameter(part.bias.detach() + 1)


def _narrowed(model: Model) -> None:
    model.to(torch.bfloat16)


def _widened(model: Model) -> None:
    model.double()
    _scaled(model)


@each_dialect
@pytest.mark.parametrize(
    "change",
    [
        _scaled,
        _scaled_past_version_counter,
        _swapped,
        _set,
        _through_numpy,
        _loaded,
        _assigned,
        _trained,
        _other_parameters,
        _narrowed,
        _widened,
    ],
)
def test_every_change_of_the_weights_takes_effect(
    source: Path, dialect: str, change: Callable[[Model], None]
) -> None:
    model = load_pretrained(source, dialect)
    generate(model, torch.tensor(IDS[:1]), max_new_tokens=2, temperature=0)
    before = logits(model)
    change(model)
    assert isinstance(decoder_of(model), StaticDecoder) == (change is not _assigned)
    expected = logits(PlainBlocks(model))
    bound = 0.05 if change is _narrowed else 1e-5
    assert (logits(model) - expected).norm() < bound * expected.norm()
    assert (before - expected).norm() > 1e-3 * expected.norm()


@each_dialect
def test_a_change_of_the_weights_between_two_decode_steps_takes_effect(
    source: Path, dialect: str
) -> None:
    model = load_pretrained(source, dialect)
    decoders = [decoder_of(model), decoder_of(PlainBlocks(model))]
    for decoder in decoders:
        decoder.start(IDS)
    _scaled_past_version_counter(model)
    found, expected = (decoder.step(torch.tensor([3, 1, 4])) for decoder in decoders)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@each_dialect
def test_generating_does_not_keep_a_model_alive(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    generate(model, torch.tensor(IDS[:1]), max_new_tokens=2, temperature=0)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@each_dialect
def test_threads_may_share_one_model(source: Path, dialect: str) -> None:
    model, prompts = load_pretrained(source, dialect), [torch.tensor([ids]) for ids in IDS] * 4

    def continued(ids: Tensor) -> list[int]:
        return greedy(model, ids, 20)[0].tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(continued, prompts)) == [continued(ids) for ids in prompts]


@pytest.fixture
def remove_global_hooks() -> Iterator[None]:
    """Remove hooks on all modules, which would otherwise remain after the test."""
    yield
    nn.modules.module._global_forward_hooks.clear()


class _Doubled(linear.FeedForward):
    """A user's module, which changes the output."""

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
@pytest.mark.usefixtures("remove_global_hooks")
def test_a_modified_model_runs_its_own_forward(
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
def test_a_nan_that_fused_attention_hides_is_found(source: Path, dialect: str) -> None:
    model = load_pretrained(source, dialect)
    att = model.trf_blocks[1].attention.W_query if dialect == "linear" else model.h[1].attn.c_attn
    att.bias.data[0] = torch.nan
    with pytest.raises(
        GenerationError, match=r"h\.1\.q is the first hidden state that contains NaN"
    ):
        generate(model, torch.tensor(IDS[:1]), max_new_tokens=1, temperature=0)
