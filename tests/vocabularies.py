"""Small byte-level vocabularies, and the sizes of a checkpoint for them."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from compat import Tokenizer
from compat.vocabulary import build_vocabulary

END = "<|endoftext|>"
BYTES = sorted(ByteLevel.alphabet())
SMALL = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}


def small_vocab(**more: Any) -> dict[str, Any]:
    """Return a vocabulary of all bytes, "ab" = 256, end-of-text = 257, and the passed tokens."""
    return {**{char: i for i, char in enumerate(BYTES)}, "ab": 256, END: 257, **more}


def build_tokenizer(vocab: dict[str, Any], merges: list[Any], added: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of these tables, without a folder."""
    return Tokenizer(build_vocabulary(vocab, merges, added))
