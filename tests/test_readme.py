"""Every code block and command of every README runs on the checkpoint that ships with the package.

`"gpt2"` in Python blocks stands for that checkpoint. The blocks of one file run in order, in one
namespace. If a README shows the output of a command, the words must match. Numbers need not match,
because rounding errors differ between machines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from compat.checkpoint import open_checkpoint
from compat.dialects.linear import GPTModel, MultiHeadAttention
from tests.command_line import ROOT, Cli

PATTERNS = ["README.md", *(f"{top}/**/README.md" for top in ("compat", "scripts", "tests"))]
READMES = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))
CONFIG = open_checkpoint("demo").config
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)\)")
READERS_MODELS = ("my_model", "another_model", "linear_model")  # defined before the first block
RECIPES = "tests/interop/README.md"  # needs other packages; test_recipes.py runs its blocks
TIMED = "scripts/bench.py"  # benchmarks take minutes and have their own tests


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found


@pytest.mark.parametrize(
    "readme", [name for name in READMES if blocks(name, "python") and name != RECIPES]
)
def test_python_blocks_run(
    readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {name: GPTModel(CONFIG) for name in READERS_MODELS}
    names["my_attention"] = MultiHeadAttention(CONFIG)
    for number, block in enumerate(blocks(readme, "python"), start=1):
        code = compile(block.replace('"gpt2"', '"demo"'), f"{readme}, block {number}", "exec")
        exec(code, names)
    if readme == "README.md":
        assert "Every effort moves" in capsys.readouterr().out


@pytest.mark.parametrize("readme", [name for name in READMES if blocks(name, "console")])
def test_commands_print_the_output_that_a_readme_shows(
    readme: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for block in blocks(readme, "console"):
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = entry.partition("\n")
            printed = output_of(command, cli)
            if shown.strip():
                assert comparable(printed) == comparable(shown), command


def output_of(command: str, cli: Cli) -> str:
    if TIMED in command:
        return ""
    program, *argv = shlex.split(command)
    if program != "gpt2-compat":
        env = {**os.environ, "PYTHONUTF8": "1"}
        done = subprocess.run(command, shell=True, env=env, check=True, capture_output=True)
        return done.stdout.decode()
    done = cli(*argv)
    assert done.code in (0, 1), done.err  # 1 is a verdict, which the output shows
    return done.out


def comparable(text: str) -> list[str]:
    """Return the words of a text, without numbers, line breaks and the padding of tables."""
    lines = [re.sub(r"\d[\d.e+-]*|\s+", " ", line).split() for line in text.splitlines()]
    return [word for line in lines for word in line]


@pytest.mark.parametrize("readme", READMES)
def test_links_resolve(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    missing = [
        link for link in LINK.findall(text) if not (ROOT / readme).parent.joinpath(link).exists()
    ]
    assert not missing


def test_the_readme_on_pypi_names_files_instead_of_linking_to_them() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    changes = hatch["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = LINK.findall(text)
    for change in changes:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert files and not LINK.search(text)
    assert all(f"`{file}" in text for file in files)


def test_the_main_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
