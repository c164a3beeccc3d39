"""bench.py load: from a checkpoint on disk to a usable model, against transformers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import JsonOption, RunsOption, checkpoint_folder, in_fresh_process

ONE_LOAD = str(Path(__file__).parent / "one_load.py")
LOADERS = ("transformers", "linear", "conv1d", "linear copied", "conv1d copied")
ModelsOption = Annotated[
    str, typer.Option("--models", help="Shapes such as gpt2, or folders, separated by commas.")
]


def load_command(
    models: ModelsOption = "gpt2,gpt2-xl", runs: RunsOption = 5, as_json: JsonOption = False
) -> None:
    """Measure the time and memory of loading, in turns with transformers.

    transformers memory-maps the file too. The columns are:

    - call: from the call of the loader to its return.
    - logits: from the call to the logits of 8 ids. A memory-mapped file is only read then.
    - process: from the start of Python to its end, without these logits.
    - peak: resident memory beyond that after the imports, over the size of the weights.
    """
    results = []
    for model in models.split(","):
        with checkpoint_folder(model) as folder:
            results.append(measure(model, folder, runs))
            if not as_json:
                show(results[-1])
    if as_json:
        print(json.dumps(results, indent=2))


def measure(model: str, folder: str, runs: int) -> dict[str, Any]:
    turns = [[in_fresh_process(ONE_LOAD, one, folder) for one in LOADERS] for _ in range(runs)]
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    loaders = {}
    for loader, found in zip(LOADERS, zip(*turns, strict=True), strict=True):
        for one in found:
            one["process"] -= one["logits"] - one["call"]
        columns = {key: [one[key] for one in found] for key in found[0]}
        loaders[loader] = {key: statistics.median(column) for key, column in columns.items()}
        loaders[loader]["spread"] = [min(columns["call"]), max(columns["call"])]
    return {"model": model, "runs": runs, "bytes": size, "loaders": loaders}


def show(result: dict[str, Any]) -> None:
    size, reference = result["bytes"], result["loaders"]["transformers"]
    title = f"loading {result['model']}, {size / 1e9:.2f} GB of weights"
    table = Table("loader", title=title)
    for heading in ("call", "lowest … highest", "logits", "process", "peak / weights"):
        table.add_column(heading, justify="right")
    for loader, found in result["loaders"].items():
        low, high = found["spread"]
        cells = [
            f"{found[key]:.3f} s ({found[key] / reference[key]:.2f} ×)"
            for key in ("call", "logits", "process")
        ]
        cells.insert(1, f"{low:.3f} … {high:.3f}")
        table.add_row(loader, *cells, f"{found['peak'] / size:.2f}")
    table.caption = f"medians of {result['runs']}; × transformers in the same run"
    Console(width=120).print(table)
