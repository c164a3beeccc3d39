"""The tokenizer against transformers' GPT2TokenizerFast, and what it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2TokenizerFast

from compat import Tokenizer, TokenizerError, load_tokenizer
from compat.tokenizer import build_tokenizer

END = "<|endoftext|>"
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # one emoji of three, joined
FLAG, WAVE = "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f44b\U0001f3fd"

NASTY = [
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

# What the cutting pattern has an opinion about, in every mixture, beside any text at all.
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
    """One vocabulary in both libraries."""

    ours: Tokenizer
    theirs: GPT2TokenizerFast


def gpt2_tables(shared: Path) -> tuple[dict[str, int], list[str]]:
    folder = shared / "data/gpt2-tokenizer"
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    return json.loads((folder / "vocab.json").read_text(encoding="utf-8")), lines[1:-1]


def both(vocab: dict[str, int], merges: list[str]) -> Pair:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    return Pair(build_tokenizer(vocab, merges, {}), GPT2TokenizerFast(vocab=vocab, merges=pairs))


@pytest.fixture(scope="module", params=["gpt2", "tarot", "permuted"])
def pair(request: pytest.FixtureRequest, shared: Path) -> Pair:
    tarot = shared / "data/checkpoints/tarot"
    if request.param == "gpt2":
        return both(*gpt2_tables(shared))
    if request.param == "tarot":
        return Pair(load_tokenizer(tarot), GPT2TokenizerFast.from_pretrained(tarot))
    model = json.loads((tarot / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ids = list(model["vocab"].values())
    random.Random(0).shuffle(ids)  # the merges keep their order, the ids know nothing of it
    return both(dict(zip(model["vocab"], ids, strict=True)), model["merges"])


def check(pair: Pair, text: str) -> None:
    """Plain and special encodings equal transformers', and decoding gives the text back."""
    ids = pair.ours.encode(text)
    assert ids == pair.theirs(text, split_special_tokens=True)["input_ids"]
    assert pair.ours.encode(text, allow_special=True) == pair.theirs(text)["input_ids"]
    assert pair.ours.decode(ids) == text
    assert "".join(pair.ours.stream(ids)) == text


@pytest.mark.parametrize("text", NASTY)
def test_nasty_texts_encode_as_in_transformers(pair: Pair, text: str) -> None:
    check(pair, text)


def test_any_text_encodes_as_in_transformers(pair: Pair) -> None:
    @EXAMPLES
    @given(TEXTS)
    def run(text: str) -> None:
        check(pair, text)

    run()


def test_every_kind_of_character_is_cut_as_in_transformers(pair: Pair) -> None:
    """Letters, digits and spaces of two Unicode versions: densely at first, then a sample."""
    points = [*range(0x3400), *range(0x3400, 0xD800, 53), *range(0xE000, 0x110000, 53)]
    texts = [f"a{chr(c)}a1{chr(c)}1.{chr(c)}. {chr(c)}  {chr(c)}" for c in points]
    expected = pair.theirs(texts, split_special_tokens=True)["input_ids"]
    differ = [
        hex(c)
        for c, text, ids in zip(points, texts, expected, strict=True)
        if pair.ours.encode(text) != ids
    ]
    assert differ == []


def test_special_text_is_plain_unless_allowed(pair: Pair) -> None:
    end = pair.ours.end_of_text
    assert end == pair.theirs.eos_token_id
    assert end not in pair.ours.encode(f"a{END}b")
    assert pair.ours.encode(f"a{END}b", allow_special=True).count(end) == 1
    assert pair.ours.decode([end]) == END


def test_any_ids_decode_as_in_transformers(pair: Pair) -> None:
    """Random ids are mostly no UTF-8: bytes cut in the middle, and streamed in the middle."""

    @EXAMPLES
    @given(st.lists(st.sampled_from(sorted(pair.theirs.get_vocab().values())), max_size=12))
    def run(ids: list[int]) -> None:
        assert pair.ours.decode(ids) == pair.theirs.decode(ids)
        assert "".join(pair.ours.stream(ids)) == pair.theirs.decode(ids)

    run()


