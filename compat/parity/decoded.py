"""The proof of what generates: prefill and decode steps of an engine, through its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compat.decoding import HasDecoder
from compat.parity.inputs import LENGTH, LONG, sequences
from compat.parity.logits import InputResult, KnownLogits, LogitsProof
from compat.user_code import raised

Piece = tuple[int, int, Tensor]  # number of a sequence, position, logits (1, V)
STEPS = 8  # decoded after a long prompt
GREEDY = 40  # tokens of the text that the decoder writes itself


def prove_decoder(model: HasDecoder, known: KnownLogits, most_rows: int | None) -> LogitsProof:
    """Compare the logits of prefill and of decode steps with the reference's.

    Args:
        model: makes a decoder for each input.
        known: the reference; its bound judges the logits.
        most_rows: sequences that one decoder takes at once; None for any number.
    """
    return _DecoderProof(model, known, most_rows).run()


class _DecoderProof:
    def __init__(self, model: HasDecoder, known: KnownLogits, most_rows: int | None) -> None:
        self.model, self.known, self.most_rows = model, known, most_rows
        self.config = model.decoder().config
        self.room = self.config.n_positions

    def run(self) -> LogitsProof:
        rows = self.known.add(sequences(self.config, self.room))
        S, every = min(LENGTH, self.room), tuple(rows[1:])
        batch = every[: self.most_rows or len(every)]
        results = [
            self._result("decode steps alone", (1, S), lambda: self._decode((3,), 1)),
            self._result("prefill, then decode steps", (1, S), lambda: self._decode((3,), S // 2)),
            self._result("prompts of every length", (S, S), self._prompts),
            self._result("a batch", (len(batch), S), lambda: self._decode(batch, max(1, S // 3))),
            self._result("the full context", (1, self.room), self._long),
            self._result("greedy decoding", (1, min(S + GREEDY, self.room)), self._greedy),
        ]
        if len(batch) > 2:
            results.append(self._result("a batch that shrinks", (len(batch), S), self._shrinking))
        tried = {int(i) for row in self.known.rows for i in row}
        return LogitsProof(results, ids_tried=len(tried))

    def _result(
        self, name: str, shape: tuple[int, int], decode: Callable[[], Iterator[Piece]]
    ) -> InputResult:
        try:
            pieces = [(row, at, logits.cpu()) for row, at, logits in decode()]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit() in the user's code is a result too
            return InputResult(name, shape, None, raised(error))
        V = self.config.vocab_size
        if strange := [logits for *_, logits in pieces if logits.shape != (1, V)]:
            found = f"the decoder gave logits {list(strange[0].shape)} a row; expected [1, {V}]"
            return InputResult(name, shape, None, found)
        return InputResult(name, shape, self.known.difference(pieces))

    def _prompt(self, row: int, length: int) -> list[int]:
        ids: list[int] = self.known.rows[row][:length].tolist()
        return ids

    def _decode(self, rows: tuple[int, ...], prompt: int) -> Iterator[Piece]:
        """Prompts of one length, then every further id of the sequences by a decode step."""
        decoder, prompt = self.model.decoder(), max(1, prompt)
        logits = decoder.start([self._prompt(row, prompt) for row in rows])
        for at in range(prompt, len(self.known.rows[rows[0]]) + 1):
            yield from ((row, at - 1, ours[None]) for row, ours in zip(rows, logits, strict=True))
            if at < len(self.known.rows[rows[0]]):
                logits = decoder.step(torch.stack([self.known.rows[row][at] for row in rows]))

    def _prompts(self) -> Iterator[Piece]:
        """Prefill alone: the last position of prompts of all lengths, side by side."""
        lengths, row = list(range(1, len(self.known.rows[3]) + 1)), 3
        at_once = self.most_rows or len(lengths)
        for start in range(0, len(lengths), at_once):
            part = lengths[start : start + at_once]
            logits = self.model.decoder().start([self._prompt(row, length) for length in part])
            for length, ours in zip(part, logits, strict=True):
                yield row, length - 1, ours[None]

    def _long(self) -> Iterator[Piece]:
        """Long prompts, the longest followed by decode steps up to the last position."""
        prompt = max(1, self.room - STEPS)
        for length in {max(1, self.room // 2), max(1, self.room // 4 + 1), self.room}:
            logits = self.model.decoder().start([self._prompt(LONG, length)])
            yield LONG, length - 1, logits
        decoder = self.model.decoder()
        logits = decoder.start([self._prompt(LONG, prompt)])
        for at in range(prompt, self.room):
            logits = decoder.step(self.known.rows[LONG][at : at + 1])
            yield LONG, at, logits

    def _greedy(self) -> Iterator[Piece]:
        """A text that the decoder writes itself, in which its own drafts are accepted."""
        prompt = self._prompt(3, min(LENGTH, max(1, self.room // 2)))
        decoder, ids, found = self.model.decoder(), list(prompt), []
        logits = decoder.start([prompt])
        for _ in range(min(GREEDY, self.room - len(ids))):
            found.append(logits)
            ids.append(int(logits[0].argmax()))
            logits = decoder.step(torch.tensor(ids[-1:]))
        [row] = self.known.add([torch.tensor(ids)])
        for at, ours in enumerate([*found, logits], start=len(prompt) - 1):
            yield row, at, ours

    def _shrinking(self) -> Iterator[Piece]:
        """Unequal prompts side by side; then two rows go on, in another order."""
        rows, longest, decoder = (1, 2, 3), len(self.known.rows[1]), self.model.decoder()
        lengths = [min(length, max(1, longest - 2)) for length in (3, 7, 5)]
        prompts = [self._prompt(row, length) for row, length in zip(rows, lengths, strict=True)]
        logits = decoder.start(prompts)
        going = [
            (row, length, ours) for row, length, ours in zip(rows, lengths, logits, strict=True)
        ]
        yield from ((row, at - 1, ours[None]) for row, at, ours in going)
        decoder.keep(torch.tensor([2, 0]))
        kept = [(going[2][0], going[2][1]), (going[0][0], going[0][1])]
        for _ in range(longest - max(at for _, at in kept)):
            logits = decoder.step(torch.stack([self.known.rows[row][at] for row, at in kept]))
            for (row, at), ours in zip(kept, logits, strict=True):
                yield row, at, ours[None]
            kept = [(row, at + 1) for row, at in kept]
