"""SIGINT to a running process keeps the output so far, and the exit code is 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command_line import ROOT, script
from tests.conftest import MakeCheckpoint
from tests.text_common import with_tokenizer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals are needed")
Process = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def slow(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint with a long context, which takes seconds to fill."""
    return with_tokenizer(make_checkpoint, n_positions=4096, n_layer=6, n_embd=96)


def enable_sigint() -> None:
    """Handle SIGINT, which processes started in the background ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def running(*argv: object) -> Iterator[Process]:
    env = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts/generate.py", *map(str, argv)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
        preexec_fn=enable_sigint,
        bufsize=0,  # `communicate` would miss what `read` leaves in a buffer
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt(process: Process) -> tuple[int, bytes, str]:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err.decode()


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_keeps_the_text_so_far(slow: Path) -> None:
    options = ("--model", slow, "--temperature", 0, "--max-new-tokens", 4000)
    with running("ROMEO:", *options) as process:
        assert process.stdout is not None
        partial = b"".join(process.stdout.read(1) for _ in range(40))
        code, out, err = interrupt(process)
    assert code == 130
    assert "interrupted" in err and "Traceback" not in err
    text = (partial + out).decode()
    assert text.startswith("ROMEO:") and text.endswith("\n")
    tokens = int(err.split(" tokens")[0].replace(",", ""))
    assert 0 < tokens < 4000
    again = script("generate", "ROMEO:", *options[:-1], tokens)
    assert again.stdout.rstrip("\n\ufffd") == text.rstrip("\n\ufffd")


def test_an_interrupted_prompt_file_leaves_complete_lines_and_can_be_resumed(
    slow: Path, tmp_path: Path
) -> None:
    prompts, out, whole = (tmp_path / name for name in ("prompts.txt", "out", "whole"))
    prompts.write_text("".join(f"Prompt {i}\n" for i in range(40)))
    options = ("--model", slow, "--max-new-tokens", 40, "--seed", 1, "--batch-size", 2)
    argv = ("--prompt-file", prompts, *options)
    with running(*argv, "--out", out) as process:
        wait(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2)
        code, printed, err = interrupt(process)
    assert (code, printed) == (130, b"")
    assert "interrupted" in err and "Traceback" not in err
    partial = out.read_bytes()
    assert partial.endswith(b"\n")
    assert 2 <= len([json.loads(line) for line in partial.splitlines()]) < 40
    assert script("generate", *argv, "--out", out, "--resume").returncode == 0
    assert out.read_bytes().startswith(partial)
    assert script("generate", *argv, "--out", whole).returncode == 0
    assert out.read_bytes() == whole.read_bytes()


# In the order in which `gpt2-compat parity` imports these modules.
MOMENTS = ["typer", "torch._C", "torch.fx", "compat.checkpoint.source", "compat.parity.check"]


@pytest.mark.parametrize("module", MOMENTS)
def test_ctrl_c_during_imports_exits_with_130(module: str) -> None:
    """SIGINT is sent as soon as Python reports on stderr that the module has been imported."""
    argv = [sys.executable, "-X", "importtime", "-m", "compat", "parity"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=enable_sigint, cwd=ROOT
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        assert any(line.split(b"|")[-1].strip() == module.encode() for line in lines)
        code, out, err = interrupt(process)
    assert (code, out) == (130, b"")
    assert "interrupted" in err and "Traceback" not in err


def test_a_conversation_continues_after_ctrl_c_and_a_second_one_ends_it(slow: Path) -> None:
    options = ("--model", slow, "--max-new-tokens", 4000)
    with running("--interactive", *options) as process:
        assert process.stdin and process.stdout and process.stderr
        for prompt in (b"ROMEO:", b"JULIET:"):
            process.stdin.write(prompt + b"\n")
            process.stdin.flush()
            shown = b""
            while prompt not in shown:
                shown += process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            while b"stopped" not in process.stderr.readline():
                pass
        assert process.stderr.read(2) == b"> "
        code, _, err = interrupt(process)
    assert code == 130
    assert "Traceback" not in err
