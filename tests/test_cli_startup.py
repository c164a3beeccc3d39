"""The command line before a command runs: help, version, completion, and how a source is passed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest

import compat
from compat.cli.app import COMMANDS
from compat.cli.generate import DEFAULT_NEW_TOKENS
from compat.generation import text
from tests.command_line import ROOT, Cli
from tests.command_line import script as run_script

each_command = pytest.mark.parametrize("command", COMMANDS)
HEAVY = {"torch", "numpy", "transformers", "tiktoken", "huggingface_hub", "safetensors", "jinja2"}
NEED_A_SOURCE = {"inspect": [], "export": ["DEST"], "pack": ["--out", "a.safetensors"]}


def python(*argv: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, cwd=cwd, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **env},
    )  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    [["--version"], ["-h"], *([command, "-h"] for command in COMMANDS), ["load", "--nonsense"]],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_before_a_command_runs(argv: list[str]) -> None:
    code = f"""
import sys
from compat.cli import main
try:
    main({argv!r})
except SystemExit as exited:
    print(exited.code or 0, {HEAVY!r} & set(sys.modules))
"""
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == f"{2 if 'nonsense' in argv[-1] else 0} set()"


def test_the_program_can_be_run_as_a_module() -> None:
    done = python("-m", "compat", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"gpt2-compat {version('gpt2-compat')}\n"
    assert compat.__version__ == version("gpt2-compat")


def test_files_of_the_working_directory_do_not_hide_libraries(tmp_path: Path) -> None:
    """With `-m`, Python also searches the working directory, where users run `adapt`."""
    (tmp_path / "rich.py").write_text("raise NotImplementedError\n")
    (tmp_path / "typer.py").write_text("raise NotImplementedError\n")
    done = python("-m", "compat", "-h", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str | None
) -> None:
    """`-h` and `--help` print the same, and no line of a paragraph is broken before it is full."""
    monkeypatch.setenv("COLUMNS", "80")
    argv = [command] if command else []
    done = cli(*argv, "--help")
    assert (done.code, done.err) == (0, "")
    assert cli(*argv, "-h").out == done.out
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    prose = [line.strip() for line in lines[: next(i for i, x in enumerate(lines) if "╭" in x)]]
    for line, following in pairwise(prose):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > 78


@pytest.mark.parametrize("script", ["bench", "finetune", "fuzz", "train_demo"])
def test_other_scripts_have_help(script: str) -> None:
    done = run_script(script, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lstrip().lower().startswith(f"usage: {script}.py")


def test_options_of_generate_are_grouped(cli: Cli) -> None:
    out = cli("generate", "--help").out
    panels = dict(re.findall(r"╭─ ([\w ]+?) ─+╮\n(.*?)\n╰", out, re.DOTALL))
    options = {name: re.findall(r"│ (--[\w-]+)", text) for name, text in panels.items()}
    assert options["Options"] == ["--help"]
    assert {"--model", "--revision", "--n-head"} == {*options["Checkpoint"]}
    assert {"--temperature", "--top-k", "--seed"} <= {*options["Sampling"]}
    assert {"--max-new-tokens", "--stop"} <= {*options["Length and stopping"]}
    assert {"--prompt-file", "--out", "--resume"} <= {*options["Prompts"]}
    assert {"--dtype", "--speculate", "--plain"} <= {*options["Execution"]}
    assert {"--json", "--logprobs"} == {*options["Output"]}


def test_the_help_states_the_librarys_default_length() -> None:
    assert DEFAULT_NEW_TOKENS == text.DEFAULT_NEW_TOKENS


def test_shell_completion_proposes_commands() -> None:
    shown = python(
        "-m",
        "compat",
        "--show-completion",
        "bash",
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert shown.returncode == 0
    assert "_GPT2_COMPAT_COMPLETE=complete_bash" in shown.stdout
    words = {"_GPT2_COMPAT_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert python("-m", "compat", COMP_WORDS="gpt2-compat par", **words).stdout == "parity\n"
    words["COMP_CWORD"] = "2"
    found = python("-m", "compat", COMP_WORDS="gpt2-compat generate --top", **words).stdout
    assert found.split() == ["--top-k", "--top-p"]


# Sources


@pytest.fixture
def arguments(project: Path) -> dict[str, list[str]]:
    """The arguments of every command except its source, in a project folder."""
    return {
        "load": ["--json"],
        "inspect": ["--json"],
        "parity": ["--json"],
        "adapt": ["--emit-map"],
        "export": ["--json"],
        "golden": ["--out", "golden.npz"],
        "pack": ["--json", "--out", "packed.safetensors"],
    }


def argv(command: str, *source: object) -> list[object]:
    """Return the positional arguments of a command with its source."""
    before = ["right.py:MyGPT"] if command == "adapt" else []
    return [command, *before, *source, *(["exported"] if command == "export" else [])]


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"generate", "explain", "compare"}))
def test_a_source_is_an_argument_or_an_option(
    cli: Cli, tiny: Path, arguments: dict[str, list[str]], command: str
) -> None:
    options = arguments[command]
    expected = cli(*argv(command, tiny), *options)
    assert expected.code == 0
    for source in (("--model", tiny), (tiny, "--model", tiny)):
        assert cli(*argv(command, *source), *options)[:2] == expected[:2]
    done = cli(*argv(command, tiny, "--model", "demo"), *options)
    assert (done.code, done.out) == (2, "")
    assert "SOURCE is" in done.err and "--model is" in done.err


@pytest.mark.parametrize("command", NEED_A_SOURCE)
def test_a_command_without_its_source_exits_with_2(cli: Cli, command: str) -> None:
    done = cli(command, *NEED_A_SOURCE[command])
    assert (done.code, done.out) == (2, "")
    assert "SOURCE" in done.err


def resident_after_freeing(command: str) -> int:
    """Return how many bytes stay in the process after 64 MiB were allocated, written and freed."""
    done = python("-c", f"""
import ctypes
from compat.cli import main
try:
    {command}
except SystemExit:
    pass
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before, size = resident(), 64 * 2**20
block = libc.malloc(size)
ctypes.memset(block, 1, size)
libc.free(block)
print(resident() - before)
""")  # fmt: skip
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_the_process_of_a_command_keeps_freed_memory() -> None:
    assert resident_after_freeing("main(['--version'])") > 60 * 2**20
    assert resident_after_freeing("pass") < 4 * 2**20  # what glibc does by itself
