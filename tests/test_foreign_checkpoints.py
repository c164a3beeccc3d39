"""Checkpoints of nanoGPT, files that only resemble them, and the choice of a file in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import check_parity, load_pretrained
from compat.checkpoint import foreign, open_checkpoint
from compat.errors import CheckpointError, ConfigError
from tests.checkpoint_files import check_contents
from tests.conftest import State, Write, noisy_reference
from tests.foreign_files import (
    ARGS,
    NANO_GPT,
    PROJECTIONS,
    TANH,
    linear,
    logits_of,
    plain_state,
)
from tests.loading_common import both_dialects

Make = Callable[..., Path]


@pytest.fixture
def nano(tmp_path: Path, state: State) -> Callable[..., Path]:
    """A function that writes a ckpt.pt as nanoGPT does: `nano(state, prefix, **changes)`."""

    def write(tensors: State | None = None, prefix: str = "transformer.", **changes: Any) -> Path:
        tensors = state if tensors is None else tensors
        head = {"lm_head.weight": tensors["wte.weight"]} if "wte.weight" in tensors else {}
        content = {
            "model": linear({**head, **tensors}, prefix),
            "optimizer": {"state": {0: {"exp_avg": torch.ones(24)}}, "param_groups": [{"lr": 0.1}]},
            "model_args": {**ARGS, **changes},
            "iter_num": 100,
            "best_val_loss": torch.tensor(1.5),
            "config": {"dataset": "shakespeare", "device": "cuda"},
        }
        torch.save(content, tmp_path / "ckpt.pt")
        return tmp_path

    return write


# nanoGPT


@pytest.mark.parametrize("wrapped", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_a_checkpoint_of_nanogpt_is_read(nano: Make, state: State, wrapped: str) -> None:
    folder = nano(prefix=f"{wrapped}transformer.")
    for source in (folder, folder / "ckpt.pt"):
        checkpoint = open_checkpoint(source)
        check_contents(checkpoint, state)
        config = checkpoint.config
        assert (config.n_layer, config.n_head, config.n_embd) == (3, 4, 24)
        assert (config.n_positions, config.vocab_size) == (32, 97)
        assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.0, 0.0, 0.0)
        assert (config.activation_function, config.tie_word_embeddings) == ("gelu", True)
        assert (checkpoint.kind, config.stop_ids) == ("nanoGPT", ())
        assert "since 2023" in "\n".join(checkpoint.notes)


@both_dialects
@pytest.mark.parametrize(("config", "same"), [(None, True), (TANH, False), (NANO_GPT, True)])
def test_the_gelu_of_nanogpt_is_exact_unless_a_config_overrides_it(
    nano: Make, dialect: str, config: dict[str, str] | None, same: bool
) -> None:
    reference = noisy_reference(seed=3, **NANO_GPT)
    folder = nano(plain_state(reference))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    difference = (logits_of(load_pretrained(folder, dialect)) - logits_of(reference)).abs().max()
    assert (difference < 1e-4) == same, difference
    assert check_parity(dialect, folder).passed


@pytest.mark.parametrize("omitted", PROJECTIONS)
def test_a_missing_transposition_of_a_projection_is_detected(
    nano: Make, monkeypatch: pytest.MonkeyPatch, omitted: str
) -> None:
    """The tests above depend on this, because a square projection fits in either layout."""
    reference = noisy_reference(seed=3, **NANO_GPT)
    folder = nano(plain_state(reference))
    transposed = tuple(name for name in PROJECTIONS if name != omitted)
    monkeypatch.setattr(foreign, "PROJECTIONS", transposed)
    if omitted != "attn.c_proj.weight":
        with pytest.raises(CheckpointError, match="looks transposed"):
            open_checkpoint(folder)
    else:
        found = logits_of(load_pretrained(folder))
        assert (found - logits_of(reference)).abs().max() > 0.1


def without_biases(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}


@both_dialects
def test_biases_that_nanogpt_omits_are_zero(nano: Make, dialect: str) -> None:
    reference = noisy_reference(seed=4, **NANO_GPT)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    folder = nano(without_biases(plain_state(reference)), bias=False)
    check_contents(open_checkpoint(folder), plain_state(reference))
    found = logits_of(load_pretrained(folder, dialect))
    assert torch.allclose(found, logits_of(reference), atol=1e-4)
    assert check_parity(dialect, folder).passed


def test_unexpected_biases_are_refused(nano: Make) -> None:
    with pytest.raises(CheckpointError, match=r"biases although bias is False.*h\.\{0…2\}\.ln_1"):
        open_checkpoint(nano(bias=False))


def test_missing_biases_are_reported(nano: Make, state: State) -> None:
    with pytest.raises(CheckpointError, match=r"19 missing: h\.\{0…2\}\.ln_1\.bias"):
        open_checkpoint(nano(without_biases(state)))


def test_a_vocabulary_padded_by_nanogpt_is_kept(nano: Make, state: State) -> None:
    state["wte.weight"] = torch.randn(50304, 24)
    checkpoint = open_checkpoint(nano(state, vocab_size=50304))
    check_contents(checkpoint, state)
    assert (checkpoint.config.vocab_size, checkpoint.config.eos_token_id) == (50304, 50256)


def test_the_head_of_nanogpt_may_be_untied(nano: Make, state: State) -> None:
    folder = nano({**state, "lm_head.weight": state["wte.weight"] + 1})
    assert not open_checkpoint(folder).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_layer": 10**9}, ["n_layer is 1000000000 by its model_args", "3 by its tensors"]),
        ({"n_embd": 48}, ["n_embd is 48", "24 by its tensors"]),
        ({"block_size": 64}, ["n_positions is 64", "32 by its tensors"]),
        ({"vocab_size": 98}, ["vocab_size is 98", "97 by its tensors"]),
        ({"n_head": 5}, ["'n_head' is 5", "does not divide"]),
        ({"n_kv_head": 2}, ["'n_kv_head' = 2", "does not understand"]),
        ({"n_head": "4"}, ["'n_head' is '4'", "must be of type int"]),
        ({"n_head": torch.ones(2)}, ["model_args", "numbers"]),
    ],
)
def test_impossible_arguments_are_refused(
    nano: Make, changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(nano(**changes))
    assert [words for words in named if words not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"n_head": 6}, r"n_head is 4 by its model_args, but 6 by config\.json"),
        ({"model_type": "gpt2", "n_positions": 64}, "n_positions is 32 by its model_args, but 64"),
    ],
)
def test_a_config_that_contradicts_the_arguments_is_refused(
    nano: Make, config: dict[str, Any], named: str
) -> None:
    folder = nano()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named):
        open_checkpoint(folder)


def test_a_complete_hugging_face_config_is_used_for_a_nanogpt_file(
    nano: Make, tiny: Path, state: State
) -> None:
    folder = nano()
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    checkpoint = open_checkpoint(folder)
    check_contents(checkpoint, state)
    assert checkpoint.config.activation_function == "gelu_new"


def test_a_nanogpt_checkpoint_in_hugging_faces_layout_is_refused(
    tmp_path: Path, state: State
) -> None:
    torch.save({"model": state, "model_args": ARGS}, tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=r"are \[in, out\]: h\.\{0…2\}\.attn\.c_attn"):
        open_checkpoint(tmp_path)


# Hugging Face checkpoints are not mistaken for nanoGPT's


def test_linear_layout_with_hugging_faces_config_is_refused(write: Write, state: State) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = write(linear(state), name)
        with pytest.raises(CheckpointError, match=r"c_attn\.weight: looks transposed"):
            open_checkpoint(folder / name)


def test_hugging_faces_layout_needs_its_config(write: Write, state: State) -> None:
    folder = write(state)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(folder, n_head=4)
    (folder / "config.json").write_text(json.dumps({"n_head": 4, "block_size": 32}))
    with pytest.raises(ConfigError, match="'block_size' = 32"):
        open_checkpoint(folder)


def test_n_head_must_agree_with_hugging_faces_config(tiny: Path, state: State) -> None:
    check_contents(open_checkpoint(tiny, n_head=4), state)
    with pytest.raises(ConfigError, match=r"n_head is passed as 6, but .*config\.json has 4"):
        load_pretrained(tiny, n_head=6)


# The choice of a file in a folder


def test_hugging_faces_files_are_preferred(nano: Make, tiny: Path, state: State) -> None:
    folder = nano({name: tensor + 1 for name, tensor in state.items()})
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    checkpoint = open_checkpoint(folder)
    check_contents(checkpoint, state)
    assert checkpoint.notes == ["model.safetensors is used, and ckpt.pt beside it is not"]


def test_a_single_file_is_preferred_to_shards(write: Write, state: State) -> None:
    folder = write(state)
    (folder / "model.safetensors.index.json").write_text("{}")
    checkpoint = open_checkpoint(folder)
    check_contents(checkpoint, state)
    assert checkpoint.notes == [
        "model.safetensors is used, and model.safetensors.index.json beside it is not"
    ]


def test_an_error_lists_weight_files_with_other_names(tmp_path: Path, state: State) -> None:
    for name in ("b.pt", "a.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).endswith(
        "If the weights are in a.safetensors and b.pt, use the path of that file."
    )
    assert "ckpt.pt or model.pt" in str(caught.value)


@pytest.mark.parametrize("option", [{"revision": "main"}, {"verify": True}])
def test_options_of_the_hub_are_refused_for_a_folder(tiny: Path, option: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"{next(iter(option))}.* applies only to the hub"):
        open_checkpoint(tiny, **option)
