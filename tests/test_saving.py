"""Saved checkpoints have the same bits as the source, and are the same model in transformers."""

from __future__ import annotations

import json
import weakref
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.nn import functional as F

import compat.saving.shards
from compat import (
    GPT2Config,
    adapt,
    generate,
    load_into,
    load_pretrained,
    load_tokenizer,
    save_pretrained,
    to_hf_state_dict,
)
from compat.checkpoint import open_checkpoint
from compat.dialects import get_dialect
from compat.export_view import hf_tensors
from tests.conftest import TINY, MakeCheckpoint, noisy_reference
from tests.loading_common import both_dialects, check_identical, ids, save
from tests.own_gpt2 import MyGPT2, my_map
from tests.saving_common import open_in_transformers, stored_tensors, their_logits

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NOT_KEPT = {"initializer_range": 0, "n_ctx": 0, "_name_or_path": ""}  # unused in the forward pass


def special_ids(model: transformers.GPT2LMHeadModel) -> dict[str, Any]:
    settings = model.generation_config.to_dict()
    return {name: value for name, value in settings.items() if name.endswith("_token_id")}


@both_dialects
@pytest.mark.parametrize("limit", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checkpoint_is_restored_bit_by_bit(
    tmp_path: Path, dialect: str, limit: str, dtype: torch.dtype
) -> None:
    """The tensors, the configs and the logits in transformers are equal."""
    source = save(tmp_path / "source", noisy_reference().to(dtype))
    folder = tmp_path / "export"
    files = save_pretrained(load_pretrained(source, dialect), folder, max_shard_size=limit)
    assert sorted(files) == sorted(folder.iterdir())
    assert (len(list(folder.glob("model-*.safetensors"))) > 1) == (limit == "20KB")
    check_identical(stored_tensors(folder), stored_tensors(source))
    theirs, original = open_in_transformers(folder), open_in_transformers(source)
    assert theirs.dtype == dtype
    assert theirs.config.to_dict() | NOT_KEPT == original.config.to_dict() | NOT_KEPT
    assert special_ids(theirs) == special_ids(original)
    # Compare copies, because mapped tensors are aligned as in their file, and some BLAS libraries
    # round operands with another alignment differently.
    copies = deepcopy(theirs), deepcopy(original)
    assert torch.equal(*(their_logits(model, ids()) for model in copies))
    check_identical(to_hf_state_dict(load_pretrained(folder, dialect)), stored_tensors(source))


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": False},
        {"vocab_size": 128},
        {"n_inner": 40, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"scale_attn_weights": False, "resid_pdrop": 0.3},
        {"bos_token_id": None, "eos_token_id": [3, 4], "pad_token_id": 7},
        {"eos_token_id": None},
    ],
    ids=lambda config: ",".join(config),
)
@both_dialects
def test_every_config_is_restored(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, dialect: str, config: dict[str, Any]
) -> None:
    source, folder = make_checkpoint(**config), tmp_path / "export"
    save_pretrained(load_pretrained(source, dialect), folder)
    check_identical(stored_tensors(folder), stored_tensors(source))
    theirs, original = open_in_transformers(folder), open_in_transformers(source)
    assert theirs.config.to_dict() | NOT_KEPT == original.config.to_dict() | NOT_KEPT
    assert special_ids(theirs) == special_ids(original)
    assert torch.equal(their_logits(theirs, ids()), their_logits(original, ids()))
    assert open_checkpoint(folder).config == open_checkpoint(source).config


