"""Output on a terminal or pipe whose encoding lacks some of the characters that are printed."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import Any

# What stands for the characters that compat itself prints.
SUBSTITUTES = {
    "✓": "+", "✗": "x", "≈": "~", "·": "-", "→": "->", "Δ": "d", "×": "x", "…": "-",
    "√": "sqrt ", "−": "-", "–": "-", "ᵀ": ".T",
}  # fmt: skip


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: a substitute, or for all other characters the escape."""
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    if character in SUBSTITUTES:
        return SUBSTITUTES[character], error.start + 1
    one = UnicodeEncodeError(
        error.encoding, error.object, error.start, error.start + 1, error.reason
    )
    escaped, end = codecs.backslashreplace_errors(one)
    assert isinstance(escaped, str)
    return escaped, end


def never_fail_to_encode() -> None:
    """Let stdout and stderr write a substitute for what they cannot encode."""
    codecs.register_error("compat_substitute", _substitute)
    for stream in (sys.stdout, sys.stderr):
        # `replace` and the like are someone's choice; these two are the defaults of stdout.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
            "backslashreplace",
        ):
            stream.reconfigure(errors="compat_substitute")


def to_json(value: Any, encoding: str | None, indent: int | None = None) -> str:
    """JSON that can be written in this encoding: with escapes where it is not a Unicode one."""
    unicode = (encoding or "utf-8").lower().startswith("utf")
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=not unicode)
