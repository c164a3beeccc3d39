"""The tokenizer equals transformers' GPT2TokenizerFast and tiktoken's gpt2."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2TokenizerFast

from compat import Tokenizer, TokenizerError, load_tokenizer
from compat.checkpoint.find import DEMO
from tests.conftest import MakeCheckpoint
from tests.vocabularies import BYTES, END, SMALL, build_tokenizer, small_vocab

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # one emoji that joins three
FLAG, WAVE = "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f44b\U0001f3fd"

DIFFICULT = [
    "",
    " ",
    "a  b   c    d ",
    "\t\tif x:\n\n\n    return\r\n \n",
    "\u00a0no\u00a0\u00a0break \u2003em\u3000wide\u2028line\u0085next\u200bzero\ufeffmark",
    "nul\0 \0\0end\x1c\x1f\x7f",
    "I'm we'll they've he'd it's can't 'S 'LL ''re don\u2019t ' t",
    "x1 12 123 1,234.50 ½ ² Ⅷ \u0663\u0664 \u0967\u0968 \U0001d7d8",
    f"{FAMILY} {FLAG} {WAVE}{FAMILY}x \U0001f1ea\U0001f1fa 1\ufe0f\u20e3",
    "汉字漢字 日本語のテキスト。 한국어 \U00020bb7",
    "e\u0301 a\u0308\u0323o \u0301alone Z\u0351\u036b\u0343\u036a\u0302 \u0e01\u0e33 \u0928\u093f",
    "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u0645\u0631\u062d\u0628\u0627",
    f"one{END}two {END} {END}{END}",
    "<|endoftext|<|endoftext",
    "a" * 501,
    "ha" * 200 + "!" * 67 + "\n" * 33 + " " * 129,
    "\u1e9e ǅ ʰ ª ﬁ \U0001e900 \U0010ffff \ufffd",
]

# Fragments that affect how the pattern splits a text, in any mixture, and any other text.
FRAGMENTS = st.one_of(
    st.text(" \t\n\r\v\f\u00a0\u2003\u3000\u2028\u0085\u200b", min_size=1, max_size=5),
    st.sampled_from(["'s", "'t", "'ll", "'ve", "'re", "'d", "'m", "'S", "'", "''", "\u2019s"]),
    st.text("0123456789.,-½²Ⅷ\u0663\u0967", min_size=1, max_size=4),
    st.sampled_from([FAMILY, FLAG, WAVE, "汉字", "の", "한국", "e\u0301", "\u0301", "\0"]),
    st.sampled_from(["The", " the", "aaaa", "ing", " rhythm", "!!!", "->", END, "<|", "|>"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])), st.lists(FRAGMENTS, max_size=9).map("".join)
)
EXAMPLES = settings(deadline=None, max_examples=200, derandomize=True)


class Pair(NamedTuple):
    """The tokenizers of both libraries for one vocabulary."""

    ours: Tokenizer
    theirs: GPT2TokenizerFast


def tables(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary and the merges of the files."""
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    return json.loads((folder / "vocab.json").read_text(encoding="utf-8")), lines[1:-1]


def build_pair(vocab: dict[str, int], merges: list[str]) -> Pair:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    return Pair(build_tokenizer(vocab, merges, {}), GPT2TokenizerFast(vocab=vocab, merges=pairs))


