"""The README's code runs, on the embedded checkpoint instead of the downloaded one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import compat

README = Path(compat.__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_first_use_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0].replace('"gpt2"', '"demo"'), {})
    text = capsys.readouterr().out
    assert text.startswith("Every effort moves") and len(text) > len("Every effort moves\n")


def test_second_use_names_what_there_is() -> None:
    """It stands for a model of the reader's, so that only its names can be checked."""
    compile(BLOCKS[1], "README.md", "exec")
    imported = re.search(r"from compat import \((.*?)\)", BLOCKS[1], re.DOTALL)
    assert imported is not None
    assert all(hasattr(compat, name.strip()) for name in imported[1].strip(", \n").split(","))


@pytest.mark.parametrize("script", ["demo", "test", "load.py", "parity.py", "generate.py"])
def test_scripts_that_it_names_are_there(script: str) -> None:
    assert f"scripts/{script}" in README.read_text(encoding="utf-8")
    assert (README.parent / "scripts" / script).is_file()
