"""A repository in the hub client's cache: `refs/main` holds a commit, `snapshots/COMMIT` files."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4


def is_commit(text: str | None) -> bool:
    """The full name of a commit, as git has it."""
    return re.fullmatch(r"[0-9a-f]{40}", text or "") is not None


@dataclass(frozen=True)
class RepoCache:
    """One repository's folder of the cache."""

    folder: Path

    def snapshot(self, commit: str) -> Path:
        """Where the files of a commit are: links to `blobs/HASH`."""
        return self.folder / "snapshots" / commit

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag meant when it was last fetched; a commit is its own."""
        with suppress(OSError, ValueError):
            revision = (self.folder / "refs" / revision).read_text()
        return revision if is_commit(revision) else None

    def remember(self, revision: str, commit: str) -> None:
        """Note which commit a branch or tag means; in a cache that may only be read, nothing."""
        ref = self.folder / "refs" / revision
        part = ref.with_name(f"{ref.name}.{uuid4().hex}.tmp")
        if self.commit_of(revision) != commit:
            with suppress(OSError):
                ref.parent.mkdir(parents=True, exist_ok=True)
                part.write_text(commit)
                os.replace(part, ref)
