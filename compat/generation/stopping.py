"""Incremental decoding of new tokens to text, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from compat.tokenizer import Tokenizer


class NewText:
    """The text of new tokens. The part that no later token can change is `final`.

    A tail that may be the beginning of a stop string is held back, and so are the bytes of an
    incomplete character. The text ends before the stop string that is completed first, even across
    token boundaries. If several are completed at the same time, the longest one counts.

    Args:
        tokenizer: maps every token to its bytes.
        stop: strings that end the text and are not part of it.
        prompt_ids: tokens of the prompt, whose text becomes `prompt`. A character that is
            incomplete at their end belongs to the new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.prompt = self._decoder.decode(tokenizer.decode_bytes(prompt_ids))
        self.final, self._held, self.stopped = "", "", False

    @property
    def so_far(self) -> str:
        """The whole text, including what is held back."""
        return self.final + self._held

    def add(self, token_id: int) -> None:
        """Add a token. Do not call this after `stopped` became true."""
        self._read(self._decoder.decode(self._tokenizer.decode_bytes([token_id])))

    def end(self) -> None:
        """Finish the text: the part that was held back becomes final."""
        if not self.stopped:
            self._read(self._decoder.decode(b"", final=True))
            self.final, self._held = self.so_far, ""

    def _read(self, piece: str) -> None:
        text = self._held + piece
        if ends := [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.final, self._held, self.stopped = self.final + text[: min(ends)[1]], "", True
            return
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self.final, self._held = self.final + text[: len(text) - held], text[len(text) - held :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that is the beginning of the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
