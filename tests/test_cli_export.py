"""`export`: what it writes, prints and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compat.checkpoint.find import DEMO
from tests.command_line import Cli, script
from tests.loading_common import both_dialects, check_identical
from tests.saving_common import open_in_transformers, stored_tensors
from tests.test_atomic import contents

FILES = [
    *("config.json", "generation_config.json", "merges.txt", "model.safetensors"),
    *("tokenizer_config.json", "vocab.json"),
]


@both_dialects
def test_export_writes_the_checkpoint_with_its_tokenizer(
    cli: Cli, tmp_path: Path, dialect: str
) -> None:
    done = cli("export", "demo", tmp_path / "out", "--dialect", dialect)
    assert (done.code, done.err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert all(name in done.out for name in FILES)
    assert f"demo → {tmp_path / 'out'}: 957,184 values in float32, through {dialect}" in done.out
    check_identical(stored_tensors(tmp_path / "out"), stored_tensors(DEMO))
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (DEMO / name).read_bytes()


def test_export_prints_a_summary_as_json(cli: Cli, tmp_path: Path) -> None:
    done = cli("export", "demo", tmp_path, "--json", "--max-shard-size", "2MB")
    found = done.json()
    assert {name: (tmp_path / name).stat().st_size for name in found["files"]} == found["files"]
    assert {path.name for path in tmp_path.iterdir()} == {*found["files"]}
    assert "model-00001-of-00002.safetensors" in found["files"]
    del found["files"]
    assert found == {
        "source": "demo",
        "folder": str(tmp_path),
        "dialect": "linear",
        "dtype": "float32",
        "parameters": 957_184,
        "notes": [],
    }


@both_dialects
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_export_converts_the_data_type(
    cli: Cli, tmp_path: Path, tiny: Path, dialect: str, dtype: str
) -> None:
    kind = getattr(torch, dtype)
    assert cli("export", tiny, tmp_path, "--dtype", dtype, "--dialect", dialect).code == 0
    check_identical(
        stored_tensors(tmp_path), {name: t.to(kind) for name, t in stored_tensors(tiny).items()}
    )
    assert open_in_transformers(tmp_path).dtype == kind


def test_export_can_overwrite_its_source(tmp_path: Path) -> None:
    """The command runs in a separate process, as for a user."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in contents(DEMO).items():
        assert isinstance(content, bytes)
        if "/" not in name:
            (folder / name).write_bytes(content)
    before = stored_tensors(folder)
    before = {name: tensor.clone() for name, tensor in before.items()}
    done = script("export", folder, folder, "--max-shard-size", "1MB")
    assert (done.returncode, done.stderr) == (0, "")
    check_identical(stored_tensors(folder), before)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "README.md").exists() and (folder / "vocab.json").exists()


def test_notes_go_to_stderr(cli: Cli, tmp_path: Path, tiny: Path) -> None:
    done = cli("export", tiny, tmp_path)
    assert done.code == 0
    assert done.err == f"note: {tiny} has no tokenizer files, so none were written\n"
    found = cli("export", tiny, tmp_path, "--json").json()
    assert found["notes"] == [f"{tiny} has no tokenizer files, so none were written"]


@pytest.mark.parametrize("size", ["5 bananas", "0", "-1", ""])
def test_an_invalid_size_exits_with_2(cli: Cli, tmp_path: Path, size: str) -> None:
    done = cli("export", "demo", tmp_path / "new", f"--max-shard-size={size}")
    assert done.code == 2
    assert "max_shard_size is" in done.err.replace("\n", " ")
    assert not (tmp_path / "new").exists()


def test_a_destination_that_cannot_be_written_exits_with_3(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = cli("export", "demo", tmp_path / "file")
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        f"error: {tmp_path / 'file'} is a file, but must be a folder or a path that does not "
        "exist. Use another path.\n"
    )


def test_a_source_that_does_not_exist_exits_with_3(cli: Cli, tmp_path: Path) -> None:
    done = cli("export", tmp_path / "nothing", tmp_path / "new")
    assert (done.code, done.out) == (3, "")
    assert not (tmp_path / "new").exists()
