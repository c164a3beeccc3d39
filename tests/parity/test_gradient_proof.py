"""Every gradient is compared with the reference's, and the first wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat import (
    Engine,
    NameMap,
    NameMapError,
    ParityError,
    check_parity,
    load_into,
    load_pretrained,
    open_checkpoint,
)
from compat.dialects import conv1d, linear
from compat.parity import GradientsProof
from compat.parity.check import random_ids
from compat.parity.gradients import prove_gradients
from compat.parity.reference import Reference
from tests.command_line import Cli
from tests.conftest import MakeCheckpoint
from tests.own_gpt2 import MyGPT2, my_map

pytestmark = pytest.mark.usefixtures("shared_reference")


def loaded(folder: Path, **options: Any) -> linear.GPTModel:
    model = load_pretrained(folder, "linear", **options)
    assert isinstance(model, linear.GPTModel)
    return model


def compare_gradients(
    model: nn.Module, folder: Path, name_map: NameMap = linear.NAME_MAP
) -> GradientsProof:
    """Compare only the gradients."""
    checkpoint = open_checkpoint(folder)
    reference = Reference(checkpoint, next(model.parameters()).dtype)
    return prove_gradients(model, reference, name_map, random_ids(checkpoint), model)


def first_wrong(proof: GradientsProof) -> str:
    return proof.failed[0].tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dialect", [linear, conv1d])
def test_the_gradients_of_the_dialects_equal_those_of_transformers(
    tiny: Path, dialect: Any, dtype: torch.dtype
) -> None:
    model = load_pretrained(tiny, dialect.__name__.rpartition(".")[2], dtype=dtype)
    proof = compare_gradients(model, tiny, dialect.NAME_MAP)
    assert proof.passed and "all 40 tensors agree" in proof.headline
    order = [result.tensor for result in proof.results]
    assert order[:3] == ["ln_f.weight", "ln_f.bias", "h.2.mlp.c_proj.weight"]
    assert order[-2:] == ["wpe.weight", "wte.weight"] and len(order) == 40
    names = [name for result in proof.results for name in result.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_half_precision_is_compared_in_float32(tiny: Path) -> None:
    report = check_parity("linear", tiny, dtype="bfloat16", gradients=True)
    assert report.passed and "the gradients of all 40 tensors agree" in report.headline
    assert report.gradients is None and report.float32 is not None
    assert report.float32.gradients is not None and report.float32.gradients.passed


def test_an_untied_head_has_its_own_gradient(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tie_word_embeddings=False)
    proof = compare_gradients(load_pretrained(folder), folder)
    assert proof.passed and proof.results[0].tensor == "lm_head.weight"


@pytest.mark.parametrize("head", ["tied", "own", None])
def test_a_users_model_is_compared_by_its_name_map(tiny: Path, head: str | None) -> None:
    model = MyGPT2(head)
    name_map = my_map(without="lm_head.weight" if head is None else "")
    load_into(model, name_map, tiny)
    assert compare_gradients(model, tiny, name_map).passed
    assert model.tokens.weight.grad is None
    if head == "own":  # only one of the two receives a gradient
        model.head.weight.register_hook(torch.zeros_like)
        assert first_wrong(compare_gradients(model, tiny, name_map)) == "lm_head.weight"


class HalfGradient(torch.autograd.Function):
    """A custom backward pass that halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def detached_attention(model: linear.GPTModel) -> None:
    attention = model.trf_blocks[1].attention
    inner = attention.forward
    attention.forward = lambda x, *rest: inner(x.detach(), *rest)


def detached_residual(model: linear.GPTModel) -> None:
    block = model.trf_blocks[1]

    def forward(x: Tensor, *_: Any) -> Tensor:
        x = x.detach() + block.attention(block.norm1(x))
        return x + block.feedforward(block.norm2(x))

    block.forward = forward


def custom_backward(model: linear.GPTModel) -> None:
    model.trf_blocks[1].feedforward.layers[1].register_forward_hook(
        lambda module, args, output: HalfGradient.apply(output)
    )


def head_without_gradient(model: linear.GPTModel) -> None:
    inner = model.final_norm.forward
    model.final_norm.forward = torch.no_grad()(inner)


