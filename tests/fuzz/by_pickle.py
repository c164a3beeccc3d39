"""Mutations of the files of `torch.save`: fields of the archive and opcodes of the pickle."""

from __future__ import annotations

import io
import pickletools
import zipfile
from itertools import pairwise
from random import Random

# Signature → fields of the structure that starts with it, as (offset, bytes).
_FIELDS = {
    b"PK\x03\x04": [(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)],
    b"PK\x01\x02": [(6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4)],
    b"PK\x06\x06": [(4, 8), (24, 8), (32, 8), (40, 8), (48, 8)],
    b"PK\x06\x07": [(4, 4), (8, 8), (16, 4)],
    b"PK\x05\x06": [(4, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
}
_GLOBALS = [
    *("os system", "posix system", "builtins eval", "builtins bytearray", "builtins set"),
    *("collections OrderedDict", "collections Counter", "torch FloatStorage", "torch LongStorage"),
    *("torch DoubleStorage", "torch HalfStorage", "torch FloatTensor", "torch Size", "torch load"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch float32"),
    *("torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_nested_tensor"),
]
_OPCODES = b"(.0125}])RQbcshjqrtuXBCGHIJKLMNPSTUVaegilopd\x80\x81" + bytes(range(0x85, 0x96))
_STRAY = [
    *(b"\x85", b"\x85" * 300, b"0", b"N", b"}", b"]", b"(", b"2", b"R", b"Q", b"b", b"s", b"."),
    b"(" * 100,
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"J\xff\xff\xff\x7f",
    b"J\xff\xff\xff\xff",
    b"\x8b\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
]


def mutate_zip(data: bytes, rng: Random) -> bytes:
    """Change one field of the archive's structures, or rewrite the archive."""
    if rng.random() < 0.15:
        return _rewritten(data, rng)
    positions = [
        (at + offset, size)
        for signature, fields in _FIELDS.items()
        for at in _occurrences(data, signature)
        for offset, size in fields
    ]
    at, size = rng.choice(positions)
    old = int.from_bytes(data[at : at + size], "little")
    odd = (0, 1, 8, old + 1, old - 1, old * 2, 2 ** (8 * size) - 1, rng.getrandbits(8 * size))
    new = rng.choice(odd) % 2 ** (8 * size)
    return data[:at] + new.to_bytes(size, "little") + data[at + size :]


def _occurrences(data: bytes, signature: bytes) -> list[int]:
    found, at = [], data.find(signature)
    while at >= 0:
        found.append(at)
        at = data.find(signature, at + 1)
    return found


def _rewritten(data: bytes, rng: Random, pickle: bytes | None = None) -> bytes:
    """Rewrite the archive: compressed, or with a missing, renamed, repeated or exchanged entry."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    if pickle is not None:
        entries = [(n, pickle if n.endswith("/data.pkl") else value) for n, value in entries]
    else:
        i, j = rng.randrange(len(entries)), rng.randrange(len(entries))
        kind = rng.randrange(6)
        if kind == 0:
            del entries[i]
        elif kind == 1:
            entries[i] = (entries[i][0].upper(), entries[i][1])
        elif kind == 2:
            entries.append((entries[i][0] + rng.choice(("", "x", "/")), entries[j][1]))
        elif kind == 3:
            entries[i], entries[j] = (entries[i][0], entries[j][1]), (entries[j][0], entries[i][1])
        elif kind == 4:
            entries[i] = (entries[i][0], rng.randbytes(rng.randrange(100)))
    method = zipfile.ZIP_DEFLATED if pickle is None and rng.random() < 0.4 else zipfile.ZIP_STORED
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, value in entries:
            info = zipfile.ZipInfo(name)  # has a fixed date, and repeated names cause no warning
            info.compress_type = method
            archive.NameToInfo.pop(name, None)
            archive.writestr(info, value)
    return out.getvalue()


def mutate_zipped_pickle(data: bytes, rng: Random) -> bytes:
    """Mutate only the pickle in the archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        pickle = archive.read(name)
    return _rewritten(data, rng, _mutate_stream(pickle, rng, 1))


def mutate_old_style(data: bytes, rng: Random) -> bytes:
    """Mutate the five pickles at the start of a legacy file."""
    return _mutate_stream(data, rng, 5)


def _mutate_stream(data: bytes, rng: Random, count: int) -> bytes:
    ops, rest = _opcodes(data, count)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        k = rng.randrange(len(ops))
        ops[k] = _replacement(ops[k], rng.choice(ops), rng)
    return b"".join(ops) + rest


def _opcodes(data: bytes, count: int) -> tuple[list[bytes], bytes]:
    """Return the opcodes of the first pickles with their arguments, and the remaining bytes."""
    bounds, start = [], 0
    for _ in range(count):
        bounds += [start + (at or 0) for _, _, at in pickletools.genops(data[start:])]
        start = bounds[-1] + 1
    return [data[i:j] for i, j in pairwise([*bounds, start])], data[start:]


def _replacement(op: bytes, another: bytes, rng: Random) -> bytes:
    """Return a replacement of an opcode and its argument."""
    changed = op[:-1] + bytes([rng.choice((0, 1, 2, 255, rng.randrange(256)))])
    kind = rng.randrange(9)
    if kind == 0 or (op[:1] == b"c" and kind < 5):
        return b"c" + rng.choice(_GLOBALS).replace(" ", "\n").encode() + b"\n"
    if kind < 4:
        return changed if len(op) > 1 else bytes([rng.choice(_OPCODES)])
    replacements = (bytes([rng.choice(_OPCODES)]) + op[1:], b"", op + op, another, op + another)
    return rng.choice((*replacements, op + rng.choice(_STRAY), rng.choice(_STRAY)))
