"""inspect_checkpoint describes a source, and reports the error that loading it would raise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import CompatError, HubError, inspect_checkpoint, load_pretrained, load_tokenizer
from compat.checkpoint.contents import Stored
from tests.checkpoint_files import save_sharded
from tests.command_line import Cli
from tests.conftest import State, Write
from tests.foreign_files import ARGS, linear, masks
from tests.test_cli_errors import failing_with

PARAMETERS = 97 * 24 + 32 * 24 + 3 * (12 * 24 * 24 + 13 * 24) + 2 * 24  # of conftest.TINY


def test_a_checkpoint_of_transformers_is_described(tiny: Path) -> None:
    found = inspect_checkpoint(tiny)
    path = tiny / "model.safetensors"
    assert found.loads and found.error is None
    assert (found.source, found.weights) == (str(tiny), str(path))
    assert (found.format, found.layout) == ("Hugging Face safetensors", "[in, out]")
    assert found.files == {"model.safetensors": path.stat().st_size}
    assert (found.parameters, found.tensors) == (PARAMETERS, 3 * 12 + 4)
    assert (found.dtypes, found.prefixes) == ({"float32": 40}, ["transformer."])
    assert found.config == {
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 24,
        "n_positions": 32,
        "vocab_size": 97,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
    assert (found.notes, found.names) == ([], [])
    assert found.tokenizer == {"files": [], "tokens": None, "error": None}
    json.dumps(found.to_json(), allow_nan=False)


def test_no_tensor_of_a_safetensors_file_is_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stored, "read", failing_with(RuntimeError("read")))
    assert inspect_checkpoint(tiny).loads
    with pytest.raises(RuntimeError, match="read"):
        load_pretrained(tiny)


def test_the_number_of_parameters_is_that_of_the_model(demo_model: Any) -> None:
    found = inspect_checkpoint("demo")
    assert found.parameters == sum(p.numel() for p in demo_model.parameters())
    tokens = max(load_tokenizer("demo").encode("The")) < 1024
    assert tokens and found.tokenizer["tokens"] == 1024
    assert found.tokenizer["files"] == ["vocab.json", "merges.txt"]


@pytest.fixture(scope="module")
def demo_model() -> Any:
    return load_pretrained("demo")


def test_shards_are_described(tiny: Path, tmp_path: Path) -> None:
    found = inspect_checkpoint(save_sharded(tmp_path, tiny))
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert found.format == f"Hugging Face safetensors, {len(shards)} shards"
    index = tmp_path / "model.safetensors.index.json"
    assert found.files == {path.name: path.stat().st_size for path in (index, *shards)}
    assert found.loads and found.parameters == PARAMETERS


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_with_masks_and_a_head_are_described(
    write: Write, state: State, zipped: bool
) -> None:
    tensors = {**state, **masks(), "lm_head.weight": state["wte.weight"].clone()}
    folder = write(tensors, "pytorch_model.bin")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    found = inspect_checkpoint(folder)
    assert found.loads and found.parameters == PARAMETERS
    assert found.format == ("Hugging Face pickle" if zipped else "Hugging Face legacy pickle")
    assert (found.prefixes, len(found.notes)) == ([""], 2)


def test_a_checkpoint_of_nanogpt_is_described(tmp_path: Path, state: State) -> None:
    model = linear(state, "_orig_mod.transformer.")
    torch.save({"model": model, "model_args": ARGS, "optimizer": {}}, tmp_path / "ckpt.pt")
    found = inspect_checkpoint(tmp_path)
    assert found.loads
    assert (found.format, found.layout) == ("nanoGPT pickle", "[out, in]")
    assert (found.prefixes, found.parameters) == (["_orig_mod.transformer."], PARAMETERS)
    assert found.config["activation_function"] == "gelu"


def test_a_checkpoint_of_mingpt_needs_the_number_of_heads(tmp_path: Path, state: State) -> None:
    head = {"lm_head.weight": state["wte.weight"] + 1}
    torch.save(linear({**state, **head, **masks()}), tmp_path / "model.pt")
    found = inspect_checkpoint(tmp_path)
    assert (found.loads, found.format) == (False, "minGPT pickle")
    assert "--n-head" in str(found.error)
    assert found.tensors == 3 * 12 + 4 + 1 + 3
    found = inspect_checkpoint(tmp_path, n_head=4)
    assert found.loads and found.parameters == PARAMETERS + 97 * 24
    assert found.config["n_head"] == 4


def test_several_data_types_are_counted(write: Write, state: State) -> None:
    state["ln_f.bias"] = state["ln_f.bias"].half()
    found = inspect_checkpoint(write(state))
    assert found.dtypes == {"float32": 39, "float16": 1}
    assert len(found.notes) == 1


# Checkpoints that would not load


def loading_error(source: Path) -> str:
    with pytest.raises(CompatError) as caught:
        load_pretrained(source)
    return str(caught.value)


def test_the_tensors_are_reported_despite_an_invalid_config(write: Write, state: State) -> None:
    folder = write(state, n_head=0)
    found = inspect_checkpoint(folder)
    assert not found.loads
    assert found.error == loading_error(folder)
    assert (found.config["n_head"], found.config["n_layer"]) == (0, 3)
    assert (found.tensors, found.parameters, found.layout) == (40, PARAMETERS, "[in, out]")
    assert found.dtypes == {"float32": 40}
    assert len(found.names) == 5 and set(found.names) < state.keys()


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_config_that_is_not_json_is_reported(write: Write, state: State, text: str) -> None:
    folder = write(state)
    (folder / "config.json").write_text(text)
    found = inspect_checkpoint(folder)
    assert found.error == loading_error(folder)
    assert (found.config, found.tensors) == ({}, 40)


def test_the_first_of_two_faults_is_reported(write: Write, state: State) -> None:
    folder = write(state)
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"")
    assert inspect_checkpoint(folder).error == loading_error(folder)


@pytest.mark.parametrize(
    "value", ["[" * 900 + "]" * 900, "NaN", '"\\ud800"', '"\\u001b[31m"', '{"a": {}}', "1e400"]
)
@pytest.mark.parametrize("name", ["n_layer", "activation_function"])
def test_any_config_can_be_printed(
    cli: Cli, tiny: Path, tmp_path: Path, value: str, name: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "odd")
    (folder / "config.json").write_text(f'{{"model_type": "gpt2", "{name}": {value}}}')
    for as_json in ([], ["--json"]):
        done = cli("inspect", folder, *as_json)
        assert (done.code, done.err) == (3, "")
        assert done.out.replace("\n", "").isprintable()
        done.out.encode()


def test_the_config_is_reported_despite_an_invalid_file(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = inspect_checkpoint(folder)
    assert found.error == loading_error(folder)
    assert (found.format, found.tensors, found.config["n_layer"]) == ("safetensors", None, 3)
    assert found.bytes == path.stat().st_size


@pytest.mark.parametrize(
    "changes", [{"n_layer": 2}, {"n_layer": 4}, {"vocab_size": 98}, {"n_layer": 10**9}]
)
def test_tensors_that_contradict_the_config_are_reported(
    write: Write, state: State, changes: dict[str, int]
) -> None:
    folder = write(state, **changes)
    found = inspect_checkpoint(folder)
    assert found.error == loading_error(folder)
    assert found.config.items() >= changes.items()
    assert (found.tensors, found.format) == (40, "Hugging Face safetensors")


def test_the_layout_reveals_a_transposed_tensor(write: Write, state: State) -> None:
    name = "h.1.mlp.c_fc.weight"
    folder = write({**state, name: state[name].t().contiguous()})
    found = inspect_checkpoint(folder)
    assert found.layout == "[in, out] and [out, in]"
    assert found.error == loading_error(folder)


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    found = inspect_checkpoint(tmp_path)
    assert found.error == loading_error(tmp_path)
    assert (found.weights, found.format, found.files, found.tensors) == (None, None, {}, None)


def test_an_unreachable_hub_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compat.checkpoint.hub.fetch", failing_with(HubError("no route")))
    with pytest.raises(HubError, match="no route"):
        inspect_checkpoint("some/model")


# The tokenizer


def test_a_tokenizer_with_more_tokens_than_the_model_is_reported(
    tmp_path: Path, tiny: Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "larger")
    demo = Path(str(inspect_checkpoint("demo").weights)).parent
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(demo / name, folder)
    found = inspect_checkpoint(folder)
    assert found.loads  # because the model can be used with ids
    assert "id 1023, but config.json has vocab_size 97" in found.tokenizer["error"]


def test_ids_without_text_are_not_counted(tmp_path: Path, write: Write, state: State) -> None:
    demo = Path(str(inspect_checkpoint("demo").weights)).parent
    folder = write({**state, "wte.weight": torch.randn(1050, 24)}, vocab_size=1050)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(demo / name, folder)
    assert inspect_checkpoint(folder).tokenizer["tokens"] == 1024


def test_the_tokenizer_of_gpt2_is_not_fetched(
    write: Write, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compat.inspection.load_tokenizer", failing_with(RuntimeError("fetched")))
    folder = write({**state, "wte.weight": torch.randn(50304, 24)}, vocab_size=50304)
    found = inspect_checkpoint(folder)
    assert found.tokenizer == {"files": [], "tokens": 50257, "error": None}


@pytest.mark.parametrize(
    ("name", "format_", "count"),
    [
        ("adder", "minGPT pickle", 86_160),
        ("tarot", "Hugging Face pickle", 929_536),
        ("machining", "Hugging Face safetensors", 236_224),
    ],
)
def test_checkpoints_by_other_authors_are_described(
    shared: Path, name: str, format_: str, count: int
) -> None:
    found = inspect_checkpoint(shared / "data/checkpoints" / name)
    assert (found.loads, found.format, found.parameters) == (True, format_, count)


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        ({}, []),
        (
            {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
            [
                "vLLM cannot serve it: its GPT-2 refuses scale_attn_by_inverse_layer_idx and "
                "reorder_and_upcast_attn",
                "ctranslate2 computes other logits: it ignores scale_attn_by_inverse_layer_idx",
            ],
        ),
        (
            {"scale_attn_weights": False},
            [
                "vLLM computes other logits: it ignores scale_attn_weights = false",
                "ctranslate2 computes other logits: it ignores scale_attn_weights = false",
            ],
        ),
    ],
)
def test_settings_that_serving_tools_do_not_support_are_noted(
    write: Write, state: State, config: dict[str, Any], notes: list[str]
) -> None:
    found = inspect_checkpoint(write(state, **config))
    assert found.loads and found.notes == notes
