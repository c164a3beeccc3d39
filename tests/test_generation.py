"""Generated ids equal those of transformers.generate, greedy and seeded, with and without cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compat import PlainBlocks, generate, left_pad, load_tokenizer, stream
from compat.checkpoint.find import DEMO
from compat.dialects import conv1d, linear
from compat.layers import KVCache, position_ids
from tests.generation_common import (
    BATCH,
    PROMPT,
    cached_or_not,
    each_dialect,
    greedy,
    ours,
    theirs,
)

UNEQUAL = [[5, 17, 60, 8, 1, 90, 33], [44], [9, 0, 0, 71]]


@each_dialect
@cached_or_not
def test_200_greedy_ids_equal_those_of_transformers(
    noisy: Path, dialect: str, use_cache: bool
) -> None:
    found = greedy(ours(noisy, dialect), BATCH, 200, use_cache=use_cache)
    assert torch.equal(found, theirs(noisy, BATCH, 200))
    assert all(len(set(row)) > 15 for row in found[:, 3:].tolist())


@each_dialect
@cached_or_not
def test_the_embedded_checkpoint_generates_what_transformers_generates(
    dialect: str, use_cache: bool
) -> None:
    model, tokenizer = ours(DEMO, dialect), load_tokenizer("demo")
    prompts = torch.tensor([tokenizer.encode(letter) for letter in "IOA"])
    found = greedy(model, prompts, 80, use_cache=use_cache)
    assert torch.equal(found, theirs(DEMO, prompts, 80))
    assert len({tuple(row[1:]) for row in found.tolist()}) == 3


@each_dialect
@pytest.mark.parametrize(
    ("name", "first_ids", "distinct"),
    [("tarot", [438, 49, 261], 30), ("machining", [49, 5, 14], 5)],
)
def test_models_of_other_authors_generate_what_transformers_generates(
    shared: Path, name: str, first_ids: list[int], distinct: int, dialect: str
) -> None:
    """Tarot is generated up to its last position; machining has only 53 ids."""
    folder = shared / "data/checkpoints" / name
    model, prompts = ours(folder, dialect), torch.tensor(first_ids)[:, None]
    new = min(100, model.config.n_positions - 1)
    found = greedy(model, prompts, new)
    assert torch.equal(found, theirs(folder, prompts, new))
    assert all(len(set(row)) >= distinct for row in found.tolist())
    assert len({tuple(row[1:]) for row in found.tolist()}) == 3


def test_the_tarot_checkpoint_generates_the_text_in_its_readme(shared: Path) -> None:
    folder = shared / "data/checkpoints/tarot"
    tokenizer = load_tokenizer(folder)
    found = greedy(ours(folder), torch.tensor([tokenizer.encode("The")]), 40)
    text = tokenizer.decode(found[0].tolist())
    assert text.startswith("The more you make things happen the more you will make money too.\n")


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 0.7},
]


@each_dialect
@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_the_same_seed_samples_the_same_tokens_as_transformers(
    noisy: Path, dialect: str, settings: dict[str, Any]
) -> None:
    for seed, use_cache in ((1, True), (2, False)):
        found = generate(
            ours(noisy, dialect),
            BATCH,
            max_new_tokens=40,
            generator=torch.Generator().manual_seed(seed),
            stop_ids=(),
            use_cache=use_cache,
            **settings,
        )
        drawn = {"do_sample": True, "top_k": 0, "top_p": 1.0, **settings}
        assert torch.equal(found, theirs(noisy, BATCH, 40, seed, **drawn))


@each_dialect
@cached_or_not
def test_the_repetition_penalty_matches_transformers_even_with_padding(
    noisy: Path, dialect: str, use_cache: bool
) -> None:
    """The padding id also occurs in the texts, but is not penalized as padding."""
    model = ours(noisy, dialect)
    plain, (ids, mask) = greedy(model, BATCH, 60), left_pad(UNEQUAL, pad_id=9)
    settings: dict[str, Any] = {"use_cache": use_cache, "repetition_penalty": 1.4}
    found = greedy(model, BATCH, 60, **settings)
    assert torch.equal(found, theirs(noisy, BATCH, 60, repetition_penalty=1.4))
    assert not torch.equal(found, plain)
    found = greedy(model, ids, 60, attention_mask=mask, **settings)
    expected = theirs(noisy, ids, 60, attention_mask=mask, repetition_penalty=1.4)
    assert torch.equal(found, expected)


def test_sampling_uses_only_the_passed_generator(noisy: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = [
        generate(ours(noisy), PROMPT, max_new_tokens=20, generator=generator, stop_ids=())
        for generator in (torch.Generator().manual_seed(s) for s in (3, 3, 4))
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(generate(ours(noisy), PROMPT, max_new_tokens=20, stop_ids=()), runs[0])


@each_dialect
@cached_or_not
def test_a_left_padded_batch_generates_the_ids_of_each_prompt_alone(
    noisy: Path, dialect: str, use_cache: bool
) -> None:
    model = ours(noisy, dialect)
    ids, mask = left_pad(UNEQUAL, pad_id=13)
    found = greedy(model, ids, 50, attention_mask=mask, use_cache=use_cache)
    assert torch.equal(found, theirs(noisy, ids, 50, attention_mask=mask))
    for row, prompt in zip(found, UNEQUAL, strict=True):
        alone = greedy(model, torch.tensor([prompt]), 50, use_cache=use_cache)
        assert row[ids.shape[1] - len(prompt) :].tolist() == alone[0].tolist()


@each_dialect
@cached_or_not
def test_unmasked_padding_or_its_positions_change_the_ids(
    noisy: Path, dialect: str, use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above depend on this: the mask must hide padding and shift positions."""
    model = PlainBlocks(ours(noisy, dialect))
    ids, mask = left_pad(UNEQUAL, pad_id=13)
    right = greedy(model, ids, 50, attention_mask=mask, use_cache=use_cache)
    unmasked = greedy(model, ids, 50, use_cache=use_cache)
    module = {"linear": linear, "conv1d": conv1d}[dialect]
    monkeypatch.setattr(
        module, "position_ids", lambda ids, cache, mask: position_ids(ids, cache, None)
    )
    unshifted = greedy(model, ids, 50, attention_mask=mask, use_cache=use_cache)
    for wrong in (unmasked, unshifted):
        assert torch.equal(wrong[0], right[0])  # the longest prompt has no padding
        assert not torch.equal(wrong[1], right[1])
        assert not torch.equal(wrong[2], right[2])


