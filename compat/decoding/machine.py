"""The processor, and the user's folder for what was measured and compiled for it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def processor() -> dict[str, str]:
    """Its "model name" and "flags", as far as the system lists them."""
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
    """The folder of this package in the user's cache; None if none can be found."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG standard says to ignore these
        try:
            root = str(Path.home() / ".cache")
        except (RuntimeError, KeyError):  # neither HOME nor a user entry
            return None
    return Path(root) / "gpt2-compat"
