"""Generation in child processes: forked, spawned, and as workers of a DataLoader."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compat import Engine, generate, load_pretrained
from compat.checkpoint import files
from compat.decoding import decoder_of

IDS = torch.tensor([[5, 17, 60]])
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Disable torch's threads, which do not exist in a forked child that would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def continued(model: Any, ids: Tensor = IDS) -> list[int]:
    return generate(model, ids, max_new_tokens=8, temperature=0, stop_ids=())[0].tolist()


class Texts(Dataset[list[int]]):
    """A dataset that continues a prompt for each item."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> list[int]:
        return continued(self.model, IDS + i)


@needs_fork
@pytest.mark.parametrize("kind", ["engine", "model"])
def test_a_forked_child_has_its_own_cache(tiny: Path, kind: str) -> None:
    """Parent and child continue one prompt with different ids without affecting each other."""
    model = Engine.from_pretrained(tiny) if kind == "engine" else load_pretrained(tiny)
    alone = decoder_of(model)
    alone.start(IDS.tolist())
    expected = [alone.step(torch.tensor([7])), alone.step(torch.tensor([9]))]
    decoder = decoder_of(model)
    decoder.start(IDS.tolist())
    child = os.fork()
    if child == 0:
        try:
            with torch.inference_mode():
                decoder.cache.kv.fill_(100.0)  # type: ignore[attr-defined]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(decoder.step(torch.tensor([7])), expected[0])
    assert torch.equal(decoder.step(torch.tensor([9])), expected[1])


def test_private_memory_works_without_the_flags_of_unix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of these names exists on Windows."""
    monkeypatch.delattr(files.mmap, "MAP_PRIVATE", raising=False)
    monkeypatch.delattr(files.mmap, "MAP_ANONYMOUS", raising=False)
    memory = files.private_memory(100)
    assert memory[:] == bytes(100)


@pytest.mark.parametrize(
    ("kind", "method", "workers"),
    [
        pytest.param("engine", "fork", 2, marks=needs_fork),
        pytest.param("model", "fork", 2, marks=needs_fork),
        ("model", "spawn", 1),
    ],
)
def test_workers_of_a_data_loader_generate(
    tiny: Path, kind: str, method: str, workers: int
) -> None:
    model = Engine.from_pretrained(tiny) if kind == "engine" else load_pretrained(tiny)
    loader = DataLoader(
        Texts(model), batch_size=None, num_workers=workers, multiprocessing_context=method
    )
    assert list(loader) == [continued(model, IDS + i) for i in range(6)]


def generate_with_an_engine(folder: Path) -> list[int]:
    torch.set_num_threads(1)
    return continued(Engine.from_pretrained(folder))


@pytest.mark.parametrize("method", [pytest.param("fork", marks=needs_fork), "spawn"])
def test_processes_build_their_own_engines(tiny: Path, method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.map(generate_with_an_engine, [tiny, tiny])
    assert found == [generate_with_an_engine(tiny)] * 2
