"""Every common mistake is found at the tap where it is made, and harmless variants pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import ParityReport, check_parity, load_pretrained
from compat.dialects import conv1d, linear
from tests.conftest import MakeCheckpoint
from tests.parity.mistakes import MISTAKES, block, patch_attention, patch_block

pytestmark = pytest.mark.usefixtures("shared_reference")


def check_broken(
    folder: Path, make_mistake: Callable[[linear.GPTModel], None], calibrate: bool = True
) -> ParityReport:
    """Load `linear`, make the mistake, and compare the model on ids that fill the context."""
    model = load_pretrained(folder, "linear")
    assert isinstance(model, linear.GPTModel)
    torch.manual_seed(0)
    make_mistake(model)
    return check_parity(model, folder, calibrate=calibrate)


@pytest.mark.parametrize("calibrate", [True, False])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_where_it_is_made(tiny: Path, name: str, calibrate: bool) -> None:
    first_tap, make_mistake = MISTAKES[name]
    report = check_broken(tiny, make_mistake, calibrate)
    assert not report.passed
    assert report.first_divergence == first_tap
    assert first_tap in report.headline
    if name in ("left_in_training_mode", "layers_in_the_wrong_order"):
        return  # these break more than one layer
    # Local errors are attributed to no piece before the mistake and to no other layer.
    blamed = [result.tap for result in report.taps if not result.local.within]
    assert blamed[0] == first_tap
    assert {tap.rpartition(".")[0] for tap in blamed} == {first_tap.rpartition(".")[0]}


def test_there_are_at_least_25_mistakes() -> None:
    assert len(MISTAKES) >= 25


def test_an_ignored_inverse_layer_scale_is_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(scale_attn_by_inverse_layer_idx=True)

    def omit_the_layer_scale(model: linear.GPTModel) -> None:
        for i, layer in enumerate(model.trf_blocks):
            layer.attention.scale *= i + 1

    assert check_parity("linear", folder).passed
    assert check_broken(folder, omit_the_layer_scale).first_divergence == "h.1.probs"


def test_an_ignored_epsilon_of_the_config_is_found(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(layer_norm_epsilon=1e-3)

    def use_the_default(model: linear.GPTModel) -> None:
        model.trf_blocks[0].norm1.eps = 1e-5

    assert check_parity("linear", folder).passed
    assert check_broken(folder, use_the_default).first_divergence == "h.0.ln_1"


def test_the_output_of_the_last_block_is_not_the_last_hidden_state(tiny: Path) -> None:
    """Mistake 10: transformers' `hidden_states[-1]` comes after the final norm."""
    from compat.checkpoint import open_checkpoint
    from compat.parity import random_ids
    from compat.parity.trace import record
    from compat.parity.transformers_gpt2 import load_reference, taps

    checkpoint = open_checkpoint(tiny)
    reference, ids = load_reference(checkpoint, torch.float32), random_ids(checkpoint)
    recorded = record(reference, taps(3, "eager"), ids)
    hidden_states = reference(ids, output_hidden_states=True).hidden_states
    assert torch.equal(hidden_states[-1], recorded["ln_f"])
    assert not torch.allclose(hidden_states[-1], recorded["h.2.out"], atol=0.1)


def interleave_qkv(model: conv1d.GPTModel) -> None:
    """Mistake 3 in the fused layout: the columns are ordered head by head, as in Megatron."""
    c_attn, H = model.h[1].attn.c_attn, model.config.n_head
    for parameter in (c_attn.weight, c_attn.bias):
        fused = parameter.data.unflatten(-1, (H, 3, -1))
        parameter.data = fused.transpose(-3, -2).flatten(-3).contiguous()


def swap(modules: dict[str, nn.Module], one: str, other: str) -> None:
    modules[one], modules[other] = modules[other], modules[one]


CONV1D_MISTAKES: dict[str, tuple[str, Callable[[conv1d.GPTModel], object]]] = {
    "square_c_proj_transposed": (
        "h.1.attn",
        lambda m: m.h[1].attn.c_proj.weight.data.copy_(m.h[1].attn.c_proj.weight.t().clone()),
    ),
    "qkv_interleaved_by_head": ("h.1.q", interleave_qkv),
    "erf_gelu": ("h.1.act", lambda m: setattr(m.h[1].mlp, "act", nn.GELU())),
    "norms_swapped": ("h.1.ln_1", lambda m: swap(m.h[1]._modules, "ln_1", "ln_2")),
    "bias_of_the_wrong_layer": (
        "h.1.fc",
        lambda m: setattr(m.h[1].mlp.c_fc, "bias", m.h[0].mlp.c_fc.bias),
    ),
    "no_scale": ("h.1.probs", lambda m: setattr(m.h[1].attn, "scale", 1.0)),
    "eps_1e_6": ("h.0.ln_1", lambda m: setattr(m.h[0].ln_1, "eps", 1e-6)),
    "shift_dropped": ("ln_f", lambda m: setattr(m.ln_f, "bias", None)),
    "random_head": (
        "logits",
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.randn(97, 24))),
    ),
    "training_mode": ("embed", lambda m: m.train()),
}


@pytest.mark.parametrize("name", CONV1D_MISTAKES)
def test_a_mistake_in_conv1d_is_found_where_it_is_made(tiny: Path, name: str) -> None:
    first_tap, make_mistake = CONV1D_MISTAKES[name]
    model = load_pretrained(tiny, "conv1d")
    assert isinstance(model, conv1d.GPTModel)
    torch.manual_seed(0)
    make_mistake(model)
    assert check_parity(model, tiny).first_divergence == first_tap


def masked(fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, hidden: scores.masked_fill(hidden, fill).softmax(dim=-1)


def renormalised(scores: Tensor, hidden: Tensor) -> Tensor:
    probs = scores.softmax(dim=-1).masked_fill(hidden, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def in_place_residual(x: Tensor, b: linear.TransformerBlock) -> Tensor:
    """Mistake 19: the tensor that an earlier tap recorded is overwritten."""
    x += b.attention(b.norm1(x))
    x += b.feedforward(b.norm2(x))
    return x


HARMLESS: dict[str, Callable[[linear.GPTModel], None]] = {
    "mask_of_minus_infinity": lambda m: patch_attention(m, weigh=masked(-math.inf)),
    "mask_of_minus_10000": lambda m: patch_attention(m, weigh=masked(-1e4)),
    "mask_after_softmax_renormalised": lambda m: patch_attention(m, weigh=renormalised),
    "in_place_residual": lambda m: patch_block(m, in_place_residual),
    "fused_layer_norm": lambda m: setattr(
        block(m).norm1,
        "forward",
        lambda x: nn.functional.layer_norm(x, (24,), block(m).norm1.scale, block(m).norm1.shift),
    ),
    "fused_tanh_gelu": lambda m: setattr(
        block(m).feedforward.layers[1],
        "forward",
        lambda x: nn.functional.gelu(x, approximate="tanh"),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_variant_passes(tiny: Path, name: str) -> None:
    report = check_broken(tiny, HARMLESS[name])
    assert report.passed, report.headline
