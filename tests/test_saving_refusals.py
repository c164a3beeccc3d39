"""Errors are raised before anything is written, and outdated weights are removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compat import (
    CheckpointError,
    CompatError,
    ConfigError,
    NameMapError,
    load_pretrained,
    save_pretrained,
)
from compat.checkpoint import open_checkpoint
from compat.dialects import Model, get_dialect
from tests.loading_common import both_dialects, check_identical
from tests.own_gpt2 import MyGPT2, my_map
from tests.saving_common import stored_tensors


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that a refused save must leave unchanged."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "model.safetensors").write_text("old")
    return folder


def check_refused(
    old: Path, kind: type[CompatError], match: str, model: nn.Module, **options: Any
) -> None:
    """Check that saving into an existing or a new folder raises this error and writes nothing."""
    for folder in (old, old.with_name("new")):
        with pytest.raises(kind, match=match):
            save_pretrained(model, folder, **options)
    assert [path.name for path in old.parent.iterdir()] == ["old"]
    assert [path.name for path in old.iterdir()] == ["model.safetensors"]
    assert (old / "model.safetensors").read_text() == "old"


def with_values(*values: float) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        parameter = list(model.parameters())[5]
        with torch.no_grad():
            parameter.view(-1)[3 : 3 + len(values)] = torch.tensor(values)

    return change


def as_integers(model: Model) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.int32)


def as_float8(model: Model) -> None:
    model.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (with_values(torch.nan), r"1 NaN or infinite values, the first at \[(0, )?3\]"),
        (with_values(torch.inf, 0, -torch.inf), "2 NaN or infinite"),
        (as_integers, "int32, .*must be a dense float"),
        (as_float8, "float8_e4m3fn"),
    ],
)
@both_dialects
def test_invalid_weights_are_refused(
    old: Path, tiny: Path, dialect: str, change: Callable[[Model], None], match: str
) -> None:
    model = load_pretrained(tiny, dialect)
    change(model)
    check_refused(old, CheckpointError, rf"GPTModel cannot be saved:\n  .*{match}", model)


def test_a_model_without_values_is_refused(old: Path, tiny: Path) -> None:
    with torch.device("meta"):
        model = get_dialect("linear").model_class(open_checkpoint(tiny).config)
    check_refused(old, CheckpointError, "on the meta device, without values", model)


def test_a_users_model_is_refused_without_a_map_and_a_config(old: Path, tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    check_refused(old, NameMapError, "Pass its name_map", MyGPT2(), config=config)
    check_refused(old, ConfigError, "no GPT2Config.*n_head", MyGPT2(), dialect_or_name_map=my_map())
    check_refused(
        old,
        NameMapError,
        "parameters of the model have no row: places.weight",
        MyGPT2(),
        dialect_or_name_map=my_map(without="wpe.weight"),
        config=config,
    )
    check_refused(
        old,
        ConfigError,
        "dialect is 'mine', but must be one of linear, conv1d",
        MyGPT2(),
        dialect_or_name_map="mine",
        config=config,
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_layer": 4}, r"h.3.ln_1.weight: the model has none"),
        ({"n_layer": 2}, r"h.2.ln_1.weight: the config has no place for it"),
        ({"n_positions": 16}, r"wpe.weight: found \[32, 24\], expected \[16, 24\]"),
        ({"vocab_size": 100}, r"wte.weight: found \[97, 24\], expected \[100, 24\]"),
        ({"n_inner": 8}, r"h.\{0…2\}.mlp.c_fc.weight: found \[24, 96\], expected \[24, 8\]"),
        ({"n_head": 5}, "'n_head' is 5, which does not divide"),
        ({"surprise": 1}, "'surprise' = 1, which compat does not understand"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_the_tensors_is_refused(
    old: Path, tiny: Path, change: dict[str, Any], match: str
) -> None:
    config = {**json.loads((tiny / "config.json").read_text()), **change}
    options = {"dialect_or_name_map": my_map(), "config": config}
    check_refused(old, ConfigError, match, MyGPT2(), **options)


def test_a_config_that_contradicts_that_of_the_model_is_refused(old: Path, tiny: Path) -> None:
    model = load_pretrained(tiny)
    check_refused(old, ConfigError, "contradicts", model, config=replace(model.config, n_head=2))
    save_pretrained(model, old, config=model.config)
    check_identical(stored_tensors(old), stored_tensors(tiny))


def test_an_invalid_size_is_refused(old: Path, tiny: Path) -> None:
    check_refused(old, ConfigError, "max_shard_size", load_pretrained(tiny), max_shard_size="5 big")


STALE = [
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "model.fp16.safetensors",
    "model.fp16.safetensors.index.json",
    "model.fp16-00001-of-00002.safetensors",
    "model.safetensors.index.fp16.json",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
]
KEPT = [
    "README.md",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "adapter_model.safetensors",
    "my_model.safetensors",
    "model_ema.safetensors",
    "model-best.safetensors",
    "model.best.safetensors",
    "model2.safetensors",
    "modeling_notes.safetensors",
    "model_ema-00001-of-00002.safetensors",
    "model-1-of-2.safetensors",
    "model.safetensors.bak",
    "model_ema.safetensors.index.json",
    "pytorch_model_ema.bin",
    "pytorch_model-old.bin",
    "pytorch_model.bin.index.json.orig",
    "tf_model_notes.h5",
    "flax_model-2.msgpack",
    "tokenizer.json",
    "added_tokens.json",
    ".gitattributes",
    "runs",
]


def test_other_weights_in_the_folder_are_removed_and_other_files_are_kept(
    old: Path, tiny: Path
) -> None:
    for name in [*STALE, *KEPT]:
        (old / name).mkdir() if name == "runs" else (old / name).write_text(name)
    (old / "runs" / "model.safetensors").write_text("a checkpoint of its own")
    files = save_pretrained(load_pretrained(tiny), old)
    assert sorted(path.name for path in old.iterdir()) == sorted([*KEPT, *(f.name for f in files)])
    assert all((old / name).read_text() == name for name in KEPT if name != "runs")
    assert (old / "runs" / "model.safetensors").read_text() == "a checkpoint of its own"
    check_identical(stored_tensors(old), {**stored_tensors(tiny)})


def test_sharded_and_single_file_saves_can_overwrite_each_other(tmp_path: Path, tiny: Path) -> None:
    model = load_pretrained(tiny)
    for limit, count in [("5GB", 1), ("20KB", 6), ("40KB", 3), ("5GB", 1)]:
        save_pretrained(model, tmp_path / "folder", max_shard_size=limit)
        names = [path.name for path in (tmp_path / "folder").glob("model*.safetensors")]
        assert len(names) == count
        check_identical(stored_tensors(tmp_path / "folder"), stored_tensors(tiny))
        assert open_checkpoint(tmp_path / "folder").notes == []