@each_dialect
@cached_or_not
def test_stream_yields_the_same_ids_as_generate(noisy: Path, dialect: str, use_cache: bool) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "top_k": 9, "use_cache": use_cache}
    seeds = (torch.Generator().manual_seed(1) for _ in range(2))
    complete = generate(ours(noisy, dialect), BATCH, generator=next(seeds), **settings)
    steps = list(stream(ours(noisy, dialect), BATCH, generator=next(seeds), **settings))
    assert all(step.shape == (3,) for step in steps)
    assert torch.equal(torch.stack(steps, dim=1), complete[:, 3:])


@each_dialect
@pytest.mark.parametrize(("use_cache", "lengths"), [(True, [3, 1, 1, 1]), (False, [3, 4, 5, 6])])
def test_with_a_cache_the_model_reads_only_the_newest_id(
    noisy: Path, dialect: str, use_cache: bool, lengths: list[int]
) -> None:
    model, read = ours(noisy, dialect), []
    with model.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1])):
        greedy(model, BATCH, 4, use_cache=use_cache)
    assert read == lengths


@each_dialect
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 3, 2]], ids=["one by one", "in chunks"])
@torch.no_grad()
def test_cached_logits_equal_those_without_a_cache(
    noisy: Path, dialect: str, padded: bool, chunks: list[int]
) -> None:
    model, T = ours(noisy, dialect), sum(chunks)
    ids = torch.randint(97, (2, T), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * T, [0] * 4 + [1] * (T - 4)]) if padded else None
    complete = model(ids, None, mask)
    cache = [KVCache(T) for _ in range(model.config.n_layer)]
    seen = 0
    for chunk in chunks:
        new = slice(seen, seen + chunk)
        seen += chunk
        logits = model(ids[:, new], cache, None if mask is None else mask[:, :seen])
        assert [layer.length for layer in cache] == [seen] * model.config.n_layer
        shown = torch.ones(2, chunk).bool() if mask is None else mask[:, new].bool()
        apart = (logits - complete[:, new])[shown]
        assert apart.abs().max() < 1e-5 * complete.abs().max()


@each_dialect
@cached_or_not
def test_all_positions_of_the_context_can_be_used(
    tiny: Path, dialect: str, use_cache: bool
) -> None:
    found = greedy(ours(tiny, dialect), PROMPT, 29, use_cache=use_cache)
    assert found.shape == (1, 32)
    assert torch.equal(found, theirs(tiny, PROMPT, 29))
    assert torch.equal(greedy(ours(tiny, dialect), found, 0, use_cache=use_cache), found)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_zero_new_tokens_return_the_prompt(tiny: Path, temperature: float) -> None:
    found = generate(ours(tiny), BATCH, max_new_tokens=0, temperature=temperature)
    assert torch.equal(found, BATCH)
