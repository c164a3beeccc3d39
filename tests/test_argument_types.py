"""Arguments of a wrong type raise one CompatError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compat import (
    CompatError,
    Engine,
    Tokenizer,
    generate,
    inspect_checkpoint,
    left_pad,
    load_pretrained,
    save_pretrained,
)

WRONG: list[Any] = [
    *(True, 2.5, "", b"x", [], {}, (), ..., object(), int, torch.float16, range(3)),
    *(np.array([[1, 2]]), np.zeros(0), torch.tensor([[1, 2]]), torch.zeros(1, 0)),
    np.float32(1),
]  # fmt: skip
IDS = torch.tensor([[1, 2]])


def kind(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", WRONG, ids=kind)
@pytest.mark.parametrize("name", ["device", "dtype", "speculate", "max_batch"])
def test_engine_settings_of_a_wrong_type_are_refused(tiny: Path, name: str, value: Any) -> None:
    with pytest.raises(CompatError, match=f"{name} is"):
        Engine.from_pretrained(tiny, **{name: value})


@pytest.mark.parametrize("value", [v for v in WRONG if not isinstance(v, int)], ids=kind)
def test_a_number_of_heads_of_a_wrong_type_is_refused(tiny: Path, value: Any) -> None:
    with pytest.raises(CompatError, match="n_head is"):
        load_pretrained(tiny, n_head=value)
    assert "n_head is" in str(inspect_checkpoint(tiny, n_head=value).error)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 10**30},
        {"suppress_tokens": torch.tensor(3)},
        {"suppress_tokens": (i for i in (1.5,))},
        {"stop_ids": np.array(3)},
        {"use_cache": np.array([True, False])},
    ],
    ids=[
        "huge temperature",
        "a number of ids",
        "ids of floats",
        "a number of stops",
        "an array for use_cache",
    ],
)
def test_unusual_generation_settings_work_or_are_refused(
    tiny: Path, settings: dict[str, Any]
) -> None:
    if "temperature" in settings:
        out = generate(load_pretrained(tiny), IDS, max_new_tokens=1, **settings)
        assert out.shape == (1, 3)
        return
    with pytest.raises(CompatError):
        generate(load_pretrained(tiny), IDS, max_new_tokens=1, **settings)


@pytest.mark.parametrize("collection", [np.array, torch.tensor, iter, set], ids=kind)
def test_suppressed_tokens_may_be_in_any_collection(tiny: Path, collection: Any) -> None:
    model = load_pretrained(tiny)
    best = int(model(IDS)[0, -1].argmax())
    for suppressed, is_best in (([], True), ([best], False)):
        ids = collection(suppressed) if suppressed else np.array(suppressed, dtype=int)
        out = generate(model, IDS, max_new_tokens=1, temperature=0, suppress_tokens=ids)
        assert (int(out[0, -1]) == best) is is_best


@pytest.mark.parametrize(
    "prompts",
    [None, 3, "text", ["text"], [1, 2], [[1.5]], [[[1]]], [None], object(), torch.ones(2, 2)],
    ids=lambda prompts: repr(prompts)[:8],
)
def test_left_pad_refuses_prompts_of_a_wrong_type(prompts: Any) -> None:
    with pytest.raises(CompatError, match="the prompts are"):
        left_pad(prompts)


@pytest.mark.parametrize("value", WRONG, ids=kind)
def test_a_vocabulary_of_a_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(CompatError, match="the vocabulary is"):
        Tokenizer(value)


def test_a_folder_name_with_a_null_character_is_refused(tiny: Path) -> None:
    with pytest.raises(CompatError, match="folder is"):
        save_pretrained(load_pretrained(tiny), "a\0b")
