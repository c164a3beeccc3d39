"""bench.py generate: speed of decoding and prefill beside other libraries that run GPT-2."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks import generate_table, plot
from benchmarks.common import JsonOption, RunsOption, checkpoint_folder
from benchmarks.measurements import Measurements
from benchmarks.peers import BOTH, PEERS, Peer
from benchmarks.targets import targets_of
from compat.errors import listed

FAMILIES = list(dict.fromkeys(peer.family for peer in PEERS))
ALL = ",".join(FAMILIES)

PeersOption = Annotated[
    str, typer.Option(help="Libraries, or rows such as 'engine int8', separated by commas.")
]
ShapesOption = Annotated[
    str, typer.Option(help="Shapes such as gpt2, demo, or folders, separated by commas.")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="Write an SVG chart of the speeds.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, or cuda for the libraries that run there.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="One run, fewer tokens, and batches of up to 8.")
]


def generate_command(
    peers: PeersOption = ALL,
    shapes: ShapesOption = "gpt2",
    runs: RunsOption = 3,
    as_json: JsonOption = False,
    plot_file: PlotOption = None,
    quick: QuickOption = False,
    device: DeviceOption = "cpu",
) -> None:
    """Measure the speed and memory of generation, in turns with other libraries.

    All decode greedily, without stop ids, and with the same number of threads. If the context is
    short, so are the prompts.

    - decode: tokens per second after a prompt of 32 tokens.
    - prefill: tokens per second of a prompt of 512 tokens.
    - first: from the start of the process to its first token.
    - growth: the time of a token late in the context over that of an early one.
    - peak: resident memory with one sequence; on a GPU, the memory allocated there.
    """
    chosen = choose(peers, device)
    results = []
    for shape in shapes.split(","):
        with checkpoint_folder(shape) as source, TemporaryDirectory() as files:
            measurements = Measurements(Path(source), Path(files), runs, quick, device)
            result = {"model": shape, **measurements.measure(chosen)}
        targets = targets_of(shape, result["rows"])
        results.append({**result, "targets": [target.to_json() for target in targets]})
        if not as_json:
            generate_table.show(result, targets)
    if plot_file is not None:
        plot_file.write_text(plot.svg(results), encoding="utf-8")
    if as_json:
        print(json.dumps(results, indent=2))


def choose(names: str, device: str) -> list[Peer]:
    """Select rows and families by name that run on the device, with their stand-ins."""
    wanted = {name.strip() for name in names.split(",")}
    rows = [peer.name for peer in PEERS if not peer.instead_of]
    if unknown := sorted(wanted - {*FAMILIES, *rows}):
        raise typer.BadParameter(
            f"--peers has {listed(unknown)}, but the names are {listed([*FAMILIES, *rows], 99)}"
        )
    if device not in BOTH:
        raise typer.BadParameter(f"--device is {device}, but must be {' or '.join(BOTH)}")
    here = [peer for peer in PEERS if device in peer.devices]
    return [peer for peer in here if wanted & {peer.family, peer.name, peer.instead_of}]
