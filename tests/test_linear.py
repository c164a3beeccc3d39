"""The `linear` blocks equal the formulas of torch and transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import CheckpointError, ConfigError, GPT2Config, load_into
from compat.checkpoint import open_checkpoint
from compat.dialects import linear

NOTEBOOK = {
    "vocab_size": 50257,
    "context_length": 64,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 1,
    "drop_rate": 0.1,
    "qkv_bias": False,
}


@pytest.fixture
def x() -> Tensor:
    """Hidden states (2, 5, 768) with a different mean and spread at each position."""
    torch.manual_seed(0)
    return 3 * torch.randn(2, 5, 768) + torch.randn(2, 5, 1)


def noisy(module: nn.Module) -> nn.Module:
    """Add noise to every parameter of the module, and return it in eval mode."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_layer_norm_yields_mean_0_and_variance_1(x: Tensor) -> None:
    out = linear.LayerNorm(768)(x)  # scale 1 and shift 0
    torch.testing.assert_close(out.mean(-1), torch.zeros(2, 5), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(2, 5), atol=1e-5, rtol=0)


def test_scale_and_shift_can_undo_layer_norm(x: Tensor) -> None:
    """With scale = √variance and shift = mean, the output equals the input."""
    position = x[1, 3]
    norm = linear.LayerNorm(768, eps=0.0)
    norm.scale.data.fill_(position.var(correction=0).sqrt().item())
    norm.shift.data.fill_(position.mean().item())
    torch.testing.assert_close(norm(position), position, atol=1e-5, rtol=0)


def test_layer_norm_equals_that_of_torch_and_differs_from_similar_formulas(x: Tensor) -> None:
    norm, fused = noisy(linear.LayerNorm(768)), nn.LayerNorm(768)
    fused.load_state_dict({"weight": norm.scale, "bias": norm.shift})
    rounding = 2e-6
    assert (norm(x) - fused(x)).abs().max() < rounding

    centred = x - x.mean(-1, keepdim=True)
    unbiased = centred / torch.sqrt(x.var(-1, keepdim=True, correction=1) + norm.eps)
    std_plus_eps = centred / (x.std(-1, keepdim=True, correction=0) + norm.eps)
    for other in (unbiased, std_plus_eps):
        assert (norm(x) - (other * norm.scale + norm.shift)).abs().max() > 2 * rounding


def test_layer_norm_uses_eps(x: Tensor) -> None:
    small = 1e-3 * x
    for eps in (1e-5, 1e-3):
        fused = nn.LayerNorm(768, eps=eps)
        torch.testing.assert_close(linear.LayerNorm(768, eps)(small), fused(small))
    assert not torch.allclose(linear.LayerNorm(768, 1e-3)(small), linear.LayerNorm(768)(small))


def test_layer_norm_without_bias_equals_that_of_torch(x: Tensor) -> None:
    norm, fused = noisy(linear.LayerNorm(768, bias=False)), nn.LayerNorm(768, bias=False)
    assert [name for name, _ in norm.named_parameters()] == ["scale"]
    fused.load_state_dict({"weight": norm.scale})
    torch.testing.assert_close(norm(x), fused(x), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_layer_norm_in_other_precisions_equals_that_of_torch(x: Tensor, dtype: torch.dtype) -> None:
    """As in torch's kernel, sums are computed in float32, and the result keeps its data type."""
    norm, fused = noisy(linear.LayerNorm(768)).to(dtype), nn.LayerNorm(768, dtype=dtype)
    fused.load_state_dict({"weight": norm.scale, "bias": norm.shift})
    assert norm(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(norm(x.to(dtype)), fused(x.to(dtype)))


def test_feed_forward_has_4722432_parameters(x: Tensor) -> None:
    feed_forward = noisy(linear.FeedForward(NOTEBOOK))
    assert count(feed_forward) == 4_722_432
    expand, _, project = feed_forward.layers
    inner = torch.nn.functional.gelu(x @ expand.weight.T + expand.bias, approximate="tanh")
    by_hand = inner @ project.weight.T + project.bias
    torch.testing.assert_close(feed_forward(x), by_hand, atol=1e-4, rtol=1e-5)


def test_attention_without_qkv_bias_has_2360064_parameters(x: Tensor) -> None:
    attention = noisy(linear.MultiHeadAttention(NOTEBOOK))
    assert count(attention) == 2_360_064
    assert count(linear.MultiHeadAttention({**NOTEBOOK, "qkv_bias": True})) == 2_360_064 + 3 * 768
    q, k, v = (
        (x @ W.weight.T).unflatten(-1, (12, 64)).transpose(1, 2)
        for W in (attention.W_query, attention.W_key, attention.W_value)
    )
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    by_torch = attention.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), by_torch, atol=1e-5, rtol=1e-4)


def test_attention_is_causal(x: Tensor) -> None:
    attention = noisy(linear.MultiHeadAttention(NOTEBOOK))
    changed = x.clone()
    changed[:, 3:] += 1
    assert torch.equal(attention(x)[:, :3], attention(changed)[:, :3])
    assert not torch.allclose(attention(x)[:, 3:], attention(changed)[:, 3:])


def test_the_causal_mask_is_not_stored() -> None:
    attention = linear.MultiHeadAttention(NOTEBOOK)
    assert "mask" not in attention.state_dict()
    assert not dict(attention.named_buffers())


def test_every_block_accepts_the_notebooks_dictionary(x: Tensor) -> None:
    assert linear.TransformerBlock(NOTEBOOK).eval()(x).shape == x.shape
    names = {"emb_dim": 768, "num_heads": 12, "number_of_layers": 2, "context_length": 8}
    model = linear.GPTModel({**names, "vocab_size": 11, "drop_rate": 0.0, "qkv_bias": True})
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 11)
    assert len(model.trf_blocks) == 2 and model.config.attn_pdrop == 0.0


def test_dropout_is_off_in_eval_mode_and_on_in_training(x: Tensor) -> None:
    block = noisy(linear.TransformerBlock(NOTEBOOK))
    assert torch.equal(block(x), block(x))
    block.train()
    assert not torch.equal(block(x), block(x))


def test_the_model_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert count(linear.GPTModel(GPT2Config())) == 124_439_808
        assert count(linear.GPTModel(GPT2Config(n_layer=6))) == 81_912_576
        medium = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        assert count(linear.GPTModel(medium)) == 354_823_168


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'gelu_old'.*must be one of gelu_new"):
        linear.FeedForward({"activation_function": "gelu_old"})


def test_norm_biases_are_refused_by_a_model_without_them(tiny: Path) -> None:
    fields = {**open_checkpoint(tiny).config.to_hf_dict(), "layer_norm_bias": False}
    with pytest.raises(CheckpointError, match=r"7 biases.*\.ln_1\.bias.*\.ln_2\.bias"):
        load_into(linear.GPTModel(fields), linear.NAME_MAP, tiny)
