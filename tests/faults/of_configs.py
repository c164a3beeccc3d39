"""Faults of `config.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compat.errors import ConfigError
from tests.faults.fault import Fault, content, tensors, values

CONFIG = "config.json"
_UNREADABLE = (CONFIG, "cannot be read as JSON", "write it again")
_SHAPES = "does not hold the tensors that its config requires"


def _unreadable(breaks: Callable[[Path], Any], *says: str) -> Fault:
    return Fault(breaks, (*_UNREADABLE, *says))


def _misfit(breaks: Callable[[Path], Any], *says: str) -> Fault:
    return Fault(breaks, (_SHAPES, *says))


def _field(name: str, value: Any, *says: str) -> Fault:
    return Fault(values(CONFIG, **{name: value}), (CONFIG, f"'{name}'", *says), ConfigError)


def _raw(name: str, text: str) -> Callable[[Path], None]:
    """Write a value as JSON text, for values that json.dumps cannot write."""

    def breaks(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        text_of_all = json.dumps({**config, name: "@"}).replace('"@"', text)
        (folder / CONFIG).write_text(text_of_all)

    return breaks


def _twice(folder: Path) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(f'{text[:-1]}, "n_head": 4}}')


_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")

FAULTS = {
    "config: empty": _unreadable(content(CONFIG, b"")),
    "config: a web page": _unreadable(content(CONFIG, b"<html>"), "web page"),
    "config: not UTF-8": _unreadable(content(CONFIG, b"\xff\xfe{}")),
    "config: cut short": _unreadable(content(CONFIG, b'{"n_layer": 2')),
    "config: nested 100,000 deep": _unreadable(content(CONFIG, b"[" * 100_000)),
    "config: a million objects": _unreadable(
        content(CONFIG, b"[" + b"{}," * 1_000_000 + b"0]"), "more than 200,000"
    ),
    "config: a field twice": _unreadable(_twice, "it repeats the key 'n_head'"),
    "config: a number of 5,000 digits": _unreadable(_raw("n_embd", "9" * 5000)),
    "config: a list": Fault(
        content(CONFIG, b"[1]"), (CONFIG, "JSON list, but must hold an object")
    ),
    "config: null": Fault(
        content(CONFIG, b"null"), (CONFIG, "JSON NoneType, but must hold an object")
    ),
    "config: of another model": Fault(
        values(CONFIG, model_type="llama"),
        (CONFIG, "model_type 'llama', but must have 'gpt2'"),
        ConfigError,
    ),
    **{
        f"config: {name} {value}": _field(
            name, value, f"is {value}, but must be from 1 to 2,147,483,647"
        )
        for name in _SIZES
        for value in (0, -1, 10**30)
    },
    "config: n_head that does not divide": _field("n_head", 3, "does not divide 'n_embd' = 8"),
    "config: n_layer a word": _field("n_layer", "2", "is '2', but must be of type int"),
    "config: n_layer with a point": _field("n_layer", 2.0, "is 2.0, but must be of type int"),
    "config: n_layer true": _field("n_layer", True, "is True, but must be of type int"),
    "config: n_layer infinite": Fault(
        _raw("n_layer", "1e999"), (CONFIG, "'n_layer' is inf, but must be of type int"), ConfigError
    ),
    "config: n_layer null": _field("n_layer", None, "is None, but must be of type int"),
    "config: n_layer nested 900 deep": Fault(
        _raw("n_layer", "[" * 900 + "]" * 900), (CONFIG, "'n_layer' is "), ConfigError
    ),
    "config: epsilon a word": _field(
        "layer_norm_epsilon", "1e-5", "is '1e-5', but must be of type float"
    ),
    "config: epsilon negative": _field("layer_norm_epsilon", -1e-5, "must be ≥ 0"),
    "config: epsilon of 400 digits": _field("layer_norm_epsilon", 10**400, "must be ≥ 0"),
    "config: epsilon NaN": Fault(
        _raw("layer_norm_epsilon", "NaN"), (CONFIG, "is nan, but must be ≥ 0"), ConfigError
    ),
    "config: dropout above 1": _field("attn_pdrop", 1.5, "is 1.5, but must be from 0 to 1"),
    "config: end of text a word": _field(
        "eos_token_id", "260", "is '260', but must be of type int"
    ),
    "config: end of text 10^30": _field("eos_token_id", 10**30, "must be ≤ 2,147,483,647"),
    "config: tied as a number": _field("tie_word_embeddings", 1, "is 1, but must be of type bool"),
    "config: unknown activation": _field(
        "activation_function", "gegelu", "'gegelu', but must be one of gelu_new"
    ),
    "config: cross-attention": _field("add_cross_attention", True, "does not understand", "remove"),
    "config: an unknown field": _field("rotary_pct", 0.25, " = 0.25", "does not understand"),
    "config: an unknown field of a megabyte": _field("x", "y" * 1_000_000, "does not understand"),
    "config: two names that disagree": Fault(
        values(CONFIG, hidden_size=16),
        (CONFIG, "'n_embd' twice: 8, and 16 as 'hidden_size'"),
        ConfigError,
    ),
    "config: n_embd 10^7": _misfit(
        values(CONFIG, n_embd=10**7), "expected [262, 10000000], found [262, 8]"
    ),
    "config: n_layer 10^6": Fault(
        values(CONFIG, n_layer=10**6), ("n_layer", "1000000", "28 tensors", "belong together")
    ),
    "config: n_layer too high": _misfit(
        values(CONFIG, n_layer=3), "12 missing: h.2.ln_1.weight", "and 2 more"
    ),
    "config: n_layer too low": _misfit(
        values(CONFIG, n_layer=1), "12 unexpected: h.1.", "and 2 more"
    ),
    "config: a large vocab_size": _misfit(
        values(CONFIG, vocab_size=2**31 - 1), "vocab_size 2147483647 and the tensor has 262"
    ),
    "config: a large n_positions": _misfit(
        values(CONFIG, n_positions=10**9), "n_positions 1000000000 and the tensor has 8 rows"
    ),
    "config: another n_inner": _misfit(
        values(CONFIG, n_inner=16), "h.{0…1}.mlp.c_fc.weight: expected [8, 16], found [8, 32]"
    ),
    "config: epsilon 0 loads": Fault(values(CONFIG, layer_norm_epsilon=0), (), None),
    "config: unchanged loads": Fault(tensors(lambda state: None), (), None),
}