def test_the_config_has_n_ctx_and_the_data_type(tmp_path: Path, tiny: Path) -> None:
    """Older programs require n_ctx; transformers 5 loads in the data type of the config."""
    save_pretrained(load_pretrained(tiny, dtype=torch.bfloat16), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"] == TINY["n_positions"]
    assert (config["dtype"], config["model_type"]) == ("bfloat16", "gpt2")


def test_the_generation_config_has_the_ids_of_the_config(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """As in transformers, it states that it was derived from config.json."""
    source = make_checkpoint(bos_token_id=None, eos_token_id=[3, 4], pad_token_id=7)
    save_pretrained(load_pretrained(source), tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert found == {"_from_model_config": True, "eos_token_id": [3, 4], "pad_token_id": 7}


def test_several_data_types_are_kept_and_the_config_names_the_widest(
    tmp_path: Path, tiny: Path
) -> None:
    model = load_pretrained(tiny, "conv1d", dtype=torch.bfloat16)
    model.ln_f.to(torch.float32)
    save_pretrained(model, tmp_path)
    assert stored_tensors(tmp_path)["transformer.ln_f.weight"].dtype == torch.float32
    assert stored_tensors(tmp_path)["transformer.wte.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_files_have_the_format_metadata_of_pytorch(tmp_path: Path, tiny: Path) -> None:
    for limit in ("5GB", "20KB"):
        save_pretrained(load_pretrained(tiny), tmp_path, max_shard_size=limit)
        for path in tmp_path.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}


@both_dialects
def test_biases_that_the_model_lacks_are_saved_as_zeros(
    tmp_path: Path, tiny: Path, dialect: str
) -> None:
    config = replace(open_checkpoint(tiny).config, qkv_bias=False, layer_norm_bias=False)
    torch.manual_seed(3)
    model = get_dialect(dialect).model_class(config).eval()
    save_pretrained(model, tmp_path)
    assert not stored_tensors(tmp_path)["transformer.h.1.attn.c_attn.bias"].any()
    assert not stored_tensors(tmp_path)["transformer.ln_f.bias"].any()
    with torch.no_grad():
        ours = model(ids())
    torch.testing.assert_close(their_logits(open_in_transformers(tmp_path), ids()), ours)


def train(model: torch.nn.Module, batches: torch.Tensor) -> None:
    """Train for a few steps that change every parameter, and stay in training mode."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    for batch in batches:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@both_dialects
def test_a_trained_model_generates_the_same_text_in_transformers(
    tmp_path: Path, dialect: str
) -> None:
    model, tokenizer = load_pretrained("demo", dialect), load_tokenizer("demo")
    before = to_hf_state_dict(load_pretrained("demo", dialect))
    torch.manual_seed(5)
    train(model, torch.randint(0, 1000, (4, 2, 32)))
    save_pretrained(model, tmp_path, tokenizer="demo")
    assert all(
        not torch.equal(before[name], value) for name, value in stored_tensors(tmp_path).items()
    )
    prompt = torch.tensor([tokenizer.encode("ROMEO:\nI ")])
    ours = generate(model.eval(), prompt, max_new_tokens=40, temperature=0, stop_ids=())
    theirs = open_in_transformers(tmp_path).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=[],
        pad_token_id=0,
    )
    assert ours.tolist() == theirs.tolist()
    assert load_tokenizer(tmp_path).decode(theirs[0].tolist()) == tokenizer.decode(ours[0].tolist())


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_a_users_model_is_saved_with_its_name_map(
    tmp_path: Path, tiny: Path, make_checkpoint: MakeCheckpoint, head: str
) -> None:
    source = make_checkpoint(tie_word_embeddings=False) if head == "untied" else tiny
    config = open_checkpoint(source).config
    config = replace(config, tie_word_embeddings=head != "tied")  # wrong; the tensors decide
    model = MyGPT2(head)
    load_into(model, my_map(), source)
    save_pretrained(model, tmp_path, dialect_or_name_map=my_map(), config=config)
    check_identical(stored_tensors(tmp_path), stored_tensors(source))
    assert open_checkpoint(tmp_path).config == open_checkpoint(source).config
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["tie_word_embeddings"] == (head == "tied")
    assert torch.equal(
        their_logits(open_in_transformers(tmp_path), ids()),
        their_logits(open_in_transformers(source), ids()),
    )


def test_an_adapted_and_trained_model_is_saved_with_the_map_of_adapt(
    tmp_path: Path, tiny: Path
) -> None:
    model = MyGPT2()
    adaptation = adapt(model, tiny)
    train(model, torch.randint(0, 97, (3, 2, 16)))
    config = json.loads((tiny / "config.json").read_text())
    save_pretrained(model, tmp_path, dialect_or_name_map=adaptation.name_map, config=config)
    with torch.no_grad():
        ours = model.eval()(ids())
    torch.testing.assert_close(their_logits(open_in_transformers(tmp_path), ids()), ours)


def test_the_name_of_a_dialect_can_be_passed_for_another_class(tmp_path: Path, tiny: Path) -> None:
    model = torch.nn.Module()
    for name, child in load_pretrained(tiny, "conv1d").named_children():
        model.add_module(name, child)
    config = open_checkpoint(tiny).config
    save_pretrained(model, tmp_path, dialect_or_name_map="conv1d", config=config)
    check_identical(stored_tensors(tmp_path), stored_tensors(tiny))


@both_dialects
def test_parameters_that_share_memory_are_written(tmp_path: Path, tiny: Path, dialect: str) -> None:
    """Views of one flat buffer, as some optimizers use, and an untied head that shares memory."""
    model = load_pretrained(tiny, dialect)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    views = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, view in zip(model.parameters(), views, strict=True):
        parameter.data = view.view_as(parameter)
    save_pretrained(model, tmp_path)
    check_identical(stored_tensors(tmp_path), stored_tensors(tiny))
    model.config = replace(model.config, tie_word_embeddings=False)
    save_pretrained(model, tmp_path)
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings
    head = {"lm_head.weight": stored_tensors(tiny)["transformer.wte.weight"]}
    check_identical(stored_tensors(tmp_path), stored_tensors(tiny) | head)


def test_the_export_view_has_the_tensors_of_the_state_dict(tiny: Path) -> None:
    own = MyGPT2()
    load_into(own, my_map(), tiny)
    models = [(load_pretrained(tiny), None), (load_pretrained(tiny, "conv1d"), None)]
    for model, name_map in [*models, (own, my_map())]:
        tensors = hf_tensors(model, name_map)
        made = {name: tensor.make() for name, tensor in tensors.items()}
        theirs = to_hf_state_dict(model, name_map)
        check_identical(
            made, {n.removeprefix("transformer."): value for n, value in theirs.items()}
        )
        for name, tensor in tensors.items():
            assert tensor.like.is_meta
            assert (tensor.like.shape, tensor.like.dtype) == (made[name].shape, made[name].dtype)


def test_only_one_shard_at_a_time_is_in_memory(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a shard is written, no tensor that was rearranged for an earlier one is alive."""
    alive: list[weakref.ref[torch.Tensor]] = []
    save_file, counts = compat.saving.shards.save_file, []

    def count_and_save(made: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        new = [
            tensor for name, tensor in made.items() if name.endswith(("attn.weight", "fc.weight"))
        ]
        alive.extend(map(weakref.ref, new))
        counts.append((sum(ref() is not None for ref in alive), len(new)))
        save_file(made, path, metadata)

    monkeypatch.setattr(compat.saving.shards, "save_file", count_and_save)
    save_pretrained(load_pretrained(tiny), tmp_path, max_shard_size="20KB")
    assert len(alive) == 2 * 3 and len(counts) > 2
    assert all(living == own for living, own in counts)


def test_the_source_may_be_the_destination(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", noisy_reference())
    (folder / "README.md").write_text("mine")
    before = stored_tensors(folder)
    save_pretrained(load_pretrained(folder), folder, max_shard_size="20KB")
    check_identical(stored_tensors(folder), before)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "README.md").read_text() == "mine"
    assert GPT2Config.from_dict(json.loads((folder / "config.json").read_text())).n_layer == 3
