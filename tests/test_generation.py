"""Generated ids against transformers.generate, greedy and seeded, with and without cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from compat import GenerationError, generate, left_pad, load_pretrained, load_tokenizer, stream
from compat.dialects import Model, conv1d, linear
from compat.layers import KVCache, position_ids

MakeCheckpoint = Callable[..., Path]

each_dialect = pytest.mark.parametrize("dialect", ["linear", "conv1d"])
cached_or_not = pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])

PROMPT = torch.tensor([[5, 17, 60]])
BATCH = torch.tensor([[5, 17, 60], [0, 96, 3], [44, 44, 2]])
UNEQUAL = [[5, 17, 60, 8, 1, 90, 33], [44], [9, 0, 0, 71]]


@functools.cache
def ours(folder: Path, dialect: str = "linear") -> Model:
    return load_pretrained(folder, dialect)


@functools.cache
def reference(folder: Path) -> transformers.GPT2LMHeadModel:
    """transformers' model without generation settings of its own, such as stop ids."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    model.generation_config = GenerationConfig()
    return model.eval()


def theirs(folder: Path, input_ids: Tensor, new: int, seed: int = 0, **settings: Any) -> Tensor:
    """What transformers generates: greedy, or drawn from the global generator."""
    torch.manual_seed(seed)
    mask = settings.pop("attention_mask", torch.ones_like(input_ids))
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, **settings}
    return reference(folder).generate(input_ids, attention_mask=mask, **given)


@pytest.fixture(scope="module")
def noisy(make_checkpoint: MakeCheckpoint) -> Path:
    """A tiny noisy checkpoint with room for long texts; its id 0 ends a text."""
    return make_checkpoint(n_positions=256)


def greedy(model: Model, input_ids: Tensor, new: int, **settings: Any) -> Tensor:
    return generate(
        model, input_ids, max_new_tokens=new, **{"temperature": 0, "stop": (), **settings}
    )


@each_dialect
@cached_or_not
def test_greedy_ids_are_transformers_for_200_tokens(
    noisy: Path, dialect: str, use_cache: bool
) -> None:
    found = greedy(ours(noisy, dialect), BATCH, 200, use_cache=use_cache)
    assert torch.equal(found, theirs(noisy, BATCH, 200))
    assert all(len(set(row)) > 15 for row in found[:, 3:].tolist())


@each_dialect
@cached_or_not
@pytest.mark.parametrize(
    ("name", "first_ids", "distinct"),
    [("tarot", [438, 49, 261], 30), ("machining", [49, 5, 14], 5)],
)
def test_trained_models_generate_what_transformers_generates(
    shared: Path, name: str, first_ids: list[int], distinct: int, dialect: str, use_cache: bool
) -> None:
    """Tarot up to its last position; machining has 53 ids, so its three rows must differ."""
    folder = shared / "data/checkpoints" / name
    model, prompts = ours(folder, dialect), torch.tensor(first_ids)[:, None]
    new = min(100, model.config.n_positions - 1)
    found = greedy(model, prompts, new, use_cache=use_cache)
    assert torch.equal(found, theirs(folder, prompts, new))
    assert all(len(set(row)) >= distinct for row in found.tolist())
    assert len({tuple(row[1:]) for row in found.tolist()}) == 3


def test_tarot_continues_the_as_its_readme_says(shared: Path) -> None:
    folder = shared / "data/checkpoints/tarot"
    tokenizer = load_tokenizer(folder)
    found = greedy(ours(folder), torch.tensor([tokenizer.encode("The")]), 40)
    text = tokenizer.decode(found[0].tolist())
    assert text.startswith("The more you make things happen the more you will make money too.\n")


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
]


@each_dialect
@pytest.mark.parametrize("prompts", [PROMPT, BATCH], ids=["1 row", "3 rows"])
@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_the_same_seed_draws_transformers_tokens(
    noisy: Path, dialect: str, prompts: Tensor, settings: dict[str, Any]
) -> None:
    for seed, use_cache in ((1, True), (2, False)):
        found = generate(
            ours(noisy, dialect),
            prompts,
            max_new_tokens=60,
            generator=torch.Generator().manual_seed(seed),
            stop=(),
            use_cache=use_cache,
            **settings,
        )
        expected = theirs(
            noisy, prompts, 60, seed, do_sample=True, **{"top_k": 0, "top_p": 1.0, **settings}
        )
        assert torch.equal(found, expected)


