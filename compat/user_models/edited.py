"""Import a user's files with edits that are not written to disk."""

from __future__ import annotations

import contextlib
import importlib.abc
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from compat.user_models.notebook import EDITED


@contextlib.contextmanager
def edited_sources(texts: Mapping[str, str]) -> Iterator[None]:
    """Read these texts in place of the files, where `load_target` imports them and where lines of
    them are shown.

    Args:
        texts: by absolute path, or by `PATH#cell-N` for a cell of a notebook.
    """
    finder, before = _Finder(), {name: linecache.cache.get(name) for name in texts}
    EDITED.update(texts)
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, entry in before.items():
            del EDITED[name]
            linecache.cache.pop(name, None)
            if entry is not None:
                linecache.cache[name] = entry


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules whose files are edited."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in EDITED:
            return None
        spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    """Compiles an edited text; without `path_stats`, no compiled file is read or written."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(path)

    def get_data(self, path: str) -> bytes:
        return EDITED[path].encode() if path in EDITED else super().get_data(path)
