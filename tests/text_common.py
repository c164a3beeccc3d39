"""A noisy checkpoint with the demo's tokenizer for tests of generated text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import compat
from compat import load_tokenizer
from tests.conftest import MakeCheckpoint

DEMO = Path(compat.__file__).parent / "demo"
TOKENIZER = load_tokenizer("demo")
V = 1024
PROMPTS = ["ROMEO:", "O", "The king, my lord, and all the rest of them", "\N{SNOWMAN}é", ""]


def with_tokenizer(make_checkpoint: MakeCheckpoint, **config: Any) -> Path:
    """Make a checkpoint with the demo's tokenizer; its texts do not end and are invalid UTF-8."""
    folder = make_checkpoint(**{"vocab_size": V, "eos_token_id": None, **config})
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(DEMO / name, folder)
    return folder


def ids_of(prompt: str) -> list[int]:
    return TOKENIZER.encode(prompt) or [TOKENIZER.end_of_text or 0]
