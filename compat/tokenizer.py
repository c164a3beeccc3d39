"""GPT-2's byte-level BPE by tiktoken, built from a checkpoint's own files."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from compat.checkpoint import Source, open_checkpoint
from compat.checkpoint.files import read_json, read_small
from compat.checkpoint.layout import has_tokenizer
from compat.errors import CheckpointError, TokenizerError, described, short_repr
from compat.vocabulary import END_OF_TEXT, Vocabulary, build_vocabulary

# Splits text before merging: contractions, words, numbers, punctuation, white space. Source:
# OpenAI's `gpt-2/src/encoder.py`.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# GPT-2's files take up to 4 MB, those of other languages more.
_MAX_BYTES = 8 << 20


class Tokenizer:
    """Converts text to token ids and back.

    tiktoken merges by rank, which is the order of the merges. A table converts ranks to ids.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import tiktoken

        if not isinstance(vocabulary, Vocabulary):
            raise TokenizerError(
                f"the vocabulary is {described(vocabulary)}, but must be a Vocabulary. Use "
                "load_tokenizer to make a tokenizer from a checkpoint's files."
            )
        self.vocabulary = vocabulary
        self.special = vocabulary.special
        self._ids, self._texts = vocabulary.ids, vocabulary.texts
        self._encoding = tiktoken.Encoding(
            "gpt2-compat", pat_str=PATTERN, mergeable_ranks=vocabulary.ranks, special_tokens={}
        )
        longest_first = sorted(self.special, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @property
    def end_of_text(self) -> int | None:
        """The id of `<|endoftext|>`, or None."""
        return self.special.get(END_OF_TEXT)

    def ids_without_text(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size` that are not tokens, as in a padded embedding."""
        return [token_id for token_id in range(vocab_size) if token_id not in self._texts]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            text: the text.
            allow_special: encode the names of special tokens as these tokens, not as plain text.

        Raises:
            TokenizerError: The text has a lone surrogate, which is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not valid Unicode: {error}") from error
        if not (allow_special and self.special):
            return [self._ids[rank] for rank in self._encoding.encode_ordinary(text)]
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            ids += [self.special[piece]] if piece in self.special else self.encode(piece)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of the ids.

        Raises:
            TokenizerError: An id is not in the vocabulary, as in a padded embedding.
        """
        try:
            return b"".join(self._texts[token_id] for token_id in ids)
        except KeyError as error:
            raise TokenizerError(
                f"id {error} is not in the vocabulary of {len(self._texts)} tokens."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with U+FFFD for invalid UTF-8; errors as in `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of ids in pieces, one per id, empty while a character is incomplete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in ids:
            yield decoder.decode(self.decode_bytes([token_id]))
        yield decoder.decode(b"", final=True)


def load_tokenizer(
    source: Source, *, revision: str | None = None, verify: bool = False, n_head: int | None = None
) -> Tokenizer:
    """Load a checkpoint's tokenizer from `tokenizer.json`, or `vocab.json` and `merges.txt`.

    A checkpoint with GPT-2's vocabulary that has none of these files gets tiktoken's own `gpt2`.

    Args:
        source, revision, verify, n_head: see `open_checkpoint`.

    Raises:
        TokenizerError: There are no files, or the vocabulary is not a complete byte-level BPE.
        CompatError: As in `open_checkpoint`.
    """
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    folder, vocab_size = checkpoint.folder, checkpoint.config.vocab_size
    try:
        vocabulary = _read_vocabulary(folder, vocab_size)
    except (CheckpointError, OSError, UnicodeError) as error:
        raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}") from error
    except TokenizerError as error:
        raise TokenizerError(f"{folder}: {error}") from None
    highest = max(vocabulary.texts)
    if highest >= vocab_size:
        raise TokenizerError(
            f"{folder}: the tokenizer has id {highest}, but config.json has vocab_size "
            f"{vocab_size}. Use the files of one model."
        )
    return Tokenizer(vocabulary)


def _read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(read_json(folder / "tokenizer.json", _MAX_BYTES))
    if has_tokenizer(folder):
        lines = read_small(folder / "merges.txt", _MAX_BYTES).decode().split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        return build_vocabulary(read_json(folder / "vocab.json", _MAX_BYTES), merges, {})
    if vocab_size >= 50257:
        return _gpt2_of_tiktoken()
    raise TokenizerError(
        "there is no tokenizer.json, nor vocab.json and merges.txt, and the vocabulary size is "
        f"{vocab_size} instead of GPT-2's 50257. Put these files beside the weights, or in Python "
        "pass ids instead of text."
    )


def _from_tokenizer_json(data: dict[str, Any]) -> Vocabulary:
    """Return the tables of a `tokenizer.json`, provided that it is GPT-2's byte-level BPE."""
    model, pre_tokenizer = _section(data, "model"), _section(data, "pre_tokenizer")
    unsupported = [
        f"model.{name} = {short_repr(model[name])}"
        for name in ("dropout", "end_of_word_suffix", "continuing_subword_prefix", "ignore_merges")
        if model.get(name)
    ]
    if model.get("type", "BPE") != "BPE":
        unsupported.append(f"model.type = {short_repr(model['type'])}")
    if data.get("normalizer") is not None:
        unsupported.append("a normalizer")
    if pre_tokenizer.get("type") != "ByteLevel" or not pre_tokenizer.get("use_regex", True):
        unsupported.append("another pre-tokenizer")
    if pre_tokenizer.get("add_prefix_space"):
        unsupported.append("pre_tokenizer.add_prefix_space")
    if unsupported:
        raise TokenizerError(
            f"tokenizer.json is not GPT-2's byte-level BPE: it has {', '.join(unsupported)}."
        )
    vocab, merges, added = model.get("vocab"), model.get("merges", []), data.get("added_tokens")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise TokenizerError("tokenizer.json has no model.vocab, or no list of model.merges.")
    added = added or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]
        for token in added
    ):
        raise TokenizerError("tokenizer.json has added_tokens without content.")
    return build_vocabulary(vocab, merges, {token["content"]: token.get("id") for token in added})


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise TokenizerError(
            f"tokenizer.json has a {type(section).__name__} as {name!r}, which must be an object."
        )
    return section


def _gpt2_of_tiktoken() -> Vocabulary:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # its HTTP library's, or a file with another hash
        raise TokenizerError(
            f"the checkpoint has no tokenizer, and tiktoken could not get GPT-2's: {error}. "
            "Put vocab.json and merges.txt beside the weights."
        ) from error
    tokens = [encoding.decode_single_token_bytes(rank) for rank in range(encoding.n_vocab)]
    plain = [text for rank, text in enumerate(tokens) if rank != encoding.eot_token]
    return Vocabulary(
        ranks={text: rank for rank, text in enumerate(plain)},
        ids=list(range(len(plain))),
        texts=dict(enumerate(tokens)),
        special={END_OF_TEXT: encoding.eot_token},
    )
