"""Runs mutations in a subprocess, which may crash or hang, and counts the outcomes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.mutations import KINDS, mutation

ROOT = Path(__file__).parents[2]
STARTS_WITHIN, ANSWERS_WITHIN = 120.0, 10.0
A_BATCH = 10_000  # then a fresh process, whose memory is not worn


@dataclass
class Report:
    """The outcomes of the mutations, by kind."""

    seed: int
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, index: int, kind: str, outcome: str, fault: str) -> None:
        self.counts[kind, outcome] += 1
        if fault:
            self.failures.append({"index": index, "kind": kind, "fault": fault})

    def lines(self) -> list[str]:
        """A line for each kind, and one for each failure with the command to reproduce it."""
        kinds = dict.fromkeys(kind for kind, _ in self.counts)
        found = [
            f"{kind}: " + ", ".join(f"{n} {what}" for (k, what), n in rows if k == kind)
            for rows in [sorted(self.counts.items())]
            for kind in kinds
        ]
        return found + [
            f"✗ {f['kind']}: {f['fault']}\n  again: --kind {f['kind']} --n 1 --start {f['index']} "
            f"--seed {self.seed}"
            for f in self.failures
        ]


def run(
    n: int,
    seed: int,
    start: int = 0,
    kind: str | None = None,
    target: str = "tests.fuzz.oracle:load",
) -> Report:
    """Mutations `start` to `start + n` of a seed.

    Args:
        n: how many.
        seed: of all of them.
        start: the first.
        kind: the only kind to make; else all of them, by turns.
        target: what loads them, as `module:function`.
    """
    report, kinds = Report(seed), [kind] if kind else list(KINDS)
    at = start
    while at < start + n:
        at = _batch(report, at, min(at + A_BATCH, start + n), kinds, target)
    return report


def _batch(report: Report, start: int, stop: int, kinds: list[str], target: str) -> int:
    """Run mutations until the process ends; returns the number of the next mutation."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        arguments = [str(report.seed), str(start), str(stop), ",".join(kinds), target]
        noise = Path(folder, "noise")
        ours = {"FUZZ_NOISE": str(noise), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            bufsize=0,  # else lines wait where select does not see them
            env={**os.environ, **ours},
        ) as worker:
            try:
                if not answer(worker, STARTS_WITHIN):
                    raise RuntimeError(f"the worker does not start: {noise.read_text()}")
                for index in range(start, stop):
                    if not (result := answer(worker, ANSWERS_WITHIN)):
                        kind, _ = mutation(report.seed, index, kinds)
                        report.add(index, kind, "dead or silent", _end(worker, noise))
                        return index + 1
                    report.add(**result)
            finally:
                worker.kill()
        return stop


def answer(worker: subprocess.Popen[bytes], within: float) -> Any:
    """The next line of output, or nothing if the process has ended or is silent."""
    assert worker.stdout is not None
    if not select.select([worker.stdout], [], [], within)[0]:
        return {}
    return json.loads(worker.stdout.readline() or b"{}")


def _end(worker: subprocess.Popen[bytes], noise: Path) -> str:
    """Why a process does not answer."""
    try:
        code = worker.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWERS_WITHIN:.0f} s"
    last = (noise.read_text(errors="replace").strip().splitlines() or [""])[-1]
    how = f"killed by signal {-code}" if code < 0 else f"the process ended with code {code}"
    return f"{how}: {last}" if last else how
