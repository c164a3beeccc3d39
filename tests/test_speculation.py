"""Guessing ahead: the same ids and the same logits in fewer passes, whatever is guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compat import generate, load_pretrained
from compat.decoding import Decoder
from compat.decoding.speculative import (
    Draft,
    Guesser,
    ModelDraft,
    SpeculativeDecoder,
    greedy,
)
from compat.engine import Engine
from tests.conftest import MakeCheckpoint

N = 64
both_ways = pytest.mark.parametrize("speculate", ["int8", "lookup"])


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(n_positions=N, n_embd=32)


@pytest.fixture(scope="module")
def engine(source: Path) -> Engine:
    return Engine(source)


@pytest.fixture
def guess(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fixes the number of guesses, which else depends on what was measured."""

    def fix(count: int) -> None:
        monkeypatch.setattr(Guesser, "best", lambda self, read: (1.0, count))

    return fix


class Counting(Guesser):
    """It counts its guesses, and those of them that came true."""

    guessed = right = 0

    def guess(self, *arguments: Any) -> list[int]:
        guesses = super().guess(*arguments)
        self.guessed += len(guesses)
        return guesses

    def learn(self, right: bool) -> None:
        super().learn(right)
        self.right += right


class Speculating:
    """An engine whose guesses are given; it counts the passes of its model."""

    def __init__(self, engine: Engine, draft: Draft) -> None:
        self.guesser = Counting(draft)
        self.made = SpeculativeDecoder(engine.transformer, [self.guesser])
        self.config, self.passes = engine.config, 0
        transformer = engine.transformer

        class Passing:
            def __getattr__(_, name: str) -> Any:
                return getattr(transformer, name)

            def __call__(_, *arguments: Any) -> Tensor:
                self.passes += 1
                return transformer(*arguments)

        self.made.transformer = Passing()  # type: ignore[assignment]

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


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_guesses_give_the_same_ids(
    source: Path, engine: Engine, guess: Callable[[int], None], data: Any
) -> None:
    """Right, wrong, right for a while, none, up to the last position."""
    guess(data.draw(st.integers(0, Guesser.MOST)))
    ids = prompt(data.draw(st.integers(0, 50)), data.draw(st.integers(1, 20)))
    truth = true_ids(source, ids)

    def draft(so_far: list[int], count: int, *_: Any) -> list[int]:
        right = truth[len(so_far) :][:count]
        wrong_from = data.draw(st.integers(0, len(right)))
        guesses = [*right[:wrong_from], *[(g + 1) % 97 for g in right[wrong_from:]]]
        return guesses[: data.draw(st.integers(0, count))]

    speculating = Speculating(engine, draft)
    found = generate(speculating, ids, max_new_tokens=N - ids.shape[1], temperature=0, stop=())
    assert found[0].tolist() == truth


def test_right_guesses_save_passes(
    source: Path, engine: Engine, guess: Callable[[int], None]
) -> None:
    guess(7)
    ids = prompt(1)
    truth = true_ids(source, ids)
    speculating = Speculating(engine, lambda so_far, count, *_: truth[len(so_far) :][:count])
    found = generate(speculating, ids, max_new_tokens=N - 8, temperature=0, stop=())
    assert found[0].tolist() == truth
    assert speculating.passes == 9  # the prompt, one that is timed, then 8 ids each
    guesser = speculating.guesser
    assert guesser.rate > 0.9
    assert guesser.guessed - guesser.right <= 1


def test_wrong_guesses_are_soon_given_up(source: Path, engine: Engine) -> None:
    ids = prompt(1)
    truth = true_ids(source, ids)
    wrong = [(token_id + 1) % 97 for token_id in truth]
    speculating = Speculating(engine, lambda so_far, count, *_: wrong[len(so_far) :][:count])
    found = generate(speculating, ids, max_new_tokens=N - 8, temperature=0, stop=())
    assert found[0].tolist() == truth
    guesser = speculating.guesser
    assert guesser.right == 0
    assert guesser.rate < 0.15
    assert speculating.passes == N - 8  # the last id is not read


def test_guesses_of_drawn_ids_are_drawn_by_the_same_random_numbers(
    source: Path, guess: Callable[[int], None]
) -> None:
    """A draft as good as the model guesses every id that will be drawn."""
    guess(4)
    engine = Engine(source)
    speculating = Speculating(engine, ModelDraft(engine.transformer))
    generate(speculating, prompt(4), max_new_tokens=50, stop=(), top_k=50)
    guesser = speculating.guesser
    assert guesser.guessed == 40
    assert guesser.right >= 36  # but those after the last id drawn


def test_drawn_ids_have_the_distribution_of_the_model(
    make_checkpoint: MakeCheckpoint, guess: Callable[[int], None]
) -> None:
    """Chi-square of the third id, over a vocabulary of 11, where the second was guessed."""
    guess(2)
    folder, draws = make_checkpoint(vocab_size=11, n_positions=8), 1500
    engine, ids = Engine(folder, speculate="int8"), torch.tensor([[3, 1, 4]])
    model, generator, counts = load_pretrained(folder), torch.Generator().manual_seed(1), [0] * 11
    for _ in range(draws):
        found = engine.generate(ids, max_new_tokens=3, generator=generator, stop=())
        counts[int(found[0, 5])] += 1

    def chi_square(temperature: float) -> float:
        texts, odds = ids, torch.ones(1)
        for _ in range(3):  # all texts of one more id, with their probabilities
            with torch.no_grad():
                following = (model(texts)[:, -1] / temperature).softmax(-1)
            odds = (odds[:, None] * following).view(-1)
            ends = torch.arange(11).repeat(len(texts))[:, None]
            texts = torch.cat([texts.repeat_interleave(11, 0), ends], dim=1)
        expected = draws * odds.view(-1, 11).sum(0)
        return float(((torch.tensor(counts) - expected) ** 2 / expected).sum())

    most = 29.6  # which 10 degrees of freedom exceed once in 1,000 times
    assert chi_square(1.0) < most
    assert chi_square(0.7) > most  # other odds would be seen


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
    decoder = SpeculativeDecoder(
        engine.transformer, [Guesser(lambda so_far, count, *_: [1] * count)]
    )
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
def test_a_draft_guesses_what_its_model_would_say(engine: Engine, data: Any) -> None:
    """From the cache of the exact model, which holds all ids but the last."""
    ids = data.draw(st.lists(st.integers(0, 96), min_size=2, max_size=10))
    count = data.draw(st.integers(0, 4))
    cache = engine.transformer.new_cache(1)
    engine.transformer(torch.tensor([ids[:-1]]), cache, 0)
    expected = engine.generate(torch.tensor([ids]), max_new_tokens=count, temperature=0, stop=())
    assert (
        ModelDraft(engine.transformer)(ids, count, cache, greedy)
        == expected[0, len(ids) :].tolist()
    )


def test_a_draft_that_fails_leaves_the_message_to_the_model(
    source: Path, guess: Callable[[int], None]
) -> None:
    guess(3)
    engine = Engine(source, speculate="int8")
    engine._guessers[-1].draft.transformer.ln_f[1].fill_(torch.nan)
    found = engine.generate(prompt(2), max_new_tokens=20, temperature=0, stop=())
    assert found[0].tolist() == true_ids(source, prompt(2))[:28]
