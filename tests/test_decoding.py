"""The plain decoder computes the same logits for a sequence in a shrinking batch as alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compat import GenerationError, generate, load_pretrained
from compat.config import GPT2Config
from compat.decoding import Decoder, PlainDecoder, decoder_of
from compat.layers import KVCache
from tests.generation_common import BATCH, PROMPT, cached_or_not, each_dialect, greedy, ours

UNEQUAL = [[5, 17, 60, 8, 1, 90, 33], [44], [9, 0, 0, 71]]


@torch.no_grad()
def alone(folder: Path, dialect: str, ids: list[int]) -> Tensor:
    logits: Tensor = ours(folder, dialect)(torch.tensor([ids]))
    return logits[0, -1]


@each_dialect
@cached_or_not
@settings(deadline=None, max_examples=20, derandomize=True)
@given(data=st.data())
def test_logits_after_any_steps_and_removals_equal_those_of_each_sequence_alone(
    noisy: Path, dialect: str, use_cache: bool, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    draw = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(97, (n,), generator=draw).tolist() for n in lengths]
    decoder = PlainDecoder(ours(noisy, dialect), use_cache)
    logits = decoder.start(texts)
    for _ in range(data.draw(st.integers(0, 5))):
        if data.draw(st.booleans()):
            rows = data.draw(
                st.lists(st.integers(0, len(texts) - 1), min_size=1, unique=True).map(sorted)
            )
            decoder.keep(torch.tensor(rows))
            texts = [texts[row] for row in rows]
        ids = torch.randint(97, (len(texts),), generator=draw)
        texts = [[*text, token_id] for text, token_id in zip(texts, ids.tolist(), strict=True)]
        logits = decoder.step(ids)
    assert logits.dtype == torch.float32
    for row, text in zip(logits, texts, strict=True):
        expected = alone(noisy, dialect, text)
        assert (row - expected).abs().max() < 1e-5 * expected.abs().max()


@each_dialect
def test_short_sequences_continue_after_longer_ones_fill_the_context(
    tiny: Path, dialect: str
) -> None:
    """The padding of short sequences is removed with the long ones; else they would not fit."""
    decoder, text = PlainDecoder(ours(tiny, dialect)), [3]
    decoder.start([list(range(32)), text])
    decoder.keep(torch.tensor([1]))
    for token_id in range(20, 51):
        text.append(token_id)
        logits = decoder.step(torch.tensor([token_id]))
    assert len(text) == 32
    expected = alone(tiny, dialect, text)
    assert (logits[0] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_cache_keeps_the_selected_rows_and_its_capacity() -> None:
    cache = KVCache(6)
    k, v = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
    cache.append(k, v)
    cache.keep(torch.tensor([2, 0]), 1)
    assert (cache.length, cache.keys.shape) == (3, (2, 2, 6, 5))
    more = torch.randn(2, 2, 2, 5)
    keys, values = cache.append(more, -more)
    assert torch.equal(keys, torch.cat([k[[2, 0], :, 1:], more], dim=2))
    assert torch.equal(values, torch.cat([v[[2, 0], :, 1:], -more], dim=2))


@cached_or_not
def test_finished_sequences_leave_the_batch(noisy: Path, use_cache: bool) -> None:
    """The stop ids are chosen so that the three prompts end at different positions."""
    unstopped = greedy(ours(noisy), BATCH, 20)
    stop = [int(unstopped[0, 4]), int(unstopped[1, 9])]
    rows: list[int] = []
    model = load_pretrained(noisy)
    with model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0]))):
        settings = {"temperature": 0, "stop_ids": stop, "use_cache": use_cache}
        found = generate(model, BATCH, max_new_tokens=20, **settings)
    running = [[stop[0] in row[:n] or stop[1] in row[:n] for row in found[:, 3:].tolist()].count(0)
               for n in range(found.shape[1] - 3)]  # fmt: skip
    assert rows == running
    assert len(set(rows)) > 1


def test_a_model_with_its_own_decoder_uses_it(tiny: Path) -> None:
    class Counting:
        """Generate ascending ids, and record the calls."""

        def __init__(self) -> None:
            self.calls: list[object] = []

        @property
        def config(self) -> GPT2Config:
            return ours(tiny).config

        def start(self, prompts: Sequence[Sequence[int]], preview_sampling: Any = None) -> Tensor:
            self.calls.append([list(prompt) for prompt in prompts])
            return self.logits([prompt[-1] for prompt in prompts])

        def step(self, ids: Tensor) -> Tensor:
            self.calls.append(ids.tolist())
            return self.logits(ids.tolist())

        def keep(self, rows: Tensor) -> None:
            self.calls.append(("keep", rows.tolist()))

        def logits(self, last: list[int]) -> Tensor:
            return torch.nn.functional.one_hot(torch.tensor(last) + 1, 97).float()

    class Model:
        def __init__(self) -> None:
            self.counting = Counting()

        def decoder(self) -> Decoder:
            return self.counting

    model = Model()
    found = generate(model, torch.tensor([[4, 9], [4, 2]]), max_new_tokens=3, temperature=0,
                     stop_ids=[11])  # fmt: skip
    assert found.tolist() == [[4, 9, 10, 11, 11], [4, 2, 3, 4, 5]]
    assert model.counting.calls == [[[4, 9], [4, 2]], [10, 3], ("keep", [1]), [4]]
    assert decoder_of(model) is model.counting
    with pytest.raises(GenerationError, match="use_cache=False is for a dialect's model"):
        generate(model, PROMPT, max_new_tokens=1, use_cache=False)
