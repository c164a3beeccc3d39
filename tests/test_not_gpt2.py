"""Other models are recognized before missing settings are reported, and aliases are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compat import CheckpointError, inspect_checkpoint, load_pretrained
from compat.checkpoint import open_checkpoint
from tests.conftest import State, Write
from tests.foreign_files import ARGS, linear, masks


def llama() -> State:
    """Return a state dict with the names of Llama."""
    names = [f"model.layers.{i}.{n}.weight" for i in range(2) for n in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )]  # fmt: skip
    return dict.fromkeys(["model.embed_tokens.weight", *names, "lm_head.weight"], torch.zeros(8, 8))


def rnn() -> State:
    """Return makemore's recurrent model, whose embedding has the same name as GPT-2's."""
    cell = nn.Linear(16, 8)
    return {
        "start": torch.zeros(1, 8),
        "wte.weight": torch.zeros(27, 8),
        "cell.xh_to_h.weight": cell.weight.data,
        "cell.xh_to_h.bias": cell.bias.data,
        "lm_head.weight": torch.zeros(27, 8),
    }


def lstm() -> State:
    model = nn.ModuleDict({"wte": nn.Embedding(27, 8), "rnn": nn.LSTM(8, 8)})
    return dict(model.state_dict())


def bert() -> State:
    names = ["embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight"]
    return dict.fromkeys(names, torch.zeros(8, 8))


OTHERS = {"llama": llama, "rnn": rnn, "lstm": lstm, "bert": bert}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin", "ckpt.pt"])
@pytest.mark.parametrize("config", [None, {"model_type": "gpt2"}, {"model_type": "llama"}, {}])
@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_reported_first(
    tmp_path: Path, name: str, config: object, other: str
) -> None:
    state: Any = {k: v.clone() for k, v in OTHERS[other]().items()}
    if name.endswith(".safetensors"):
        save_file(state, tmp_path / name)
    else:
        wrapped = {"model": state, "model_args": {}} if name == "ckpt.pt" else state
        torch.save(wrapped, tmp_path / name)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is not a GPT-2: ") as caught:
        load_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.error == str(caught.value)
    assert found.tensors == len(state) and not found.loads


def gated(state: State) -> State:
    """Return GPT-2's tensors with a gate in each MLP."""
    gates = {f"h.{i}.mlp.c_gate.weight": torch.randn(96, 24) for i in range(3)}
    return {**linear(state), **{f"transformer.{name}": gate for name, gate in gates.items()}}


@pytest.mark.parametrize("name", ["model.pt", "ckpt.pt"])
def test_a_gated_model_with_the_names_of_gpt2_is_reported(
    tmp_path: Path, state: State, name: str
) -> None:
    content: Any = gated(state)
    torch.save({"model": content, "model_args": {}} if "ck" in name else content, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is not a GPT-2: .*h\.\{0…2\}\.mlp\.c_gate\.weight"):
        load_pretrained(tmp_path)


def test_missing_tensors_are_reported_before_the_number_of_heads(
    tmp_path: Path, state: State
) -> None:
    kept = {k: v for k, v in linear({**state, **masks()}).items() if "wpe" not in k}
    torch.save(kept, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"wpe\.weight"):
        load_pretrained(tmp_path)


def test_the_error_for_names_of_the_linear_dialect_suggests_adapt(
    tmp_path: Path, tiny: Path
) -> None:
    torch.save(load_pretrained(tiny).state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"is not a GPT-2: .*tok_emb\.weight(?s:.*)adapt"):
        load_pretrained(tmp_path)


# nanoGPT's arguments


@pytest.mark.parametrize("field", ["num_heads", "n_heads", "num_attention_heads"])
def test_aliases_of_the_number_of_heads_are_accepted(
    tmp_path: Path, state: State, field: str
) -> None:
    args = {field if name == "n_head" else name: value for name, value in ARGS.items()}
    torch.save({"model": linear(state), "model_args": args}, tmp_path / "ckpt.pt")
    assert open_checkpoint(tmp_path).config.n_head == 4


def test_aliases_of_all_sizes_are_accepted(tmp_path: Path, state: State) -> None:
    args = {"num_layers": 3, "num_heads": 4, "hidden_size": 24, "context_length": 32}
    torch.save({"model": linear(state), "model_args": args}, tmp_path / "ckpt.pt")
    config = open_checkpoint(tmp_path).config
    assert (config.n_layer, config.n_head, config.n_embd, config.n_positions) == (3, 4, 24, 32)


def test_two_aliases_with_different_values_are_refused(tmp_path: Path, state: State) -> None:
    args = {**ARGS, "num_heads": 2}
    torch.save({"model": linear(state), "model_args": args}, tmp_path / "ckpt.pt")
    with pytest.raises(Exception, match=r"n_head.*4.*2"):
        open_checkpoint(tmp_path)


# Ids outside the vocabulary


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bos_token_id": 50256}, "bos_token_id 50256"),
        ({"eos_token_id": 97}, "eos_token_id 97"),
        ({"eos_token_id": [0, 200]}, "eos_token_id 200"),
        ({"pad_token_id": -1}, "pad_token_id -1"),
        ({"bos_token_id": 99, "eos_token_id": 98}, "bos_token_id 99 and eos_token_id 98"),
    ],
)
def test_an_id_outside_the_vocabulary_is_noted(
    write: Write, state: State, changes: dict[str, Any], named: str
) -> None:
    folder = write(state, **changes)
    notes = open_checkpoint(folder).notes
    assert len(notes) == 1 and named in notes[0] and "0 to 96" in notes[0]
    assert inspect_checkpoint(folder).notes == notes
    with torch.no_grad():
        logits: Tensor = load_pretrained(folder)(torch.zeros(1, 3, dtype=torch.long))
    assert logits.isfinite().all()


def test_ids_inside_the_vocabulary_are_not_noted(tiny: Path) -> None:
    assert open_checkpoint(tiny).notes == []