def overwritten(model: linear.GPTModel) -> None:
    """Overwrite the input of the first projection in a way that autograd does not detect."""
    block = model.trf_blocks[1]

    def damage(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        args[0].data.mul_(0.5)

    block.feedforward.layers[0].register_forward_hook(damage)


# The first wrong gradient, in order from the logits to the embeddings.
MISTAKES: dict[str, tuple[Callable[[linear.GPTModel], None], str]] = {
    "detached_attention": (detached_attention, "h.1.ln_1.weight"),
    "detached_residual": (detached_residual, "h.0.mlp.c_proj.weight"),
    "custom_backward": (custom_backward, "h.1.mlp.c_fc.weight"),
    "head_without_gradient": (head_without_gradient, "ln_f.weight"),
    "overwritten": (overwritten, "h.1.mlp.c_fc.weight"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_gradients_are_found_although_the_logits_are_right(tiny: Path, name: str) -> None:
    make_mistake, first = MISTAKES[name]
    model, ids = loaded(tiny), torch.arange(20).view(2, 10)
    before = model(ids)
    make_mistake(model)
    assert torch.equal(model(ids), before)
    proof = compare_gradients(model, tiny)
    assert not proof.passed and first_wrong(proof) == first
    assert f"is that of {first} (" in proof.headline


def test_the_report_names_the_first_wrong_gradient(tiny: Path) -> None:
    model = loaded(tiny)
    detached_attention(model)
    report = check_parity(model, tiny, gradients=True)
    assert not report.passed and report.first_divergence == "gradient of h.1.ln_1.weight"
    assert "computes what transformers computes, but trains differently" in report.headline
    assert "the backward pass does not reach it" in report.headline
    assert report.gradients is not None
    assert report.gradients.failed[0].unused == ("trf_blocks.1.norm1.scale",)
    with pytest.raises(ParityError, match="trains differently"):
        report.raise_if_failed()


def test_an_in_place_change_that_autograd_detects_fails(tiny: Path) -> None:
    model = loaded(tiny)

    def damage(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        args[0].mul_(0.5)

    model.trf_blocks[1].feedforward.layers[0].register_forward_hook(damage)
    proof = compare_gradients(model, tiny)
    assert not proof.passed and "modified by an inplace operation" in proof.headline


def test_active_dropout_fails(tiny: Path) -> None:
    assert not compare_gradients(loaded(tiny).train(), tiny).passed


def test_the_gradients_of_the_user_are_restored(tiny: Path) -> None:
    model = loaded(tiny)
    model.tok_emb.weight.grad = kept = torch.ones_like(model.tok_emb.weight)
    model.pos_emb.weight.requires_grad_(False)
    proof = compare_gradients(model, tiny)
    assert proof.passed and proof.frozen == ["pos_emb.weight"]
    assert model.tok_emb.weight.grad is kept and bool((kept == 1).all())
    assert model.final_norm.scale.grad is None and not model.pos_emb.weight.requires_grad


def test_models_without_comparable_gradients_are_refused(tiny: Path) -> None:
    with pytest.raises(ParityError, match="Engine has no gradients"):
        check_parity(Engine.from_pretrained(tiny), tiny, gradients=True)
    model = MyGPT2()
    with pytest.raises(ParityError, match=r"name_map=adapt\(model, source\)\.name_map"):
        check_parity(model, tiny, gradients=True)
    with pytest.raises(NameMapError, match="parameters of the model have no row"):
        compare_gradients(model, tiny, my_map(without="ln_f.bias"))


def test_the_parity_command_compares_gradients(tiny: Path, cli: Cli) -> None:
    done = cli("parity", "--model", str(tiny), "--gradients")
    assert done.code == 0 and "gradients" in done.out and "all 40 tensors agree" in done.out
    shown = done.out.partition("gradients")[2]
    rows = [line.strip("│ ").split()[0] for line in shown.splitlines() if "│ ✓" in line]
    assert rows == ["ln_f", "h.2", "h.1", "h.0", "wpe", "wte"]
    found = cli("parity", "--model", str(tiny), "--gradients", "--json").json()
    assert found["gradients"]["passed"] and len(found["gradients"]["results"]) == 40
    assert cli("parity", "--model", str(tiny), "--gradients", "--engine", "float32").code == 2
