"""`generate` for a single prompt: its options, several texts, and interactive use."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from compat import Engine, load_pretrained
from compat.generation import Sampling, generate_text
from tests.command_line import Cli
from tests.conftest import MakeCheckpoint
from tests.text_common import TOKENIZER, interrupt_at, with_tokenizer

GREEDY = ("--temperature", 0, "--max-new-tokens", 20)


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return with_tokenizer(make_checkpoint, n_positions=64)


def expected(folder: Path, prompt: str, **how: Any) -> list[dict[str, Any]]:
    how = {"max_new_tokens": 20, "sampling": Sampling(0), **how}
    completions = generate_text(Engine.from_pretrained(folder), TOKENIZER, [prompt], **how)
    return [completion.to_json() for completion in completions]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (("--min-p", 0.2, "--seed", 5), {"sampling": Sampling(0.8, min_p=0.2), "seed": 5}),
        (("--temperature", 0, "--repetition-penalty", 2), {
            "sampling": Sampling(0, repetition_penalty=2.0)}),
        (("--temperature", 0, "--stop", "e", "--stop", "a"), {"stop": ["e", "a"]}),
        (("--temperature", 0, "--stop-id", 5, "--logprobs"), {"stop_ids": [5], "logprobs": True}),
        (("--temperature", 0, "--plain"), {}),
    ],
    ids=str,
)  # fmt: skip
def test_every_option_reaches_the_library(
    cli: Cli, folder: Path, options: tuple[object, ...], how: dict[str, Any]
) -> None:
    argv = ("generate", "O king", "--model", folder, "--max-new-tokens", 20, *options)
    found = cli(*argv, "--json").json()
    assert found.pop("tokens_per_second") > 0
    assert [found] == expected(folder, "O king", **how)
    if "--logprobs" not in options:
        assert cli(*argv).out == found["text"] + "\n"


def test_these_options_change_the_text(cli: Cli, folder: Path) -> None:
    """Otherwise the previous test could pass although an option has no effect."""
    argv = ("generate", "O king", "--model", folder, "--max-new-tokens", 50, "--seed", 5)
    plain = cli(*argv).out
    for options in (("--min-p", 0.9), ("--repetition-penalty", 9), ("--stop", plain[9])):
        assert cli(*argv, *options).out != plain


def test_n_texts_of_a_prompt_are_printed(cli: Cli, folder: Path) -> None:
    argv = ("generate", "O", "--model", folder, "--n", 3, "--seed", 2, "--max-new-tokens", 9)
    expected_texts = expected(folder, "O", sampling=Sampling(0.8), n=3, seed=2, max_new_tokens=9)
    assert cli(*argv, "--json").json() == expected_texts
    done = cli(*argv)
    assert done.out == "".join(found["text"] + "\n" for found in expected_texts)
    assert "text 3 of 3" in done.err and "27 tokens" in done.err


def test_a_sliding_context_is_reported(cli: Cli, folder: Path) -> None:
    argv = ("generate", "O", "--model", folder, "--temperature", 0, "--max-new-tokens", 90)
    assert cli(*argv).code == 2
    done = cli(*argv, "--overflow", "slide")
    expected_texts = expected(folder, "O", max_new_tokens=90, overflow="slide")[0]
    assert (done.code, done.out) == (0, expected_texts["text"] + "\n")
    assert expected_texts["dropped"] == 33
    assert "note: the context was full. Its oldest 33 tokens" in done.err
    assert "dropped" not in cli(*argv[:-1], 20, "--overflow", "slide").err


def test_non_finite_logits_exit_with_2_and_name_the_layer(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_pretrained(folder)
    model.get_parameter("trf_blocks.1.norm2.scale").data[0] = float("nan")
    monkeypatch.setattr("compat.load_pretrained", lambda *args: model)
    done = cli("generate", "O", "--model", folder, "--plain", "--json")
    assert (done.code, done.out) == (2, "")
    assert "h.1.ln_2 is the first hidden state that contains NaN" in done.err


class TypedLines(io.BytesIO):
    """Lines typed on a terminal; the line `^C` raises KeyboardInterrupt."""

    def readline(self, *args: Any) -> bytes:
        line = super().readline()
        if line == b"^C\n":
            raise KeyboardInterrupt
        return line


def converse(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, typed: bytes, folder: Path, *options: object
) -> Any:
    stdin = io.TextIOWrapper(TypedLines(typed))
    monkeypatch.setattr("sys.stdin", stdin)
    return cli("generate", "--interactive", "--model", folder, *GREEDY, *options)


def test_a_conversation_continues_each_line_until_the_input_ends(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    done = converse(cli, monkeypatch, "O\nKöng \r\nlast".encode(), folder)
    texts = [expected(folder, prompt)[0]["text"] for prompt in ("O", "Köng ", "last")]
    assert (done.code, done.out) == (0, "".join(text + "\n" for text in texts))
    assert done.err.count("> ") == 4


def test_an_invalid_prompt_does_not_end_a_conversation(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    done = converse(cli, monkeypatch, b"\x01" * 60 + b"\n\xff\nO\n", folder)
    assert (done.code, done.out) == (0, expected(folder, "O")[0]["text"] + "\n")
    assert "error: 60 prompt tokens" in done.err
    assert "error: the prompt cannot be encoded" in done.err


def test_ctrl_c_at_the_prompt_ends_the_conversation(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    done = converse(cli, monkeypatch, b"O\n^C\nO\n", folder)
    assert (done.code, done.out) == (130, expected(folder, "O")[0]["text"] + "\n")


def test_ctrl_c_during_generation_keeps_the_text_and_returns_to_the_prompt(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """After 7 tokens, the end of the first text is withheld because it may begin a stop string."""
    partial = expected(folder, "x", max_new_tokens=7)[0]["text"]
    stop = partial[-1] + "never"
    complete = expected(folder, "x", stop=[stop])[0]["text"]
    interrupt_at(monkeypatch, "draw", 8)
    options = ("--speculate", "off", "--stop", stop)
    done = converse(cli, monkeypatch, b"x\nx\n", folder, *options)
    assert (done.code, done.out) == (0, f"{partial}\n{complete}\n")
    assert "stopped. Press Ctrl-C again" in done.err


def test_ctrl_c_prints_the_incomplete_result_as_json(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    partial = expected(folder, "x", max_new_tokens=7, logprobs=True)[0]
    options = ("--model", folder, *GREEDY, "--json", "--logprobs", "--speculate", "off")
    interrupt_at(monkeypatch, "draw", 8)
    done = cli("generate", "x", *options)
    found = done.json()
    assert found.pop("tokens_per_second") > 0
    assert (done.code, found) == (130, {**partial, "finish_reason": "interrupted"})
    interrupt_at(monkeypatch, "draw", 8)
    done = cli("generate", "x", *options, "--n", 2)
    assert done.code == 130
    assert done.json() == [{**partial, "finish_reason": "interrupted", "logprobs": ANY}] * 2
