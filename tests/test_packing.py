"""Packed files: engines, models and commands read them, and damage is detected."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compat import (
    CheckpointError,
    CompatError,
    ConfigError,
    Engine,
    load_pretrained,
    open_checkpoint,
    pack_checkpoint,
    save_pretrained,
)
from compat.checkpoint.layout import PROJECTIONS
from compat.checkpoint.packed import METADATA, OUTLIER_WEIGHT, OUTLIERS, SCALE, checksum
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.decoding import matrices, native
from tests.command_line import Cli
from tests.conftest import MakeCheckpoint
from tests.native_common import plant_outliers

HEAD = "lm_head.weight"
IDS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
# Kernels for every representation of quantized weights; the last one works everywhere.
INT8 = [matrices.int8_weight_only, matrices.Int8TwoTerm, matrices.Int8]


def pack(folder: Path, source: Any, **options: Any) -> Path:
    return pack_checkpoint(source, folder / "packed.safetensors", **options)


def metadata_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SafetensorsFile(file).metadata[METADATA])
    return found


def rewrite(file: Path, metadata: object, **tensors: torch.Tensor | None) -> None:
    """Write the file again with other metadata and tensors; tensors that are None are omitted."""
    state = {**load_file(file), **tensors}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, file, {METADATA: json.dumps(metadata)})


@pytest.mark.parametrize("outliers", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        pytest.param("int8", native.NativeInt8Prompts, marks=pytest.mark.vnni),
        *(("int8", kernel) for kernel in INT8),
        ("bfloat16", matrices.Linear),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_engine_of_a_packed_file_computes_the_same_as_one_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make_checkpoint: MakeCheckpoint,
    dtype: Any,
    kernel: Any,
    tied: bool,
    outliers: bool,
) -> None:
    monkeypatch.setattr("compat.engine.fastest", lambda *_: kernel)
    source = make_checkpoint(n_embd=32, tie_word_embeddings=tied)
    if outliers:
        plant_outliers(source)
    file = pack(tmp_path, source, dtype=dtype)
    same = pack_checkpoint(source, tmp_path / "same.safetensors", dtype=getattr(torch, dtype))
    assert metadata_of(same) == metadata_of(file)
    one, other = Engine.from_pretrained(source, dtype=dtype), Engine.from_pretrained(file)
    assert other.dtype == dtype
    assert torch.equal(one.score(IDS), other.score(IDS))
    options: Any = {"max_new_tokens": 8, "temperature": 0}
    assert torch.equal(one.generate(IDS, **options), other.generate(IDS, **options))


def test_a_wrong_scale_changes_what_the_engine_computes(tmp_path: Path, tiny: Path) -> None:
    """The previous test depends on this."""
    file = pack(tmp_path, tiny)
    correct = Engine.from_pretrained(file).score(IDS)
    name, metadata = f"h.1.mlp.c_fc.weight{SCALE}", metadata_of(file)
    wrong = load_file(file)[name].roll(1)
    metadata["checksums"][name] = hashlib.sha256(wrong.numpy().tobytes()).hexdigest()
    rewrite(file, metadata, **{name: wrong})
    assert not torch.allclose(Engine.from_pretrained(file).score(IDS), correct, atol=1e-3)


def test_drafts_from_a_packed_file_do_not_change_the_tokens(tmp_path: Path, tiny: Path) -> None:
    file, options = pack(tmp_path, tiny), {"max_new_tokens": 10, "temperature": 0}
    plain = Engine.from_pretrained(file, dtype="float32")
    drafted = Engine.from_pretrained(file, dtype="float32", speculate="int8")
    generated: Any = (plain.generate(IDS[:1], **options), drafted.generate(IDS[:1], **options))
    assert torch.equal(*generated)


def test_the_tensors_of_a_packed_file_are_the_dequantized_values(
    tmp_path: Path, tiny: Path
) -> None:
    before, after = open_checkpoint(tiny), open_checkpoint(pack(tmp_path, tiny))
    assert after.infos.keys() == before.infos.keys()
    assert not after.config.tie_word_embeddings  # the head has 8 bits, the embedding 16
    for name in before.infos:
        exact, found = before.read(name), after.read(name).float()
        if name.endswith((*PROJECTIONS, HEAD)):
            largest = exact.abs().amax(dim=1 if name == HEAD else 0, keepdim=name == HEAD)
            step = largest / 127  # the distance of neighbouring quantized values of an output
            assert ((found - exact).abs() <= 0.51 * step).all()
            assert not torch.equal(found, exact)
        elif name in ("wte.weight", "wpe.weight"):
            assert torch.equal(found, exact.bfloat16().float())
        else:
            assert torch.equal(found, exact)


@pytest.mark.parametrize("dialect", ["linear", "conv1d"])
@pytest.mark.parametrize("mmap", [True, False])
def test_models_can_be_loaded_from_a_packed_file(
    tmp_path: Path, tiny: Path, dialect: str, mmap: bool
) -> None:
    file = pack(tmp_path, tiny)
    checkpoint = open_checkpoint(file, mmap=mmap)
    assert checkpoint.notes == [f"packed in int8 from {tiny}"]
    model = load_pretrained(checkpoint, dialect)
    save_pretrained(model, tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    for name in checkpoint.infos:
        saved = written[name if name == HEAD else f"transformer.{name}"]
        assert torch.equal(saved, checkpoint.read(name).float())
    assert torch.equal(
        checkpoint.take("ln_f.weight", slice(2, 5))[0], written["transformer.ln_f.weight"][2:5]
    )
    assert torch.equal(checkpoint.take(HEAD, slice(2, 5))[0], written[HEAD][2:5])


def test_mapped_tensors_of_usual_sizes_are_aligned_to_64_bytes(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    for length in range(1, 9):  # the source's name changes the length of the header
        source = tmp_path / ("a" * length)
        make_checkpoint(n_embd=64, vocab_size=128).rename(source)
        file = SafetensorsFile(pack(tmp_path, source))
        assert {file.read(name, mapped=True).data_ptr() % 64 for name in file.infos} == {0}


def test_a_packed_file_records_the_checkpoint_of_which_it_was_packed(
    tmp_path: Path, tiny: Path
) -> None:
    weights = (tiny / "model.safetensors").read_bytes()
    found = metadata_of(pack(tmp_path, tiny))
    assert found["source"] == str(tiny)
    assert found["source_sha256"] == hashlib.sha256(weights).hexdigest()
    sharded = tmp_path / "sharded"
    save_pretrained(load_pretrained(tiny), sharded, max_shard_size="20KB")
    files = [sharded / "model.safetensors.index.json", *sorted(sharded.glob("model-*"))]
    assert len(files) > 3
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    assert metadata_of(pack(tmp_path, sharded))["source_sha256"] == digest


def test_a_changed_byte_is_detected_in_every_tensor(tmp_path: Path, tiny: Path) -> None:
    file = pack(tmp_path, tiny)
    content, stored = file.read_bytes(), load_file(file)
    data_start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data_start])
    for name in stored:
        begin, end = header[name]["data_offsets"]
        at = data_start + (begin + end) // 2
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match=f"{name} does not match its checksum"):
            open_checkpoint(file).read(name.removesuffix(SCALE))
        if name == HEAD:
            with pytest.raises(CheckpointError, match="does not match its checksum"):
                Engine.from_pretrained(file)
    file.write_bytes(content)
    Engine.from_pretrained(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda stated: [],
        lambda stated: {**stated, "precision": "int4"},
        lambda stated: {**stated, "config": None},
        lambda stated: {**stated, "checksums": {}},
        lambda stated: {name: value for name, value in stated.items() if name != "source"},
    ],
)
def test_damaged_metadata_raises_one_error(tmp_path: Path, tiny: Path, change: Any) -> None:
    file = pack(tmp_path, tiny)
    rewrite(file, change(metadata_of(file)))
    with pytest.raises(CheckpointError, match="is damaged: its"):
        open_checkpoint(file)


def test_tensors_that_do_not_fit_raise_one_error(tmp_path: Path, tiny: Path) -> None:
    file = pack(tmp_path, tiny)
    metadata, name = metadata_of(file), "h.0.attn.c_attn.weight"
    rewrite(file, metadata, **{name + SCALE: torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"the shapes of {name} and its scale do not match"):
        open_checkpoint(file)
    del metadata["checksums"]["ln_f.bias"]
    rewrite(pack(tmp_path, tiny), metadata, **{"ln_f.bias": None})
    with pytest.raises(CompatError, match=r"missing.*ln_f\.bias"):
        open_checkpoint(file)


def test_inputs_with_outliers_are_stored_exactly(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    source = make_checkpoint()
    outliers = plant_outliers(source)
    file = pack(tmp_path, source)
    stored, exact = open_checkpoint(file), open_checkpoint(source)
    for name, inputs in outliers.items():
        assert torch.equal(stored.read(name)[inputs], exact.read(name)[inputs])
        assert not torch.equal(stored.read(name), exact.read(name))


@pytest.mark.parametrize(
    ("inputs", "rows", "reason"),
    [
        (torch.tensor([0]), 2, "its outliers do not match"),
        (torch.tensor([0, 1]), 1, "its outliers do not match"),
        (torch.tensor([0, 1]).int(), 2, "its outliers do not match"),
        (torch.tensor([[0, 1]]), 2, "its outliers do not match"),
        (torch.tensor([0, 24]), 2, "has other inputs than those with outliers"),
        (torch.tensor([0, -1]), 2, "has other inputs than those with outliers"),
    ],
)
def test_outliers_that_do_not_fit_raise_one_error(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, inputs: torch.Tensor, rows: int, reason: str
) -> None:
    source = make_checkpoint()
    name = next(iter(plant_outliers(source)))
    file = pack(tmp_path, source)
    metadata, weight = metadata_of(file), load_file(file)[name + OUTLIER_WEIGHT]
    metadata["checksums"][name + OUTLIERS] = checksum(inputs)
    if rows != len(weight):
        weight = weight[:1].expand(rows, -1).contiguous()
        metadata["checksums"][name + OUTLIER_WEIGHT] = checksum(weight)
    rewrite(file, metadata, **{name + OUTLIERS: inputs, name + OUTLIER_WEIGHT: weight})
    with pytest.raises(CheckpointError, match=reason):
        Engine.from_pretrained(file)


def test_a_failed_packing_keeps_the_existing_file(tmp_path: Path, tiny: Path) -> None:
    file = pack(tmp_path, tiny)
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=f"is already packed. Pack {tiny} instead"):
        pack(tmp_path, file)
    with pytest.raises(ConfigError, match=r"dtype is 'float32', but must be 'int8' or 'bfloat16'"):
        pack(tmp_path, tiny, dtype="float32")
    with pytest.raises(ConfigError, match=r"must be a path that ends in \.safetensors"):
        pack_checkpoint(tiny, tmp_path / "model.bin")
    (tmp_path / "a.safetensors").mkdir()
    for target in (tmp_path / "missing" / "a.safetensors", tmp_path / "a.safetensors"):
        with pytest.raises(CheckpointError, match=r"cannot be written: .* Pass another path\."):
            pack_checkpoint(tiny, target)
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "a.safetensors"}


def test_values_beyond_the_range_of_bfloat16_are_refused(tmp_path: Path, tiny: Path) -> None:
    model = load_pretrained(tiny, dtype="float64")
    with torch.no_grad():
        model.final_norm.scale[3] = 3.4e38  # type: ignore[union-attr, operator, index]
    save_pretrained(model, tmp_path / "large")
    with pytest.raises(CheckpointError, match=r"in torch\.bfloat16, ln_f\.weight has 1 NaN or inf"):
        pack(tmp_path, tmp_path / "large", dtype="bfloat16")
    assert not (tmp_path / "packed.safetensors").exists()


def test_the_pack_command_writes_a_file_that_generate_reads(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "demo.safetensors"
    done = cli("pack", "demo", "--out", file)
    assert done.code == 0
    size = file.stat().st_size
    assert f"demo → {file}: {size:,} bytes in int8, 0.34 × the checkpoint" in done.out
    assert "no tokenizer files" in done.err
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((open_checkpoint("demo").folder / name).read_bytes())
    asked = ("--max-new-tokens", "8", "--temperature", "0")
    one = cli("generate", "To be", "--dtype", "int8", *asked)
    other = cli("generate", "To be", "--model", file, *asked)
    assert (other.code, other.out) == (0, one.out)
    again = cli("pack", "--model", "demo", "--dtype", "bfloat16", "--out", file, "--json").json()
    assert again == {
        "source": "demo",
        "file": str(file),
        "dtype": "bfloat16",
        "bytes": file.stat().st_size,
        "notes": [],
    }
    assert cli("inspect", file).out.count("packed safetensors") == 1
