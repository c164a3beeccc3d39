"""Fixtures: small checkpoints with noise on every parameter, and the files of COMPAT_SHARED."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from compat.checkpoint import Checkpoint
from compat.config import HALF
from compat.decoding import kernels
from compat.decoding.native_library import library
from compat.parity.reference import Reference, SharedReference
from tests.adapt_project import write_project
from tests.command_line import Cli, run

# No result depends on the speed of the machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

pytest.register_assert_rewrite("tests.checkpoint_files", "tests.loading_common")

State = dict[str, Tensor]
MakeCheckpoint = Callable[..., Path]
Write = Callable[..., Path]

TINY = {
    "vocab_size": 97,
    "n_positions": 32,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def noisy_reference(
    seed: int = 0, noise: float = 0.1, **config: Any
) -> transformers.GPT2LMHeadModel:
    """Return a GPT-2 of transformers with noise on every parameter, including biases and norms."""
    torch.manual_seed(seed)
    fields = {"initializer_range": 0.2, **TINY, **config}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**fields, attn_implementation="eager")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session", autouse=True)
def _engines_cache_no_weights_and_draft_at_once() -> Iterator[None]:
    """Keep engines from caching weights, and let them use a draft model from the first token on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPAT_CACHE", "0")
        patch.setattr("compat.engine.PATIENCE", 0)
        yield


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """A function that saves a `noisy_reference` with its arguments and returns the folder."""

    def make(seed: int = 0, noise: float = 0.1, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        noisy_reference(seed, noise, **config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny(make_checkpoint: MakeCheckpoint) -> Path:
    """A small noisy checkpoint that tests must not change."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def noisy(make_checkpoint: MakeCheckpoint) -> Path:
    """A small noisy checkpoint with a context of 256 tokens; its stop id is 0."""
    return make_checkpoint(n_positions=256)


@pytest.fixture
def state(tiny: Path) -> State:
    """The tensors of `tiny` without `transformer.` and without a head, which tests may change."""
    stored = load_file(tiny / "model.safetensors")
    return {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}


@pytest.fixture
def write(tmp_path: Path, tiny: Path) -> Write:
    """A function that writes tensors and a config: `write(state, file name, **config changes)`."""

    def write(tensors: State, name: str = "model.safetensors", **changes: Any) -> Path:
        path = tmp_path / name
        if path.suffix == ".bin":
            torch.save(tensors, path)
        else:
            save_file(tensors, path)
        config = json.loads((tiny / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with GPT-2's tokenizer files and with checkpoints by other authors."""
    if "COMPAT_SHARED" not in os.environ:
        pytest.skip("COMPAT_SHARED names no folder with data/gpt2-tokenizer and data/checkpoints")
    return Path(os.environ["COMPAT_SHARED"])


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A function that runs a command in this process: `cli("load", "--model", folder)`."""
    for variable in ("FORCE_COLOR", "COLUMNS", "COMPAT_TRACEBACK"):
        monkeypatch.delenv(variable, raising=False)
    return partial(run, capsys)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with compatible and incompatible models."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def _references() -> dict[tuple[object, ...], Reference]:
    return {}


@pytest.fixture
def shared_reference(
    _references: dict[tuple[object, ...], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let `adapt` and `check_parity` share one reference for each checkpoint of the test module.

    Only for tests that do not patch torch or transformers.
    """

    def reference(checkpoint: Checkpoint, dtype: torch.dtype, *rest: Any) -> Reference:
        if dtype in HALF:  # `to_float32` modifies the reference
            return Reference(checkpoint, dtype, *rest)
        key = str(checkpoint.weights), dtype, rest
        if key not in _references:
            _references[key] = SharedReference(checkpoint, dtype, *rest)
        return _references[key]

    for module in (
        "compat.adaptation.adapt",
        "compat.adaptation.repair.repair",
        "compat.parity.check",
    ):
        monkeypatch.setattr(import_module(module), "Reference", reference)
    monkeypatch.setattr("compat.adaptation.repair.repair.SharedReference", reference)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Restore the number of torch's threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """Disable the progress bars and the log messages of transformers."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield


@pytest.fixture(autouse=True)
def _kernels_are_not_measured(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Select the first working kernel, regardless of measurements and of the cached choice."""
    if request.module.__name__ != "tests.test_kernels":

        def first(precision: str, rows: int, working: dict[str, Any]) -> tuple[str, bool]:
            return next(iter(working)), False

        monkeypatch.setattr(kernels, "_measured", first)
        monkeypatch.setattr(kernels, "_read_memory", dict)
        monkeypatch.setattr(kernels, "_chosen", {})  # the tests of kernels fill it


@pytest.fixture(scope="module", autouse=True)
def _objects_of_earlier_modules_are_not_traversed() -> None:
    """Keep the garbage collector from traversing what the tests of other modules have left.

    These are users' modules, graphs and caches, and collections take a fifth of the time otherwise.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from traversing the objects of torch and transformers.

    Otherwise, its collections take a tenth of the time of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need the real weights or a GPU if these are not available."""
    with_vnni = any(item.get_closest_marker("vnni") for item in items) and library().has_panels()
    for item in items:
        if item.get_closest_marker("network") and "COMPAT_NETWORK" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="COMPAT_NETWORK is not set"))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("vnni") and not with_vnni:
            item.add_marker(pytest.mark.skip(reason="no processor with AVX-512 VNNI"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let skipped tests fail if COMPAT_SHARED is set, unless they need a network or a GPU."""
    report = yield
    excused = any(item.get_closest_marker(name) for name in ("network", "cuda", "vnni"))
    if report.skipped and "COMPAT_SHARED" in os.environ and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped, although COMPAT_SHARED is set: {report.longrepr}"
    return report
