"""Long texts have the same ids as in transformers, and their memory does not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compat.engine import Engine
from tests import long_text
from tests.conftest import MakeCheckpoint
from tests.forked import run
from tests.generation_common import greedy, theirs

WIDE = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 2, "n_head": 12}


@pytest.fixture(scope="module")
def wide(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint with two layers, and with the context and the head size of gpt2."""
    return make_checkpoint(**{**WIDE, "vocab_size": 8192, "n_embd": 384, "n_head": 6})


def test_512_greedy_ids_of_ten_prompts_equal_those_of_transformers(wide: Path) -> None:
    ids = torch.randint(8192, (10, 32), generator=torch.Generator().manual_seed(0))
    expected = theirs(wide, ids, 512, min_new_tokens=512)
    found = greedy(Engine.from_pretrained(wide), ids, 512)
    assert torch.equal(found, expected)
    assert len(set(expected[:, 32:].flatten().tolist())) > 100


def growth(folder: Path, settings: dict[str, Any], *mode: str) -> int:
    """Return by how many bytes memory grows over 350 tokens."""
    return int(run(long_text.main, folder, settings, *mode))


@pytest.fixture(scope="module")
def wide_vocabulary(make_checkpoint: MakeCheckpoint) -> Path:
    """A small checkpoint whose logits would use noticeable memory if they were kept."""
    return make_checkpoint(**{**WIDE, "n_embd": 96, "n_head": 4})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux reports the memory")
@pytest.mark.parametrize("settings", [{}, {"dtype": "int8"}, {"speculate": "lookup"}], ids=str)
def test_450_tokens_need_no_more_memory_than_their_kv_cache(
    wide_vocabulary: Path, settings: dict[str, Any]
) -> None:
    cache = 2 * 2 * 1024 * 96 * 4  # layers × keys and values × positions × channels × bytes
    assert growth(wide_vocabulary, settings) < cache + 4e6
    if not settings:
        # A leak would be detected.
        assert growth(wide_vocabulary, settings, "keep logits") > 50e6