def test_stream_waits_for_a_whole_character(pair: Pair) -> None:
    ids = pair.ours.encode("\U00020bb7")
    assert len(ids) > 1
    assert list(pair.ours.stream(ids)) == [""] * (len(ids) - 1) + ["\U00020bb7", ""]


def test_stream_ends_an_incomplete_character_with_a_replacement(pair: Pair) -> None:
    ids = pair.ours.encode("a\U00020bb7")[:-1]
    pieces = list(pair.ours.stream(ids))
    assert (pieces[0], pieces[-1]) == ("a", "\ufffd")
    assert "".join(pieces) == pair.ours.decode(ids) == "a\ufffd"


@pytest.fixture(scope="module")
def tiktoken_gpt2() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"tiktoken's gpt2 is neither in TIKTOKEN_CACHE_DIR nor to be fetched: {error}")


def test_gpt2_from_its_files_is_tiktokens_gpt2(
    tiktoken_gpt2: tiktoken.Encoding, shared: Path
) -> None:
    ours = build_tokenizer(*gpt2_tables(shared), {})
    assert ours.special == {END: 50256}
    for token_id in range(50257):
        assert ours.decode_bytes([token_id]) == tiktoken_gpt2.decode_bytes([token_id])
    for text in NASTY:
        assert ours.encode(text) == tiktoken_gpt2.encode(text, disallowed_special=())
        assert ours.encode(text, allow_special=True) == tiktoken_gpt2.encode(
            text, allowed_special="all"
        )


MakeCheckpoint = Callable[..., Path]
SMALL = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}


def test_a_checkpoint_of_gpt2s_vocabulary_without_files_gets_tiktokens(
    tiktoken_gpt2: tiktoken.Encoding, make_checkpoint: MakeCheckpoint
) -> None:
    ours = load_tokenizer(make_checkpoint(vocab_size=50257, **SMALL))
    for text in NASTY:
        assert ours.encode(text) == tiktoken_gpt2.encode(text, disallowed_special=())
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode(END, allow_special=True) == [ours.end_of_text] == [50256]


