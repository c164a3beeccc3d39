"""Models built on the meta device must not keep uninitialised memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import NameMapError, load_into, load_pretrained
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS
from tests.loading_common import both_dialects, check_identical, ids
from tests.own_gpt2 import MyGPT2, my_map


class Block(nn.Module):
    """A module with an additional buffer, such as the mask of an attention module."""

    def __init__(self, inner: nn.Module, values: Callable[[], Tensor], persistent: bool) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mask", values(), persistent=persistent)


def with_masks(
    values: Callable[[], Tensor] = lambda: torch.ones(32, 32).tril(), persistent: bool = False
) -> MyGPT2:
    """Return MyGPT2 with a mask in each block."""
    model = MyGPT2("tied")
    for block in model.stack:
        block.register_buffer("mask", values(), persistent=persistent)
    return model


def build_uninitialised(model: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on the meta device, and move it to uninitialised memory."""
    with torch.device("meta"):
        built = model()
    return built.to_empty(device="cpu")


@both_dialects
def test_a_dialects_model_built_on_meta_computes_the_same_as_a_loaded_one(
    tiny: Path, dialect: str
) -> None:
    config, kind = open_checkpoint(tiny).config, DIALECTS[dialect]
    model = build_uninitialised(lambda: kind.model_class(config)).eval()
    load_into(model, kind.name_map, tiny)
    assert not dict(model.named_buffers())
    with torch.no_grad():
        assert torch.equal(model(ids()), load_pretrained(tiny, dialect)(ids()))


@both_dialects
@pytest.mark.parametrize("length", [2, 3, 32])
def test_a_dialects_model_can_be_exported_for_all_lengths(
    tiny: Path, dialect: str, length: int
) -> None:
    model = load_pretrained(tiny, dialect)
    T = torch.export.Dim("T", min=2, max=model.config.n_positions)
    exported = torch.export.export(model, (ids(),), dynamic_shapes={"input_ids": {1: T}})
    with torch.no_grad():
        found, expected = exported.module()(ids(2, length)), model(ids(2, length))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        lambda: torch.ones(32, 32).tril(),
        lambda: torch.ones(32, 32, dtype=torch.bool).triu(1),
        lambda: torch.arange(32),
        lambda: torch.ones(32, 32).tril().view(1, 1, 32, 32),
    ],
)
def test_uninitialised_buffers_are_named(
    tiny: Path, values: Callable[[], Tensor], persistent: bool
) -> None:
    model = build_uninitialised(lambda: with_masks(values, persistent))
    with pytest.raises(NameMapError, match=r"3 buffers.*: stack\.\{0…2\}\.mask"):
        load_into(model, my_map(), tiny)


def test_one_uninitialised_block_of_an_otherwise_initialised_model_is_found(tiny: Path) -> None:
    model = with_masks()
    model.stack[1] = build_uninitialised(lambda: with_masks().stack[1])
    with pytest.raises(NameMapError, match=r"1 buffers.*: stack\.1\.mask"):
        load_into(model, my_map(), tiny)


def test_an_uninitialised_buffer_in_its_own_module_is_found(tiny: Path) -> None:
    def model() -> MyGPT2:
        built = MyGPT2("tied")
        built.positions = Block(nn.Identity(), lambda: torch.arange(32), False)
        return built

    with pytest.raises(NameMapError, match=r"1 buffers.*: positions\.mask"):
        load_into(build_uninitialised(model), my_map(), tiny)


def test_uninitialised_memory_with_values_of_another_model_is_found(tiny: Path) -> None:
    """The allocator reuses the memory of a freed model, which still contains its weights."""
    missed = 0
    for _ in range(20):
        with_masks()  # freed immediately
        model = build_uninitialised(with_masks)
        try:
            load_into(model, my_map(), tiny)
        except NameMapError:
            continue
        missed += 1
    assert missed == 0


def test_buffers_that_are_filled_after_to_empty_are_accepted(tiny: Path) -> None:
    model = build_uninitialised(with_masks)
    for block in model.stack:
        block.mask.copy_(torch.ones(32, 32).tril())
    load_into(model, my_map(), tiny)
    assert all(torch.equal(block.mask, torch.ones(32, 32).tril()) for block in model.stack)


def test_an_unregistered_tensor_on_meta_is_named(tiny: Path) -> None:
    def model() -> MyGPT2:
        built = MyGPT2("tied")
        built.stack[1].mask = torch.ones(32, 32).tril()  # not registered, so to_empty skips it
        return built

    with pytest.raises(NameMapError, match=r"stack\.1\.mask"):
        load_into(build_uninitialised(model), my_map(), tiny)


def test_a_buffer_with_values_in_a_model_on_meta_is_accepted(tiny: Path) -> None:
    with torch.device("meta"):
        model = with_masks(lambda: torch.ones(32, 32, device="cpu").tril())
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(old)))  # remains uninitialised
    load_into(model, my_map(), tiny)
    assert all(torch.equal(block.mask, torch.ones(32, 32).tril()) for block in model.stack)


def initialised_out_of_place() -> MyGPT2:
    """Return a model whose parameters are all results of torch.randn and torch.zeros."""
    model = with_masks()
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            value = torch.randn(old.shape) if old.ndim > 1 else torch.zeros(old.shape)
            setattr(module, name, nn.Parameter(value))
    return model


def with_zeros_out_of_place() -> MyGPT2:
    """Return such a model with zero position embeddings, and with a buffer in the same module."""
    model = initialised_out_of_place()
    model.places.weight = nn.Parameter(torch.zeros(32, 24))
    model.places.register_buffer("ids", torch.arange(32), persistent=False)
    return model


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "model",
    [
        with_masks,
        lambda: with_masks(lambda: torch.zeros(32, 32)),
        lambda: with_masks(lambda: torch.arange(32)),
        initialised_out_of_place,
        with_zeros_out_of_place,
        lambda: copy.deepcopy(with_masks()),
        lambda: copy.deepcopy(initialised_out_of_place()),
        lambda: with_masks().double().float(),
        lambda: with_masks().bfloat16(),
        lambda: initialised_out_of_place().half(),
        lambda: pickled(with_masks()),
    ],
)
def test_ordinary_models_with_buffers_are_loaded(tiny: Path, model: Callable[[], MyGPT2]) -> None:
    built = model()
    buffers = {name: buffer.clone() for name, buffer in built.named_buffers()}
    load_into(built, my_map(), tiny)
    load_into(built, my_map(), tiny)  # loading again must work, too
    check_identical(dict(built.named_buffers()), buffers)
