"""Files in the cache of the hub against the sizes and hashes that the hub states for them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compat.errors import HubError, lines, listed

# By their length; the hub states the first for large files and the second for small ones.
KINDS = {64: "SHA-256", 40: "git's SHA-1"}


@dataclass(frozen=True)
class Stated:
    """What the hub states of a file, as far as it does: bytes, and SHA-256 or git's SHA-1."""

    size: int | None
    hash: str | None

    def fits(self, path: Path) -> bool:
        """The file is there, in the size stated."""
        return path.is_file() and self.size in (None, path.stat().st_size)


def check_hashes(what: str, stated: Mapping[Path, str | None]) -> None:
    """Read every file and compare its hash with the one stated.

    Args:
        what: the repository and revision, in words.
        stated: file → SHA-256 or git's blob SHA-1, in hex digits; None where the hub states none.

    Raises:
        HubError: a file whose bytes are not those stated, or that nothing is stated of.
    """
    if unknown := [path.name for path, hash in stated.items() if len(hash or "") not in KINDS]:
        raise HubError(
            f"{what} cannot be verified: neither the hub nor the cache states a hash of "
            f"{listed(unknown)}; expected SHA-256 or git's SHA-1\n"
            "Load it without verify, or from a hub that states hashes."
        )
    faults = []
    for path, expected in stated.items():
        if expected and (found := hash_of(path, KINDS[len(expected)])) != expected:
            faults.append(
                f"{path}: {KINDS[len(expected)]} is {found}, expected {expected}; "
                f"delete {path.resolve()}"
            )
    if faults:
        headline = f"{what}: {len(faults)} of {len(stated)} files are not what the hub states:"
        raise HubError(lines(headline, faults) + "\nThen fetch again.")


def hash_of(path: Path, kind: str) -> str:
    """The hash of a file; git's is that of `blob`, the size, a zero and then the bytes."""
    digest = hashlib.sha256() if kind == "SHA-256" else hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as file:
        if kind != "SHA-256":
            digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_in_name(path: Path) -> str | None:
    """The hash that the cache gives as a name to what a file of a snapshot links to, if it does."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else None
