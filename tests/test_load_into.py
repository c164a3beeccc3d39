"""load_into loads a user's module completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from compat import (
    CheckpointError,
    CompatError,
    GPT2Config,
    NameMap,
    NameMapError,
    Row,
    Same,
    Split,
    Transpose,
    load_into,
    to_hf_state_dict,
)
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS
from tests.conftest import MakeCheckpoint, noisy_reference
from tests.loading_common import both_dialects, check_identical, ids, save, state_of_tied
from tests.own_gpt2 import MyGPT2, my_map


def check_refused(
    model: nn.Module,
    name_map: NameMap,
    source: Path,
    *fragments: str,
    error: type[CompatError] = CompatError,
) -> None:
    """Check that load_into raises this error and leaves all parameters unchanged."""
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    with pytest.raises(error) as caught:
        load_into(model, name_map, source)
    for fragment in fragments:
        assert fragment in str(caught.value)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    check_identical({name: parameter.detach() for name, parameter in after.items()}, values)


# A user's module


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("head", "row"), [("tied", True), ("tied", False), ("untied", True), (None, False)]
)
def test_load_into_loads_a_users_module(
    make_checkpoint: MakeCheckpoint, tied: bool, head: str | None, row: bool
) -> None:
    folder = make_checkpoint(tie_word_embeddings=tied)
    model = MyGPT2(head).eval()
    name_map = my_map(without="" if row else "lm_head.weight")
    if not tied and head != "untied":  # the model has no separate head
        check_refused(model, name_map, folder, "head" if row or head else "lm_head.weight")
        return
    load_into(model, name_map, folder)
    reference = noisy_reference(tie_word_embeddings=tied)
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=1e-4, atol=1e-4)
    if head is not None:
        assert (model.head.weight is model.tokens.weight) is (head == "tied")
    expected = state_of_tied(reference) if tied else reference.state_dict()
    check_identical(to_hf_state_dict(model, name_map), expected)


def test_load_into_keeps_dtype_mode_and_frozen_parameters(tiny: Path) -> None:
    model = MyGPT2().to(torch.float64)
    model.stack.eval()
    model.places.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    load_into(model, my_map(), tiny)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert [module.training for module in model.modules()] == modes
    assert [k for k, v in model.named_parameters() if not v.requires_grad] == ["places.weight"]
    assert torch.equal(
        model.places.weight.float(), load_file(tiny / "model.safetensors")["transformer.wpe.weight"]
    )


def test_load_into_keeps_the_parameters_that_an_optimizer_holds(tiny: Path) -> None:
    model = MyGPT2()
    held = torch.optim.SGD(model.parameters()).param_groups[0]["params"]
    load_into(model, my_map(), tiny)
    assert {id(parameter) for parameter in held} == {id(p) for p in model.parameters()}
    assert torch.equal(held[0], load_file(tiny / "model.safetensors")["transformer.wte.weight"])


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_load_into_fills_a_module_built_on_the_meta_device(tiny: Path, head: str) -> None:
    with torch.device("meta"):
        model = MyGPT2(head)
    load_into(model, my_map(), tiny)
    ordinary = MyGPT2(head)
    load_into(ordinary, my_map(), tiny)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), ordinary(ids))
    assert (model.head.weight is model.tokens.weight) == (head == "tied")


# Maps and modules that do not fit


QKV, FC = "h.{i}.attn.c_attn.weight", "h.{i}.mlp.c_fc.weight"
QKV_PARTS, WIDE = ("stack.{i}.query_key.weight", "stack.{i}.value.weight"), "stack.{i}.wide.weight"


@pytest.mark.parametrize(
    ("name_map", "fragments"),
    [
        pytest.param(
            my_map(Row("ln_f.weight", ("the_end",), Same())),
            ("1 of its names are not in the model: the_end", "have no row: end.weight"),
            id="name not in the model",
        ),
        pytest.param(
            my_map(Row("ln_f.bias", ("end.shift",), Same())),
            ("1 parameters of the model have no row: end.bias",),
            id="misspelt bias",
        ),
        pytest.param(
            my_map(Row(FC, ("stack.0.wide.weight",), Transpose())),
            ("has stack.0.wide.weight in two rows",),
            id="layer forgotten",
        ),
        pytest.param(
            my_map(without="wpe.weight"),
            ("1 tensors have no row: wpe.weight",),
            id="tensor without a row",
        ),
        pytest.param(
            my_map(without=FC),
            ("3 tensors have no row: h.{0…2}.mlp.c_fc.weight",),
            id="tensors of all layers without a row",
        ),
        pytest.param(
            my_map(Row("h.{i}.rotary", ("stack.{i}.rotary",), Same())),
            ("3 rows name no tensor: h.{0…2}.rotary",),
            id="row without a tensor",
        ),
        pytest.param(
            my_map(Row(FC, (WIDE,), Same())),
            (
                "stack.0.wide.weight: found [24, 96] (h.0.mlp.c_fc.weight [24, 96], same), "
                "expected [96, 24]",
                "stack.2.wide.weight",
            ),
            id="not transposed",
        ),
        pytest.param(
            my_map(Row(QKV, QKV_PARTS, Split(3))),
            ("h.0.attn.c_attn.weight: split in 3 makes 3 tensors, but the row names 2",),
            id="split with too few names",
        ),
        pytest.param(
            my_map(Row(QKV, QKV_PARTS, Split(1))),
            ("h.0.attn.c_attn.weight: split in 1 makes 1 tensors, but the row names 2",),
            id="split with too many names",
        ),
        pytest.param(
            my_map(Row(QKV, QKV_PARTS, Split(5))),
            ("h.0.attn.c_attn.weight", "into 5 equal parts"),
            id="split in parts that do not divide",
        ),
    ],
)
def test_load_into_refuses_a_map_that_does_not_fit(
    tiny: Path, name_map: NameMap, fragments: tuple[str, ...]
) -> None:
    check_refused(MyGPT2(), name_map, tiny, *fragments, error=NameMapError)


def test_load_into_refuses_a_parameter_without_a_row(tiny: Path) -> None:
    model = MyGPT2()
    model.temperature = nn.Parameter(torch.ones(1))
    check_refused(model, my_map(), tiny, "1 parameters", "no row: temperature", error=NameMapError)


def test_load_into_refuses_a_module_of_another_size(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(n_positions=64)
    message = "places.weight: found [64, 24] (wpe.weight [64, 24], same), expected [32, 24]"
    check_refused(MyGPT2(), my_map(), folder, message, error=NameMapError)


@pytest.mark.parametrize("n_layer", [2, 4])
def test_load_into_refuses_another_depth(make_checkpoint: MakeCheckpoint, n_layer: int) -> None:
    name = "stack.2.wide.bias" if n_layer == 2 else "stack.3.wide.weight"
    folder = make_checkpoint(n_layer=n_layer)
    check_refused(MyGPT2(), my_map(), folder, name.removesuffix(".wide.bias"), error=NameMapError)


def test_load_into_changes_nothing_if_the_last_tensor_is_not_finite(tmp_path: Path) -> None:
    reference = noisy_reference()
    with torch.no_grad():
        reference.transformer.h[2].mlp.c_proj.bias[7] = float("nan")
    folder = save(tmp_path, reference)
    check_refused(MyGPT2(), my_map(), folder, "h.2.mlp.c_proj.bias", "[7]", error=CheckpointError)


def test_load_into_refuses_buffers_without_values(tiny: Path) -> None:
    with torch.device("meta"):
        model = MyGPT2("tied")
        model.register_buffer("mask", torch.ones(32, 32), persistent=False)
    with pytest.raises(CompatError, match=r"1 buffers are on the meta device.*: mask"):
        load_into(model, my_map(), tiny)


# Blocks without biases


LACKING = [
    ("qkv_bias", ("attn.c_attn.bias",), "h.{0…2}.attn.c_attn.bias"),
    ("layer_norm_bias", ("ln_1.bias", "ln_2.bias", "ln_f.bias"), "ln_f.bias"),
]


@both_dialects
@pytest.mark.parametrize(("field", "biases", "named"), LACKING)
def test_a_bias_that_the_model_lacks_is_refused_unless_zero(
    tiny: Path, dialect: str, field: str, biases: tuple[str, ...], named: str
) -> None:
    config = GPT2Config.from_dict({**open_checkpoint(tiny).config.to_hf_dict(), field: False})
    model = DIALECTS[dialect].model_class(config)
    name_map = DIALECTS[dialect].name_map
    check_refused(model, name_map, tiny, named, "not zero", error=CheckpointError)


@both_dialects
@pytest.mark.parametrize(("field", "biases", "named"), LACKING)
def test_zero_biases_that_the_model_lacks_are_skipped_and_written_again(
    tmp_path: Path, dialect: str, field: str, biases: tuple[str, ...], named: str
) -> None:
    reference = noisy_reference()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(biases):
                parameter.zero_()
    folder = save(tmp_path, reference)
    config = GPT2Config.from_dict({**open_checkpoint(folder).config.to_hf_dict(), field: False})
    model = DIALECTS[dialect].model_class(config).eval()
    load_into(model, DIALECTS[dialect].name_map, folder)
    check_identical(to_hf_state_dict(model), state_of_tied(reference))
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=1e-4, atol=1e-4)


# Saving


def test_a_users_module_cannot_be_saved_without_a_map() -> None:
    with pytest.raises(NameMapError, match="MyGPT2 is not one of compat's models"):
        to_hf_state_dict(MyGPT2())


def test_a_map_that_lacks_a_parameter_is_refused_when_saving() -> None:
    with pytest.raises(
        NameMapError, match=r"1 parameters of the model have no row: places\.weight"
    ):
        to_hf_state_dict(MyGPT2(), my_map(without="wpe.weight"))


def test_a_map_without_an_embedding_can_be_used_for_saving() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 5, bias=False)})
    name_map = NameMap((Row("lm_head.weight", ("head.weight",), Same()),))
    written = to_hf_state_dict(model, name_map)
    check_identical(written, {"lm_head.weight": model["head"].weight.detach()})
