"""GPT-2's byte-level BPE by tiktoken, built from a checkpoint's own files."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.checkpoint.files import read_json
from compat.errors import CheckpointError, TokenizerError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"

# How text is cut before merging: contractions, words, numbers, signs, white space. Source: OpenAI's
# `gpt-2/src/encoder.py`.
PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)  # fmt: skip


class Tokenizer:
    """Text to ids and back.

    tiktoken merges by rank, and ranks follow the order of the merges; ids may be numbered in
    another way, so a table leads from ranks to ids.

    Args:
        encoding: tiktoken's, in which tokens are numbered by rank.
        ids: the id of every rank.
        special: text and id of the tokens that stand for themselves, such as end-of-text.
    """

    def __init__(
        self, encoding: tiktoken.Encoding, ids: list[int], special: dict[str, int]
    ) -> None:
        self._encoding, self._ids, self.special = encoding, ids, special
        self._ranks = {token_id: rank for rank, token_id in enumerate(ids)}

    @property
    def end_of_text(self) -> int | None:
        """The id of `<|endoftext|>`, if the vocabulary has it."""
        return self.special.get(END_OF_TEXT)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text. The text of a special token is plain text unless it is allowed."""
        allowed = set(self.special) if allow_special else set()
        ranks = self._encoding.encode(text, allowed_special=allowed, disallowed_special=())
        return [self._ids[rank] for rank in ranks]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids.

        Raises:
            TokenizerError: an id that the vocabulary does not have, as in a padded embedding.
        """
        try:
            return self._encoding.decode_bytes([self._ranks[token_id] for token_id in ids])
        except KeyError as error:
            raise TokenizerError(
                f"id {error} is not in the vocabulary of {len(self._ids)} tokens and has no text"
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
        if (folder / "tokenizer.json").is_file():
            tokenizer = _from_tokenizer_json(folder / "tokenizer.json")
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
            tokenizer = build_tokenizer(read_json(folder / "vocab.json"), merges, {})
        elif vocab_size >= 50257:
            return _tiktoken_gpt2()
        else:
            raise TokenizerError(
                f"no tokenizer.json, nor vocab.json and merges.txt; a vocabulary of {vocab_size} "
                "is not GPT-2's 50257; give ids instead of text"
            )
    except (CheckpointError, OSError, UnicodeError) as error:
        raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}") from error
    except TokenizerError as error:
        raise TokenizerError(f"{folder}: {error}") from None
    highest = max(tokenizer._ids)
    if highest >= vocab_size:
        raise TokenizerError(
            f"{folder}: the tokenizer has id {highest}, config.json a vocab_size of {vocab_size}"
        )
    return tokenizer


def build_tokenizer(
    vocab: dict[str, Any], merges: Iterable[str | list[str]], added: dict[str, int]
) -> Tokenizer:
    """A tokenizer from GPT-2's tables.

    Args:
        vocab: token, bytes written as GPT-2's printable characters → id.
        merges: "left right" or [left, right], in order of priority.
        added: further tokens that stand for themselves.

    Raises:
        TokenizerError: a byte, or the result of a merge, has no id, or an id belongs to two tokens.
    """
    import tiktoken

    if not all(isinstance(i, int) and i >= 0 for i in vocab.values()):
        raise TokenizerError("the vocabulary has ids that are no whole numbers from 0 on")
    to_byte = _printable_bytes()
    missing = [char for char in to_byte if char not in vocab]
    if missing:
        raise TokenizerError(
            f"the vocabulary lacks {len(missing)} of the 256 bytes, the first as {missing[0]!r}; "
            "expected GPT-2's byte-level BPE"
        )
    tokens = list(to_byte)  # in order of rank: bytes first, then what the merges make
    known = set(tokens)
    for number, merge in enumerate(merges, start=1):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        made = "".join(parts)
        if len(parts) != 2 or not known.issuperset(parts) or made not in vocab:
            raise TokenizerError(f"merge {number}, {merge!r}, does not make one known token of two")
        if made not in known:
            tokens.append(made)
            known.add(made)
    special = {END_OF_TEXT: vocab[END_OF_TEXT], **added} if END_OF_TEXT in vocab else added
    rest = {token: i for token, i in {**vocab, **special}.items() if token not in known}
    ids = [vocab[token] for token in tokens] + list(rest.values())
    if len(set(ids)) < len(ids):
        raise TokenizerError("the vocabulary gives one id to two tokens")
    encoding = tiktoken.Encoding(
        "gpt2-compat",
        pat_str=PATTERN,
        mergeable_ranks={
            bytes(to_byte[char] for char in token): rank for rank, token in enumerate(tokens)
        },
        special_tokens={token: rank for rank, token in enumerate(rest, start=len(tokens))},
    )
    return Tokenizer(encoding, ids, special)


def _from_tokenizer_json(path: Path) -> Tokenizer:
    data = read_json(path)
    model, before = data.get("model"), data.get("pre_tokenizer") or {}
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise TokenizerError(f"{path.name} has no vocabulary")
    plain_gpt2 = (
        model.get("type", "BPE") == "BPE"
        and data.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space")
    )
    if not plain_gpt2:
        raise TokenizerError(
            f"{path.name} is not GPT-2's byte-level BPE: another model, normalizer or pre-tokenizer"
        )
    added = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
    return build_tokenizer(model["vocab"], model.get("merges") or [], added)


def _tiktoken_gpt2() -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # its HTTP library's, or a file that fails its hash
        raise TokenizerError(
            f"the checkpoint has no tokenizer, and tiktoken could not get GPT-2's: {error}; "
            "put vocab.json and merges.txt beside the weights"
        ) from error
    return Tokenizer(encoding, list(range(encoding.n_vocab)), {END_OF_TEXT: encoding.eot_token})


def _printable_bytes() -> dict[str, int]:
    """GPT-2's way to write bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
