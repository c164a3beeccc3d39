"""Stop strings are found across all token boundaries and are never part of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compat import Tokenizer, load_tokenizer
from compat.generation.stopping import NewText

DEMO = load_tokenizer("demo")
LETTERS = st.text(st.sampled_from("abéß—😀 \n"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abéß—😀 \n"), min_size=1, max_size=4), max_size=3)


def ids_of_bytes(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Return an id for each byte, so that characters are split."""
    tables = tokenizer.vocabulary
    return [tables.ids[tables.ranks[bytes([byte])]] for byte in text]


def cut(text: str, stop: list[str]) -> str:
    """Return the text before the first complete stop string; of several, the longest applies."""
    for end in range(len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))]
    return text


@settings(deadline=None, max_examples=500, derandomize=True)
@given(pieces=st.lists(st.tuples(LETTERS, st.booleans()), max_size=4), stop=STOPS)
def test_text_ends_before_the_first_stop_string_for_any_tokens(
    pieces: list[tuple[str, bool]], stop: list[str]
) -> None:
    ids = []
    for text, by_bytes in pieces:
        ids += ids_of_bytes(DEMO, text.encode()) if by_bytes else DEMO.encode(text)
    whole = "".join(text for text, _ in pieces)
    expected, new, shown = cut(whole, stop), NewText(DEMO, stop), ""
    for token_id in ids:
        new.add(token_id)
        assert new.final.startswith(shown) and expected.startswith(new.final)
        held = new.so_far[len(new.final) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
        shown = new.final
        if new.stopped:
            break
    assert new.stopped == (expected != whole)
    new.end()
    assert new.final == new.so_far == expected


@pytest.mark.parametrize(
    ("stop", "shown", "stopped"),
    [("e k", ["th", "th"], True), ("e q", ["th", "the king"], False), (" ", ["the"] * 2, True)],
)
def test_text_that_may_start_a_stop_string_is_withheld(
    stop: str, shown: list[str], stopped: bool
) -> None:
    ids = DEMO.encode("the king")
    assert [DEMO.decode([token_id]) for token_id in ids] == ["the", " king"]
    new, seen = NewText(DEMO, [stop]), []
    for token_id in ids:
        new.add(token_id)
        seen.append(new.final)
    assert (seen, new.stopped) == (shown, stopped)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["ing", "kin"], "the "),
        (["kin", "ing"], "the "),
        (["ki", "e ki", " ki"], "th"),
        (["king", "e k"], "th"),
        (["e king", "n"], "the ki"),
    ],
)
def test_the_first_complete_or_the_longest_of_several_stop_strings_applies(
    stop: list[str], text: str
) -> None:
    new = NewText(DEMO, stop)
    for token_id in DEMO.encode("the king"):
        new.add(token_id)
    assert (new.final, new.stopped) == (text, True)


def test_stop_strings_with_characters_of_several_bytes_are_found() -> None:
    """The bytes of a character arrive separately, also within the stop string."""
    new = NewText(DEMO, ["é!"])
    seen = []
    for token_id in ids_of_bytes(DEMO, "caé😀é!".encode()):
        new.add(token_id)
        seen.append(new.final)
    assert seen == ["c", "ca", "ca", "ca", "ca", "ca", "ca", "caé😀", "caé😀", "caé😀", "caé😀"]
    assert new.stopped


@pytest.mark.parametrize("stop", [["xyz"], []])
def test_withheld_and_incomplete_text_is_returned_at_the_end(stop: list[str]) -> None:
    new = NewText(DEMO, stop)
    for token_id in ids_of_bytes(DEMO, b"axy" + "é".encode()[:1]):
        new.add(token_id)
    assert new.final == ("a" if stop else "axy")
    assert new.so_far == "axy"
    new.end()
    assert new.final == "axy\ufffd"


def test_a_character_that_starts_in_the_prompt_belongs_to_the_new_text() -> None:
    ids = ids_of_bytes(DEMO, "aé".encode())
    new = NewText(DEMO, (), ids[:2])
    assert new.prompt == "a"
    new.add(ids[2])
    assert new.final == "é"