@pytest.fixture(scope="module", params=["demo", "permuted", "gpt2"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """The vocabulary of the embedded checkpoint, the same with permuted ids, and that of GPT-2."""
    if request.param == "demo":
        return Pair(load_tokenizer("demo"), GPT2TokenizerFast.from_pretrained(DEMO))
    if request.param == "permuted":
        vocab, merges = tables(DEMO)
        ids = list(vocab.values())
        random.Random(0).shuffle(ids)  # the order of the merges no longer follows from the ids
        return build_pair(dict(zip(vocab, ids, strict=True)), merges)
    return build_pair(*tables(request.getfixturevalue("shared") / "data/gpt2-tokenizer"))


def check(pair: Pair, text: str) -> None:
    """Check that all encodings equal those of transformers and that decoding restores the text."""
    ids = pair.ours.encode(text)
    assert ids == pair.theirs(text, split_special_tokens=True)["input_ids"]
    assert pair.ours.encode(text, allow_special=True) == pair.theirs(text)["input_ids"]
    assert pair.ours.decode(ids) == text
    assert "".join(pair.ours.stream(ids)) == text


@pytest.mark.parametrize("text", DIFFICULT)
def test_difficult_texts_encode_as_in_transformers(pair: Pair, text: str) -> None:
    check(pair, text)


def test_a_tokenizer_json_of_another_author_encodes_as_in_transformers(shared: Path) -> None:
    tarot = shared / "data/checkpoints/tarot"
    pair = Pair(load_tokenizer(tarot), GPT2TokenizerFast.from_pretrained(tarot))
    assert pair.ours.end_of_text == pair.theirs.eos_token_id
    for text in DIFFICULT:
        check(pair, text)


def test_any_text_encodes_as_in_transformers(pair: Pair) -> None:
    @EXAMPLES
    @given(TEXTS)
    def run(text: str) -> None:
        check(pair, text)

    run()


def split_revealing_pair() -> Pair:
    """Return tokenizers whose tokens reveal where a text is split.

    They merge "a", "1", "." and space with every adjacent byte: first with the bytes of other
    characters, then with each other.
    """
    probes = ["a", "1", ".", "Ġ"]
    others = [char for char in BYTES if char not in probes]
    merges = [
        merge
        for probe in probes
        for char in others
        for merge in (f"{probe} {char}", f"{char} {probe}")
    ]
    merges += [f"{left} {right}" for left in probes for right in probes]
    made = [merge.replace(" ", "") for merge in merges]
    return build_pair({token: i for i, token in enumerate([*BYTES, *made, END])}, merges)


def test_every_kind_of_character_is_split_as_in_transformers() -> None:
    """All low code points and a sample of the others; both libraries may use other versions."""
    pair = split_revealing_pair()
    points = [*range(0x3400), *range(0x3400, 0xD800, 53), *range(0xE000, 0x110000, 53)]
    texts = [f"a{chr(c)}a1{chr(c)}1.{chr(c)}. {chr(c)}  {chr(c)}" for c in points]
    expected = pair.theirs(texts, split_special_tokens=True)["input_ids"]
    differ = [
        hex(c)
        for c, text, ids in zip(points, texts, expected, strict=True)
        if pair.ours.encode(text) != ids
    ]
    assert differ == []


def test_special_tokens_are_encoded_as_text_unless_allowed(pair: Pair) -> None:
    end = pair.ours.end_of_text
    assert end == pair.theirs.eos_token_id
    assert end not in pair.ours.encode(f"a{END}b")
    assert pair.ours.encode(f"a{END}b", allow_special=True).count(end) == 1
    assert pair.ours.decode([end]) == END


def test_any_ids_decode_as_in_transformers(pair: Pair) -> None:
    """Most random ids are not valid UTF-8, because they split characters."""

    @EXAMPLES
    @given(st.lists(st.sampled_from(sorted(pair.theirs.get_vocab().values())), max_size=12))
    def run(ids: list[int]) -> None:
        assert pair.ours.decode(ids) == pair.theirs.decode(ids)
        assert "".join(pair.ours.stream(ids)) == pair.theirs.decode(ids)

    run()


def test_a_stream_waits_for_a_complete_character(pair: Pair) -> None:
    ids = pair.ours.encode("\U00020bb7")
    assert len(ids) > 1
    assert list(pair.ours.stream(ids)) == [""] * (len(ids) - 1) + ["\U00020bb7", ""]


def test_a_stream_replaces_an_incomplete_character_at_its_end(pair: Pair) -> None:
    ids = pair.ours.encode("a\U00020bb7")[:-1]
    pieces = list(pair.ours.stream(ids))
    assert (pieces[0], pieces[-1]) == ("a", "\ufffd")
    assert "".join(pieces) == pair.ours.decode(ids) == "a\ufffd"


def test_a_lone_surrogate_is_refused(pair: Pair) -> None:
    for special in (False, True):
        with pytest.raises(TokenizerError, match="not valid Unicode"):
            pair.ours.encode("a\udcff", allow_special=special)


def test_the_longest_of_several_added_tokens_is_selected_as_in_transformers() -> None:
    added = {"<s>": 258, "<s>x": 259, "<s>xy": 260}
    theirs = GPT2TokenizerFast(vocab=small_vocab(), merges=[("a", "b")])
    theirs.add_tokens(list(added), special_tokens=True)
    ours = build_tokenizer(small_vocab(), ["a b"], added)
    for text in ("<s>", "<s>x", "<s>xy", "<s>xyz<s><s>x"):
        assert ours.encode(text, allow_special=True) == theirs(text)["input_ids"]


def test_a_token_without_a_merge_decodes_as_in_transformers() -> None:
    vocab = small_vocab(Ġfoo=258)
    theirs = GPT2TokenizerFast(vocab=vocab, merges=[("a", "b")])
    assert build_tokenizer(vocab, ["a b"], {}).decode([256, 258]) == theirs.decode([256, 258])


@pytest.fixture(scope="module")
def tiktoken_gpt2() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"tiktoken's gpt2 is not in TIKTOKEN_CACHE_DIR and cannot be fetched: {error}")


def test_gpt2_from_its_files_equals_that_of_tiktoken(
    tiktoken_gpt2: tiktoken.Encoding, shared: Path
) -> None:
    ours = build_tokenizer(*tables(shared / "data/gpt2-tokenizer"), {})
    assert ours.special == {END: 50256}
    for token_id in range(50257):
        assert ours.decode_bytes([token_id]) == tiktoken_gpt2.decode_bytes([token_id])
    for text in DIFFICULT:
        assert ours.encode(text) == tiktoken_gpt2.encode(text, disallowed_special=())
        assert ours.encode(text, allow_special=True) == tiktoken_gpt2.encode(
            text, allowed_special="all"
        )


def test_a_checkpoint_with_gpt2s_vocabulary_size_and_without_files_uses_tiktoken(
    tiktoken_gpt2: tiktoken.Encoding, make_checkpoint: MakeCheckpoint
) -> None:
    ours = load_tokenizer(make_checkpoint(vocab_size=50257, **SMALL))
    for text in DIFFICULT:
        assert ours.encode(text) == tiktoken_gpt2.encode(text, disallowed_special=())
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode(END, allow_special=True) == [ours.end_of_text] == [50256]


def test_the_error_without_files_and_tiktoken_names_the_next_step(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(TokenizerError, match=r"no route to host.*vocab\.json and merges\.txt"):
        load_tokenizer(make_checkpoint(vocab_size=50257, **SMALL))
