"""Speculative decoding yields the same tokens and logits in fewer passes, with any draft tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compat import generate, load_pretrained
from compat.decoding import Decoder
from compat.decoding.draft import ModelDraft
from compat.decoding.matrices import Blas
from compat.decoding.native import NativeInt8, NativeLinear
from compat.decoding.speculative import Draft, DraftSource, SpeculativeDecoder
from compat.decoding.speculative import greedy as most_likely
from compat.decoding.transformer import Transformer
from compat.engine import Engine
from tests.conftest import MakeCheckpoint
from tests.generation_common import greedy
from tests.native_common import WITH_COMPILER, needs_compiler

N = 64
each_draft_source = pytest.mark.parametrize("speculate", ["int8", "lookup"])


@pytest.fixture(scope="module")
def source(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(n_positions=N, n_embd=32)


@pytest.fixture(scope="module")
def engine(source: Path) -> Engine:
    return Engine.from_pretrained(source)


@pytest.fixture
def draft_count(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that fixes the number of draft tokens, which otherwise depends on timings."""

    def fix(count: int) -> None:
        monkeypatch.setattr(DraftSource, "best", lambda self, pass_seconds: (1.0, count))

    return fix


class CountingSource(DraftSource):
    """Count the proposed and the accepted draft tokens."""

    proposed = accepted = 0

    def propose(self, *arguments: Any) -> list[int]:
        tokens = super().propose(*arguments)
        self.proposed += len(tokens)
        return tokens

    def observe(self, accepted: bool) -> None:
        super().observe(accepted)
        self.accepted += accepted


class SpeculativeEngine:
    """An engine whose draft tokens the test chooses, and which counts its forward passes."""

    def __init__(self, engine: Engine, draft: Draft) -> None:
        self.source = CountingSource(draft)
        self.speculative = SpeculativeDecoder(engine.transformer, [self.source])
        self.config, self.passes = engine.config, 0
        transformer = engine.transformer

        class CountingTransformer:
            def __getattr__(_, name: str) -> Any:
                return getattr(transformer, name)

            def __call__(_, *arguments: Any) -> Tensor:
                self.passes += 1
                return transformer(*arguments)

            def prefill(counting, *arguments: Any) -> Tensor:
                return Transformer.prefill(counting, *arguments)  # type: ignore[arg-type]

        self.speculative.transformer = CountingTransformer()  # type: ignore[assignment]

    def decoder(self) -> Decoder:
        return self.speculative


def exact_draft(engine: Engine) -> ModelDraft:
    """Return a draft model that equals the model."""
    draft = ModelDraft(engine.transformer, lambda: engine.transformer)
    return draft


def prompt(seed: int, length: int = 8) -> Tensor:
    return torch.randint(97, (1, length), generator=torch.Generator().manual_seed(seed))


def expected_ids(source: Path, ids: Tensor) -> list[int]:
    """Return what the dialect's modules generate up to the last position."""
    room = N - ids.shape[1]
    model = load_pretrained(source)
    return greedy(model, ids, room)[0].tolist()


@each_draft_source
def test_greedy_tokens_equal_those_without_speculation(source: Path, speculate: Any) -> None:
    engine = Engine.from_pretrained(source, speculate=speculate)
    for seed in range(10):
        ids = prompt(seed)
        found = greedy(engine, ids, N - 8)
        assert found[0].tolist() == expected_ids(source, ids), seed


@each_draft_source
@pytest.mark.parametrize("how", [{}, {"top_k": 20}, {"temperature": 0.5, "top_p": 0.9}], ids=str)
def test_the_same_seed_samples_the_same_ids_as_without_speculation(
    source: Path, speculate: Any, how: dict[str, Any]
) -> None:
    """Therefore, the distribution is the same, too."""
    model, engine = load_pretrained(source), Engine.from_pretrained(source, speculate=speculate)
    for seed in range(5):
        found, expected = (
            generate(
                one, prompt(seed), max_new_tokens=40, stop_ids=(),
                generator=torch.Generator().manual_seed(seed), **how,
            )
            for one in (engine, model)
        )  # fmt: skip
        assert torch.equal(found, expected), seed


@each_draft_source
def test_a_batch_is_decoded_without_draft_tokens(source: Path, speculate: Any) -> None:
    ids = torch.cat([prompt(seed) for seed in range(3)])
    found, expected = (
        Engine.from_pretrained(source, speculate=how).generate(
            ids, max_new_tokens=40, temperature=0, stop_ids=[3, 5]
        )
        for how in (speculate, None)
    )
    assert torch.equal(found, expected)


