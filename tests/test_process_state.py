"""compat does not change the state of the process in which it runs, even if it raises."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx.proxy import TracerBase

from compat import (
    CompatError,
    Engine,
    adapt,
    check_parity,
    generate,
    inspect_checkpoint,
    load_pretrained,
    save_pretrained,
)
from compat.checkpoint import open_checkpoint
from compat.decoding import kernels
from compat.decoding.matrices import Int8DynamicActivations
from compat.parity.transformers_gpt2 import load_reference, quiet
from tests.conftest import MakeCheckpoint
from tests.own_gpt2 import MyGPT2

OWNERS = (TracerBase, nn.Module, nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention)


def state() -> dict[str, Any]:
    """Return the state on which other code in this process may depend."""
    named = [log for log in logging.root.manager.loggerDict.values() if hasattr(log, "filters")]
    loggers = [logging.root, *named]
    torch_flags = {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fused attention": torch.backends.mha.get_fastpath_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
    return {
        "logging": logging.root.manager.disable,
        "loggers": {log.name: (log.level, log.disabled, list(log.filters)) for log in loggers},
        "streams": (sys.stdout, sys.stderr),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "torch": torch_flags,
        "classes": [dict(vars(owner)) for owner in OWNERS],
        "functions": {name: id(value) for name, value in vars(nn.functional).items()},
        "environ": dict(os.environ),
        "cwd": Path.cwd(),
        "path": (list(sys.path), list(sys.argv)),
        "torch seed": torch.get_rng_state().tolist(),
        "numpy seed": [str(part) for part in np.random.get_state()],
        "python seed": random.getstate(),
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    new = after["loggers"].keys() - before["loggers"].keys()  # of newly imported modules
    after["loggers"] = {k: v for k, v in after["loggers"].items() if k not in new}
    return [key for key in before if before[key] != after[key]]


def raising(model: nn.Module, ids: Tensor) -> Tensor:
    raise RuntimeError("by the user's code")


class Branching(MyGPT2):
    """A model whose forward pass branches on its logits."""

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(ids)
        return logits + 1 if (logits > 1e9).any() else logits


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "adapt": lambda folder, new: adapt(MyGPT2(), folder),
    "adapt, a branch": lambda folder, new: adapt(Branching(), folder),
    "adapt, raising": lambda folder, new: adapt(MyGPT2(), folder, forward=raising),
    "check_parity": lambda folder, new: check_parity("linear", folder),
    "check_parity, no checkpoint": lambda folder, new: check_parity("linear", new),
    "load_pretrained": lambda folder, new: load_pretrained(folder, "linear"),
    "load_pretrained, no checkpoint": lambda folder, new: load_pretrained(new, "linear"),
    "generate": lambda folder, new: generate(
        load_pretrained(folder, "linear"), torch.tensor([[1, 2]]), max_new_tokens=3, temperature=0
    ),
    "Engine": lambda folder, new: Engine.from_pretrained(folder),
    "save_pretrained": lambda folder, new: save_pretrained(load_pretrained(folder, "linear"), new),
    "inspect_checkpoint": lambda folder, new: inspect_checkpoint(folder),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_state_of_the_process_is_restored(name: str, tiny: Path, tmp_path: Path) -> None:
    logging.disable(logging.DEBUG)  # a setting of the user
    transformers.utils.logging.enable_progress_bar()
    try:
        torch.manual_seed(1)
        before = state()
        if name.startswith("adapt"):  # building the user's model draws random numbers
            MyGPT2()
            before["torch seed"] = state()["torch seed"]
            torch.manual_seed(1)
        try:
            CALLS[name](tiny, tmp_path / "new")
        except (CompatError, RuntimeError):
            assert "," in name
        assert differences(before, state()) == []
    finally:
        logging.disable(logging.NOTSET)
        transformers.utils.logging.disable_progress_bar()


def test_other_threads_can_print_while_adapt_runs(
    tiny: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    stop, counts = threading.Event(), []

    def other() -> None:
        count = 0
        while not stop.wait(0.005):
            print(f"heard {count}")
            logging.getLogger("other").critical("logged %d", count)
            count += 1
        counts.append(count)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        adapt(Branching(), tiny)
    finally:
        stop.set()
        thread.join()
    assert capfd.readouterr().out.count("heard") == counts[0] > 10
    assert len([record for record in caplog.records if record.name == "other"]) == counts[0]


def test_two_threads_can_run_adapt_concurrently(tiny: Path) -> None:
    models = [MyGPT2(), Branching()]
    before, verdicts = state(), {}

    def one(index: int) -> None:
        verdicts[index] = adapt(models[index], tiny).compatible

    threads = [threading.Thread(target=one, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {0: True, 1: True}
    assert differences(before, state()) == []


def test_references_that_are_loaded_concurrently_restore_transformers(tiny: Path) -> None:
    """While it runs, transformers' from_pretrained replaces a method of its class."""
    before = vars(transformers.PreTrainedModel)["tie_weights"]
    checkpoint = open_checkpoint(tiny)
    with ThreadPoolExecutor(4) as pool:
        loaded = [pool.submit(load_reference, checkpoint, torch.float32) for _ in range(24)]
    assert len([model.result() for model in loaded]) == 24
    assert vars(transformers.PreTrainedModel)["tie_weights"] is before


def test_quiet_restores_the_settings_after_overlapping_threads() -> None:
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity_info()
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not transformers.utils.logging.is_progress_bar_enabled()
    second.__exit__(None, None, None)
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert transformers.utils.logging.get_verbosity() == logging.INFO


def fail(*arguments: Any, **settings: Any) -> Any:
    raise AssertionError("the warning filters belong to the process")


def test_reading_and_packing_do_not_change_the_warning_filters(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.clear_choices()
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", fail)
        engine = Engine.from_pretrained(tiny, dtype="int8", speculate="int8")
        product = Int8DynamicActivations(torch.ones(64, 96), None)(torch.ones(1, 64))
        assert product.shape == (1, 96)  # on some processors with too large an error
    assert engine.generate(torch.tensor([[1, 2]]), max_new_tokens=3, temperature=0).shape == (1, 5)


def test_an_engine_works_if_warnings_are_errors(make_checkpoint: MakeCheckpoint) -> None:
    """Some of the kernels that are tried issue warnings."""
    code = f"""
import torch
from compat import Engine
from compat.decoding import kernels
from compat.decoding.matrices import Int8DynamicActivations
kernels._measured = lambda precision, rows, working: (next(iter(working)), False)
engine = Engine.from_pretrained({str(make_checkpoint(n_layer=1))!r}, speculate="int8")
print(engine.generate(torch.tensor([[1, 2]]), max_new_tokens=3, temperature=0).shape)
print(Int8DynamicActivations(torch.ones(64, 96), None)(torch.ones(1, 64)).shape)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 5])" in done.stdout
    assert "torch.Size([1, 96])" in done.stdout
