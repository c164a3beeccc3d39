"""Mutations of the bytes of any file."""

from __future__ import annotations

from random import Random

# The structures of most formats are at the start and at the end of a file.
_EDGE = 3_000
_UNUSUAL = [*(b"\x00", b"\xff", b"\n", b'"', b"{", b"}", b"["), b"\x7f\xff\xff\xff", b"\xff" * 8]


def mutate_bytes(data: bytes, rng: Random, other: bytes) -> bytes:
    """Change bytes at a few random positions; `other` is another file to splice with."""
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        data = rng.choice(_CHANGES)(data, rng, other)
    return data


def _position(data: bytes, rng: Random) -> int:
    size = len(data)
    near = rng.randrange(min(_EDGE, size) + 1)
    return rng.choice((near, size - near, rng.randrange(size + 1)))


def _span(data: bytes, rng: Random) -> tuple[int, int]:
    start = _position(data, rng)
    return start, min(len(data), start + rng.choice((1, 1, 2, 4, 8, rng.randrange(1, 500))))


def _flip(data: bytes, rng: Random, other: bytes) -> bytes:
    start, end = _span(data, rng)
    if start == end:
        return data
    return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]


def _overwrite(data: bytes, rng: Random, other: bytes) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + rng.randbytes(end - start) + data[end:]


def _insert(data: bytes, rng: Random, other: bytes) -> bytes:
    start, _ = _span(data, rng)
    return data[:start] + rng.choice([*_UNUSUAL, rng.randbytes(8)]) + data[start:]


def _delete(data: bytes, rng: Random, other: bytes) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, rng: Random, other: bytes) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 2, 50)) + data[end:]


def _move(data: bytes, rng: Random, other: bytes) -> bytes:
    (start, end), to = _span(data, rng), _position(data, rng)
    return data[:to] + data[start:end] + data[to + end - start :]


def _cut(data: bytes, rng: Random, other: bytes) -> bytes:
    return data[: _position(data, rng)]


def _splice(data: bytes, rng: Random, other: bytes) -> bytes:
    return data[: _position(data, rng)] + other[_position(other, rng) :]


_CHANGES = (_flip, _flip, _flip, _overwrite, _insert, _delete, _repeat, _move, _cut, _splice)