def logits_of_text(engine: Engine, ids: Tensor) -> Tensor:
    """Return the logits of a prompt and of the greedy tokens after it."""
    decoder = engine.decoder()
    found = [decoder.start(ids.tolist())]
    for _ in range(30):
        found.append(decoder.step(found[-1].argmax(-1)))
    return torch.cat(found)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_speculation_changes_no_bit_of_the_logits(
    source: Path,
    dtype: Any,
    draft_count: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft_count(5)
    packs = {dtype: NativeLinear, "draft": NativeInt8}
    monkeypatch.setattr("compat.engine.fastest", lambda precision, *_: packs[precision])
    engine = Engine.from_pretrained(source, dtype=dtype)
    assert engine.speculate == "int8"
    plain = Engine.from_pretrained(source, dtype=dtype, speculate=None)
    for seed in range(3):
        assert torch.equal(*(logits_of_text(one, prompt(seed)) for one in (engine, plain)))
    assert engine._draft_sources[-1].rate > 0.7  # the initial value, so drafts were accepted


@pytest.mark.parametrize(
    ("pack", "options"),
    [
        (Blas, {}),  # rounds the same row differently in products of several rows
        (NativeLinear, {"max_batch": 2}),
        (NativeLinear, {"dtype": "int8"}),
        (NativeLinear, {"speculate": None}),
    ],
)
def test_speculation_is_disabled_by_default_where_it_does_not_help(
    source: Path, pack: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pack is NativeLinear and not WITH_COMPILER:
        pytest.skip("no C compiler")
    packs = {"float32": pack, "int8": NativeInt8}
    monkeypatch.setattr("compat.engine.fastest", lambda precision, *_: packs[precision])
    assert Engine.from_pretrained(source, **options).speculate is None


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_draft_tokens_yield_the_same_tokens(
    source: Path, engine: Engine, draft_count: Callable[[int], None], data: Any
) -> None:
    """The draft tokens are right, wrong, right at first, or missing, up to the last position."""
    draft_count(data.draw(st.integers(0, DraftSource.MAX_TOKENS)))
    ids = prompt(data.draw(st.integers(0, 50)), data.draw(st.integers(1, 20)))
    expected = expected_ids(source, ids)

    def draft(so_far: list[int], count: int, *_: Any) -> list[int]:
        correct = expected[len(so_far) :][:count]
        wrong_from = data.draw(st.integers(0, len(correct)))
        tokens = [*correct[:wrong_from], *[(t + 1) % 97 for t in correct[wrong_from:]]]
        return tokens[: data.draw(st.integers(0, count))]

    speculative = SpeculativeEngine(engine, draft)
    found = greedy(speculative, ids, N - ids.shape[1])
    assert found[0].tolist() == expected


def test_accepted_draft_tokens_save_forward_passes(
    source: Path, engine: Engine, draft_count: Callable[[int], None]
) -> None:
    draft_count(7)
    ids = prompt(1)
    expected = expected_ids(source, ids)
    speculative = SpeculativeEngine(
        engine, lambda so_far, count, *_: expected[len(so_far) :][:count]
    )
    found = greedy(speculative, ids, N - 8)
    assert found[0].tolist() == expected
    assert speculative.passes == 9  # the prompt, one timed pass, then 8 tokens in each pass
    draft_source = speculative.source
    assert draft_source.rate > 0.9
    assert draft_source.proposed - draft_source.accepted <= 1


def test_a_source_of_rejected_draft_tokens_is_soon_ignored(
    source: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(1)
    expected = expected_ids(source, ids)
    wrong = [(token_id + 1) % 97 for token_id in expected]
    speculative = SpeculativeEngine(engine, lambda so_far, count, *_: wrong[len(so_far) :][:count])
    # Each forward pass takes a second and each draft a millisecond, on any machine.
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: speculative.passes + next(ticks) / 1000)
    monkeypatch.setattr("compat.decoding.speculative.time", clock)
    found = greedy(speculative, ids, N - 8)
    assert found[0].tolist() == expected
    draft_source = speculative.source
    assert draft_source.accepted == 0
    assert draft_source.rate < 0.15
    assert speculative.passes == N - 8  # the last id is not passed to the model


def test_draft_tokens_are_sampled_with_the_same_random_numbers(
    source: Path, draft_count: Callable[[int], None]
) -> None:
    """A draft model that equals the model therefore predicts every sampled token."""
    draft_count(4)
    engine = Engine.from_pretrained(source)
    speculative = SpeculativeEngine(engine, exact_draft(engine))
    generate(speculative, prompt(4), max_new_tokens=50, stop_ids=(), top_k=50)
    draft_source = speculative.source
    assert draft_source.proposed == 40
    assert draft_source.accepted >= 36  # all except those after the last sampled id


def test_sampled_ids_have_the_distribution_of_the_model(
    make_checkpoint: MakeCheckpoint, draft_count: Callable[[int], None]
) -> None:
    """A chi-square test of the third id over a vocabulary of 11; the second id was drafted."""
    draft_count(2)
    folder, draws = make_checkpoint(vocab_size=11, n_positions=8, n_layer=1), 1500
    engine, ids = Engine.from_pretrained(folder, speculate="int8"), torch.tensor([[3, 1, 4]])
    model, generator, counts = load_pretrained(folder), torch.Generator().manual_seed(1), [0] * 11
    for _ in range(draws):
        found = engine.generate(ids, max_new_tokens=3, generator=generator, stop_ids=())
        counts[int(found[0, 5])] += 1

    def chi_square(temperature: float) -> float:
        texts, odds = ids, torch.ones(1)
        for _ in range(3):  # all texts that are one id longer, with their probabilities
            with torch.no_grad():
                following = (model(texts)[:, -1] / temperature).softmax(-1)
            odds = (odds[:, None] * following).view(-1)
            ends = torch.arange(11).repeat(len(texts))[:, None]
            texts = torch.cat([texts.repeat_interleave(11, 0), ends], dim=1)
        expected = draws * odds.view(-1, 11).sum(0)
        return float(((torch.tensor(counts) - expected) ** 2 / expected).sum())

    most = 29.6  # with 10 degrees of freedom, exceeded once in 1,000 times
    assert chi_square(1.0) < most
    assert chi_square(0.7) > most  # the test detects other probabilities


@each_draft_source
def test_a_stop_id_among_accepted_draft_tokens_ends_the_text(source: Path, speculate: Any) -> None:
    ids = prompt(3)
    expected = expected_ids(source, ids)
    stop = expected[8 + 3]
    length = expected.index(stop, 8) + 1
    found = Engine.from_pretrained(source, speculate=speculate).generate(
        ids, max_new_tokens=N - 8, temperature=0, stop_ids=[stop]
    )
    assert found[0].tolist() == expected[:length]


def test_a_decoder_can_start_another_text(engine: Engine) -> None:
    decoder = SpeculativeDecoder(
        engine.transformer, [DraftSource(lambda so_far, count, *_: [1] * count)]
    )
    first = decoder.start([[5, 6, 7]])
    decoder.step(torch.tensor([1]))
    assert torch.equal(decoder.start([[5, 6, 7]]), first)
    plain = engine.decoder()
    plain.start([[5, 6, 7]])
    expected = plain.step(torch.tensor([2]))
    torch.testing.assert_close(decoder.step(torch.tensor([2])), expected, rtol=1e-5, atol=1e-5)


# Draft sources


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_draft_model_proposes_what_it_would_generate(engine: Engine, data: Any) -> None:
    """It starts from the cache of the exact model, which holds all ids except the last one."""
    ids = data.draw(st.lists(st.integers(0, 96), min_size=2, max_size=10))
    count = data.draw(st.integers(0, 4))
    cache = engine.transformer.new_cache(1)
    engine.transformer(torch.tensor([ids[:-1]]), cache.kv, 0)
    expected = greedy(engine, torch.tensor([ids]), count)
    assert exact_draft(engine)(ids, count, cache, most_likely) == expected[0, len(ids) :].tolist()


def test_a_failing_draft_model_does_not_affect_the_tokens(
    source: Path, draft_count: Callable[[int], None]
) -> None:
    draft_count(3)
    engine = Engine.from_pretrained(source, speculate="int8")
    norm = engine._draft_sources[-1].draft.transformer.ln_f
    norm.bias = torch.full_like(norm.bias, torch.nan)
    found = greedy(engine, prompt(2), 20)
    assert found[0].tolist() == expected_ids(source, prompt(2))[:28]


@pytest.mark.parametrize("patience", [0, 12])
def test_a_draft_model_is_packed_after_enough_tokens_of_all_texts(
    source: Path, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    monkeypatch.setattr("compat.engine.PATIENCE", patience)
    engine = Engine.from_pretrained(source, speculate="int8")
    draft: Any = engine._draft_sources[1].draft
    packed = []
    for seed in range(4):  # five tokens each, the first of which needs no decode step
        engine.generate(prompt(seed), max_new_tokens=5, stop_ids=(), temperature=0)
        packed.append("transformer" in vars(draft))
    assert packed == ([True] * 4 if patience == 0 else [False, False, False, True])
    ids = prompt(9)
    found = greedy(engine, ids, N - 8)
    assert found[0].tolist() == expected_ids(source, ids)
