"""Vocabularies are read from the files of a checkpoint, and inconsistent ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2TokenizerFast

from compat import Tokenizer, TokenizerError, load_tokenizer
from tests.conftest import MakeCheckpoint
from tests.vocabularies import BYTES, END, SMALL, build_tokenizer, small_vocab

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def small_json(model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a tokenizer.json, as the `tokenizers` library writes it, with changes."""
    data = {
        "version": "1.0",
        "added_tokens": [{"id": 257, "content": END, "special": True}],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": small_vocab(), "merges": ["a b"], **(model or {})},
    }
    return {**data, **changes}


@pytest.fixture(scope="module")
def of_300_ids(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint without a tokenizer, which tests must not change."""
    return make_checkpoint(vocab_size=300, **SMALL)


@pytest.fixture
def folder(of_300_ids: Path, tmp_path: Path) -> Path:
    """A copy of that checkpoint, to which tests may add a tokenizer."""
    return shutil.copytree(of_300_ids, tmp_path / "of_300_ids")


LoadJson = Callable[[Any], Tokenizer]


@pytest.fixture
def load_json(folder: Path) -> LoadJson:
    """A function that loads a tokenizer.json in a checkpoint with 300 ids."""

    def load(data: Any) -> Tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
        return load_tokenizer(folder)

    return load


def test_both_kinds_of_files_define_the_same_tokenizer(folder: Path, load_json: LoadJson) -> None:
    (folder / "vocab.json").write_text(json.dumps(small_vocab()), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    expected = [256, BYTES.index("c"), 257]
    assert load_tokenizer(folder).encode(f"abc{END}", allow_special=True) == expected
    assert load_json(small_json()).encode(f"abc{END}", allow_special=True) == expected


def test_merges_may_be_written_as_lists(load_json: LoadJson) -> None:
    assert load_json(small_json({"merges": [["a", "b"]]})).encode("ab") == [256]


def test_merges_that_tiktoken_applies_differently_are_refused() -> None:
    """In "abc", b and c merge first, and a + bc is not a merge, but tiktoken would merge them."""
    vocab = small_vocab(bc=258, abc=259)
    merges = ["b c", "a b", "ab c"]
    theirs = GPT2TokenizerFast(vocab=vocab, merges=[tuple(merge.split()) for merge in merges])
    assert theirs("abc")["input_ids"] == [vocab["a"], vocab["bc"]]
    with pytest.raises(TokenizerError, match=r"merge 3 makes .abc. of .*makes it of"):
        build_tokenizer(vocab, merges, {})


def vocab_without(char: str) -> dict[str, int]:
    return {token: i for token, i in small_vocab().items() if token != char}


@pytest.mark.parametrize(
    ("vocab", "merges", "named"),
    [
        (vocab_without("Ġ"), ["a b"], r"lacks 1 of the 256 bytes, the first as 'Ġ'"),
        (small_vocab(ab=3), ["a b"], r"id \d+ belongs to"),
        (small_vocab(**{END: 256}), ["a b"], r"id \d+ belongs to"),
        (small_vocab(), ["a b", "b c"], "merge 2 makes 'bc'"),
        (small_vocab(), ["x ab"], "merge 1 is 'x ab'"),
        (small_vocab(abab=258), ["ab ab", "a b"], "merge 1 is 'ab ab'"),
        (small_vocab(), ["ab"], "merge 1 is 'ab'"),
        (small_vocab(), ["a b "], "merge 1 is 'a b '"),
        (small_vocab(), ["a  b"], "merge 1 is 'a  b'"),
        (small_vocab(), [["a", "b", ""]], r"merge 1 is \['a', 'b', ''\]"),
        (small_vocab(), [7], "merge 1 is 7"),
        (small_vocab(), [[1, 2]], r"merge 1 is \[1, 2\]"),
        (small_vocab(ab=-1), ["a b"], "token 'ab' has id"),
        (small_vocab(ab="256"), ["a b"], "token 'ab' has id"),
        (small_vocab(ab=256.0), ["a b"], "token 'ab' has id"),
        (small_vocab(ab=None), ["a b"], "token 'ab' has id"),
    ],
)
def test_an_inconsistent_vocabulary_is_refused_by_name(
    vocab: dict[str, Any], merges: list[Any], named: str
) -> None:
    with pytest.raises(TokenizerError, match=named):
        build_tokenizer(vocab, merges, {})


def test_an_id_beyond_the_embedding_is_refused(load_json: LoadJson) -> None:
    highest = {"vocab": small_vocab(ab=299)}
    assert load_json(small_json(highest)).encode("ab") == [299]
    with pytest.raises(TokenizerError, match=r"id 300, but config\.json has vocab_size 300"):
        load_json(small_json({"vocab": small_vocab(ab=300)}))


@pytest.mark.parametrize(
    "harmless",
    [
        {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False},
        {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": False},
        {"continuing_subword_prefix": None, "end_of_word_suffix": None},
    ],
)
def test_disabled_options_are_accepted(load_json: LoadJson, harmless: dict[str, Any]) -> None:
    assert load_json(small_json(harmless)).encode("ab") == [256]


OTHER_KINDS: dict[str, Any] = {
    "WordPiece": small_json({"type": "WordPiece"}),
    "Unigram": small_json({"type": "Unigram", "vocab": [["a", -1.0]]}),
    "no model": {**small_json(), "model": None},
    "merges ignored": small_json({"ignore_merges": True}),
    "suffix": small_json({"end_of_word_suffix": "</w>"}),
    "prefix": small_json({"continuing_subword_prefix": "##"}),
    "dropout": small_json({"dropout": 0.1}),
    "prefix space": small_json(pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}),
    "uncut": small_json(pre_tokenizer={**BYTE_LEVEL, "use_regex": False}),
    "cut at spaces": small_json(pre_tokenizer={"type": "Whitespace"}),
    "cut twice": small_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}),
    "no pre-tokenizer": small_json(pre_tokenizer=None),
    "pre-tokenizer a list": small_json(pre_tokenizer=["ByteLevel"]),
    "normalizer": small_json(normalizer={"type": "NFC"}),
    "added without id": small_json(added_tokens=[{"content": "<s>"}]),
    "added without text": small_json(added_tokens=[{"id": 258}]),
    "added and empty": small_json(added_tokens=[{"id": 258, "content": ""}]),
    "added no list": small_json(added_tokens={"<s>": 258}),
    "added, negative": small_json(added_tokens=[{"id": -1, "content": "<s>"}]),
    "added, id a string": small_json(added_tokens=[{"id": "258", "content": "<s>"}]),
    "added, id taken": small_json(added_tokens=[{"id": 256, "content": "<s>"}]),
    "a list": [],
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_an_unsupported_tokenizer_json_is_refused_with_its_folder(
    load_json: LoadJson, kind: str
) -> None:
    with pytest.raises(TokenizerError, match="of_300_ids"):
        load_json(OTHER_KINDS[kind])


@pytest.mark.parametrize("text", ["", "{", "\x00\xff"])
def test_an_unreadable_tokenizer_json_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TokenizerError, match=r"of_300_ids.*cannot be read"):
        load_tokenizer(folder)


def test_a_small_vocabulary_without_files_is_refused(of_300_ids: Path) -> None:
    with pytest.raises(TokenizerError, match=rf"{of_300_ids.name}.*no tokenizer\.json.* 300 "):
        load_tokenizer(of_300_ids)


@pytest.mark.parametrize("token_id", [258, -1])
def test_an_id_without_text_is_refused(token_id: int) -> None:
    ours = build_tokenizer(small_vocab(), ["a b"], {})
    with pytest.raises(TokenizerError, match=f"id {token_id} "):
        ours.decode([256, token_id])
    with pytest.raises(TokenizerError, match=f"id {token_id} "):
        list(ours.stream([token_id]))


def test_ids_without_text_are_all_ids_that_are_not_tokens() -> None:
    """These are gaps between the ids of tokens and ids beyond them; added tokens have text."""
    ours = build_tokenizer(small_vocab(ab=259), ["a b"], {"<s>": 261})
    assert ours.ids_without_text(265) == [256, 258, 260, 262, 263, 264]
    assert ours.ids_without_text(259) == [256, 258]
    assert ours.ids_without_text(256) == []
    for token_id in ours.ids_without_text(265):
        with pytest.raises(TokenizerError, match=f"id {token_id} "):
            ours.decode([token_id])
    with_text = sorted({*range(265)} - {*ours.ids_without_text(265)})
    assert ours.decode(with_text[256:]) == f"{END}ab<s>"
