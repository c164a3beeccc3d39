"""bench.py adapt: the stages of adapt, against forward passes of transformers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import (
    JsonOption,
    ModelOption,
    RunsOption,
    checkpoint_folder,
    in_fresh_process,
)
from benchmarks.one_adapt import N_IDS

ONE_ADAPT = str(Path(__file__).parent / "one_adapt.py")
PER_FORWARD, FIXED = 6, 10  # adapt should take no longer than 6 forward passes and 10 s


def adapt_command(
    model: ModelOption = "gpt2", runs: RunsOption = 3, as_json: JsonOption = False
) -> None:
    """Measure the time of each stage of adapt, in turns with a forward pass of transformers.

    The target for the whole call is 6 forward passes and 10 s. The time of the process, from the
    start of Python on, is shown too.
    """
    with checkpoint_folder(model) as source:
        adapts, forwards = [], []
        for _ in range(runs):
            adapts.append(in_fresh_process(ONE_ADAPT, "adapt", source))
            forwards.append(in_fresh_process(ONE_ADAPT, "forward", source)["forward"])
    seconds = {name: statistics.median(one[name] for one in adapts) for name in adapts[0]}
    process, total, forward = (
        seconds.pop("process"),
        seconds.pop("call"),
        statistics.median(forwards),
    )
    target = PER_FORWARD * forward + FIXED
    threads = torch.get_num_threads()
    result: dict[str, Any] = {"model": model, "runs": runs, "threads": threads}
    result["seconds"] = {**seconds, "between": total - sum(seconds.values())}
    result |= {"total": total, "process": process, "forward": forward, "target": target}
    result["ratio"] = total / target
    print(json.dumps(result, indent=2)) if as_json else show(result)


def show(result: dict[str, Any]) -> None:
    table = Table("stage", title=f"adapt on {result['model']}")
    table.add_column("seconds", justify="right")
    for stage, seconds in result["seconds"].items():
        table.add_row(stage, f"{seconds:.2f}")
    table.add_section()
    table.add_row("the call", f"{result['total']:.2f}")
    table.add_row("the process", f"{result['process']:.2f}")
    table.add_row(f"forward: transformers, {N_IDS} ids", f"{result['forward']:.3f}")
    table.add_row(f"target: {PER_FORWARD} × forward + {FIXED}", f"{result['target']:.2f}")
    table.caption = f"median of {result['runs']}, threads: {result['threads']}"
    Console().print(table)
    print(f"{'✓' if result['ratio'] <= 1 else '✗'} {result['ratio']:.2f} × the target")
