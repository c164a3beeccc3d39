"""Run a command in this process, or a script in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from compat.cli import main

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """The exit code and the output of a command."""

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


def script(name: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME.py in a process of its own; its output has to be UTF-8."""
    env = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:strict"}
    env["OMP_NUM_THREADS"] = "1"
    env.pop("FORCE_COLOR", None)
    return subprocess.run(
        [sys.executable, ROOT / f"scripts/{name}.py", *map(str, argv)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=env,
        timeout=120,
        check=False,
    )
