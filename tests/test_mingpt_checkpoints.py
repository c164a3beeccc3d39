"""Files of minGPT and makemore: projections of `nn.Linear`, unknown number of heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compat import GPT2Config, check_parity, generate, load_pretrained
from compat.checkpoint import foreign, open_checkpoint
from compat.checkpoint.layout import HEAD, expected_shapes
from compat.dialects import Model
from compat.errors import CheckpointError, ConfigError
from tests.checkpoint_files import check_contents
from tests.conftest import State, noisy_reference
from tests.foreign_files import NANO_GPT, linear, logits_of, masks, plain_state
from tests.loading_common import both_dialects

Make = Callable[..., Path]


@pytest.fixture
def mini(tmp_path: Path, state: State) -> Callable[..., Path]:
    """A function that writes minGPT's untied state dict and, unless it is None, a config.json."""

    def write(config: object = None, *, masked: bool = True, **tensors: Tensor) -> Path:
        head = {"lm_head.weight": state["wte.weight"] + 1}
        content = {**state, **head, **(masks() if masked else {}), **tensors}
        torch.save(linear(content), tmp_path / "model.pt")
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def count_correct_sums(model: Model) -> int:
    """Return how many of the 10,000 sums of two numbers below 100 the model predicts correctly."""
    first, second = torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100)
    question = torch.stack([first // 10, first % 10, second // 10, second % 10], dim=1)
    seen = generate(model, question, max_new_tokens=2, temperature=0.0)
    with torch.no_grad():  # the last digit is predicted at the last position
        hundreds = model(seen)[:, -1].argmax(-1)
    return int((seen[:, 4] + 10 * seen[:, 5] + 100 * hundreds == first + second).sum())


@both_dialects
@pytest.mark.parametrize("source", ["adder", "adder/model.pt"])
def test_the_adder_predicts_all_sums(shared: Path, dialect: str, source: str) -> None:
    assert (
        count_correct_sums(load_pretrained(shared / "data/checkpoints" / source, dialect)) == 10_000
    )


@pytest.mark.parametrize("n_head", [1, 4, 6])
def test_the_adder_fails_with_another_number_of_heads(
    shared: Path, tmp_path: Path, n_head: int
) -> None:
    """The previous test depends on this, because the shapes are the same and few sums are wrong."""
    (tmp_path / "model.pt").write_bytes((shared / "data/checkpoints/adder/model.pt").read_bytes())
    assert count_correct_sums(load_pretrained(tmp_path, n_head=n_head)) < 10_000


@both_dialects
def test_the_adder_has_parity(shared: Path, dialect: str) -> None:
    assert check_parity(dialect, shared / "data/checkpoints/adder").passed


def nested(**model: Any) -> dict[str, Any]:
    """Return the content of config.json as minGPT writes it."""
    sizes = {"n_layer": None, "n_head": None, "n_embd": None}
    return {
        "system": {"seed": 3407},
        "model": {"model_type": None, **sizes, "vocab_size": 97, "block_size": 32, **model},
        "trainer": {"device": "auto", "betas": [0.9, 0.95]},
    }


@pytest.mark.parametrize(
    ("config", "n_head"),
    [
        (None, 4),
        (nested(), 4),
        (nested(n_head=4, n_embd=24, n_layer=3), None),
        (nested(n_head=4, embd_pdrop=0.2), 4),
        ({"n_head": 4}, None),
        ({"n_head": 4, "block_size": 32, "vocab_size": 97, "n_embd": 24, "n_embd2": 64}, None),
    ],
)
def test_a_state_dict_of_mingpt_is_read(
    mini: Make, state: State, config: object, n_head: int | None
) -> None:
    checkpoint = open_checkpoint(mini(config), n_head=n_head)
    check_contents(checkpoint, {**state, "lm_head.weight": state["wte.weight"] + 1})
    found = checkpoint.config
    assert (found.n_layer, found.n_head, found.n_embd) == (3, 4, 24)
    assert (found.n_positions, found.vocab_size) == (32, 97)
    assert (found.activation_function, found.tie_word_embeddings) == ("gelu_new", False)
    assert checkpoint.kind == "minGPT"
    assert "ignored 3 causal-mask buffers" in "\n".join(checkpoint.notes)


@both_dialects
def test_a_mingpt_file_computes_what_the_reference_computes(tmp_path: Path, dialect: str) -> None:
    reference = noisy_reference(seed=5, tie_word_embeddings=False)
    torch.save(linear({**plain_state(reference), **masks()}), tmp_path / "model.pt")
    model = load_pretrained(tmp_path, dialect, n_head=4)
    assert torch.allclose(logits_of(model), logits_of(reference), atol=1e-4)
    other = load_pretrained(tmp_path, dialect, n_head=3)
    assert not torch.allclose(logits_of(other), logits_of(reference), atol=0.1)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_the_presets_of_mingpt_have_the_published_sizes(name: str, count: int) -> None:
    n_layer, n_head, n_embd = foreign.PRESETS[name]
    assert n_embd == 64 * n_head
    shapes = expected_shapes(GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=n_embd))
    assert sum(math.prod(shape) for name, shape in shapes.items() if name != HEAD) == count


def test_a_preset_defines_the_number_of_heads(tmp_path: Path) -> None:
    reference = noisy_reference(n_layer=3, n_head=3, n_embd=48, tie_word_embeddings=False)
    torch.save(linear({**plain_state(reference), **masks()}), tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(nested(model_type="gpt-nano")))
    assert torch.allclose(logits_of(load_pretrained(tmp_path)), logits_of(reference), atol=1e-4)


def test_linear_layout_is_read_from_safetensors(tmp_path: Path, state: State) -> None:
    head = {"lm_head.weight": state["wte.weight"] + 1}
    save_file(linear({**state, **head, **masks()}), tmp_path / "model.safetensors")
    for mmap in (False, True):
        check_contents(open_checkpoint(tmp_path, n_head=4, mmap=mmap), {**state, **head})
    assert check_parity("linear", open_checkpoint(tmp_path, n_head=4)).passed


@pytest.mark.parametrize("config", [None, nested(), {"activation_function": "gelu_new"}])
def test_an_unknown_number_of_heads_is_an_error(mini: Make, config: object) -> None:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(mini(config))
    for words in ("model.pt", "number of heads", "--n-head", "config.json", "1, 2, 3, 4, 6, 8, 12"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "n_head", "named"),
    [
        ({"n_head": 4}, 6, r"n_head is 4 by config\.json, but 6 by the argument n_head"),
        (nested(model_type="gpt-nano"), None, "n_embd is 48 by minGPT's 'gpt-nano', but 24"),
        (nested(block_size=16), 4, r"n_positions is 16 by config\.json, but 32 by its tensors"),
        (nested(n_head=6, model_type="gpt-mini"), None, "n_head|n_layer|n_embd"),
        (None, 5, "does not divide"),
        (None, 0, "'n_head' is 0"),
        (nested(rotary=True), 4, "'rotary' = True"),
        (nested(model_type=["gpt2"]), None, "number of heads"),
    ],
)
def test_contradictory_settings_are_refused(
    mini: Make, config: object, n_head: int | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        open_checkpoint(mini(config), n_head=n_head)


def test_an_unknown_activation_without_masks_is_an_error(mini: Make) -> None:
    """nanoGPT's bare state dict looks the same, but was trained with another GELU."""
    with pytest.raises(ConfigError, match="does not state its activation"):
        open_checkpoint(mini(masked=False), n_head=4)
    checkpoint = open_checkpoint(mini({**NANO_GPT, "n_head": 4}, masked=False))
    assert checkpoint.config.activation_function == "gelu"


def test_projections_in_two_layouts_are_refused(mini: Make, state: State) -> None:
    folder = mini(**{"h.1.mlp.c_fc.weight": state["h.1.mlp.c_fc.weight"].t()})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, n_head=4)
    for words in ("are [in, out]: h.1.mlp.c_fc.weight", "others that are [out, in]: h.{0…2}."):
        assert words in str(caught.value)
