"""Helpers that run a command in this process, or a script in a fork of it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from compat.cli import main
from tests.forked import Forked

ROOT = Path(__file__).parents[1]
subprocess_run = subprocess.run


class Outcome(NamedTuple):
    """The exit code and the output of a finished command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> Outcome:
    """Run a command in this process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in argv])
    finally:
        signal.signal(signal.SIGINT, handler)
    out, err = capsys.readouterr()
    return Outcome(int(exited.value.code or 0), out, err)


def python(code: str, *argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, by default in the environment of this process."""
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess_run(command, capture_output=True, text=True, **{"check": True, **options})


def script(name: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME.py as a program in a fork of this process; its output must be UTF-8."""
    env = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return run_in_fork([str(ROOT / f"scripts/{name}.py"), *map(str, argv)], env)


def run_in_fork(program: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python file with arguments in a fork of this process."""
    ended = Forked(run_as_program, program, "utf-8", env=env, of_tests=True).wait(300)
    return subprocess.CompletedProcess(program, ended.code, ended.out, ended.err)


def run_forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Replace `subprocess.run`: run Python files in a fork, and other programs as usual."""
    if command[0] != sys.executable:
        return subprocess_run(command, **options)
    done = run_in_fork(command[1:], options.get("env") or dict(os.environ))
    if not options.get("capture_output"):
        sys.stderr.write(done.stderr)
    return done


def run_as_program(argv: list[str], encoding: str) -> None:
    """Run a Python file as `python FILE ARGUMENT …` does, with output in this encoding."""
    sys.stdout = open(1, "w", encoding=encoding, errors="strict", closefd=False)
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
