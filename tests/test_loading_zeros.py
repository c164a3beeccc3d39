"""Parameters that GPT-2 lacks must be listed in the map as zeros, and are set to zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from compat import CompatError, NameMap, NameMapError, load_into, to_hf_state_dict
from tests.loading_common import check_identical
from tests.own_gpt2 import MyGPT2, my_map

ZEROS = ("head_bias", "stack.{i}.gate_bias")


class WithBiases(MyGPT2):
    """MyGPT2 with additional biases on the head and in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.head_bias = nn.Parameter(torch.ones(97))
        for block in self.stack:
            block.gate_bias = nn.Parameter(torch.ones(24))


def with_zeros(*zeros: str) -> NameMap:
    return replace(my_map(), zeros=zeros)


@contextmanager
def check_refused(
    model: nn.Module, *words: str, error: type[CompatError] = NameMapError
) -> Iterator[None]:
    """Check that the block raises this error and leaves the model unchanged."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error) as caught:
        yield
    for text in words:
        assert text in str(caught.value)
    check_identical(model.state_dict(), before)


def test_expand_zeros_returns_the_names_for_every_layer() -> None:
    assert with_zeros(*ZEROS).expand_zeros(3) == [
        "head_bias", "stack.0.gate_bias", "stack.1.gate_bias", "stack.2.gate_bias",
    ]  # fmt: skip
    assert my_map().zeros == ()


def test_loading_sets_these_parameters_to_zero_in_place(tiny: Path) -> None:
    model = WithBiases()
    model.head_bias.requires_grad_(False)
    before = dict(model.named_parameters())
    load_into(model, with_zeros(*ZEROS), tiny)
    for name in with_zeros(*ZEROS).expand_zeros(3):
        parameter = model.get_parameter(name)
        assert parameter is before[name]
        assert not parameter.any()
    assert not model.head_bias.requires_grad
    assert torch.equal(
        model.tokens.weight, load_file(tiny / "model.safetensors")["transformer.wte.weight"]
    )


def test_loading_fills_these_parameters_on_the_meta_device(tiny: Path) -> None:
    with torch.device("meta"):
        model = WithBiases()
    load_into(model, with_zeros(*ZEROS), tiny)
    assert not any(p.is_meta for p in model.parameters())
    assert not model.head_bias.any()


def test_saving_omits_these_parameters(tiny: Path) -> None:
    model = WithBiases()
    load_into(model, with_zeros(*ZEROS), tiny)
    check_identical(
        to_hf_state_dict(model, with_zeros(*ZEROS)), load_file(tiny / "model.safetensors")
    )


@pytest.mark.parametrize("name", ["head_bias", "stack.1.gate_bias"])
def test_saving_refuses_these_parameters_if_they_are_not_zero(tiny: Path, name: str) -> None:
    model = WithBiases()
    load_into(model, with_zeros(*ZEROS), tiny)
    with torch.no_grad():
        model.get_parameter(name)[5] = 1e-20
    with check_refused(model, f"{name} must be zero, because GPT-2 does not have"):
        to_hf_state_dict(model, with_zeros(*ZEROS))


def test_a_map_without_these_parameters_is_refused(tiny: Path) -> None:
    model = WithBiases()
    with check_refused(
        model, "4 parameters of the model have no row: head_bias and stack.{0…2}.gate_bias"
    ):
        load_into(model, my_map(), tiny)
    with check_refused(model, "4 parameters of the model have no row"):
        to_hf_state_dict(model, my_map())
    with check_refused(model, "3 parameters of the model have no row: stack.{0…2}.gate_bias"):
        load_into(model, with_zeros("head_bias"), tiny)


def test_a_name_that_the_model_lacks_is_refused(tiny: Path) -> None:
    model = MyGPT2()
    with check_refused(model, "1 of its names are not in the model: head_bias"):
        load_into(model, with_zeros("head_bias"), tiny)
    with check_refused(model, "1 of its names are not in the model: head_bias"):
        to_hf_state_dict(model, with_zeros("head_bias"))
