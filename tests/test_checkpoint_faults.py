"""open_checkpoint: every fault is named."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compat.checkpoint import open_checkpoint
from compat.errors import CheckpointError, ConfigError
from tests.checkpoint_files import holds, sharded
from tests.conftest import State, Write


def refused(source: Path, *fragments: str) -> None:
    """Opening fails, and the message names the file and says all of this."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    for fragment in (source.name, *fragments):
        assert fragment in str(caught.value)


# Tensors that are not those the config asks for.


@pytest.mark.parametrize("name", ["wte.weight", "h.1.attn.c_proj.bias"])
def test_a_missing_tensor_is_named(write: Write, state: State, name: str) -> None:
    del state[name]
    refused(write(state), f"1 missing: {name}" if name != "wte.weight" else "missing: wte.weight")


def test_an_untied_head_that_is_absent_is_missing(write: Write, state: State) -> None:
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        open_checkpoint(write(state, tie_word_embeddings=False))


def test_a_left_over_tensor_is_named(write: Write, state: State) -> None:
    refused(write({**state, "h.0.adapter": torch.ones(2)}), "1 left over: h.0.adapter")


def test_a_missing_and_a_left_over_tensor_are_named_together(write: Write, state: State) -> None:
    state["h.0.ln1.weight"] = state.pop("h.0.ln_1.weight")
    refused(write(state), "1 missing: h.0.ln_1.weight", "1 left over: h.0.ln1.weight")


def test_too_many_layers_in_the_config(write: Write, state: State) -> None:
    refused(write(state, n_layer=4), "12 missing: h.3.ln_1.weight", "and 2 more")


def test_too_few_layers_in_the_config(write: Write, state: State) -> None:
    refused(write(state, n_layer=2), "12 left over: h.2.", "and 2 more")


def test_a_lie_about_the_depth_is_refused_at_once(write: Write, state: State) -> None:
    refused(write(state, n_layer=10**9), "n_layer", "1000000000", f"{len(state)} tensors")


def test_a_transposed_tensor_is_recognised(write: Write, state: State) -> None:
    name = "h.1.mlp.c_fc.weight"
    state[name] = state[name].t().contiguous()
    refused(write(state), f"{name}: looks transposed: found [96, 24], expected [24, 96]")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"vocab_size": 100}, "wte.weight: found [97, 24], expected [100, 24]"),
        ({"n_positions": 64}, "wpe.weight: found [32, 24], expected [64, 24]"),
        ({"n_inner": 48}, "h.0.mlp.c_fc.weight: found [24, 96], expected [24, 48]"),
        ({"n_embd": 48}, "wte.weight: found [97, 24], expected [97, 48]"),
    ],
)
def test_other_sizes(write: Write, state: State, changes: dict[str, int], fragment: str) -> None:
    refused(write(state, **changes), fragment)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_no_floats(
    write: Write, state: State, dtype: torch.dtype, name: str
) -> None:
    state["h.2.mlp.c_fc.weight"] = state["h.2.mlp.c_fc.weight"].to(dtype)
    refused(write(state, name) / name, "h.2.mlp.c_fc.weight (", "floating-point")


@pytest.mark.parametrize("odd", ["float8", "sparse", "meta"])
def test_tensors_in_a_pickle_that_are_no_plain_numbers(
    write: Write, state: State, odd: str
) -> None:
    name = "h.2.mlp.c_fc.weight"
    make: dict[str, Callable[[Tensor], Tensor]] = {
        "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
        "sparse": lambda tensor: tensor.to_sparse(),
        "meta": lambda tensor: tensor.to("meta"),
    }
    path = write({**state, name: make[odd](state[name])}, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        open_checkpoint(path).read(name)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_on_reading(
    write: Write, state: State, bad: float
) -> None:
    state["h.1.mlp.c_fc.weight"][[5, 7], [11, 2]] = bad
    checkpoint = open_checkpoint(write(state))
    checkpoint.read("h.0.mlp.c_fc.weight")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("h.1.mlp.c_fc.weight")
    for fragment in ("h.1.mlp.c_fc.weight", "2 NaN or infinite", "first at [5, 11]"):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_name_with_and_without_prefix_is_refused(write: Write, state: State, name: str) -> None:
    state["transformer.ln_f.bias"] = state["ln_f.bias"].clone()
    refused(write(state, name) / name, "ln_f.bias a second time")


def test_a_name_in_two_shards_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = sharded(tmp_path, tiny)
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: tensor}, last)
    with pytest.raises(CheckpointError, match=f"{name.removeprefix('transformer.')} a second time"):
        open_checkpoint(folder)


