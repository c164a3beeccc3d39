"""Files of other formats raise an error that names the format and the next step."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from compat import CheckpointError, CompatError, inspect_checkpoint, load_pretrained
from compat.checkpoint.formats import looks_like, recognized

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"


def bytes_of(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def zip_of(name: str) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, "{}")

    return bytes_of(write)


def tar_of(name: str) -> bytes:
    def write(file: io.BytesIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(name))

    return bytes_of(write)


TENSORS = {"a": torch.zeros(3)}
FORMATS = {
    "JSON": (b'{"n_layer": 12}', "JSON", None),
    "JSON, a list": (b"\n [1, 2]", "JSON", None),
    "Git LFS pointer": (LFS, "a Git LFS pointer", "git lfs pull"),
    "HTML page": (b"\n<!DOCTYPE html><html>", "web page", "/resolve/"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(40), "GGUF", "converted from"),
    "HDF5 (Keras, TensorFlow)": (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5", "from_tf=True"),
    "NumPy .npy array": (bytes_of(lambda f: np.save(f, np.ones(3))), "NumPy", "named tensors"),
    "NumPy .npz archive": (bytes_of(lambda f: np.savez(f, a=np.ones(3))), "NumPy", "safetensors"),
    "gzip file": (gzip.compress(b"x"), "gzip", "Unpack it first."),
    "zip archive": (zip_of("gpt2/config.json"), "zip", "Unpack it first."),
    "tar archive": (tar_of("gpt2/config.json"), "tar", "Unpack it first."),
    "llm.c checkpoint": ((20240326).to_bytes(4, "little") + bytes(1020), "llm.c", "export_hf"),
    "empty file": (b"", "empty", None),
}


@pytest.mark.parametrize("ending", [".safetensors", ".bin", ".pt"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_error_names_the_format_of_the_weights(tmp_path: Path, name: str, ending: str) -> None:
    content, word, advice = FORMATS[name]
    path = tmp_path / f"model{ending}"
    path.write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(path)
    assert word in str(caught.value) and (advice or "") in str(caught.value)
    found = inspect_checkpoint(path)
    assert found.format == name.partition(",")[0] or name.startswith("HDF5")
    assert found.error == str(caught.value)


def test_valid_files_are_accepted(tmp_path: Path) -> None:
    for name in ("model.bin", "model.pt", "old.bin"):
        torch.save(TENSORS, tmp_path / name, _use_new_zipfile_serialization=name != "old.bin")
        assert looks_like(tmp_path / name) is None
    for size in range(1, 200):  # the first byte is the header's length, which may look like a "{"
        path = tmp_path / "model.safetensors"
        path.write_bytes(save({"a" * size: torch.zeros(1)}))
        assert looks_like(path) is None
        assert recognized(path).name == "safetensors"  # type: ignore[union-attr]
    (tmp_path / "config.json").write_text("{}")
    assert looks_like(tmp_path / "config.json") is None


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("model.bin", lambda p: p.write_bytes(save(TENSORS)), "a safetensors file.*ending .safete"),
        ("model.safetensors", lambda p: torch.save(TENSORS, p), "a pickle of PyTorch"),
        ("model.ckpt", lambda p: torch.save(TENSORS, p), r"a pickle of PyTorch.*\.pt"),
        ("model.onnx", lambda p: p.write_bytes(b"\x08\x07\x12\x07pytorch"), "an ONNX graph"),
        ("flax_model.msgpack", lambda p: p.write_bytes(b"\x81\xa1a"), "Flax.*from_flax"),
        ("model.gguf", lambda p: p.write_bytes(b"GGUF\3\0\0\0"), "a GGUF file"),
        ("tf_model.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5.*from_tf=True"),
        ("model.ckpt.index", lambda p: p.write_bytes(b"\0\0\2"), "a part of a TensorFlow checkp"),
        ("model.ckpt-5.meta", lambda p: p.write_bytes(b"\n\x8a"), "convert_gpt2_original_tf_check"),
        ("config.json", lambda p: p.write_text('{"n_layer": 2}'), "JSON"),
        ("notes.txt", lambda p: p.write_text("my notes"), "is not a tensor file"),
    ],
)
def test_the_path_of_a_file_in_another_format_is_refused(
    tmp_path: Path, name: str, write: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(CompatError, match=f"(?s){message}"):
        load_pretrained(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.ckpt.index", "model.ckpt.data-00000-of-00001", "checkpoint"], "TensorFlow check"),
        (["tf_model.h5", "config.json"], r"tf_model\.h5.*from_tf=True"),
        (["flax_model.msgpack"], r"flax_model\.msgpack.*from_flax=True"),
        (["gpt2.Q4_K_M.gguf"], r"gpt2\.Q4_K_M\.gguf.*llama\.cpp"),
        (["model.onnx"], r"model\.onnx.*ONNX"),
        (["weights.npz"], r"weights\.npz.*NumPy"),
    ],
)
def test_a_folder_with_weights_in_another_format_is_refused(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n" if name.endswith(".h5") else b"\1\2")
    with pytest.raises(CheckpointError, match=f"(?s)holds no weights.*{message}"):
        load_pretrained(tmp_path)


def test_the_stem_of_a_tensorflow_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model.ckpt.index", "model.ckpt.data-00000-of-00001"):
        (tmp_path / name).write_bytes(b"\1\2")
    monkeypatch.chdir(tmp_path)
    for source in ("model.ckpt", tmp_path / "model.ckpt"):
        with pytest.raises(CheckpointError, match="TensorFlow checkpoint"):
            load_pretrained(source)


@pytest.mark.parametrize("source", ["./nofolder", "../nofolder", "/nofolder", "~/nofolder"])
def test_a_missing_path_is_not_requested_from_the_hub(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"nofolder does not exist") as caught:
        load_pretrained(source)
    assert type(caught.value) is CheckpointError


def test_a_path_object_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nofolder does not exist"):
        load_pretrained(tmp_path / "nofolder")
