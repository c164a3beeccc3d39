"""bench.py evaluate: lm-eval with an engine, beside lm-eval's own hf."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import (
    SIZES,
    JsonOption,
    ModelOption,
    RunsOption,
    checkpoint_folder,
    in_fresh_process,
)
from compat import load_pretrained, load_tokenizer, save_pretrained

ONE_EVALUATE = str(Path(__file__).parent / "one_evaluate.py")
MODELS = ("hf 1", "hf 8", "compat 8")  # with lm-eval's batch_size


def evaluate_command(
    model: ModelOption = "gpt2", runs: RunsOption = 3, as_json: JsonOption = False
) -> None:
    """Measure the time of lm-eval's kinds of requests, with an engine and with lm-eval's own hf.

    - choices: four continuations of each of eight contexts.
    - last words: one continuation of each context.
    - whole texts: one text that is longer than the model's context.
    - generated: eight texts of up to 24 tokens.
    """
    with checkpoint_folder(model) as folder:
        if model in SIZES:  # with GPT-2's own tokenizer, which hf reads from files
            save_pretrained(load_pretrained(folder), folder, tokenizer=load_tokenizer(folder))
        turns = [
            [in_fresh_process(ONE_EVALUATE, one, folder) for one in MODELS] for _ in range(runs)
        ]
    result = {"model": model, "runs": runs, "threads": turns[0][0]["threads"], **compared(turns)}
    print(json.dumps(result, indent=2)) if as_json else show(result)


def compared(turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return each model's median seconds, and how far its results are from the first one's."""
    first = turns[0][0]["results"]
    rows = {}
    for number, name in enumerate(MODELS):
        found = [turn[number] for turn in turns]
        kinds = found[0]["seconds"]
        seconds = {kind: statistics.median(one["seconds"][kind] for one in found) for kind in kinds}
        results = found[0]["results"]
        pairs = [
            (mine[0], its[0])
            for kind in ("choices", "last words")
            for mine, its in zip(results[kind], first[kind], strict=True)
        ] + list(zip(results["whole texts"], first["whole texts"], strict=True))
        rows[name] = {
            "seconds": seconds,
            "largest_difference": max(abs(mine - its) / abs(its) for mine, its in pairs),
            "same_texts": sum(map(str.__eq__, results["generated"], first["generated"])),
        }
    return {"rows": rows}


def show(result: dict[str, Any]) -> None:
    rows = result["rows"]
    table = Table("model, batch_size", title=f"lm-eval on {result['model']}, seconds")
    for kind in rows[MODELS[0]]["seconds"]:
        table.add_column(kind, justify="right")
    for heading in ("all", "scores: largest relative Δ", "same texts"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        cells = [f"{seconds:.1f}" for seconds in row["seconds"].values()]
        total = sum(row["seconds"].values())
        cells += [f"{total:.1f}", f"{row['largest_difference']:.0e}", f"{row['same_texts']}/8"]
        table.add_row(name, *cells)
    table.caption = f"medians of {result['runs']}, threads: {result['threads']}"
    Console(width=120).print(table)
