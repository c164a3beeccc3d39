"""The tables of a byte-level BPE: GPT-2's vocabulary and merges, checked for consistency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compat.errors import TokenizerError, short_repr

END_OF_TEXT = "<|endoftext|>"

# Checking a merge is quadratic in the length of its token; GPT-2's merges take 2.4 million steps.
_MAX_WORK = 30_000_000


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a byte-level BPE.

    Args:
        ranks: bytes of a token → its rank. The 256 single bytes come first, then the results of
            the merges in order.
        ids: rank → id. Ids need not ascend with ranks.
        texts: id → bytes.
        special: text → id of special tokens, such as end-of-text.
    """

    ranks: dict[bytes, int]
    ids: list[int]
    texts: dict[int, bytes]
    special: dict[str, int]


def build_vocabulary(
    vocab: dict[str, Any], merges: Sequence[Any], added: dict[str, int]
) -> Vocabulary:
    """Build a vocabulary from GPT-2's tables, and check it.

    Args:
        vocab: token → id. The bytes of a token are written as `printable_bytes`.
        merges: "left right" or [left, right], in order of priority.
        added: further special token → id.

    Raises:
        TokenizerError: A byte or the result of a merge has no id, two tokens have the same id, or
            merging in order does not use a merge to make its token.
    """
    to_byte = printable_bytes()
    _check_ids(vocab, added)
    if missing := [char for char in to_byte if char not in vocab]:
        raise TokenizerError(
            f"the vocabulary lacks {len(missing)} of the 256 bytes, the first as {missing[0]!r}. "
            "Use the vocabulary of a byte-level BPE."
        )
    special = {END_OF_TEXT: vocab[END_OF_TEXT], **added} if END_OF_TEXT in vocab else added
    tokens = [*to_byte, *_merged_tokens(vocab, merges, set(to_byte))]

    def text_of(token: str) -> bytes:
        if token in special or not all(char in to_byte for char in token):
            return token.encode()
        return bytes(to_byte[char] for char in token)

    return Vocabulary(
        ranks={bytes(to_byte[char] for char in token): rank for rank, token in enumerate(tokens)},
        ids=[vocab[token] for token in tokens],
        texts={token_id: text_of(token) for token, token_id in {**vocab, **added}.items()},
        special=special,
    )


def vocabulary_tables(vocabulary: Vocabulary) -> tuple[dict[str, int], list[str], dict[str, int]]:
    """Return the `vocab`, `merges` and `added` of a vocabulary; inverse of `build_vocabulary`."""
    to_char = {byte: char for char, byte in printable_bytes().items()}

    def written(text: bytes) -> str:
        return "".join(to_char[byte] for byte in text)

    tokens = [written(text) for text in sorted(vocabulary.ranks, key=vocabulary.ranks.__getitem__)]
    vocab = dict(zip(tokens, vocabulary.ids, strict=True))
    added = {text: i for text, i in vocabulary.special.items() if text != END_OF_TEXT}
    known = {*vocab.values(), *added.values()}
    for token_id, text in vocabulary.texts.items():  # end-of-text, and tokens without a merge
        if token_id not in known:
            token = written(text)
            vocab[text.decode() if token in vocab or token in added else token] = token_id
    order = {token: rank for rank, token in enumerate(tokens[256:])}
    return vocab, [" ".join(_last_two(token, order)) for token in order], added


def printable_bytes() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable Latin-1 for itself, the rest from U+0100.

    Source: `bytes_to_unicode` in OpenAI's `gpt-2/src/encoder.py`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _check_ids(vocab: dict[str, Any], added: dict[str, int]) -> None:
    """Check that every id is an integer from 0, and no two tokens have the same id."""
    owners: dict[int, str] = {}
    for token, token_id in {**vocab, **added}.items():
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError(
                f"token {short_repr(token)} has id {short_repr(token_id)}, but ids must be "
                "whole numbers ≥ 0."
            )
        if token_id in owners:
            raise TokenizerError(
                f"id {short_repr(token_id)} belongs to {short_repr(owners[token_id])} and to "
                f"{short_repr(token)}, but must belong to one token."
            )
        owners[token_id] = token


def _merged_tokens(vocab: dict[str, Any], merges: Sequence[Any], known: set[str]) -> list[str]:
    """Return the tokens that the merges create, in order."""
    made: dict[str, list[str]] = {}
    for number, merge in enumerate(merges, start=1):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        proper = isinstance(parts, list) and len(parts) == 2
        if not proper or not all(isinstance(part, str) and part in known for part in parts):
            raise TokenizerError(
                f"merge {number} is {short_repr(merge)}, but must be two tokens that exist before "
                "it."
            )
        token = "".join(parts)
        if token not in vocab:
            raise TokenizerError(
                f"merge {number} makes {short_repr(token)}, which has no id in the vocabulary."
            )
        if token in known:
            raise TokenizerError(f"merge {number} makes {short_repr(token)}, which exists already.")
        known.add(token)
        made[token] = parts
    if sum(len(token) ** 2 for token in made) > _MAX_WORK:
        raise TokenizerError(
            f"the merges make tokens of up to {max(map(len, made)):,} bytes, "
            "but tokens must be words or parts of words."
        )
    ranks = {token: rank for rank, token in enumerate(made)}
    for number, (token, pair) in enumerate(made.items(), start=1):
        if (last := _last_two(token, ranks)) != pair:
            # tiktoken merges by the rank of the result, not of the pair: it would join these.
            raise TokenizerError(
                f"merge {number} makes {short_repr(token)} of {short_repr(pair)}, but merging in "
                f"order makes it of {short_repr(last)}. tiktoken cannot follow that."
            )
    return list(made)


def _last_two(token: str, ranks: dict[str, int]) -> list[str]:
    """Return the two parts of a token that remain before the last merge, when merging by rank."""
    parts = list(token)
    while len(parts) > 2:
        joined = [ranks.get(a + b, math.inf) for a, b in pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