# Folders that are no checkpoint.


def test_no_config(write: Write, state: State) -> None:
    folder = write(state)
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


@pytest.mark.parametrize(
    "text",
    [b"", b"<html>", b"\xff\xfe", pytest.param(b"[" * 200_000, id="deep")],
)
def test_a_config_that_is_no_json(write: Write, state: State, text: bytes) -> None:
    folder = write(state)
    (folder / "config.json").write_bytes(text)
    refused(folder, "config.json cannot be read as JSON")


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ("null", "NoneType")])
def test_a_config_that_is_no_object(write: Write, state: State, text: str, kind: str) -> None:
    folder = write(state)
    (folder / "config.json").write_text(text)
    refused(folder, f"config.json holds a JSON {kind}; expected an object")


def test_the_config_of_another_model(write: Write, state: State) -> None:
    with pytest.raises(ConfigError, match="model_type 'llama'"):
        open_checkpoint(write(state, model_type="llama"))


def test_an_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, "holds no weights", "model.safetensors", "pytorch_model.bin.index.json")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "neither a folder, a file nor a hub id")


def test_a_missing_shard(tiny: Path, tmp_path: Path) -> None:
    folder = sharded(tmp_path, tiny)
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    refused(folder, f"lacks {lost.name}, 1 of the ")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "a\\b.bin", ".."])
def test_a_shard_outside_the_folder_is_not_opened(tmp_path: Path, tiny: Path, shard: str) -> None:
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    index = {"weight_map": {"wte.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, shard)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"wte.weight": 1}}])
def test_an_index_without_a_weight_map(write: Write, state: State, index: dict[str, Any]) -> None:
    folder = write(state)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model.safetensors.index.json has no 'weight_map'")


# Files that are no tensors.


def test_a_file_of_another_kind(write: Write, state: State) -> None:
    path = write(state) / "model.gguf"
    path.write_bytes(b"GGUF")
    refused(path, "expected .safetensors or .bin")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.999])
def test_a_file_cut_short(write: Write, state: State, name: str, keep: float) -> None:
    path = write(state, name) / name
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    refused(path, "cannot be read as", "download")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "text",
    [
        b"<!DOCTYPE html><html><body>Not Found</body></html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n",
        b"h\n",  # to a pickle reader: fetch entry 10 of an empty memo
    ],
    ids=["html", "git-lfs", "two bytes"],
)
def test_a_text_under_the_name_of_a_weights_file(
    write: Write, state: State, name: str, text: bytes
) -> None:
    path = write(state, name) / name
    path.write_bytes(text)
    refused(path, "cannot be read as")


@pytest.mark.parametrize("keep", [1, 18, 28, 52, 2000, 50_000])
def test_an_old_style_pickle_cut_short(write: Write, state: State, keep: int) -> None:
    """Before torch 1.6, `torch.save` wrote no zip file; many `.bin` files on the hub are such."""
    path = write(state, "pytorch_model.bin") / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    holds(open_checkpoint(path), state)
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "cannot be read as a PyTorch file")


class Malice:
    """Unpickled the ordinary way, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.trace,)


@pytest.mark.parametrize("writer", [torch.save, None], ids=["torch.save", "pickle"])
def test_code_in_a_pickle_is_never_run(write: Write, state: State, writer: Any) -> None:
    folder = write(state, "pytorch_model.bin")
    path, trace = folder / "pytorch_model.bin", folder / "trace"
    payload = {**state, "wte.weight": Malice(trace)}
    if writer is None:
        path.write_bytes(pickle.dumps(payload, protocol=2))
    else:
        writer(payload, path)
    refused(path, "cannot be read as a PyTorch file of plain tensors", "safetensors")
    assert not trace.exists()
    if writer is None:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert trace.exists(), "the payload is harmless, so this test shows nothing"


@pytest.mark.parametrize("content", ["code", "html"])
def test_nobody_is_advised_to_run_a_refused_pickle(
    write: Write, state: State, content: str
) -> None:
    path = write(state, "pytorch_model.bin") / "pytorch_model.bin"
    if content == "code":
        torch.save({"wte.weight": Malice(path)}, path)
    else:
        path.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [[torch.ones(2)], torch.ones(2), {"model": {"wte.weight": torch.ones(2)}}, {0: torch.ones(2)}],
    ids=["list", "tensor", "nested", "numbered"],
)
def test_a_pickle_of_something_else(write: Write, state: State, value: Any) -> None:
    path = write(state, "pytorch_model.bin") / "pytorch_model.bin"
    torch.save(value, path)
    refused(path, "holds no plain dictionary of named tensors")
