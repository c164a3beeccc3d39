"""One measurement of one peer in a process of its own: one_generate.py REQUEST → JSON.

Only what the peer needs is imported, since the time to the first token counts too. The number of
threads comes from OMP_NUM_THREADS, which every library here reads or gets as an argument.
"""

import json
import os
import random
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[0:1] = []  # this folder, with names such as plot; `benchmarks` lies in the one above
sys.path.append(str(Path(__file__).resolve().parents[1]))
PROMPT = 32


def memory_peak(device: str) -> int:
    """Return the peak memory of this process in bytes; on the CPU only Linux reports it."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


class Measured:
    """A peer's generation with the time of every token."""

    def __init__(self, generate: Any, vocab_size: int) -> None:
        self.generate, self.vocab_size = generate, vocab_size

    def __call__(self, length: int, new: int, batch: int = 1) -> tuple[list[float], Any]:
        """Measure seconds from the call to each new token, always for the same prompts."""
        draw = random.Random(0)
        prompts = [[draw.randrange(self.vocab_size) for _ in range(length)] for _ in range(batch)]
        times: list[float] = []
        start = time.perf_counter()
        rows = self.generate(prompts, new, lambda: times.append(time.perf_counter() - start))
        if [len(row) for row in rows] != [new] * batch or len(times) != new:
            raise ValueError(
                f"{new} tokens a row were requested; {len(times)} were reported, {rows} returned"
            )
        return times, rows

    def pace(self, length: int, new: int, batch: int = 1) -> float:
        """Return the seconds of a decode step, after the first token."""
        times, _ = self(length, new, batch)
        return (times[-1] - times[0]) / (new - 1)


def single(measured: Measured, request: dict[str, Any], n_positions: int) -> dict[str, Any]:
    """Return all numbers of one sequence, the first being the time to the process's first token."""
    measured(PROMPT, 1)
    first = time.time() - request["started"]
    measured(PROMPT, request["new"])  # an engine packs its draft model after 32 tokens
    times, rows = measured(PROMPT, request["new"])
    long = min(512, n_positions // 2)
    measured(long, 1)
    prompt = statistics.median(measured(long, 1)[0][0] for _ in range(3))
    near, far, span = n_positions // 16 - n_positions // 64, n_positions - 44, 40
    early, late = measured.pace(near, span), measured.pace(far, span)
    return {
        "first": first,
        "decode": (len(times) - 1) / (times[-1] - times[0]),
        "ids": rows[0],
        "prompt": long / prompt,
        "early": early,
        "late": late,
        "growth": late / early,
        "peak": memory_peak(request["device"]),
    }


def batched(measured: Measured, request: dict[str, Any]) -> dict[str, Any]:
    batch = request["batch"]
    measured(PROMPT, 4, batch)
    return {f"batch {batch}": batch / measured.pace(PROMPT, request["new"], batch)}


def main(request: dict[str, Any]) -> dict[str, Any]:
    source, files = Path(request["source"]), Path(request["files"])
    peer = import_module(f"benchmarks.peers.{request['file']}")
    if request["what"] == "convert":
        peer.convert(source, request["kind"], files)
        return {}
    config = json.loads((source / "config.json").read_text())
    generate = peer.load(
        files if request["converts"] else source,
        request["kind"],
        request["batch"],
        int(os.environ["OMP_NUM_THREADS"]),
        *([request["device"]] if request["device"] != "cpu" else []),
    )
    measured = Measured(generate, config["vocab_size"])
    if request["what"] == "warm up":
        measured(PROMPT, 2)
        return {}
    if request["what"] == "single":
        return single(measured, request, config["n_positions"])
    return batched(measured, request)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