def test_draws_come_from_the_generator_alone(noisy: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = [
        generate(ours(noisy), PROMPT, max_new_tokens=20, generator=generator, stop=())
        for generator in (torch.Generator().manual_seed(s) for s in (3, 3, 4))
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(generate(ours(noisy), PROMPT, max_new_tokens=20, stop=()), runs[0])


@each_dialect
@cached_or_not
def test_a_left_padded_batch_is_its_prompts_alone(
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
def test_padding_that_is_not_masked_or_not_left_out_of_the_positions_shows(
    noisy: Path, dialect: str, use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partner of the test above: both halves of what the mask does are needed."""
    model = ours(noisy, dialect)
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


def stopped(whole: Tensor, T: int, stop: set[int], filler: int) -> list[list[int]]:
    """What is left of rows that were generated without stop ids."""
    rows = []
    for row in whole.tolist():
        end = next((i for i in range(T, len(row)) if row[i] in stop), len(row))
        rows.append(row[: end + 1])
    longest = max(map(len, rows))
    return [row + [filler] * (longest - len(row)) for row in rows]


@each_dialect
@cached_or_not
@pytest.mark.parametrize("pad", [None, 96])
def test_a_row_ends_at_a_stop_id_and_the_others_go_on(
    make_checkpoint: MakeCheckpoint, dialect: str, use_cache: bool, pad: int | None
) -> None:
    """Filled up with the padding id, or where there is none with the stop id."""
    folder = make_checkpoint(n_positions=64, pad_token_id=pad)
    whole = greedy(ours(folder, dialect), BATCH, 40, use_cache=use_cache)
    stop = int(whole[0, 8])
    filler = stop if pad is None else pad
    expected = stopped(whole, 3, {stop}, filler)
    assert expected != whole.tolist()
    found = greedy(ours(folder, dialect), BATCH, 40, stop=[stop], use_cache=use_cache)
    assert found.tolist() == expected
    assert torch.equal(found, theirs(folder, BATCH, 40, eos_token_id=stop, pad_token_id=filler))


def test_generation_ends_with_the_last_row(noisy: Path) -> None:
    whole = greedy(ours(noisy), BATCH, 30)
    stop = {int(row[3 + i]) for i, row in enumerate(whole)}
    found = greedy(ours(noisy), BATCH, 30, stop=stop)
    assert found.shape[0] == 3
    assert 4 <= found.shape[1] <= 6
    assert found.tolist() == stopped(whole, 3, stop, min(stop))


def test_a_stop_id_in_the_prompt_does_not_stop(noisy: Path) -> None:
    whole = greedy(ours(noisy), PROMPT, 20)
    prompt_id = next(i for i in range(97) if i not in whole[0, 3:].tolist())
    prompt = torch.tensor([[prompt_id, 5]])
    assert greedy(ours(noisy), prompt, 1, stop=[prompt_id]).shape == (1, 3)


@pytest.mark.parametrize("seed", [0, 1])
def test_stopping_rows_draw_as_in_transformers(noisy: Path, seed: int) -> None:
    """A finished row goes on drawing, unseen: otherwise the others' draws would shift."""
    found = generate(
        ours(noisy),
        BATCH,
        max_new_tokens=60,
        temperature=1.5,
        generator=torch.Generator().manual_seed(seed),
        stop=(7, 30),
    )
    expected = theirs(
        noisy,
        BATCH,
        60,
        seed,
        do_sample=True,
        temperature=1.5,
        top_k=0,
        eos_token_id=[7, 30],
        pad_token_id=7,
    )
    assert {7, 30} & set(found[:, 3:-1].flatten().tolist())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("as_list", [False, True])
def test_the_config_says_what_ends_a_text(
    make_checkpoint: MakeCheckpoint, noisy: Path, as_list: bool
) -> None:
    """The same weights under different configs: one stop id, several, none."""
    whole = greedy(ours(noisy), PROMPT, 30)
    stop = int(whole[0, 10])
    unused = next(i for i in range(97) if i not in whole[0].tolist())
    ends = make_checkpoint(n_positions=256, eos_token_id=[unused, stop] if as_list else stop)
    expected = stopped(whole, 3, {stop}, stop)
    found = greedy(ours(ends), PROMPT, 30, stop=None)
    assert found.tolist() == expected != whole.tolist()
    assert torch.equal(greedy(ours(ends), PROMPT, 30, stop=()), whole)
    endless = make_checkpoint(n_positions=256, eos_token_id=None)
    assert torch.equal(greedy(ours(endless), PROMPT, 30, stop=None), whole)


@each_dialect
@cached_or_not
def test_stream_yields_the_ids_of_generate(noisy: Path, dialect: str, use_cache: bool) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "top_k": 9, "use_cache": use_cache}
    seeds = (torch.Generator().manual_seed(1) for _ in range(2))
    whole = generate(ours(noisy, dialect), BATCH, generator=next(seeds), **settings)
    steps = list(stream(ours(noisy, dialect), BATCH, generator=next(seeds), **settings))
    assert all(step.shape == (3,) for step in steps)
    assert torch.equal(torch.stack(steps, dim=1), whole[:, 3:])


@each_dialect
@pytest.mark.parametrize(("use_cache", "lengths"), [(True, [3, 1, 1, 1]), (False, [3, 4, 5, 6])])
def test_with_a_cache_only_the_newest_id_is_read(
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
def test_cached_logits_are_those_without_a_cache(
    noisy: Path, dialect: str, padded: bool, chunks: list[int]
) -> None:
    model, T = ours(noisy, dialect), sum(chunks)
    ids = torch.randint(97, (2, T), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * T, [0] * 4 + [1] * (T - 4)]) if padded else None
    whole = model(ids, None, mask)
    cache = [KVCache(T) for _ in range(model.config.n_layer)]
    seen = 0
    for chunk in chunks:
        new = slice(seen, seen + chunk)
        seen += chunk
        logits = model(ids[:, new], cache, None if mask is None else mask[:, :seen])
        assert [layer.length for layer in cache] == [seen] * model.config.n_layer
        shown = torch.ones(2, chunk).bool() if mask is None else mask[:, new].bool()
        apart = (logits - whole[:, new])[shown]
        assert apart.abs().max() < 1e-5 * whole.abs().max()


@each_dialect
@cached_or_not
def test_exactly_filling_the_positions_works(tiny: Path, dialect: str, use_cache: bool) -> None:
    found = greedy(ours(tiny, dialect), PROMPT, 29, use_cache=use_cache)
    assert found.shape == (1, 32)
    assert torch.equal(found, theirs(tiny, PROMPT, 29))
    assert torch.equal(greedy(ours(tiny, dialect), found, 0, use_cache=use_cache), found)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_no_new_tokens_give_the_prompt_back(tiny: Path, temperature: float) -> None:
    found = generate(ours(tiny), BATCH, max_new_tokens=0, temperature=temperature)
    assert torch.equal(found, BATCH)


def test_left_pad_aligns_prompts_at_the_right() -> None:
    ids, mask = left_pad([[1, 2, 3], [4], [5, 6]], pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4], [9, 5, 6]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert ids.dtype == mask.dtype == torch.long


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_left_pad_refuses_empty_prompts(prompts: list[list[int]]) -> None:
    with pytest.raises(GenerationError, match="empty"):
        left_pad(prompts)


LONG = torch.zeros(1, 30, dtype=torch.long)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"input_ids": LONG, "max_new_tokens": 3}, r"\b30\b.*\b33\b.*\b32\b"),
    "one too long": ({"max_new_tokens": 30}, r"\b33\b.*\b32\b.*at most 29"),
    "prompt too long": ({"input_ids": LONG.repeat(1, 2)}, r"\b60\b.*\b32\b"),
    "empty prompt": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"\[1, 0\]"),
    "empty batch": ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, r"\[0, 3\]"),
    "no batch": ({"input_ids": torch.tensor([1, 2])}, r"\[2\]"),
    "negative id": ({"input_ids": torch.tensor([[1, -1]])}, r"-1\b.*0 to 96"),
    "id too high": ({"input_ids": torch.tensor([[1, 97]])}, r"\b97\b.*0 to 96"),
    "fractional ids": ({"input_ids": torch.tensor([[1.5]])}, "float32"),
    "negative length": ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    "mask too short": ({"attention_mask": torch.ones(1, 2)}, r"\[1, 2\].*\[1, 3\]"),
    "mask of 3 rows": ({"attention_mask": torch.ones(3, 3)}, r"\[3, 3\].*\[1, 3\]"),
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 0]])}, "left"),
    "temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "top_k": ({"top_k": 0}, "top_k is 0"),
    "top_p": ({"top_p": 1.5}, r"top_p is 1\.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_met_is_refused(tiny: Path, case: str) -> None:
    change, named = REFUSED[case]
    request = {"input_ids": PROMPT, "max_new_tokens": 1, **change}
    with pytest.raises(GenerationError, match=named):
        generate(ours(tiny), **request)
    with pytest.raises(GenerationError, match=named):
        stream(ours(tiny), **request)  # at once, not at the first id


def test_training_mode_is_refused(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear").train()
    with pytest.raises(GenerationError, match=r"training mode.*eval\(\)"):
        greedy(model, PROMPT, 1)
    assert greedy(model.eval(), PROMPT, 1).shape == (1, 4)


def test_logits_that_are_not_finite_are_refused(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear")
    with torch.no_grad():
        model.get_parameter("final_norm.shift")[0] = torch.nan
    with pytest.raises(GenerationError, match="not finite"):
        greedy(model, PROMPT, 1)
