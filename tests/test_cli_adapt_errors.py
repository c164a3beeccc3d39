"""`adapt` on the command line: how the model is built, what is refused, and the exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import HubError
from tests.adapt_project import GPT
from tests.command_line import Cli
from tests.test_cli_errors import failing_with

pytestmark = pytest.mark.usefixtures("project", "shared_reference")


# How the model is built


def test_kwargs_are_passed_to_the_constructor(cli: Cli, tiny: Path) -> None:
    done = cli("adapt", "right.py:MyGPT", "--model", tiny, "--kwargs", '{"heads": 2}')
    assert done.code == 1
    assert "n_head_mismatch" in done.out


def test_a_function_can_return_the_model(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    sizes = "vocab_size n_positions n_embd n_head n_layer".split()
    arguments = ", ".join(f"config.{size}" for size in sizes)
    make_model = f"\n\ndef make_model(config):\n    return MyGPT({arguments})\n"
    (tmp_path / "made.py").write_text(GPT + make_model)
    assert cli("adapt", "made.py:make_model", "--model", tiny).code == 0


def test_a_config_of_the_file_can_be_named(cli: Cli, tiny: Path) -> None:
    argv = ("adapt", "configured.py:Configured", "--model", tiny, "--config-name")
    assert cli(*argv, "CONFIG").code == 0
    small = cli(*argv, "SMALL")
    assert (small.code, "n_head_mismatch" in small.out) == (1, True)
    large = cli(*argv, "LARGE")
    assert (large.code, large.out) == (3, "")
    assert "SMALL" in large.err


# Errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kwargs", "{n: 2}"], "--kwargs"),
        (["--kwargs", "[2]"], "--kwargs"),
        (["--kwargs", "{}", "--config-name", "CONFIG"], "--config-name"),
        (["--json", "--emit-map"], "--emit-map"),
        (["--html", "no/such/folder/page.html"], "no/such/folder"),
    ],
)
def test_wrong_usage_exits_with_2(cli: Cli, options: list[str], named: str) -> None:
    """The error is reported before any code of the model is executed."""
    done = cli("adapt", "right.py:MyGPT", *options)
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert "built" not in done.err


@pytest.mark.parametrize("as_json", [[], ["--json"], ["--emit-map"]], ids=["text", "json", "map"])
@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("broken.py:MyGPT", "broken.py:1"),
        ("right.py:MyGTP", "MyGPT"),
        ("right.py:CONFIG", "CONFIG"),
        ("rigth.py:MyGPT", "right.py"),
        ("no.such.package:GPT", "no.such.package"),
        ("what is this", "FILE.py:Class"),
    ],
)
def test_an_invalid_model_exits_with_3(
    cli: Cli, tiny: Path, target: str, named: str, as_json: list[str]
) -> None:
    done = cli("adapt", target, "--model", tiny, *as_json)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ")
    assert named in done.err


def test_a_model_that_is_not_a_gpt2_exits_with_1(cli: Cli, tiny: Path) -> None:
    done = cli("adapt", "other.py:MyGPT", "--model", tiny)
    assert done.code == 1 and "✗ mapped 0 of 40 tensors" in done.out
    assert "so it has no attention and is not a GPT-2" in " ".join(done.out.split())


def test_a_constructor_that_raises_exits_with_3(cli: Cli, tiny: Path) -> None:
    done = cli("adapt", "right.py:MyGPT", "--model", tiny, "--kwargs", '{"layers": "three"}')
    assert (done.code, done.out) == (3, "")
    assert "right.py" in done.err
    assert "layers" in done.err


def test_a_bad_checkpoint_exits_with_3(cli: Cli, tmp_path: Path) -> None:
    done = cli("adapt", "right.py:MyGPT", "--model", tmp_path)
    assert (done.code, done.out) == (3, "")
    assert str(tmp_path) in done.err


@pytest.mark.parametrize(("error", "code"), [(HubError("no route"), 4), (KeyboardInterrupt(), 130)])
def test_no_network_exits_with_4_and_ctrl_c_with_130(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    monkeypatch.setattr("compat.checkpoint.hub.fetch", failing_with(error))
    done = cli("adapt", "right.py:MyGPT", "--model", "some/model")
    assert (done.code, done.out) == (code, "")
    assert "Traceback" not in done.err


def test_ctrl_c_while_the_model_runs_exits_with_130(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(GPT.replace('print("called")', "raise KeyboardInterrupt"))
    done = cli("adapt", "stopped.py:MyGPT", "--model", tiny)
    assert (done.code, done.out) == (130, "")
