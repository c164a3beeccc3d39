"""Runs mutations in separate processes, which may crash or hang, and counts the outcomes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.forked import CONTEXT
from tests.fuzz import worker
from tests.fuzz.mutations import KINDS, mutation

STARTS_WITHIN, ANSWERS_WITHIN = 120.0, 10.0
BATCH_SIZE = 10_000  # mutations for each process, because its memory fragments


@dataclass
class Report:
    """The outcomes of the mutations by kind."""

    seed: int
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, index: int, kind: str, outcome: str, fault: str) -> None:
        self.counts[kind, outcome] += 1
        if fault:
            self.failures.append({"index": index, "kind": kind, "fault": fault})

    def lines(self) -> list[str]:
        """Return a line for each kind, and one for each failure with a command to reproduce it."""
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
    """Test the mutations from `start` to `start + n` of a seed.

    Args:
        n: the number of mutations.
        seed: the seed of all mutations.
        start: the index of the first mutation.
        kind: the only kind of mutation; by default, all kinds in turn.
        target: the loader, as `module:function`.
    """
    report, kinds = Report(seed), [kind] if kind else list(KINDS)
    at = start
    while at < start + n:
        at = _batch(report, at, min(at + BATCH_SIZE, start + n), kinds, target)
    return report


def _batch(report: Report, start: int, stop: int, kinds: list[str], target: str) -> int:
    """Run mutations until the process ends, and return the index of the next mutation."""
    ours, theirs = Pipe()
    with TemporaryDirectory(prefix="fuzz-") as folder:
        noise = Path(folder, "noise")
        task = (theirs, folder, noise, report.seed, start, stop, kinds, target)
        process: Any = CONTEXT.Process(target=worker.main, args=task, daemon=True)
        process.start()
        theirs.close()  # so that the pipe closes when the process ends
        try:
            if not answer(ours, STARTS_WITHIN):
                raise RuntimeError(f"the worker does not start: {noise.read_text()}")
            for index in range(start, stop):
                if not (result := answer(ours, ANSWERS_WITHIN)):
                    kind, _ = mutation(report.seed, index, kinds)
                    report.add(index, kind, "dead or silent", _end(process, noise))
                    return index + 1
                report.add(**result)
        finally:
            process.kill()
            process.join()
        return stop


def answer(pipe: Connection, within: float) -> Any:
    """Return the next answer, or an empty one if the process has ended or does not answer."""
    try:
        return pipe.recv() if pipe.poll(within) else {}
    except EOFError:
        return {}


def _end(process: Any, noise: Path) -> str:
    """Return why a process does not answer."""
    process.join(0.5)
    code = process.exitcode
    if code is None:
        return f"no answer within {ANSWERS_WITHIN:.0f} s"
    last = (noise.read_text(errors="replace").strip().splitlines() or [""])[-1]
    cause = f"killed by signal {-code}" if code < 0 else f"the process ended with code {code}"
    return f"{cause}: {last}" if last else cause
