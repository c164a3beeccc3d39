"""The processor, and the cache folder for measurements and compiled libraries."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def processor() -> dict[str, str]:
    """Return the "model name" and "flags" of the processor, as far as the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = (line.partition(":") for line in lines)
    found = {name.strip(): value.strip() for name, _, value in fields}
    flags = found.get("flags") or found.get("Features", "")  # the latter on ARM
    model = found.get("model name") or platform.processor() or platform.machine()
    return {"model name": model, "flags": flags}


def cache_folder() -> Path | None:
    """Return the folder of this package in the user's cache, or None if there is no home folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG specification requires to ignore relative paths
        try:
            root = str(Path.home() / ".cache")
        except (RuntimeError, KeyError):  # neither HOME nor an entry in the user database
            return None
    return Path(root) / "gpt2-compat"
