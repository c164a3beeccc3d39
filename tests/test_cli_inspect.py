"""The command `inspect` and its script, which shares its name with a standard library module."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compat import HubError
from tests.command_line import ROOT, Cli, script
from tests.conftest import State, Write
from tests.foreign_files import linear, masks
from tests.test_cli_errors import failing_with


def lines(text: str) -> dict[str, str]:
    """Return the text after each label."""
    rows = [line.strip().split("  ", 1) for line in text.splitlines()[1:]]
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def test_inspect_describes_the_demo(cli: Cli) -> None:
    done = cli("inspect", "demo")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("demo  ✓ would load\n")
    shown = lines(done.out)
    assert shown["format"] == "Hugging Face safetensors"
    assert shown["weights"].endswith("model.safetensors, 3.8 MB")
    assert shown["config"] == (
        "4 layers · 4 heads · 128 channels · 256 positions · vocabulary of 1,024 · gelu_new · "
        "head tied to the embedding"
    )
    assert shown["layout"] == "projections [in, out], names begin with transformer."
    assert shown["parameters"] == "957,184 in 52 tensors of float32"
    assert shown["tokenizer"] == "vocab.json, merges.txt with 1,024 tokens"
    assert shown.keys() & {"names", "notes", "error"} == set()


def test_inspect_prints_json(cli: Cli, tiny: Path) -> None:
    done = cli("inspect", tiny, "--json")
    found = done.json()
    assert (done.code, found["loads"], found["error"]) == (0, True, None)
    assert found["bytes"] == (tiny / "model.safetensors").stat().st_size
    assert found["config"]["n_embd"] == 24


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_checkpoint_that_would_not_load_exits_with_3_and_the_error_on_stdout(
    cli: Cli, write: Write, state: State, as_json: list[str]
) -> None:
    folder = write(state, n_layer=2, n_inner=None)
    done = cli("inspect", folder, *as_json)
    assert (done.code, done.err) == (3, "")
    loading = cli("load", "--model", folder)
    assert loading.code == 3
    error = loading.err.removeprefix("error: ").strip()
    if as_json:
        assert done.json()["error"] == error
        assert not done.json()["loads"]
    else:
        assert "✗ would not load" in done.out
        shown = [line.strip() for line in done.out.splitlines()]
        assert [line for line in error.splitlines() if line.strip() not in " ".join(shown)] == []
        assert "values" in lines(done.out) and "names" in lines(done.out)


def test_the_number_of_heads_can_be_passed(cli: Cli, tmp_path: Path, state: State) -> None:
    head = {"lm_head.weight": state["wte.weight"] + 1}
    torch.save(linear({**state, **head, **masks()}), tmp_path / "model.pt")
    without = cli("inspect", tmp_path)
    assert without.code == 3
    assert "divisors of n_embd = 24 are 1, 2, 3, 4, 6, 8, 12 and 24." in without.out
    done = cli("inspect", tmp_path, "--n-head", 4)
    assert done.code == 0
    assert "3 layers · 4 heads" in done.out
    assert "untied head" in done.out
    assert done.out.count("\n              ") == 2  # further notes, below the first
    assert cli("inspect", tmp_path, "--n-head", 5).code == 3
    assert cli("inspect", tmp_path, "--n-head", 0).code == 2


def test_unprintable_names_are_escaped(cli: Cli, write: Write, state: State) -> None:
    folder = write({"\x1b[31mred": torch.ones(1), **state}, "pytorch_model.bin")
    done = cli("inspect", folder / "pytorch_model.bin")
    assert done.code == 3
    assert "'\\x1b[31mred'" in lines(done.out)["names"]


def test_no_network_exits_with_4(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compat.checkpoint.hub.fetch", failing_with(HubError("no route")))
    done = cli("inspect", "some/model")
    assert (done.code, done.out, done.err) == (4, "", "error: no route\n")


def test_the_script_runs_the_command(tiny: Path) -> None:
    done = script("inspect", tiny, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["loads"]
    assert len((ROOT / "scripts/inspect.py").read_text().splitlines()) <= 15


def test_other_scripts_import_inspect_of_the_standard_library(tmp_path: Path) -> None:
    """Python searches the folder of the running script first."""
    importing = tmp_path / "importing.py"
    importing.write_text("import dataclasses, inspect\nprint(inspect.__file__, inspect.Signature)")

    def run() -> str | None:
        done = subprocess.run(
            [sys.executable, importing], capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else None

    alone = run()
    assert alone and str(tmp_path) not in alone
    shutil.copy(ROOT / "scripts/inspect.py", tmp_path)
    assert run() == alone
    (tmp_path / "inspect.py").write_text("")
    assert run() is None, "Python does not search the script's folder, so this test is void"
