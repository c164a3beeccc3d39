"""Measurements of one model: all peers in turns, each measurement in a process of its own."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import try_in_fresh_process
from benchmarks.peers import BYTES, INSTALL, Peer

ONE_GENERATE = str(Path(__file__).parent / "one_generate.py")
ONE_BANDWIDTH = str(Path(__file__).parent / "one_bandwidth.py")
NEW, QUICK_NEW, BATCH_NEW = 128, 48, 48
BATCHES, QUICK_BATCHES = (8, 32), (8,)

notes = Console(stderr=True)


@dataclass
class Row:
    """A peer and its results, or the reason why there are none."""

    peer: Peer
    absent: bool = False
    error: str = ""
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return not self.absent and not self.error

    def to_json(self) -> dict[str, Any]:
        """Return its name and group, and the numbers or the error with the next step."""
        peer = self.peer
        row: dict[str, Any] = {"name": peer.name, "family": peer.family}
        row |= {"precision": peer.precision, "ours": peer.ours}
        if self.absent:
            return {**row, "absent": f"not installed: {INSTALL}"}
        if self.error:
            return {**row, "error": self.error}
        numbers = [key for key in self.found[0] if key != "ids"]
        row |= {key: spread([one[key] for one in self.found]) for key in numbers}
        return {**row, "ids": self.found[0]["ids"]}


class Measurements:
    """The checkpoint and converted files of one model, and the settings of its measurement."""

    def __init__(
        self, source: Path, files: Path, runs: int, quick: bool, device: str = "cpu"
    ) -> None:
        self.source, self.files, self.runs = source, files, 1 if quick else runs
        self.device = device
        self.threads = torch.get_num_threads()
        self.new, self.batches = (QUICK_NEW, QUICK_BATCHES) if quick else (NEW, BATCHES)

    def measure(self, peers: list[Peer]) -> dict[str, Any]:
        """Warm every peer up, then measure all of them in turns."""
        rows: list[Row] = []
        for peer in peers:
            replaced = next((row for row in rows if row.peer.name == peer.instead_of), None)
            if not peer.instead_of or (replaced and replaced.error):
                rows.append(self.prepare(peer))
        bandwidths = []
        for number in range(self.runs):
            bandwidths.append(self.bandwidth())
            for row in rows:
                if row.runs:
                    notes.print(f"[dim]run {number + 1} of {self.runs}: {row.peer.name}[/dim]")
                    self.turn(row)
        found = [row.to_json() for row in rows]
        compare_tokens(found)
        result: dict[str, Any] = {"runs": self.runs, "threads": self.threads, "new": self.new}
        result["device"] = device_name(self.device)
        result |= {"bandwidth": max(bandwidths), "weights": weights_per_token(self.source)}
        per_byte = {precision: max(bandwidths) / size for precision, size in BYTES.items()}
        result["limits"] = {p: rate / result["weights"] for p, rate in per_byte.items()}
        return {**result, "rows": found}

    def prepare(self, peer: Peer) -> Row:
        """Convert the checkpoint, and read files and select kernels once before the measurement."""
        row = Row(peer, absent=not peer.installed)
        for what in ("convert", "warm up") if peer.converts else ("warm up",):
            if row.runs:
                notes.print(f"[dim]{what}: {peer.name}[/dim]")
                row.error = self.one(peer, what, new=2).get("error", "")
        return row

    def turn(self, row: Row) -> None:
        found = self.one(row.peer, "single", new=self.new)
        for batch in self.batches if row.peer.batches else ():
            if "error" not in found:
                found |= self.one(row.peer, "batch", new=BATCH_NEW, batch=batch)
        row.error = found.get("error", "")
        row.found.append(found)

    def one(self, peer: Peer, what: str, new: int, batch: int = 1) -> dict[str, Any]:
        files = self.files / peer.name.replace(" ", "-")
        request = {"file": peer.file, "kind": peer.kind, "source": str(self.source.resolve())}
        request |= {"files": str(files), "what": what, "started": time.time()}
        request |= {"new": new, "batch": batch, "converts": peer.converts, "device": self.device}
        return try_in_fresh_process(ONE_GENERATE, json.dumps(request), self.threads)

    def bandwidth(self) -> float:
        found = try_in_fresh_process(ONE_BANDWIDTH, self.device, self.threads)
        return float(found.get("bandwidth", "nan"))


def device_name(device: str) -> str:
    """Return "cpu", or the name of the GPU."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def weights_per_token(source: Path) -> int:
    """Count the weights read for a token: all but embedding rows that are not looked up."""
    config = json.loads((source / "config.json").read_text())
    C, V = config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * C
    block = 4 * C * C + 2 * C * inner + 9 * C + inner  # 9 * C + inner: biases and norms
    return int(config["n_layer"] * block + V * C)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def compare_tokens(rows: list[dict[str, Any]]) -> None:
    """Replace the tokens by the number of leading ones equal to transformers' in float32."""
    generated = {row["name"]: row.pop("ids") for row in rows if "ids" in row}
    reference = generated.get("transformers float32")
    for row in rows:
        if reference and row["name"] in generated:
            pairs = zip(generated[row["name"]], reference, strict=True)
            same = [ours == theirs for ours, theirs in pairs]
            row["same_tokens"] = [*same, False].index(False)
            row["distinct_tokens"] = len({*generated[row["name"]]})
