"""`adapt --summary`: examine many files, such as a class's homework, with one row for each."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from compat.cli.output import note

COLUMNS = ("file", "verdict", "codes", "first divergence", "line", "mapped", "seconds")
WORDS = {0: "compatible", 1: "not compatible"}  # by exit code; any other is an error


def summarize(
    targets: Sequence[str], arguments: Sequence[str], time_limit: float
) -> Iterator[list[str]]:
    """Run `adapt --json` for each target and yield a row of COLUMNS.

    Each runs in a separate process, so that no file can affect another one or end the command.

    Args:
        targets: `FILE.py` or `FILE.py:Class`.
        arguments: further arguments of the command.
        time_limit: the limit for one target, in seconds.
    """
    for number, target in enumerate(targets, start=1):
        note(f"{number} of {len(targets)}: {target}")
        start = time.perf_counter()
        code, out, err = _run([target, *arguments, "--json"], time_limit)
        seconds = f"{time.perf_counter() - start:.1f}"
        if code is None:
            yield [target, f"not finished in {time_limit:g} s", "", "", "", "", seconds]
        elif code in WORDS and (found := _parsed(out)) is not None:
            yield [target, WORDS[code], *_cells(found), seconds]
        else:
            yield [target, _reason(err, code), "", "", "", "", seconds]


def print_csv(rows: Iterable[list[str]]) -> list[list[str]]:
    """Print rows below the names of the columns, each as soon as it is known, and return them."""
    printed = []
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_harmless(cell) for cell in row])
        sys.stdout.flush()
        printed.append(row)
    return printed


def _harmless(cell: str) -> str:
    """Return a cell that a spreadsheet does not take for a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@") else cell


def _run(argv: Sequence[str], time_limit: float) -> tuple[int | None, str, str]:
    """Return the exit code and the output of `adapt`; None for a process that was ended."""
    with subprocess.Popen(
        [sys.executable, "-m", "compat", "adapt", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONUTF8": "1"},
        start_new_session=True,  # so that what it starts ends with it
    ) as process:
        try:
            out, err = process.communicate(timeout=time_limit)
        except BaseException as error:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, "", ""
    return process.returncode, out, err


def _parsed(out: str) -> dict[str, Any] | None:
    try:
        found = json.loads(out)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _cells(found: dict[str, Any]) -> list[str]:
    """Return the codes of findings but "info", the first divergence, its line, and the mapping."""
    shown = [finding for finding in found["findings"] if finding["severity"] != "info"]
    codes = " ".join(dict.fromkeys(finding["code"] for finding in shown))
    lines = [str(finding["line"]) for finding in shown if finding["line"] is not None]
    first = (found["parity"] or {}).get("first_divergence") or ""
    return [codes, first, lines[0] if lines else "", f"{found['mapped']} of {found['tensors']}"]


def _reason(err: str, code: int) -> str:
    """Return the last error message, in one line."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    if errors:
        return errors[-1]
    usage = [line.strip(" │") for line in err.splitlines() if line.strip(" │╭╮╰╯─")]
    return f"error: {usage[-1]}" if usage else f"error: the process ended with exit code {code}"