def test_without_files_and_without_tiktokens_gpt2_the_remedy_is_named(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(TokenizerError, match=r"no route to host.*vocab\.json and merges\.txt"):
        load_tokenizer(make_checkpoint(vocab_size=50257, **SMALL))


def test_a_small_vocabulary_without_files_is_refused(shared: Path) -> None:
    with pytest.raises(TokenizerError, match=r"machining.*no tokenizer\.json.* 53 "):
        load_tokenizer(shared / "data/checkpoints/machining")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES = sorted(ByteLevel.alphabet())


def small_vocab(**more: Any) -> dict[str, Any]:
    """All bytes, "ab" = 256 and end-of-text = 257, then what the test adds or changes."""
    return {**{char: i for i, char in enumerate(BYTES)}, "ab": 256, END: 257, **more}


def small_json(model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json with changes, as the `tokenizers` library writes it."""
    data = {
        "version": "1.0",
        "added_tokens": [{"id": 257, "content": END, "special": True}],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": small_vocab(), "merges": ["a b"], **(model or {})},
    }
    return {**data, **changes}


@pytest.fixture
def load_json(make_checkpoint: MakeCheckpoint) -> Callable[[Any], Tokenizer]:
    """Load a tokenizer.json that lies in a checkpoint of 300 ids."""

    def load(data: Any) -> Tokenizer:
        folder = make_checkpoint(vocab_size=300, **SMALL)
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
        return load_tokenizer(folder)

    return load


LoadJson = Callable[[Any], Tokenizer]


def test_files_of_either_kind_give_the_same_tokenizer(
    load_json: LoadJson, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(vocab_size=300, **SMALL)
    (folder / "vocab.json").write_text(json.dumps(small_vocab()), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    for ours in (load_tokenizer(folder), load_json(small_json())):
        expected = [256, BYTES.index("c"), 257]
        assert ours.encode(f"abc{END}", allow_special=True) == expected


def test_merges_may_be_written_as_lists(load_json: LoadJson) -> None:
    assert load_json(small_json({"merges": [["a", "b"]]})).encode("ab") == [256]


def test_of_several_added_tokens_the_longest_is_taken_as_in_transformers() -> None:
    added = {"<s>": 258, "<s>x": 259, "<s>xy": 260}
    theirs = GPT2TokenizerFast(vocab=small_vocab(), merges=[("a", "b")])
    theirs.add_tokens(list(added), special_tokens=True)
    ours = build_tokenizer(small_vocab(), ["a b"], added)
    for text in ("<s>", "<s>x", "<s>xy", "<s>xyz<s><s>x"):
        assert ours.encode(text, allow_special=True) == theirs(text)["input_ids"]


def test_a_token_that_no_merge_makes_decodes_as_in_transformers() -> None:
    vocab = small_vocab(Ġfoo=258)
    theirs = GPT2TokenizerFast(vocab=vocab, merges=[("a", "b")])
    assert build_tokenizer(vocab, ["a b"], {}).decode([256, 258]) == theirs.decode([256, 258])


def test_merges_that_tiktoken_cannot_follow_are_refused() -> None:
    """In "abc", b and c merge first, and a + bc is no merge; tiktoken joins any two to "abc"."""
    vocab = small_vocab(bc=258, abc=259)
    merges = ["b c", "a b", "ab c"]
    theirs = GPT2TokenizerFast(vocab=vocab, merges=[tuple(merge.split()) for merge in merges])
    assert theirs("abc")["input_ids"] == [vocab["a"], vocab["bc"]]
    with pytest.raises(TokenizerError, match=r"merge 3 makes .abc. of .*leads to"):
        build_tokenizer(vocab, merges, {})


def without(char: str) -> dict[str, int]:
    return {token: i for token, i in small_vocab().items() if token != char}


@pytest.mark.parametrize(
    ("vocab", "merges", "named"),
    [
        (without("Ġ"), ["a b"], r"lacks 1 of the 256 bytes, the first as 'Ġ'"),
        (small_vocab(ab=3), ["a b"], r"id \d+ is given to"),
        (small_vocab(**{END: 256}), ["a b"], r"id \d+ is given to"),
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
def test_a_broken_vocabulary_is_refused_by_name(
    vocab: dict[str, Any], merges: list[Any], named: str
) -> None:
    with pytest.raises(TokenizerError, match=named):
        build_tokenizer(vocab, merges, {})


def test_an_id_beyond_the_embedding_is_refused(load_json: LoadJson) -> None:
    highest = {"vocab": small_vocab(ab=299)}
    assert load_json(small_json(highest)).encode("ab") == [299]
    with pytest.raises(TokenizerError, match=r"id 300, config\.json a vocab_size of 300"):
        load_json(small_json({"vocab": small_vocab(ab=300)}))


@pytest.mark.parametrize(
    "harmless",
    [
        {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False},
        {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": False},
        {"continuing_subword_prefix": None, "end_of_word_suffix": None},
    ],
)
def test_switches_that_are_off_are_accepted(load_json: LoadJson, harmless: dict[str, Any]) -> None:
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
def test_another_tokenizer_json_is_refused_and_its_folder_named(
    load_json: LoadJson, kind: str
) -> None:
    with pytest.raises(TokenizerError, match=r"checkpoint\d+"):
        load_json(OTHER_KINDS[kind])


@pytest.mark.parametrize("text", ["", "{", "\x00\xff"])
def test_an_unreadable_tokenizer_json_is_refused(
    make_checkpoint: MakeCheckpoint, text: str
) -> None:
    folder = make_checkpoint(vocab_size=300, **SMALL)
    (folder / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TokenizerError, match=r"checkpoint\d+.*cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("token_id", [258, -1])
def test_an_id_without_text_is_refused(token_id: int) -> None:
    ours = build_tokenizer(small_vocab(), ["a b"], {})
    with pytest.raises(TokenizerError, match=f"id {token_id} "):
        ours.decode([256, token_id])
    with pytest.raises(TokenizerError, match=f"id {token_id} "):
        list(ours.stream([token_id]))
