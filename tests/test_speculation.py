"""Guessing ahead: the same ids and the same logits in fewer passes, whatever is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compat import generate, load_pretrained
from compat.engine import Engine
from compat.engine.decoders import Draft, ModelDraft, SpeculativeDecoder, lookup
from compat.generation.decoding import Decoder
from tests.conftest import MakeCheckpoint

N = 64
both_ways = pytest.mark.parametrize("speculate", ["int8", "lookup"])


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(n_positions=N, n_embd=32)


@pytest.fixture(scope="module")
def engine(source: Path) -> Engine:
    return Engine(source)


class Speculating:
    """An engine whose guesses are given; it counts the passes of its model."""

    def __init__(self, engine: Engine, draft: Draft) -> None:
        self.made = SpeculativeDecoder(engine.transformer, draft)
        self.config, self.passes = engine.config, 0
        transformer = engine.transformer

        class Counting:
            config, new_cache, logits = (
                transformer.config,
                transformer.new_cache,
                transformer.logits,
            )

            def __call__(_, *arguments: Any) -> Tensor:
                self.passes += 1
                return transformer(*arguments)

        self.made.transformer = Counting()  # type: ignore[assignment]

    def decoder(self) -> Decoder:
        return self.made


def prompt(seed: int, length: int = 8) -> Tensor:
    return torch.randint(97, (1, length), generator=torch.Generator().manual_seed(seed))


def true_ids(source: Path, ids: Tensor) -> list[int]:
    """What the readable blocks say up to the last position."""
    room = N - ids.shape[1]
    model = load_pretrained(source)
    return generate(model, ids, max_new_tokens=room, temperature=0, stop=())[0].tolist()


@both_ways
def test_greedy_ids_are_those_without_guesses(source: Path, speculate: Any) -> None:
    engine = Engine(source, speculate=speculate)
    for seed in range(10):
        ids = prompt(seed)
        found = engine.generate(ids, max_new_tokens=N - 8, temperature=0, stop=())
        assert found[0].tolist() == true_ids(source, ids), seed


@both_ways
@pytest.mark.parametrize("how", [{}, {"top_k": 20}, {"temperature": 0.5, "top_p": 0.9}], ids=str)
def test_the_same_seed_draws_the_same_ids(
    source: Path, speculate: Any, how: dict[str, Any]
) -> None:
    """So that the distribution is the same, whatever it is."""
    model, engine = load_pretrained(source), Engine(source, speculate=speculate)
    for seed in range(5):
        found, expected = (
            generate(
                one, prompt(seed), max_new_tokens=40, stop=(),
                generator=torch.Generator().manual_seed(seed), **how,
            )
            for one in (engine, model)
        )  # fmt: skip
        assert torch.equal(found, expected), seed


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_guesses_give_the_same_ids(source: Path, engine: Engine, data: Any) -> None:
    """Right, wrong, right for a while, none, up to the last position."""
    ids = prompt(data.draw(st.integers(0, 50)), data.draw(st.integers(1, 20)))
    truth = true_ids(source, ids)

    def draft(so_far: list[int], count: int) -> list[int]:
        right = truth[len(so_far) :][:count]
        wrong_from = data.draw(st.integers(0, len(right)))
        guesses = [*right[:wrong_from], *[(g + 1) % 97 for g in right[wrong_from:]]]
        return guesses[: data.draw(st.integers(0, count))]

    speculating = Speculating(engine, draft)
    found = generate(speculating, ids, max_new_tokens=N - ids.shape[1], temperature=0, stop=())
    assert found[0].tolist() == truth


def test_right_guesses_save_passes_and_grow_longer(source: Path, engine: Engine) -> None:
    ids = prompt(1)
    truth = true_ids(source, ids)
    speculating = Speculating(engine, lambda so_far, count: truth[len(so_far) :][:count])
    found = generate(speculating, ids, max_new_tokens=N - 8, temperature=0, stop=())
    assert found[0].tolist() == truth
    assert speculating.passes <= 9  # of 56 ids
    made = speculating.made
    assert made.length_of_draft == made.MOST
    assert made.guessed - made.right <= 1


def test_wrong_guesses_grow_shorter(source: Path, engine: Engine) -> None:
    ids = prompt(1)
    truth = true_ids(source, ids)
    wrong = [(token_id + 1) % 97 for token_id in truth]
    speculating = Speculating(engine, lambda so_far, count: wrong[len(so_far) :][:count])
    found = generate(speculating, ids, max_new_tokens=N - 8, temperature=0, stop=())
    assert found[0].tolist() == truth
    made = speculating.made
    assert (made.length_of_draft, made.right) == (1, 0)
    assert speculating.passes == N - 8  # the last id is not read


@both_ways
def test_a_stop_id_amid_right_guesses_ends_the_text(source: Path, speculate: Any) -> None:
    ids = prompt(3)
    truth = true_ids(source, ids)
    stop = truth[8 + 3]
    length = truth.index(stop, 8) + 1
    found = Engine(source, speculate=speculate).generate(
        ids, max_new_tokens=N - 8, temperature=0, stop=[stop]
    )
    assert found[0].tolist() == truth[:length]


def test_a_decoder_can_start_again(engine: Engine) -> None:
    decoder = SpeculativeDecoder(engine.transformer, lambda so_far, count: [1] * count)
    first = decoder.start([[5, 6, 7]])
    decoder.step(torch.tensor([1]))
    assert torch.equal(decoder.start([[5, 6, 7]]), first)
    plain = engine.decoder()
    plain.start([[5, 6, 7]])
    expected = plain.step(torch.tensor([2]))
    torch.testing.assert_close(decoder.step(torch.tensor([2])), expected, rtol=1e-5, atol=1e-5)


# Where guesses come from.


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_draft_that_read_on_guesses_as_one_that_begins(engine: Engine, data: Any) -> None:
    """Its cache is right whatever of its guesses came true."""
    ids = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=10))
    kept = ModelDraft(engine.transformer)
    for _ in range(4):
        count = data.draw(st.integers(0, 4))
        guesses = kept(ids, count)
        assert guesses == ModelDraft(engine.transformer)(ids, count)
        right = data.draw(st.integers(0, len(guesses)))
        ids = [*ids, *guesses[:right], *data.draw(st.lists(st.integers(0, 96), max_size=2))]


@pytest.mark.parametrize(
    ("ids", "count", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3]),
        ([4, 3, 8, 2, 3, 7, 5, 2, 3], 1, [7]),  # the longest tail that stood there before
        ([3, 8, 3, 7, 3], 2, [7, 3]),  # and of those the last
        ([1, 2, 3], 2, []),
        ([1], 2, []),
        ([1, 1], 0, []),
    ],
)
def test_lookup(ids: list[int], count: int, guesses: list[int]) -> None:
    assert lookup(ids, count) == guesses
