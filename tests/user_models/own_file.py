"""A user's file in a test: it is written, its class is loaded, and the model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat import GPT2Config
from compat.user_models import construct, construct_with_call, load_target

CONFIG = GPT2Config(vocab_size=97, n_positions=32, n_embd=24, n_layer=3, n_head=4)


def loaded(tmp_path: Path, source: str, name: str | None = "GPT") -> Any:
    """Return the class or function of this name in a file; without a name, the one selected."""
    path = tmp_path / "own.py"
    path.write_text(source)
    return load_target(f"{path}:{name}" if name else str(path))


def build(
    tmp_path: Path, source: str, name: str | None = "GPT", config: GPT2Config = CONFIG, **how: Any
) -> Any:
    """Return the model of a file."""
    return construct(loaded(tmp_path, source, name), config, **how)


def described(
    tmp_path: Path, source: str, config: GPT2Config = CONFIG, **how: Any
) -> tuple[Any, str]:
    """Return the model of a file, and the call that built it."""
    return construct_with_call(loaded(tmp_path, source), config, **how)
