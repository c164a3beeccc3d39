"""A noisy checkpoint with the demo's tokenizer for tests of generated text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from compat import Sampling, load_tokenizer
from compat.checkpoint.find import DEMO
from tests.conftest import MakeCheckpoint

TOKENIZER = load_tokenizer("demo")
V = 1024
PROMPTS = ["ROMEO:", "O", "The king, my lord, and all the rest of them", "\N{SNOWMAN}é", ""]


def with_tokenizer(make_checkpoint: MakeCheckpoint, **config: Any) -> Path:
    """Make a checkpoint with the demo's tokenizer; its texts do not end and are invalid UTF-8."""
    folder = make_checkpoint(**{"vocab_size": V, "eos_token_id": None, **config})
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(DEMO / name, folder)
    return folder


def interrupt_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int) -> None:
    """Raise KeyboardInterrupt in the n-th call of a method of Sampling, counted from 1."""
    remaining, original = [call], getattr(Sampling, method)

    def interrupted(self: Sampling, *args: Any) -> Any:
        remaining[0] -= 1
        if not remaining[0]:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Sampling, method, interrupted)


def ids_of(prompt: str) -> list[int]:
    return TOKENIZER.encode(prompt) or [TOKENIZER.end_of_text or 0]
