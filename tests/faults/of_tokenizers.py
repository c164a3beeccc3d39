"""Faults of tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compat.errors import TokenizerError
from tests.faults.builder import tokenizer_json, vocab, write_json
from tests.faults.fault import Fault, content, sparse, values, without

VOCAB, MERGES, WHOLE = "vocab.json", "merges.txt", "tokenizer.json"


def _fault(breaks: Callable[[Path], Any], *says: str) -> Fault:
    return Fault(breaks, says, TokenizerError)


def _whole(**changes: Any) -> Callable[[Path], None]:
    """Write a tokenizer.json with other fields."""

    def breaks(folder: Path) -> None:
        write_json(folder / WHOLE, {**tokenizer_json(), **changes})

    return breaks


def _model(**changes: Any) -> Callable[[Path], None]:
    return _whole(model={**tokenizer_json()["model"], **changes})


def _without_a_byte(folder: Path) -> None:
    write_json(folder / VOCAB, {token: i for token, i in vocab().items() if token != "Ġ"})


def _token_twice(folder: Path) -> None:
    text = json.dumps(vocab())
    (folder / VOCAB).write_text(f'{text[:-1]}, "th": 261}}')


def _doubling(folder: Path) -> None:
    """Write merges each of which doubles a token's length; checking takes quadratic time."""
    tokens = ["a" * 2**k for k in range(1, 20)]
    table = {token: i for i, token in enumerate([*list(vocab())[:256], *tokens])}
    write_json(folder / VOCAB, table)
    (folder / MERGES).write_text("\n".join(f"{t} {t}" for t in ["a", *tokens[:-1]]))


FAULTS = {
    "tokenizer: none": _fault(
        without(VOCAB, MERGES), "no tokenizer.json, nor vocab.json and merges.txt", "pass ids"
    ),
    "tokenizer: no JSON": _fault(content(WHOLE, b"{"), WHOLE, "cannot be read"),
    "tokenizer: a list": _fault(content(WHOLE, b"[]"), WHOLE, "but must hold an object"),
    "tokenizer: 1 GB of nothing": _fault(
        sparse(WHOLE, 1 << 30), WHOLE, "has 1,073,741,824 bytes, but may have at most"
    ),
    "tokenizer: a million lists": _fault(
        content(WHOLE, b'{"model": [' + b"[]," * 1_000_000 + b"0]}"),
        WHOLE,
        "more than 200,000 lists",
    ),
    "tokenizer: nested 100,000 deep": _fault(
        content(WHOLE, b"[" * 100_000), WHOLE, "cannot be read"
    ),
    "tokenizer: of another kind": _fault(_model(type="WordPiece"), "model.type = 'WordPiece'"),
    "tokenizer: a normalizer": _fault(_whole(normalizer={"type": "NFC"}), "a normalizer"),
    "tokenizer: another pre-tokenizer": _fault(
        _whole(pre_tokenizer={"type": "Whitespace"}), "another pre-tokenizer"
    ),
    "tokenizer: a model that is a list": _fault(_whole(model=[1]), "list as 'model'"),
    "tokenizer: no vocabulary": _fault(_model(vocab=None), "no model.vocab"),
    "tokenizer: an added token without text": _fault(
        _whole(added_tokens=[{"id": 261}]), "added_tokens without content"
    ),
    "tokenizer: an added token without id": _fault(
        _whole(added_tokens=[{"content": "<s>"}]), "'<s>' has id None"
    ),
    "vocab: not UTF-8": _fault(content(VOCAB, b'{"\xff": 0}'), VOCAB, "cannot be read"),
    "vocab: 1 GB of nothing": _fault(sparse(VOCAB, 1 << 30), VOCAB, "bytes, but may have at most"),
    "vocab: without one of the bytes": _fault(_without_a_byte, "lacks 1 of the 256 bytes", "'Ġ'"),
    "vocab: a token twice": _fault(_token_twice, VOCAB, "it repeats the key 'th'"),
    "vocab: an id twice": _fault(values(VOCAB, the=256), "id 256 belongs to 'th' and to 'the'"),
    "vocab: an id that is negative": _fault(values(VOCAB, the=-1), "'the' has id -1, but ids must"),
    "vocab: an id that is a word": _fault(
        values(VOCAB, the="257"), "'the' has id '257', but ids must"
    ),
    "vocab: an id with a point": _fault(
        values(VOCAB, the=257.0), "'the' has id 257.0, but ids must"
    ),
    "vocab: an id beyond the embedding": _fault(
        values(VOCAB, the=262), "the tokenizer has id 262, but config.json has vocab_size 262"
    ),
    "vocab: an id of 10^30": _fault(values(VOCAB, the=10**30), "config.json has vocab_size 262"),
    "merges: 1 GB of nothing": _fault(
        sparse(MERGES, 1 << 30), MERGES, "bytes, but may have at most"
    ),
    "merges: not UTF-8": _fault(content(MERGES, b"\xff \xfe"), "cannot be read"),
    "merges: of what is not there": _fault(
        content(MERGES, b"x yz"), "merge 1 is 'x yz'", "must be"
    ),
    "merges: one that makes no token": _fault(
        content(MERGES, b"x y"), "merge 1 makes 'xy'", "no id"
    ),
    "merges: one twice": _fault(
        content(MERGES, b"t h\nt h"), "merge 2 makes 'th'", "exists already"
    ),
    "merges: in another order": _fault(content(MERGES, b"th e\nt h"), "merge 1 is 'th e'"),
    "merges: tokens of half a million bytes": _fault(_doubling, "tokens of up to 524,288 bytes"),
    "tokenizer: in one file loads": Fault(_whole(), (), None),
}
