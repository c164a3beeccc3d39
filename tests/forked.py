"""Functions that run in forked processes, because importing torch and transformers takes seconds.

The processes are forked from one that has imported torch and compat, but not transformers.

Code that runs at import time, and environment variables that Python reads when it starts, must be
tested in a new interpreter instead. No module here imports `huggingface_hub`, which reads its
settings when it is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["compat.loading", "compat.saving", "compat.tokenizer"])


class FinishedProcess(NamedTuple):
    """The exit code and the output of a finished process."""

    code: int
    out: str
    err: str


class Forked:
    """A process that runs `function(*args)` and writes its output to files.

    Args:
        env: the environment of the process; by default, that of this process.
        of_tests: fork this process, including all modules that the tests have imported.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: object,
        env: dict[str, str] | None = None,
        of_tests: bool = False,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp())
        variables = dict(os.environ) if env is None else env
        task = (self._folder, variables, Path.cwd(), function, args)
        context: Any = multiprocessing.get_context("fork") if of_tests else CONTEXT
        self.process: Any = context.Process(target=_run, args=task)
        self.process.start()

    def wait(self, seconds: float = 120, encoding: str = "utf-8") -> FinishedProcess:
        """Wait until the process has ended. The exit code is negative if a signal terminated it."""
        self.process.join(seconds)
        out, err = ((self._folder / name).read_bytes().decode(encoding) for name in ("out", "err"))
        code = self.process.exitcode
        self.kill()
        assert code is not None, f"still running after {seconds:.0f} s: {err}"
        return FinishedProcess(code, out, err)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def run(function: Callable[..., object], *args: object) -> str:
    """Return the output of `function(*args)`, which must succeed and print nothing to stderr."""
    ended = Forked(function, *args).wait()
    assert (ended.code, ended.err) == (0, ""), ended.err
    return ended.out


def _run(
    folder: Path,
    env: dict[str, str],
    cwd: Path,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    function(*args)
