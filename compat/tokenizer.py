"""GPT-2's byte-level BPE by tiktoken, built from a checkpoint's own files."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.checkpoint.files import read_json, read_small
from compat.errors import CheckpointError, TokenizerError, described, shown
from compat.vocabulary import END_OF_TEXT, Vocabulary, build_vocabulary

# How text is cut before merging: contractions, words, numbers, signs, white space. Source: OpenAI's
# `gpt-2/src/encoder.py`.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# GPT-2's files take up to 4 MB, those of other languages more.
_MOST_BYTES = 8 << 20


class Tokenizer:
    """Text to ids and back.

    tiktoken merges by rank, and ranks follow the order of the merges; a table leads to the ids.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import tiktoken

        if not isinstance(vocabulary, Vocabulary):
            raise TokenizerError(
                f"the vocabulary is {described(vocabulary)}; expected a Vocabulary; load_tokenizer "
                "makes a tokenizer of a checkpoint's files"
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
        """The id of `<|endoftext|>`, if the vocabulary has it."""
        return self.special.get(END_OF_TEXT)

    def ids_without_text(self, vocab_size: int) -> list[int]:
        """The ids below `vocab_size` that no token has, as in a padded embedding."""
        return [token_id for token_id in range(vocab_size) if token_id not in self._texts]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text; the name of a special token is plain text unless allowed.

        Raises:
            TokenizerError: the text holds a lone surrogate, which is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is no valid Unicode: {error}") from error
        if not (allow_special and self.special):
            return [self._ids[rank] for rank in self._encoding.encode_ordinary(text)]
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            ids += [self.special[piece]] if piece in self.special else self.encode(piece)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids.

        Raises:
            TokenizerError: an id that the vocabulary does not have, as in a padded embedding.
        """
        try:
            return b"".join(self._texts[token_id] for token_id in ids)
        except KeyError as error:
            raise TokenizerError(
                f"id {error} is not in the vocabulary of {len(self._texts)} tokens and has no text"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD. Raises as `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The same text in pieces, one for each id, empty while a character is incomplete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in ids:
            yield decoder.decode(self.decode_bytes([token_id]))
        yield decoder.decode(b"", final=True)


def load_tokenizer(source: str | Path | Checkpoint, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint: `tokenizer.json`, or `vocab.json` and `merges.txt`.

    A checkpoint of GPT-2's vocabulary that has none of these files gets tiktoken's own `gpt2`.

    Raises:
        TokenizerError: no files, or a vocabulary that is not a whole byte-level BPE.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, revision)
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
            f"{folder}: the tokenizer has id {highest}, config.json a vocab_size of {vocab_size}"
        )
    return Tokenizer(vocabulary)


def _read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(read_json(folder / "tokenizer.json", _MOST_BYTES))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        lines = read_small(folder / "merges.txt", _MOST_BYTES).decode().split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        return build_vocabulary(read_json(folder / "vocab.json", _MOST_BYTES), merges, {})
    if vocab_size >= 50257:
        return _tiktokens_gpt2()
    raise TokenizerError(
        f"no tokenizer.json, nor vocab.json and merges.txt; a vocabulary of {vocab_size} is not "
        "GPT-2's 50257; put these files beside the weights, or in Python give ids instead of text"
    )


def _from_tokenizer_json(data: dict[str, Any]) -> Vocabulary:
    """The tables in a `tokenizer.json`, if it asks for nothing but GPT-2's byte-level BPE."""
    model, before = _section(data, "model"), _section(data, "pre_tokenizer")
    asks_for_more = [
        f"model.{name} = {shown(model[name])}"
        for name in ("dropout", "end_of_word_suffix", "continuing_subword_prefix", "ignore_merges")
        if model.get(name)
    ]
    if model.get("type", "BPE") != "BPE":
        asks_for_more.append(f"model.type = {shown(model['type'])}")
    if data.get("normalizer") is not None:
        asks_for_more.append("a normalizer")
    if before.get("type") != "ByteLevel" or not before.get("use_regex", True):
        asks_for_more.append("another pre-tokenizer")
    if before.get("add_prefix_space"):
        asks_for_more.append("pre_tokenizer.add_prefix_space")
    if asks_for_more:
        raise TokenizerError(
            f"tokenizer.json is not GPT-2's byte-level BPE: it has {', '.join(asks_for_more)}"
        )
    vocab, merges = model.get("vocab"), model.get("merges", [])
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise TokenizerError("tokenizer.json has no model.vocab, or no list of model.merges")
    return build_vocabulary(vocab, merges, _added_tokens(data))


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise TokenizerError(f"tokenizer.json has a {type(section).__name__} as {name!r}")
    return section


def _added_tokens(data: dict[str, Any]) -> dict[str, int]:
    added = data.get("added_tokens") or []
    proper = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]
        for token in added
    )
    if not proper:
        raise TokenizerError("tokenizer.json has added_tokens without content")
    return {token["content"]: token.get("id") for token in added}


def _tiktokens_gpt2() -> Vocabulary:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # its HTTP library's, or a file that fails its hash
        raise TokenizerError(
            f"the checkpoint has no tokenizer, and tiktoken could not get GPT-2's: {error}; "
            "put vocab.json and merges.txt beside the weights"
        ) from error
    tokens = [encoding.decode_single_token_bytes(rank) for rank in range(encoding.n_vocab)]
    plain = [text for rank, text in enumerate(tokens) if rank != encoding.eot_token]
    return Vocabulary(
        ranks={text: rank for rank, text in enumerate(plain)},
        ids=list(range(len(plain))),
        texts=dict(enumerate(tokens)),
        special={END_OF_TEXT: encoding.eot_token},
    )
