"""A bug in compat has its own exit code and is reported in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import ConfigError
from tests.adapt_project import GPT, line_of
from tests.command_line import Cli
from tests.test_cli_errors import failing_with

pytestmark = pytest.mark.usefixtures("project", "shared_reference")
COMMANDS = {
    "load": ["--model", "demo"],
    "parity": ["--model", "demo"],
    "generate": ["The"],
    "inspect": ["demo"],
    "adapt": ["right.py:MyGPT"],
    "export": ["demo", "exported"],
}


class Panic(BaseException):
    """A BaseException like a panic of a Rust extension."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "error", [KeyError("wte.weight"), RuntimeError("one\ntwo"), EOFError(), OSError(5, "I/O"),
              AssertionError(), Panic("unwrap")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_internal_error_exits_with_70_and_prints_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, error: BaseException
) -> None:
    opener = "inspect_checkpoint" if command == "inspect" else "open_checkpoint"
    monkeypatch.setattr(f"compat.{opener}", failing_with(error))
    done = cli(command, *COMMANDS[command])
    assert (done.code, done.out) == (70, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: this is a bug in compat: {type(error).__name__}")
    assert "COMPAT_TRACEBACK=1" in line


def test_the_traceback_is_printed_on_request(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPAT_TRACEBACK", "1")
    monkeypatch.setattr("compat.load_pretrained", failing_with(KeyError("wte.weight")))
    done = cli("load")
    assert (done.code, done.out) == (70, "")
    assert "Traceback (most recent call last)" in done.err
    assert "KeyError: 'wte.weight'" in done.err


def test_an_error_while_options_are_parsed_exits_with_70(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compat.saving.shards.parse_size", failing_with(ZeroDivisionError("1 / 0")))
    done = cli("export", "demo", "exported")
    assert (done.code, done.out) == (70, "")
    assert "bug in compat: ZeroDivisionError" in done.err


def test_bad_input_still_exits_with_3(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compat.open_checkpoint", failing_with(ConfigError("n_head is 0")))
    done = cli("load")
    assert (done.code, done.err) == (3, "error: n_head is 0\n")


RAISING = {
    "a key": 'raise KeyError("mine")',
    "exit": "raise SystemExit(0)",
    "no input": "raise EOFError",
    "name": "return nowhere",
}


@pytest.mark.parametrize("statement", RAISING.values(), ids=RAISING)
@pytest.mark.parametrize("calls", range(5))
def test_an_exception_of_the_users_model_exits_with_3_and_names_its_line(
    cli: Cli, tiny: Path, tmp_path: Path, statement: str, calls: int
) -> None:
    """In any forward pass; if adapt can continue without that pass, the model is not compatible."""
    counting = f"""
        global CALLS
        CALLS += 1
        if CALLS > {calls}:
            {statement}"""
    text = "CALLS = 0\n" + GPT.replace('\n        print("called")', counting)
    (tmp_path / "raising.py").write_text(text)
    done = cli("adapt", "raising.py:MyGPT", "--model", tiny)
    assert "bug in compat" not in done.err
    assert (done.code, "raising.py" in done.err) == (3, True) or (
        done.code == 1 and "✗" in done.out
    )
    if done.code == 3:
        assert f"raising.py:{line_of(text, statement)}" in done.err
