"""Long texts: the same ids as transformers to the end, in memory that does not grow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat.engine import Engine
from tests.conftest import MakeCheckpoint
from tests.generation_common import theirs

WIDE = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 2, "n_head": 12}


@pytest.fixture(scope="module")
def wide(make_checkpoint: MakeCheckpoint) -> Path:
    """Two layers of gpt2 at full width."""
    return make_checkpoint(**WIDE)


def test_512_greedy_ids_of_ten_prompts_are_those_of_transformers(wide: Path) -> None:
    ids = torch.randint(50257, (10, 32), generator=torch.Generator().manual_seed(0))
    expected = theirs(wide, ids, 512, min_new_tokens=512)
    found = Engine(wide).generate(ids, max_new_tokens=512, temperature=0, stop=())
    assert torch.equal(found, expected)
    assert len(set(expected[:, 32:].flatten().tolist())) > 100


def memory() -> int:
    """Resident, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(engine: Engine, hoard: list[Tensor] | None = None) -> int:
    """Of memory between the 100th and the 1,000th id; a hoard keeps all logits."""
    decoder = engine.decoder()
    logits = decoder.start([[464]])
    before = 0
    for step in range(1000):
        if step == 100:
            before = memory()
        if hoard is not None:
            hoard.append(logits.clone())
        logits = decoder.step(logits.argmax(-1))
    return memory() - before


@pytest.fixture(scope="module")
def talkative(make_checkpoint: MakeCheckpoint) -> Path:
    """Small, but with logits that weigh enough to be missed."""
    return make_checkpoint(**{**WIDE, "n_embd": 96, "n_head": 4})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells the memory")
@pytest.mark.parametrize("settings", [{}, {"dtype": "int8"}, {"speculate": "lookup"}], ids=str)
def test_1000_ids_take_no_more_memory_than_their_cache(
    talkative: Path, settings: dict[str, Any]
) -> None:
    engine = Engine(talkative, **settings)
    growth(engine)  # what is allocated once
    cache = 2 * 2 * 1024 * 96 * 4  # layers, keys and values, positions, channels
    assert growth(engine) < cache + 4e6
    assert growth(engine, hoard=[]) > 100e6  # a leak would be seen
