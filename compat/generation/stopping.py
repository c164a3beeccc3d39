"""New text as its ids come, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from compat.tokenizer import Tokenizer


class NewText:
    """The text of new ids, of which the part that no later id can take back is `sure`.

    A tail that may be the beginning of a stop string is held back, and so are the bytes of a
    character that is not complete. The stop string that is complete first ends the text before it,
    wherever the borders of the tokens are; of those complete at once, the longest.

    Args:
        tokenizer: has the bytes of every id.
        stop: strings that end the text and are no part of it.
        prompt_ids: what came before, `prompt` as text; a character that it leaves incomplete
            belongs to the new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.prompt = self._decoder.decode(tokenizer.decode_bytes(prompt_ids))
        self.sure, self._held, self.stopped = "", "", False

    @property
    def so_far(self) -> str:
        """All text there is, held back or not."""
        return self.sure + self._held

    def add(self, token_id: int) -> None:
        """One more id; once `stopped`, no more are expected."""
        self._read(self._decoder.decode(self._tokenizer.decode_bytes([token_id])))

    def end(self) -> None:
        """No more ids come: what was held back is sure."""
        if not self.stopped:
            self._read(self._decoder.decode(b"", final=True))
            self.sure, self._held = self.so_far, ""

    def _read(self, piece: str) -> None:
        text = self._held + piece
        if ends := [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.sure, self._held, self.stopped = self.sure + text[: min(ends)[1]], "", True
            return
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self.sure, self._held = self.sure + text[: len(text) - held], text[len(text) - held :]


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters are the beginning of the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
