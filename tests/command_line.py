"""Running a command: in this process, or a script in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from compat.cli import main

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """What a run of the command line leaves."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> Outcome:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    return Outcome(int(exited.value.code or 0), out, err)


def script(name: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME.py in a process of its own; it may not print what is no UTF-8."""
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
