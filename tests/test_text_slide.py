"""A context that slides when it is full equals transformers on the same part of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compat import GenerationError
from compat.generation import Sampling, generate_text
from tests.conftest import MakeCheckpoint
from tests.generation_common import each_dialect, ours, reference
from tests.text_common import TOKENIZER, with_tokenizer

GREEDY = Sampling(temperature=0)
N = 24


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return with_tokenizer(make_checkpoint, n_positions=N)


@torch.no_grad()
def generate_without_cache(
    folder: Path, prompt: list[int], new: int, n: int = N, seed: int | None = None
) -> Any:
    """Compute each id with a new forward pass on the remaining ids, and count the dropped ids."""
    generator = torch.Generator().manual_seed(seed or 0)
    context, found, dropped = list(prompt), [], 0
    for _ in range(new):
        if len(context) > n:
            kept = context[-max(1, n // 2) :]
            dropped += len(context) - len(kept)
            context = kept
        logits = reference(folder)(torch.tensor([context])).logits[:, -1].float()
        ids = logits.argmax(-1) if seed is None else logits.softmax(-1).multinomial(
            1, generator=generator)[0]  # fmt: skip
        found.append(int(ids))
        context.append(int(ids))
    return found, dropped


@each_dialect
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_ids_equal_those_of_the_recomputed_second_half(
    folder: Path, dialect: str, batch_size: int
) -> None:
    """The prompts slide several times, exceed the context, or just fit."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (n,), generator=draw).tolist() for n in (1, 9, N, N + 1, 60)]
    completions = list(
        generate_text(
            ours(folder, dialect),
            TOKENIZER,
            prompts,
            max_new_tokens=50,
            sampling=GREEDY,
            overflow="slide",
            batch_size=batch_size,
            logprobs=True,
        )
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        assert (completion.new_ids, completion.dropped) == generate_without_cache(
            folder, prompt, 50
        )
        assert completion.prompt_ids == prompt
        assert completion.finish_reason == "length"
        assert len(completion.logprobs or ()) == 50
    # Each slide drops 13 ids: after 24, 16, 1 and 0 new ids, and then after every 13; 60 ids drop
    # 48.
    dropped = [2 * 13, 3 * 13, 4 * 13, 4 * 13, 48 + 3 * 13]
    assert [completion.dropped for completion in completions] == dropped


def test_the_random_generator_is_not_reset_by_a_slide(folder: Path) -> None:
    (found,) = generate_text(
        ours(folder), TOKENIZER, [[5, 6]], max_new_tokens=60, seed=4, overflow="slide"
    )
    assert found.new_ids == generate_without_cache(folder, [5, 6], 60, seed=4)[0]


def test_the_penalty_includes_dropped_ids(folder: Path) -> None:
    """With an extreme penalty, no id occurs twice as long as unused ids are left."""
    sampling = Sampling(temperature=0, repetition_penalty=1e30)
    (found,) = generate_text(
        ours(folder), TOKENIZER, [[5, 6]], max_new_tokens=60, sampling=sampling, overflow="slide"
    )
    assert len(set(found.new_ids)) == 60
    assert found.dropped > 0


def test_a_text_that_fits_does_not_slide(folder: Path) -> None:
    found = [
        list(generate_text(ours(folder), TOKENIZER, [[5] * 4], max_new_tokens=N - 4,
                           sampling=GREEDY, overflow=overflow))
        for overflow in ("error", "slide")
    ]  # fmt: skip
    assert found[0] == found[1]
    assert found[0][0].dropped == 0


def test_a_full_context_is_an_error_with_both_lengths_by_default(folder: Path) -> None:
    with pytest.raises(GenerationError, match=rf"4 prompt .* 21 new ones make 25, .* {N} pos"):
        generate_text(ours(folder), TOKENIZER, [[5] * 4], max_new_tokens=N - 3)
    (found,) = generate_text(ours(folder), TOKENIZER, [[5] * 4])
    assert len(found.new_ids) == N - 4
    (found,) = generate_text(ours(folder), TOKENIZER, [[5] * 4], overflow="slide")
    assert len(found.new_ids) == 100


@pytest.mark.parametrize("n", [1, 2, 3])
def test_contexts_of_up_to_three_positions_slide(make_checkpoint: MakeCheckpoint, n: int) -> None:
    folder = with_tokenizer(make_checkpoint, n_positions=n)
    (found,) = generate_text(
        ours(folder), TOKENIZER, [[5, 9]], max_new_tokens=8, sampling=GREEDY, overflow="slide"
    )
    assert (found.new_ids, found.dropped) == generate_without_cache(folder, [5, 9], 8, n)
