"""Mutations of JSON: other values, and repeated, missing or exchanged keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any


class Raw(str):
    """Literal text, which need not be valid JSON."""


class Pairs(list[Any]):
    """The keys and values of an object in order; keys may be repeated."""


UNUSUAL = [
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
    """Change a few values anywhere in a JSON text; other text is returned unchanged."""
    try:
        value = json.loads(data, object_pairs_hook=Pairs, parse_float=Raw)
    except ValueError:
        return data
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if positions := list(_positions(value, 0)):
            _change(rng.choice(positions), rng, positions)
    text = _dump(value)
    return text.encode(rng.choice(["utf-8"] * 12 + ["utf-16", "utf-8-sig"]), "surrogatepass")


def _positions(value: Any, depth: int) -> Iterator[tuple[list[Any], int]]:
    """Yield every list with each index of a value or a key-value pair in it."""
    if isinstance(value, list) and depth < 6:
        for i, entry in enumerate(value[:400]):
            yield value, i
            yield from _positions(entry[1] if isinstance(value, Pairs) else entry, depth + 1)


def _change(
    position: tuple[list[Any], int], rng: Random, positions: list[tuple[list[Any], int]]
) -> None:
    container, i = position
    if i >= len(container):
        return
    kind = rng.randrange(10)
    if kind < 5:
        _replace(container, i, _other(_value(container, i), rng))
    elif kind == 5:
        del container[i]
    elif kind == 6:
        container.insert(rng.randrange(len(container) + 1), container[i])
    elif kind == 7 and isinstance(container, Pairs):
        container[i] = (
            rng.choice((*_names(container), "x", "\ud800", "h.0.x\x1b[0m")),
            container[i][1],
        )
    else:
        there, j = rng.choice(positions)
        if j < len(there):
            ours, theirs = _value(container, i), _value(there, j)
            _replace(container, i, theirs)
            _replace(there, j, ours)


def _names(container: Pairs) -> list[str]:
    return [key for key, _ in container]


def _value(container: list[Any], i: int) -> Any:
    return container[i][1] if isinstance(container, Pairs) else container[i]


def _replace(container: list[Any], i: int, value: Any) -> None:
    container[i] = (container[i][0], value) if isinstance(container, Pairs) else value


def _other(value: Any, rng: Random) -> Any:
    if type(value) is int and rng.random() < 0.5:
        return rng.choice((value + 1, value - 1, value * 2, -value, value << 31, value << 62))
    return Raw(rng.choice(UNUSUAL))


def _dump(value: Any, depth: int = 0) -> str:
    if depth > 8:  # a mutation has placed a list into itself
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
    """Mutate the header of a safetensors file; its stated length is mostly right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutate_json(data[8:end], rng)
    header += b" " * rng.choice((0, 0, -len(header) % 8))
    length = rng.choice((len(header),) * 12 + (len(header) + 1, 2**63, 2**32, 0))
    return length.to_bytes(8, "little") + header + data[end:]
