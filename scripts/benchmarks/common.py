"""Checkpoints at GPT-2's real shapes, and measurements in fresh processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from compat.checkpoint.find import DEMO

SIZES = {  # n_layer, n_head, n_embd
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}

TIMEOUT = 1800  # seconds for one process; its failure does not end the run

ModelOption = Annotated[
    str, typer.Option("--model", help="A shape such as gpt2, demo, or a folder.")
]
RunsOption = Annotated[
    int, typer.Option("--runs", min=1, help="Number of runs, of which the median is shown.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def in_fresh_process(file: str, *arguments: str) -> dict[str, Any]:
    """Return what a script prints as JSON, with the seconds that it ran as "process"."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, file, *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:  # it has printed why
        sys.exit(done.returncode)
    return {**json.loads(done.stdout), "process": time.perf_counter() - start}


def try_in_fresh_process(file: str, argument: str, threads: int) -> dict[str, Any]:
    """Return what a script prints as JSON, with so many threads; or {"error": its last words}."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = {**os.environ, **dict.fromkeys(names, str(threads))}
    command = [sys.executable, file, argument]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {TIMEOUT} s"}
    if done.returncode < 0:
        return {"error": f"killed by {signal.Signals(-done.returncode).name}"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def checkpoint_folder(model: str) -> Iterator[str]:
    """Yield a folder, "demo", or a noisy checkpoint of a shape, in the system's page cache."""
    with tempfile.TemporaryDirectory() as folder:
        if model in SIZES:
            make_checkpoint(folder, *SIZES[model])
        source = folder if model in SIZES else str(DEMO) if model == "demo" else model
        for path in Path(source).glob("*.safetensors"):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        yield source


def make_checkpoint(folder: str, n_layer: int, n_head: int, n_embd: int) -> None:
    """Write a checkpoint in the shapes of a GPT-2, with noise on every parameter."""
    import torch
    from safetensors.torch import save_file

    from compat import GPT2Config
    from compat.checkpoint.layout import HEAD, expected_shapes, saved_name

    config = GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        saved_name(name): 0.03 * torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(config).items()
        if name != HEAD
    }
    for name, tensor in tensors.items():
        if ".ln_" in name and name.endswith(".weight"):
            tensor += 1
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    Path(folder, "config.json").write_text(json.dumps(config.to_hf_dict()))
