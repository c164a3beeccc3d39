"""Mutations of JSON: other values, and repeated, missing or exchanged keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any


class Raw(str):
    """Literal text, which need not be JSON."""


class Pairs(list[Any]):
    """An object's keys and values in order; a key may be repeated."""


ODD = [
    *("null", "true", "false", "0", "1", "-1", "2", "3", "7", "-0", "0.5", "8.0", "1e400"),
    *("NaN", "Infinity", "1e-5", "1E2", "2147483648", "4294967296", "9223372036854775807"),
    *("18446744073709551616", "1" + "0" * 30, "1" + "0" * 400, "9" * 4300, "9" * 5000),
    *('""', '"8"', '"gpt2"', '"transformer.wte.weight"', '"\\ud800"', '"\\u0000"', '"\\u001b[2J"'),
    *('"../model.safetensors"', '"/etc/passwd"', '"."', '"F32"', '"BF16"', '"I64"', '"F8_E4M3"'),
    *('"config.json"', '"gelu"', '"relu"', "{}", "[]", "[0]", "[8, 8]", "[0, 1e3]", '{"a": {}}'),
    *("[[[[[[[[]]]]]]]]", "[" * 500 + "]" * 500, "[" * 970 + "]" * 970, "[" * 5000 + "]" * 5000),
    *('{"":' * 300 + "0" + "}" * 300, '"' + "x" * 100_000 + '"', "", "1,", "'a'", "[1,]"),
]


def mutate_json(data: bytes, rng: Random) -> bytes:
    """A few changes anywhere in a JSON text; other text is returned unchanged."""
    try:
        value = json.loads(data, object_pairs_hook=Pairs, parse_float=Raw)
    except ValueError:
        return data
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if places := list(_places(value, 0)):
            _change(rng.choice(places), rng, places)
    text = _dump(value)
    return text.encode(rng.choice(["utf-8"] * 12 + ["utf-16", "utf-8-sig"]), "surrogatepass")


def _places(value: Any, depth: int) -> Iterator[tuple[list[Any], int]]:
    """Yield every list and the index in it of a value or a key-value pair."""
    if isinstance(value, list) and depth < 6:
        for i, entry in enumerate(value[:400]):
            yield value, i
            yield from _places(entry[1] if isinstance(value, Pairs) else entry, depth + 1)


def _change(place: tuple[list[Any], int], rng: Random, places: list[tuple[list[Any], int]]) -> None:
    holder, i = place
    if i >= len(holder):
        return
    kind = rng.randrange(10)
    if kind < 5:
        _replace(holder, i, _other(_value(holder, i), rng))
    elif kind == 5:
        del holder[i]
    elif kind == 6:
        holder.insert(rng.randrange(len(holder) + 1), holder[i])
    elif kind == 7 and isinstance(holder, Pairs):
        holder[i] = (rng.choice((*_names(holder), "x", "\ud800", "h.0.x\x1b[0m")), holder[i][1])
    else:
        there, j = rng.choice(places)
        if j < len(there):
            ours, theirs = _value(holder, i), _value(there, j)
            _replace(holder, i, theirs)
            _replace(there, j, ours)


def _names(holder: Pairs) -> list[str]:
    return [key for key, _ in holder]


def _value(holder: list[Any], i: int) -> Any:
    return holder[i][1] if isinstance(holder, Pairs) else holder[i]


def _replace(holder: list[Any], i: int, value: Any) -> None:
    holder[i] = (holder[i][0], value) if isinstance(holder, Pairs) else value


def _other(value: Any, rng: Random) -> Any:
    if type(value) is int and rng.random() < 0.5:
        return rng.choice((value + 1, value - 1, value * 2, -value, value << 31, value << 62))
    return Raw(rng.choice(ODD))


def _dump(value: Any, depth: int = 0) -> str:
    if depth > 8:  # places exchanged with what holds them
        return "0"
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        entries = (f"{json.dumps(key)}: {_dump(entry, depth + 1)}" for key, entry in value)
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_dump(entry, depth + 1) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def mutate_header(data: bytes, rng: Random) -> bytes:
    """The same in the header of a safetensors file, whose stated length is mostly right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutate_json(data[8:end], rng)
    header += b" " * rng.choice((0, 0, -len(header) % 8))
    length = rng.choice((len(header),) * 12 + (len(header) + 1, 2**63, 2**32, 0))
    return length.to_bytes(8, "little") + header + data[end:]
