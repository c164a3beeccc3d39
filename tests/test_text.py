"""Completions of prompts equal those of each prompt alone and those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import GenerationError, generate
from compat.generation import Completion, Sampling, generate_text, stream_text
from tests.conftest import MakeCheckpoint
from tests.generation_common import each_dialect, ours, reference, theirs
from tests.text_common import PROMPTS, TOKENIZER, V, ids_of, with_tokenizer

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return with_tokenizer(make_checkpoint, n_positions=64)


def complete(
    folder: Path, prompts: list[Any], dialect: str = "linear", **options: Any
) -> list[Completion]:
    options = {"max_new_tokens": 20, "seed": 3, **options}
    return list(generate_text(ours(folder, dialect), TOKENIZER, prompts, **options))


@each_dialect
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_greedy_ids_of_prompts_of_unequal_length_equal_those_of_transformers(
    folder: Path, dialect: str, batch_size: int
) -> None:
    found = complete(folder, PROMPTS, dialect, sampling=GREEDY, batch_size=batch_size)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = ids_of(prompt)
        expected = theirs(folder, torch.tensor([ids]), 20)[0].tolist()
        assert (completion.prompt, completion.prompt_ids) == (prompt, ids)
        assert completion.prompt_ids + completion.new_ids == expected
        assert completion.text == prompt + TOKENIZER.decode(completion.new_ids)
        assert (completion.finish_reason, completion.dropped) == ("length", 0)
    assert len({tuple(completion.new_ids) for completion in found}) > 1


SAMPLING = [
    {},
    {"temperature": 1.4, "top_k": 50, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_every_prompt_is_sampled_as_by_transformers_alone(
    folder: Path, settings: dict[str, Any]
) -> None:
    """Sample j uses seed + j in any batch."""
    drawn = {"do_sample": True, "top_k": 0, "top_p": 1.0, **settings}
    for batch_size in (1, 4):
        found = complete(folder, PROMPTS, sampling=Sampling(**settings), n=2, batch_size=batch_size)
        for i, completion in enumerate(found):
            prompt, seed = torch.tensor([ids_of(PROMPTS[i // 2])]), 3 + i % 2
            expected = theirs(folder, prompt, 20, seed, **drawn)
            assert completion.prompt_ids + completion.new_ids == expected[0].tolist()


def test_the_texts_of_a_prompt_do_not_depend_on_other_prompts(folder: Path) -> None:
    settings: dict[str, Any] = {"sampling": Sampling(temperature=1.3), "n": 2, "batch_size": 3}
    found = complete(folder, PROMPTS, **settings)
    assert complete(folder, PROMPTS[::-1], **settings)[-2:] == found[:2]
    assert complete(folder, PROMPTS[2:3], **settings) == found[4:6]
    assert found[4].new_ids != found[5].new_ids
    assert found != complete(folder, PROMPTS, **settings, seed=4)
    unseeded = [complete(folder, PROMPTS, **settings, seed=None) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_one_prompt_is_sampled_as_by_generate(folder: Path) -> None:
    ids = torch.tensor([ids_of("ROMEO:")])
    seeded = torch.Generator().manual_seed(3)
    whole = generate(ours(folder), ids, max_new_tokens=20, temperature=0.8, generator=seeded)
    (found,) = complete(folder, ["ROMEO:"], sampling=Sampling(0.8))
    assert found.prompt_ids + found.new_ids == whole[0].tolist()


def test_prompts_may_be_token_ids(folder: Path) -> None:
    """If the ids end within a character, the new text starts with the rest of the character."""
    as_text = complete(folder, PROMPTS[:3], sampling=GREEDY)
    assert complete(folder, [ids_of(prompt) for prompt in PROMPTS[:3]], sampling=GREEDY) == as_text
    half = [*TOKENIZER.encode("a"), TOKENIZER.encode("é")[0]]
    assert TOKENIZER.decode(half) == "a\ufffd"
    (found,) = complete(folder, [half], sampling=GREEDY)
    assert found.prompt == "a"
    assert found.text == TOKENIZER.decode(half + found.new_ids)


@pytest.mark.parametrize("settings", [{"temperature": 0}, *SAMPLING], ids=str)
def test_logprobs_are_those_of_the_raw_logits(folder: Path, settings: dict[str, Any]) -> None:
    """They are computed before temperature, penalty and filters, as in transformers."""
    found = complete(folder, PROMPTS[:3], sampling=Sampling(**settings), logprobs=True)
    for prompt, completion in zip(PROMPTS, found, strict=False):
        sequence = torch.tensor([completion.prompt_ids + completion.new_ids])
        with torch.no_grad():
            logits = reference(folder)(sequence).logits[:, len(ids_of(prompt)) - 1 : -1]
        expected = reference(folder).compute_transition_scores(
            sequence, tuple(logits.unbind(1)), normalize_logits=True
        )
        assert completion.logprobs is not None
        assert torch.allclose(torch.tensor([completion.logprobs]), expected, atol=1e-4, rtol=1e-4)
    assert complete(folder, ["O"])[0].logprobs is None


def test_a_text_ends_at_a_stop_id_of_the_config_or_of_the_request(
    make_checkpoint: MakeCheckpoint, folder: Path
) -> None:
    whole = complete(folder, PROMPTS, sampling=GREEDY)
    ids = whole[0].new_ids
    end = next(i for i in range(4, 20) if ids[i] not in ids[:i])
    ends = with_tokenizer(make_checkpoint, n_positions=64, eos_token_id=ids[end])
    for source, options, reason in (
        (ends, {}, "eos"),
        (folder, {"stop_ids": [ids[end]]}, "stop"),
        (ends, {"stop_ids": [ids[end]]}, "eos"),
    ):
        found = complete(source, PROMPTS, sampling=GREEDY, batch_size=3, logprobs=True, **options)
        assert (found[0].finish_reason, found[0].new_ids) == (reason, ids[: end + 1])
        assert found[0].new_text == TOKENIZER.decode(ids[:end])
        assert len(found[0].logprobs or ()) == end + 1
        for completion, before in zip(found, whole, strict=True):
            if ids[end] not in before.new_ids:
                assert replace(completion, logprobs=None) == before


def test_a_text_ends_before_a_stop_string(folder: Path) -> None:
    whole = complete(folder, PROMPTS, sampling=GREEDY)
    stop = whole[1].new_text[7:10]
    for completion, before in zip(
        complete(folder, PROMPTS, sampling=GREEDY, stop=["none such", stop]), whole, strict=True
    ):
        assert completion.new_text == before.new_text.split(stop)[0]
        assert (completion.finish_reason == "stop") == (stop in before.new_text)
        assert before.new_ids[: len(completion.new_ids)] == completion.new_ids
        assert (len(completion.new_ids) < 20) or stop not in before.new_text[:-4]


def test_a_stop_string_in_the_prompt_does_not_end_the_text(folder: Path) -> None:
    (free,) = complete(folder, ["The king"], sampling=GREEDY)
    (found,) = complete(folder, ["The king"], sampling=GREEDY, stop=["king"])
    assert "king" not in free.new_text
    assert (found.new_text, found.finish_reason) == (free.new_text, "length")


def test_a_stream_yields_the_same_text_and_withholds_possible_stop_strings(folder: Path) -> None:
    (whole,) = complete(folder, ["O"], sampling=GREEDY)
    stop = whole.new_text[7:10]
    (expected,) = complete(folder, ["O"], sampling=GREEDY, stop=[stop], logprobs=True)
    options: dict[str, Any] = {"max_new_tokens": 20, "sampling": GREEDY, "logprobs": True}
    stream = stream_text(ours(folder), TOKENIZER, "O", stop=[stop], **options)
    assert stream.completion.new_text == ""
    shown = ""
    for piece in stream:
        shown += piece
        assert expected.new_text.startswith(shown)
        assert stream.completion.finish_reason in ("interrupted", "stop")
    assert shown == expected.new_text
    assert stream.completion == expected


def test_without_new_tokens_the_new_text_is_empty(folder: Path) -> None:
    for completion in complete(folder, PROMPTS, max_new_tokens=0, n=2):
        assert (completion.new_ids, completion.new_text) == ([], "")
        assert completion.finish_reason == "length"


def test_the_default_is_100_new_tokens_or_as_many_as_fit(
    make_checkpoint: MakeCheckpoint, folder: Path
) -> None:
    """The limit applies to each prompt, so short texts continue after long ones are full."""
    larger = with_tokenizer(make_checkpoint, n_positions=128)
    prompts = [[5], [5] * 28, [5] * 29, [5] * 127]
    found = complete(larger, prompts, max_new_tokens=None, sampling=GREEDY)
    assert [len(completion.new_ids) for completion in found] == [100, 100, 99, 1]
    for prompt, completion in zip(prompts, found, strict=True):
        new = len(completion.new_ids)
        expected = theirs(larger, torch.tensor([prompt]), new)[0, len(prompt) :]
        assert completion.new_ids == expected.tolist()


def test_ctrl_c_yields_the_current_batch_before_the_interrupt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = complete(folder, PROMPTS, sampling=GREEDY)
    end = whole[2].new_ids.index(whole[2].new_ids[3]) + 1
    remaining = [3 + 20 + 4]  # decode steps: the first batch of two, and some of the second

    def draw(self: Sampling, scores: torch.Tensor, generator: object = None) -> torch.Tensor:
        remaining[0] -= 1
        if remaining[0] == 3:
            raise KeyboardInterrupt
        return scores.argmax(-1)

    monkeypatch.setattr(Sampling, "draw", draw)
    completions = generate_text(
        ours(folder), TOKENIZER, PROMPTS, max_new_tokens=20, sampling=GREEDY, batch_size=2,
        stop_ids=[whole[2].new_ids[end - 1]],
    )  # fmt: skip
    found = []
    with pytest.raises(KeyboardInterrupt):
        for completion in completions:
            found.append(completion)
    assert [completion.prompt for completion in found] == PROMPTS[:4]
    assert found[3].finish_reason == "interrupted"
    assert 0 < len(found[3].new_ids) < 20
    assert found[3].new_ids == whole[3].new_ids[: len(found[3].new_ids)]
    assert TOKENIZER.decode(found[3].new_ids).startswith(found[3].new_text)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 0}, "n is 0, but must be an integer of at least 1"),
        ({"n": -1}, "n is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": -1, "overflow": "slide"}, "max_new_tokens is -1"),
        ({"max_new_tokens": 64}, r"prompt 1 of 2, 'O': 1 prompt tokens and 64 new ones make 65"),
        ({"overflow": "wrap"}, "overflow is 'wrap', but must be 'error' or 'slide'"),
        ({"stop": "end"}, "stop is 'end', but must be a list of nonempty strings"),
        ({"stop": ["end", ""]}, r"stop is \['end', ''\], but must be a list of nonempty strings"),
        ({"stop_ids": [3, V]}, f"stop_ids has {V}, .* 0 to {V - 1}"),
        ({"stop_ids": [-1]}, "stop_ids has -1"),
        ({"prompts": "O"}, "prompts is one text"),
        ({"prompts": ["O", "a\ud800"]}, "prompt 2 of 2, .*: the prompt cannot be encoded"),
        ({"prompts": [[3, V]]}, f"the prompt cannot be decoded: id {V}"),
        ({"prompts": [[]]}, "the prompt has no tokens"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_fulfilled_is_refused_immediately(
    folder: Path, change: dict[str, Any], named: str
) -> None:
    prompts = change.pop("prompts", ["O", "ROMEO:"])
    with pytest.raises(GenerationError, match=named):
        generate_text(ours(folder), TOKENIZER, prompts, **change)
