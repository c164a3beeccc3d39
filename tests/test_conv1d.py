"""The `conv1d` blocks are bit-identical to those of torch and transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block

from compat import GPT2Config
from compat.dialects import conv1d

CONFIG = GPT2Config(n_positions=64)
THEIRS = transformers.GPT2Config(n_positions=64, attn_implementation="eager")


@pytest.fixture
def x() -> Tensor:
    """Hidden states (2, 5, 768)."""
    torch.manual_seed(0)
    return 3 * torch.randn(2, 5, 768)


def load_same_noise(ours: nn.Module, theirs: nn.Module) -> None:
    """Load the same noise into every parameter of both modules, which have the same names."""
    torch.manual_seed(1)
    noise = {k: 0.1 * torch.randn_like(v) for k, v in theirs.state_dict().items()}
    theirs.load_state_dict(noise)
    ours.load_state_dict(noise)
    ours.eval(), theirs.eval()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_conv1d_is_addmm_with_a_weight_of_nx_by_nf(x: Tensor) -> None:
    layer = conv1d.Conv1D(nf=5, nx=768)
    assert layer.weight.shape == (768, 5) and layer.bias.shape == (5,)
    layer.bias.data.normal_()
    # With the layer's number of rows, because some BLAS libraries round fewer rows differently.
    expected = torch.addmm(layer.bias, x.flatten(0, -2), layer.weight)
    assert torch.equal(layer(x), expected.view(*x.shape[:-1], 5))


def test_conv1d_equals_a_linear_layer_with_the_transposed_weight(x: Tensor) -> None:
    layer, dense = conv1d.Conv1D(nf=5, nx=768), nn.Linear(768, 5)
    layer.bias.data.normal_()
    dense.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
    torch.testing.assert_close(layer(x), dense(x))
    square, untransposed = conv1d.Conv1D(nf=768, nx=768), nn.Linear(768, 768)
    untransposed.load_state_dict({"weight": square.weight, "bias": square.bias})
    assert not torch.allclose(square(x), untransposed(x), atol=0.1)


def test_conv1d_equals_that_of_transformers(x: Tensor) -> None:
    ours, theirs = conv1d.Conv1D(5, 768), transformers.pytorch_utils.Conv1D(5, 768)
    load_same_noise(ours, theirs)
    assert torch.equal(ours(x), theirs(x))


def test_conv1d_accepts_non_contiguous_hidden_states(x: Tensor) -> None:
    layer = conv1d.Conv1D(5, 768)
    transposed = x.transpose(0, 1)
    assert torch.equal(layer(transposed), layer(transposed.contiguous()))


@pytest.mark.parametrize("bias", [True, False])
def test_norms_are_bit_identical_to_those_of_transformers(x: Tensor, bias: bool) -> None:
    """transformers has no norm without a bias, so torch's LayerNorm is the reference for it."""
    ours = conv1d.TransformerBlock(GPT2Config(layer_norm_bias=bias)).ln_1
    theirs = GPT2Block(THEIRS, layer_idx=0).ln_1 if bias else nn.LayerNorm(768, bias=False)
    load_same_noise(ours, theirs)
    assert torch.equal(ours(x), theirs(x))


def test_feed_forward_equals_that_of_transformers(x: Tensor) -> None:
    ours, theirs = conv1d.FeedForward(CONFIG), GPT2MLP(3072, THEIRS)
    load_same_noise(ours, theirs)
    assert count(ours) == 4_722_432
    assert torch.equal(ours(x), theirs(x))
    ours.act = nn.GELU()
    assert not torch.equal(ours(x), theirs(x))


def test_feed_forward_applies_dropout_in_training(x: Tensor) -> None:
    ours = conv1d.FeedForward(GPT2Config(resid_pdrop=0.5))
    assert (ours(x) == 0).float().mean() > 0.4
    assert (ours.eval()(x) == 0).float().mean() < 0.01


def test_attention_equals_that_of_transformers(x: Tensor) -> None:
    ours, theirs = conv1d.MultiHeadAttention(CONFIG), GPT2Attention(THEIRS, layer_idx=0)
    load_same_noise(ours, theirs)
    mask = torch.full((5, 5), torch.finfo(x.dtype).min).triu(1)[None, None]
    assert torch.equal(ours(x), theirs(x, attention_mask=mask)[0])
    assert not torch.equal(ours(x), theirs(x)[0])  # without the mask


def test_attention_without_qkv_bias_has_2360064_parameters() -> None:
    without = conv1d.MultiHeadAttention({"emb_dim": 768, "n_heads": 12, "qkv_bias": False})
    assert count(without) == 2_360_064


def test_block_equals_that_of_transformers(x: Tensor) -> None:
    ours, theirs = conv1d.TransformerBlock(CONFIG), GPT2Block(THEIRS, layer_idx=0)
    load_same_noise(ours, theirs)
    mask = torch.full((5, 5), torch.finfo(x.dtype).min).triu(1)[None, None]
    assert torch.equal(ours(x), theirs(x, attention_mask=mask))


def test_the_model_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert count(conv1d.GPTModel(GPT2Config())) == 124_439_808
        large = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
        assert count(conv1d.GPTModel(large)) == 774_030_080
        xl = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
        assert count(conv1d.GPTModel(xl)) == 1_557_611_200
