"""Messages name only options that exist in the command that prints them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import typer

import compat
from compat.cli.app import app
from tests.command_line import Cli
from tests.conftest import State
from tests.foreign_files import linear, masks

ROOT = Path(compat.__file__).parent
GROUP = typer.main.get_command(app)
OPTIONS = {
    name: {option for parameter in command.params for option in parameter.opts}
    for name, command in GROUP.commands.items()  # type: ignore[attr-defined]
    if name != "explain"  # does not read a checkpoint
}
# The commands that print the messages of a part of compat; parts that are not listed: all commands.
PRINTED_BY = {
    "user_models": {"adapt"},
    "adaptation": {"adapt"},
    "generation": {"generate"},
    "engine.py": {"generate"},
    "decoding": {"generate"},
    "parity": {"parity", "adapt"},
    "saving": {"export"},
    "tokenizer.py": {"generate", "parity", "export", "inspect"},
    "golden_files": {"golden", "compare"},
    "golden_files/candidate.py": {"compare"},
    "cli/adapt.py": {"adapt"},
    "cli/adapt_summary.py": {"adapt"},
    "cli/compare.py": {"compare"},
    "cli/export.py": {"export"},
    "cli/generate.py": {"generate"},
    "cli/golden.py": {"golden"},
    "cli/inspect.py": {"inspect"},
    "cli/load.py": {"load"},
    "cli/pack.py": {"pack"},
    "cli/parity.py": {"parity"},
    "cli/prompt_file.py": {"generate"},
}
COMPILER_OPTIONS = {"decoding/native_library.py": {"--version"}}
SHARED = ("app.py", "options.py")  # with options of only some commands, and of the program
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name not in SHARED)


def mentioned(path: Path) -> set[str]:
    """Return the options named in a file's strings, except in docstrings and complete commands."""
    tree = ast.parse(path.read_text())
    docs = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
        and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs
    ]
    strings = [re.sub(r"(gpt2-compat \w+|torchrun) --[^.;]*", "", text) for text in strings]
    found = {option for text in strings for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    return found - COMPILER_OPTIONS.get(str(path.relative_to(ROOT)), set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_messages_exist_in_the_commands_that_print_them(path: Path) -> None:
    place = path.relative_to(ROOT).as_posix()
    commands = PRINTED_BY.get(place, PRINTED_BY.get(place.partition("/")[0], set(OPTIONS)))
    for command in commands:
        assert mentioned(path) <= OPTIONS[command], f"{place}, printed by {command}"


SOURCES = {
    "load": ["load", "--model"],
    "parity": ["parity", "--model"],
    "generate": ["generate", "The", "--model"],
    "inspect": ["inspect"],
    "adapt": ["adapt", "gpt.py:GPT", "--model"],
    "export": ["export"],
    "golden": ["golden", "--out", "written.npz"],
    "compare": ["compare", "golden.npz", "golden.npz", "--model"],
    "pack": ["pack", "--dtype", "int8", "--out", "packed.safetensors"],
}


@pytest.mark.parametrize("command", OPTIONS)
def test_the_suggested_option_for_heads_works(
    cli: Cli, tmp_path: Path, state: State, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a config lacks the number of heads; every command accepts --n-head."""
    monkeypatch.chdir(tmp_path)
    if command == "compare":
        compat.golden("demo", "golden.npz", taps="logits", input_ids=[[1, 2]])
    Path("gpt.py").write_text("from torch import nn\n\n\nclass GPT(nn.Module):\n    pass\n")
    head = {"lm_head.weight": state["wte.weight"] + 1}
    torch.save(linear({**state, **head, **masks()}), tmp_path / "model.pt")
    rest = [tmp_path / "exported"] if command == "export" else []
    without_option = cli(*SOURCES[command], tmp_path, *rest)
    assert without_option.code == 3
    assert "(--n-head)" in without_option.out + without_option.err
    with_option = cli(*SOURCES[command], tmp_path, *rest, "--n-head", 4)
    assert with_option.code in (0, 3)
    assert "--n-head" not in with_option.out + with_option.err


def test_export_accepts_revision_and_verify(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    for option in (["--revision", "main"], ["--verify"]):
        done = cli("export", tiny, tmp_path / "exported", *option)
        assert done.code == 3
        assert "is a local path" in done.err
