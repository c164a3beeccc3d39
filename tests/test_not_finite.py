"""The error for non-finite logits names the first non-finite hidden state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compat import GenerationError, generate, load_pretrained, stream
from compat.checkpoint import open_checkpoint
from compat.checkpoint.checks import all_finite
from compat.decoding.not_finite import first_not_finite
from compat.dialects import Model, get_dialect
from compat.tap import expand_taps
from tests.conftest import State, Write
from tests.generation_common import BATCH, PROMPT, each_dialect, greedy, ours


def unchecked(folder: Path, dialect: str = "linear") -> Model:
    return load_pretrained(open_checkpoint(folder, check_finite=False), dialect)


VALUES = {"NaN": torch.nan, "an infinity": torch.inf}


@each_dialect
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("tensor", "at", "tap"),
    [
        ("wte.weight", 17 * 24, "embed"),  # the embedding of id 17
        ("h.0.ln_1.weight", 0, "h.0.ln_1"),
        ("h.1.attn.c_attn.bias", 0, "h.1.q"),
        ("h.1.attn.c_attn.bias", 24, "h.1.k"),
        ("h.1.attn.c_attn.bias", 71, "h.1.v"),
        ("h.1.attn.c_proj.bias", 0, "h.1.attn"),
        ("h.2.ln_2.bias", 0, "h.2.ln_2"),
        ("h.1.mlp.c_fc.bias", 0, "h.1.fc"),
        ("h.2.mlp.c_proj.bias", 0, "h.2.mlp"),
        ("ln_f.weight", 0, "ln_f"),
    ],
)
def test_a_non_finite_weight_is_located_at_the_first_tap_that_it_affects(
    state: State, write: Write, dialect: str, tensor: str, at: int, tap: str, value: str
) -> None:
    state[tensor].view(-1)[at] = VALUES[value]
    model = unchecked(write(state), dialect)
    for temperature in (0, 1.0):
        with pytest.raises(GenerationError) as caught:
            generate(model, PROMPT, max_new_tokens=2, temperature=temperature)
        message = str(caught.value)
        assert "not finite" in message
        assert f" {tap} is the first hidden state that contains {value}" in message


@each_dialect
def test_float16_overflow_names_the_layer_and_the_remedy(tiny: Path, dialect: str) -> None:
    model = load_pretrained(tiny, dialect).half()
    with torch.no_grad():
        weight = get_dialect(dialect).name_map.expand(3)
        (name,) = (row.ours[0] for row in weight if row.hf == "h.1.mlp.c_fc.weight")
        model.get_parameter(name).mul_(30_000)
    with pytest.raises(GenerationError) as caught:
        greedy(model, PROMPT, 4)
    assert "h.1.fc is the first hidden state that contains" in str(caught.value)
    assert "65,504" in str(caught.value) and "bfloat16" in str(caught.value)


@pytest.mark.parametrize("ids", [[[5, 17, 60], [8, 7, 6]], [[8, 7, 6], [5, 17, 60]]])
def test_the_row_with_non_finite_values_is_examined(
    state: State, write: Write, ids: list[list[int]]
) -> None:
    """Only prompts with token 60 read the NaN."""
    state["wte.weight"][60, 0] = torch.nan
    head = {"lm_head.weight": state["wte.weight"].nan_to_num()}
    model = unchecked(write({**state, **head}))
    assert torch.isfinite(model(torch.tensor([[8, 7, 6]]))).all()
    with pytest.raises(GenerationError, match=r"after 3 tokens, embed is the first"):
        greedy(model, torch.tensor(ids), 2)


def test_a_later_non_finite_value_is_reported_when_it_appears(
    state: State, write: Write, tiny: Path
) -> None:
    """The non-finite value is in the position embedding of the third new id."""
    state["wpe.weight"][len(PROMPT[0]) + 2, 0] = torch.inf
    model = unchecked(write(state))
    steps, found = stream(model, PROMPT, max_new_tokens=9, temperature=0, stop_ids=()), []
    with pytest.raises(GenerationError, match=r"after 6 tokens, embed is the first"):
        for ids in steps:
            found.append(int(ids))
    assert found == greedy(ours(tiny), PROMPT, 3)[0, 3:].tolist()


@each_dialect
def test_no_tap_of_a_finite_model_is_reported(tiny: Path, dialect: str) -> None:
    model: Model = ours(tiny, dialect)
    taps = expand_taps(get_dialect(dialect).taps, n_layer=3)
    assert first_not_finite(model, taps, lambda: model(BATCH)) is None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_finite_values_are_finite(dtype: torch.dtype, transposed: bool) -> None:
    """Their squares overflow."""
    values = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    values[1] = torch.finfo(dtype).smallest_normal
    view = values.mT if transposed else values
    assert all_finite(view)
    for value in (torch.nan, torch.inf, -torch.inf):
        changed = values.clone()
        changed[2, 3] = value
        assert not all_finite(changed.mT if transposed else changed)
