"""open_checkpoint reads all layouts of published checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compat import CheckpointError
from compat.checkpoint import open_checkpoint
from tests.checkpoint_files import check_contents, save_sharded
from tests.conftest import MakeCheckpoint, State, Write

C, N, LAYERS = 24, 32, 3  # the sizes in conftest.TINY


def with_transformer_prefix(state: State) -> State:
    return {f"transformer.{name}": tensor for name, tensor in state.items()}


# Files


def test_a_folder_saved_by_transformers_is_read(tiny: Path, state: State) -> None:
    checkpoint = open_checkpoint(tiny)
    check_contents(checkpoint, state)
    assert checkpoint.folder == tiny
    assert checkpoint.notes == []
    assert checkpoint.dtype is torch.float32
    assert (checkpoint.config.n_layer, checkpoint.config.n_embd) == (LAYERS, C)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_a_folder_with_a_single_file_is_read(
    write: Write, state: State, name: str, with_prefix: bool
) -> None:
    folder = write(with_transformer_prefix(state) if with_prefix else state, name)
    check_contents(open_checkpoint(folder), state)
    check_contents(open_checkpoint(str(folder)), state)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "other.safetensors"])
def test_the_path_of_a_file_is_accepted(write: Write, state: State, name: str) -> None:
    checkpoint = open_checkpoint(write(state, name) / name)
    check_contents(checkpoint, state)
    assert checkpoint.weights.name == name


def test_safetensors_shards_are_read(tiny: Path, tmp_path: Path, state: State) -> None:
    folder = save_sharded(tmp_path, tiny)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    check_contents(open_checkpoint(folder), state)
    check_contents(open_checkpoint(folder / "model.safetensors.index.json"), state)


def test_pickle_shards_are_read(tiny: Path, tmp_path: Path, state: State) -> None:
    names, weight_map = list(state), {}
    for k in range(3):
        file = f"pytorch_model-{k + 1:05}-of-00003.bin"
        torch.save({name: state[name] for name in names[k::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[k::3], file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    shutil.copy(tiny / "config.json", tmp_path)
    check_contents(open_checkpoint(tmp_path), state)


def test_safetensors_are_preferred_to_a_pickle(write: Write, state: State) -> None:
    write({"not": torch.zeros(1)}, "pytorch_model.bin")
    check_contents(open_checkpoint(write(state)), state)


def test_a_pickle_of_parameters_is_read_as_tensors(write: Write, state: State) -> None:
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    check_contents(open_checkpoint(write(parameters, "pytorch_model.bin")), state)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_each_read_allocates_its_own_memory(write: Write, state: State, name: str) -> None:
    checkpoint = open_checkpoint(write(state, name))
    checkpoint.read("wte.weight").zero_()
    check_contents(checkpoint, state)


def test_a_tensor_stored_as_a_view_is_read_as_contiguous(write: Write, state: State) -> None:
    """A `.bin` file keeps the strides of `weight.T`, which a saved transposed nn.Linear has."""
    views = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in state.items()}
    checkpoint = open_checkpoint(write(views, "pytorch_model.bin"))
    assert [name for name in state if not checkpoint.read(name).is_contiguous()] == []


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_old_mask_buffers_are_ignored_and_noted(write: Write, state: State, name: str) -> None:
    masks: State = {}
    for i in range(LAYERS):
        masks[f"h.{i}.attn.bias"] = torch.ones(N, N, dtype=torch.uint8).tril()[None, None]
        masks[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    checkpoint = open_checkpoint(write(with_transformer_prefix({**state, **masks}), name))
    check_contents(checkpoint, state)
    assert len(checkpoint.notes) == 1
    assert f"ignored {2 * LAYERS} causal-mask buffers" in checkpoint.notes[0]


# The head


def test_a_stored_head_equal_to_the_embedding_stays_tied(write: Write, state: State) -> None:
    head = state["wte.weight"].clone()
    checkpoint = open_checkpoint(write({**with_transformer_prefix(state), "lm_head.weight": head}))
    check_contents(checkpoint, state)
    assert checkpoint.config.tie_word_embeddings
    assert [("lm_head.weight" in note, "equal to" in note) for note in checkpoint.notes] == [
        (True, True)
    ]


def test_a_stored_head_that_differs_is_used_untied(write: Write, state: State) -> None:
    state["lm_head.weight"] = state["wte.weight"].clone()
    state["lm_head.weight"][-1, -1] += 1e-3
    checkpoint = open_checkpoint(write(state))
    check_contents(checkpoint, state)
    assert not checkpoint.config.tie_word_embeddings
    assert [("lm_head.weight differs" in note) for note in checkpoint.notes] == [True]


def test_an_untied_head_is_read(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(tie_word_embeddings=False)
    checkpoint = open_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")
    check_contents(checkpoint, {k.removeprefix("transformer."): v for k, v in stored.items()})
    assert not torch.equal(checkpoint.read("lm_head.weight"), checkpoint.read("wte.weight"))
    assert not checkpoint.config.tie_word_embeddings
    assert checkpoint.notes == []


# Data types


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_other_data_types_are_kept(
    write: Write, state: State, dtype: torch.dtype, name: str
) -> None:
    state = {k: v.to(dtype) for k, v in state.items()}
    checkpoint = open_checkpoint(write(state, name))
    check_contents(checkpoint, state)
    assert checkpoint.dtype is dtype
    assert checkpoint.notes == []


@pytest.mark.parametrize(
    ("one", "rest", "widest"),
    [
        (torch.float32, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("exception", ["wte.weight", "ln_f.bias"])
def test_mixed_data_types_are_noted_and_the_widest_is_used(
    write: Write,
    state: State,
    exception: str,
    one: torch.dtype,
    rest: torch.dtype,
    widest: torch.dtype,
) -> None:
    state = {k: v.to(one if k == exception else rest) for k, v in state.items()}
    checkpoint = open_checkpoint(write(state))
    check_contents(checkpoint, state)
    assert checkpoint.dtype is widest
    assert [("several data types" in note) for note in checkpoint.notes] == [True]


# Sources that a user passes


@pytest.mark.parametrize(
    "source",
    ["./nofolder", "../nofolder", "nofolder/", "/no/such/folder", "~/nofolder", "~nobody/x", ".",
     "a/b/c", "out/ckpt.pt", "model.safetensors", "gpt2/model.safetensors", "pytorch_model.bin",
     "a\\b", "no--folder", "..", "folder.git", "größe", "with space", "", "-x", "x" * 300, "a\0b"],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_not_requested_from_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")

    def fail(*args: object) -> None:
        raise AssertionError(f"{args} requested from the hub")

    monkeypatch.setattr("compat.checkpoint.hub.fetch", fail)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    text = str(caught.value)
    assert any(
        words in text for words in ("does not exist", "holds no weights", "cannot be opened")
    )


@pytest.mark.parametrize("source", ["gpt2", "openai-community/gpt2", "a.b/c_d-e.f", "org/2", "x"])
def test_a_hub_id_is_fetched(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fetched").mkdir()
    monkeypatch.setattr("compat.checkpoint.hub.fetch", lambda *args: tmp_path / "fetched")
    with pytest.raises(CheckpointError, match="fetched"):
        open_checkpoint(source)


def test_a_tilde_stands_for_the_home_folder(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert open_checkpoint(f"~/{tiny.name}").folder == tiny


def test_a_folder_without_read_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(tmp_path / "closed")
