"""A new model is initialised as in GPT-2 and transformers: small weights, and a loss of ln V."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compat import GPT2Config, load_block, load_pretrained
from compat.dialects import DIALECTS
from compat.loading import to_hf_state_dict
from tests.loading_common import both_dialects

SHAPES = [
    {"vocab_size": 1000, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4},
    {"vocab_size": 5000, "n_positions": 32, "n_embd": 128, "n_layer": 6, "n_head": 2},
    {"vocab_size": 300, "n_positions": 16, "n_embd": 96, "n_layer": 1, "n_head": 3},
    {"vocab_size": 50257, "n_positions": 32, "n_embd": 192, "n_layer": 3, "n_head": 6},
]


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_of_a_new_model_is_ln_v(dialect: str, shape: dict[str, int], tied: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(**shape, tie_word_embeddings=tied)
    model = DIALECTS[dialect].model_class(config).eval()
    ids = torch.randint(0, config.vocab_size, (4, config.n_positions + 1))
    positions = config.n_positions
    with torch.no_grad():
        logits = model(ids[:, :positions])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(config.vocab_size), rel=0.03)


def expected_std(name: str, n_layer: int) -> float | None:
    """Return the standard deviation of a tensor, or None if all of its values are equal."""
    if name.endswith("c_proj.weight"):
        return 0.02 / math.sqrt(2 * n_layer)
    matrices = ("c_attn.weight", "c_fc.weight", "wte.weight", "wpe.weight", "lm_head.weight")
    return 0.02 if name.endswith(matrices) else None


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
def test_every_kind_of_weight_is_initialised_as_in_transformers(dialect: str, tied: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(**SHAPES[1], tie_word_embeddings=tied)
    model = DIALECTS[dialect].model_class(config)
    state = to_hf_state_dict(model)
    assert ("lm_head.weight" in state) != tied
    for name, tensor in state.items():
        std = expected_std(name, config.n_layer)
        if std is None:
            expected = 1.0 if name.endswith(".weight") else 0.0
            assert torch.equal(tensor, torch.full_like(tensor, expected)), name
        else:
            assert tensor.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(tensor.mean().item()) < 0.05 * std + 4 * std / math.sqrt(tensor.numel())


@both_dialects
def test_the_head_of_a_new_model_stays_tied(dialect: str) -> None:
    model = DIALECTS[dialect].model_class(GPT2Config(**SHAPES[0]))
    head = model.get_parameter("out_head.weight" if dialect == "linear" else "lm_head.weight")
    assert head is next(iter(model.parameters()))


@both_dialects
def test_a_single_block_is_initialised_like_a_block_of_the_model(dialect: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(**SHAPES[1])
    block = DIALECTS[dialect].block_class(config)
    found = sorted(round(p.std().item(), 4) for p in block.parameters() if p.ndim > 1)
    residual = 0.02 / math.sqrt(2 * config.n_layer)
    n_other_matrices = 4 if dialect == "linear" else 2  # expansion, q, k, v
    assert found == pytest.approx([residual] * 2 + [0.02] * n_other_matrices, rel=0.05)
    biases = [p for name, p in block.named_parameters() if name.endswith("bias")]
    assert biases and not any(bias.count_nonzero() for bias in biases)


@both_dialects
def test_loading_draws_no_random_numbers(
    tiny: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError("random numbers were drawn")

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(Tensor, name, drawn)
    load_pretrained(tiny, dialect)
    load_block(tiny, 1, dialect)
