"""The README's code runs, on the embedded checkpoint instead of the downloaded one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import compat
from compat.checkpoint import open_checkpoint
from compat.dialects.linear import GPTModel

README = Path(compat.__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


CONFIG = open_checkpoint("demo").config


def test_first_use_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first block generates; the next ones write and pack what that one loaded."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(BLOCKS[0].replace('"gpt2"', '"demo"'), names)
    text = capsys.readouterr().out
    assert text.startswith("Every effort moves") and len(text) > len("Every effort moves\n")
    exec(BLOCKS[1].replace('"gpt2"', '"demo"'), names)
    assert open_checkpoint(tmp_path / "my-gpt2").config == CONFIG
    exec(BLOCKS[2].replace('"gpt2"', '"demo"'), names)
    assert isinstance(nats := names["nats"], torch.Tensor) and bool((nats < 0).all())


def test_second_use_runs() -> None:
    models: dict[str, object] = {"my_model": GPTModel(CONFIG), "another_model": GPTModel(CONFIG)}
    exec(BLOCKS[3].replace('"gpt2"', '"demo"'), models)
    adaptation = models["adaptation"]
    assert isinstance(adaptation, compat.Adaptation) and adaptation.compatible


def test_a_map_by_hand_names_what_there_is() -> None:
    """It stands for a model of the reader's, so that only its names can be checked."""
    compile(BLOCKS[4], "README.md", "exec")
    imported = re.search(r"from compat import (.*)", BLOCKS[4])
    assert imported is not None
    assert all(hasattr(compat, name.strip()) for name in imported[1].split(","))


SCRIPTS = """
demo test load.py parity.py generate.py adapt.py inspect.py export.py fuzz.py bench.py
""".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_that_it_names_are_there(script: str) -> None:
    assert f"scripts/{script}" in README.read_text(encoding="utf-8")
    assert (README.parent / "scripts" / script).is_file()
