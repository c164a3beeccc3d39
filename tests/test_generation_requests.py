"""Stop ids, suppressed ids and refused requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat import GenerationError, generate, left_pad, load_pretrained, stream
from tests.conftest import MakeCheckpoint
from tests.generation_common import (
    BATCH,
    PROMPT,
    cached_or_not,
    greedy,
    ours,
    theirs,
)


def stopped(unstopped: Tensor, T: int, stop: set[int], filler: int) -> list[list[int]]:
    """Return the expected rows, computed from rows that were generated without stop ids."""
    rows = []
    for row in unstopped.tolist():
        end = next((i for i in range(T, len(row)) if row[i] in stop), len(row))
        rows.append(row[: end + 1])
    longest = max(map(len, rows))
    return [row + [filler] * (longest - len(row)) for row in rows]


@cached_or_not
@pytest.mark.parametrize("pad", [None, 96])
def test_a_row_ends_at_a_stop_id_while_the_others_continue(
    make_checkpoint: MakeCheckpoint, use_cache: bool, pad: int | None
) -> None:
    """The finished row is filled with the padding id or, if there is none, with the stop id."""
    folder = make_checkpoint(n_positions=64, pad_token_id=pad)
    unstopped = greedy(ours(folder), BATCH, 40, use_cache=use_cache)
    stop = int(unstopped[0, 8])
    filler = stop if pad is None else pad
    expected = stopped(unstopped, 3, {stop}, filler)
    assert expected != unstopped.tolist()
    found = greedy(ours(folder), BATCH, 40, stop_ids=[stop], use_cache=use_cache)
    assert found.tolist() == expected
    assert torch.equal(found, theirs(folder, BATCH, 40, eos_token_id=stop, pad_token_id=filler))


def test_generation_ends_when_all_rows_have_ended(noisy: Path) -> None:
    unstopped = greedy(ours(noisy), BATCH, 30)
    stop = {int(row[3 + i]) for i, row in enumerate(unstopped)}
    found = greedy(ours(noisy), BATCH, 30, stop_ids=stop)
    assert found.shape[0] == 3
    assert 4 <= found.shape[1] <= 6
    assert found.tolist() == stopped(unstopped, 3, stop, min(stop))


def test_a_stop_id_in_the_prompt_does_not_end_generation(noisy: Path) -> None:
    unstopped = greedy(ours(noisy), PROMPT, 20)
    prompt_id = next(i for i in range(97) if i not in unstopped[0, 3:].tolist())
    prompt = torch.tensor([[prompt_id, 5]])
    assert greedy(ours(noisy), prompt, 1, stop_ids=[prompt_id]).shape == (1, 3)


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_that_stop_are_sampled_as_in_transformers(noisy: Path, seed: int) -> None:
    """Finished rows continue to draw random numbers, so that those of other rows do not change."""
    found = generate(
        ours(noisy),
        BATCH,
        max_new_tokens=60,
        temperature=1.5,
        generator=torch.Generator().manual_seed(seed),
        stop_ids=(7, 30),
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
def test_the_config_defines_the_stop_ids(
    make_checkpoint: MakeCheckpoint, noisy: Path, as_list: bool
) -> None:
    """Configs with one stop id, several and none are used with the same weights."""
    unstopped = greedy(ours(noisy), PROMPT, 30)
    stop = int(unstopped[0, 10])
    unused = next(i for i in range(97) if i not in unstopped[0].tolist())
    ends = make_checkpoint(n_positions=256, eos_token_id=[unused, stop] if as_list else stop)
    expected = stopped(unstopped, 3, {stop}, stop)
    found = greedy(ours(ends), PROMPT, 30, stop_ids=None)
    assert found.tolist() == expected != unstopped.tolist()
    assert torch.equal(greedy(ours(ends), PROMPT, 30, stop_ids=()), unstopped)
    endless = make_checkpoint(n_positions=256, eos_token_id=None)
    assert torch.equal(greedy(ours(endless), PROMPT, 30, stop_ids=None), unstopped)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {}, {"top_k": 5}, {"temperature": 1.7, "top_p": 0.8}],
    ids=str,
)
def test_suppressed_ids_are_sampled_as_if_their_logits_were_minus_infinity(
    noisy: Path, settings: dict[str, Any]
) -> None:
    """transformers does this, too; top_k and top_p then choose among the remaining ids."""

    def run(suppressed: list[int]) -> Tensor:
        return generate(
            ours(noisy),
            BATCH,
            max_new_tokens=40,
            suppress_tokens=suppressed,
            generator=torch.Generator().manual_seed(5),
            stop_ids=(),
            **settings,
        )

    suppressed = run([])[:, 3:].unique()[::2].tolist()
    found = run(suppressed)
    assert not set(suppressed) & set(found[:, 3:].flatten().tolist())
    drawn = {"do_sample": True, "top_k": 0, "top_p": 1.0, **settings}
    how = drawn if settings.get("temperature") != 0 else {}
    assert torch.equal(found, theirs(noisy, BATCH, 40, 5, suppress_tokens=suppressed, **how))


def test_left_pad_aligns_prompts_on_the_right() -> None:
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
    "min_p": ({"min_p": 1.5}, r"min_p is 1\.5"),
    "penalty": ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_fulfilled_is_refused(tiny: Path, case: str) -> None:
    change, named = REFUSED[case]
    request = {"input_ids": PROMPT, "max_new_tokens": 1, **change}
    with pytest.raises(GenerationError, match=named):
        generate(ours(tiny), **request)
    with pytest.raises(GenerationError, match=named):
        stream(ours(tiny), **request)  # raises immediately, not when the first id is requested


def test_training_mode_is_refused(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear").train()
    with pytest.raises(GenerationError, match=r"training mode.*eval\(\)"):
        greedy(model, PROMPT, 1)
    assert greedy(model.eval(), PROMPT, 1).shape == (1, 4)
