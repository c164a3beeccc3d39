"""Exit codes for missing parity, wrong usage, bad input and interruptions; and the scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from torch import Tensor

from compat import HubError, load_pretrained, load_tokenizer
from compat.dialects import linear
from tests.command_line import ROOT, Cli, script
from tests.conftest import noisy_reference

COMMANDS = {"load": [], "parity": [], "generate": ["The"]}
each_command = pytest.mark.parametrize("command", COMMANDS)


def unbiased_norm(self: linear.LayerNorm, x: Tensor) -> Tensor:
    """Make a common mistake: unbiased variance, divided by C − 1."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.scale + self.shift


@pytest.fixture
def unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Introduce the mistake in the linear dialect."""
    monkeypatch.setattr(linear.LayerNorm, "forward", unbiased_norm)


@pytest.mark.usefixtures("unbiased")
def test_no_parity_exits_with_1_and_names_the_first_divergence(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--json")
    found = done.json()
    assert (done.code, found["passed"], found["first_divergence"]) == (1, False, "h.0.ln_1")
    wrong = {tap["tap"] for tap in found["taps"] if tap["local"]["rel_rms"] > 1e-3}
    assert wrong == {"ln_f", *(f"h.{i}.{norm}" for i in range(3) for norm in ("ln_1", "ln_2"))}
    shown = cli("parity", "--model", tiny)
    assert shown.code == 1
    assert "✗ from ln_1" in shown.out
    assert shown.out.splitlines()[-1].startswith("✗ linear diverges from transformers at h.0.ln_1")


@pytest.mark.usefixtures("unbiased")
def test_parity_exits_with_1_if_one_of_two_dialects_fails(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--all", "--json")
    assert done.code == 1
    assert [report["passed"] for report in done.json()] == [False, True]
    assert cli("parity", "--model", tiny, "--dialect", "conv1d", "--quiet").code == 0


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["nonsense"], "nonsense"),
        (["load", "--nonsense"], "--nonsense"),
        (["load", "--dialect", "torch"], "torch"),
        (["parity", "--dtype", "int8"], "int8"),
        (["parity", "--batch", "0"], "--batch"),
        (["parity", "--batch", "-1"], "--batch"),
        (["parity", "--length", "0"], "--length"),
        (["parity", "--length", "-5"], "--length"),
        (["generate"], "prompt"),
        (["generate", "The", "--prompt-file", "-"], "exclude"),
        (["generate", "The", "--interactive"], "exclude"),
        (["generate", "--prompt-file", "-", "--interactive"], "exclude"),
        (["generate", "The", "--out", "file"], "--out needs"),
        (["generate", "--prompt-file", "-", "--resume"], "--resume needs"),
        (["generate", "The", "--logprobs"], "--logprobs needs"),
        (["generate", "--interactive", "--json"], "--json"),
        (["generate", "--interactive", "--n", "2"], "--n"),
        (["generate", "The", "--overflow", "wrap"], "wrap"),
        (["generate", "--prompt-file", "no/such/file"], "no/such/file"),
        (["generate", "The", "--temperature", "warm"], "--temperature"),
    ],
)
def test_wrong_usage_exits_with_2(cli: Cli, argv: list[str], named: str) -> None:
    done = cli(*argv)
    assert (done.code, done.out) == (2, "")
    assert named in re.sub(r"\x1b\[[\d;]*m", "", done.err)  # without forced colours


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-new-tokens", -1], ["-1"]),
        (["--temperature", -1], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-k", 0], ["top_k", "0"]),
        (["--top-p", 1.5], ["top_p", "1.5"]),
        (["--min-p", 1.5], ["min_p", "1.5"]),
        (["--repetition-penalty", 0], ["repetition_penalty", "0"]),
        (["--n", 0], ["n is 0"]),
        (["--batch-size", 0, "--n", 2], ["batch_size", "0"]),
        (["--stop", ""], ["stop", "empty"]),
        (["--stop-id", 1024], ["stop_ids", "1024"]),
        (["--seed", 2**80], ["seed"]),
    ],
)
def test_a_request_that_cannot_be_fulfilled_exits_with_2(
    cli: Cli, options: list[object], named: list[str]
) -> None:
    done = cli("generate", "The", *options)
    assert (done.code, done.out) == (2, "")
    assert all(word in done.err for word in named)


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_more_tokens_than_fit_into_the_context_exit_with_2(cli: Cli, as_json: list[str]) -> None:
    n, T = load_pretrained("demo").config.n_positions, len(load_tokenizer("demo").encode("The"))
    done = cli("generate", "The", "--max-new-tokens", n, *as_json)
    assert (done.code, done.out) == (2, "")
    assert all(f"{words}" in done.err for words in (f"{T} prompt", n, n + T))


def test_a_prompt_that_fills_the_context_exits_with_2(cli: Cli) -> None:
    n = load_pretrained("demo").config.n_positions
    prompt = "The " * n
    T = len(load_tokenizer("demo").encode(prompt))
    assert T >= n
    done = cli("generate", prompt)
    assert (done.code, done.out) == (2, "")
    assert f"{T} prompt tokens" in done.err
    assert f"{n} positions" in done.err


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_parity_check_longer_than_the_context_exits_with_2(
    cli: Cli, tiny: Path, as_json: list[str]
) -> None:
    done = cli("parity", "--model", tiny, "--length", 33, *as_json)
    assert (done.code, done.out) == (2, "")
    assert all(word in done.err for word in ("--length", "33", "32"))
    assert cli("parity", "--model", tiny, "--length", 32, *as_json).code == 0


@each_command
def test_a_bad_checkpoint_exits_with_3(cli: Cli, tiny: Path, tmp_path: Path, command: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"<html>")
    config = shutil.copytree(tiny, tmp_path / "config")
    (config / "config.json").write_text('{"model_type": "gpt2", "n_head": 0}')
    for source in (tmp_path / "no/such/folder", empty, broken, config):
        done = cli(command, *COMMANDS[command], "--model", source)
        assert (done.code, done.out) == (3, "")
        assert done.err.startswith("error: ")
        assert str(source) in done.err or "n_head" in done.err


@pytest.mark.parametrize("argv", [["generate", "The"], ["parity", "--text", "The"]])
def test_a_checkpoint_without_tokenizer_exits_with_3(cli: Cli, tiny: Path, argv: list[str]) -> None:
    done = cli(*argv, "--model", tiny)
    assert (done.code, done.out) == (3, "")
    assert "tokenizer.json" in done.err


def test_a_folder_that_does_not_exist_exits_with_3(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is not looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    for argv in (
        ["load", "--model"],
        ["parity", "--model"],
        ["inspect"],
        ["generate", "The", "--model"],
    ):
        done = cli(*argv, "./nofolder")
        assert done.code == 3
        assert "./nofolder does not exist" in done.out + done.err


def failing_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return fail


@each_command
def test_no_network_exits_with_4(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("compat.checkpoint.hub.fetch", failing_with(HubError("no route")))
    done = cli(command, *COMMANDS[command], "--model", "some/model")
    assert (done.code, done.out, done.err) == (4, "", "error: no route\n")


@each_command
def test_ctrl_c_exits_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("compat.checkpoint.hub.fetch", failing_with(KeyboardInterrupt()))
    done = cli(command, *COMMANDS[command], "--model", "some/model")
    assert (done.code, done.out) == (130, "")
    assert "interrupted" in done.err
    assert "Traceback" not in done.err


# The scripts


def test_the_scripts_run_the_commands(tiny: Path) -> None:
    load = script("load", "--model", tiny, "--json")
    assert (load.returncode, load.stderr) == (0, "")
    stored = [entry["tensor"] for entry in json.loads(load.stdout)["tensors"]]
    assert len(stored) == len(noisy_reference().state_dict())
    parity = script("parity", "--model", tiny, "--quiet")
    assert (parity.returncode, parity.stderr) == (0, "")
    assert parity.stdout.startswith("✓ linear")


def test_a_prompt_that_is_not_utf8_exits_with_2_without_a_traceback() -> None:
    done = script("generate", os.fsdecode(b"a\xff"), "--max-new-tokens", 3)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the prompt cannot be encoded")


def test_a_closed_pipe_is_not_an_error(tiny: Path) -> None:
    command = [sys.executable, ROOT / "scripts/load.py", "--model", tiny, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["parity", "--text", "T", "--length", "5"], ("--text", "--length")),
        (["parity", "--text", "T", "--batch", "2"], ("--text", "--batch")),
        (["parity", "--text", "T", "--seed", "0"], ("--text", "--seed")),
        (["parity", "--all", "--dialect", "linear"], ("--all", "--dialect")),
        (["parity", "--engine", "int8", "--all"], ("--engine", "--all")),
        (["parity", "--engine", "int8", "--dialect", "conv1d"], ("--engine", "--dialect")),
        (["parity", "--engine", "int8", "--dtype", "float32"], ("--engine", "--dtype")),
        (["parity", "--json", "--quiet"], ("--json", "--quiet")),
        (["generate", "T", "--batch-size", "2"], ("--batch-size", "--prompt-file")),
        (["generate", "T", "--n", "2", "--speculate", "lookup", "--batch-size", "2"],
         ("--batch-size", "--speculate")),
    ],
)  # fmt: skip
def test_conflicting_options_exit_with_2(
    cli: Cli, tmp_path: Path, argv: list[str], named: tuple[str, str]
) -> None:
    """They are refused before a checkpoint is searched for."""
    done = cli(*argv, "--model", tmp_path / "none")
    assert done.code == 2 and done.out == ""
    for option in named:
        assert option in done.err


def test_compatible_options_can_be_combined(cli: Cli, tiny: Path) -> None:
    assert cli("parity", "--model", tiny, "--batch", 1, "--length", 9, "--seed", 3).code == 0
    assert cli("parity", "--model", tiny, "--dialect", "conv1d", "--quiet").code == 0
