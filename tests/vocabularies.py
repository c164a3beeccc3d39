"""Small byte-level vocabularies, and a checkpoint with a large enough embedding."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from compat import Tokenizer
from compat.vocabulary import build_vocabulary

END = "<|endoftext|>"
BYTES = sorted(ByteLevel.alphabet())
SMALL = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}


def small_vocab(**more: Any) -> dict[str, Any]:
    """All bytes, "ab" = 256, end-of-text = 257, and the additions of the test."""
    return {**{char: i for i, char in enumerate(BYTES)}, "ab": 256, END: 257, **more}


def build_tokenizer(vocab: dict[str, Any], merges: list[Any], added: dict[str, int]) -> Tokenizer:
    """A tokenizer from tables, without a folder."""
    return Tokenizer(build_vocabulary(vocab, merges, added))
