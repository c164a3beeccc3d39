"""The proof of a decoder: the logits of its prefill and its decode steps, with its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compat.decoding import Decoder, HasDecoder
from compat.parity.expected import ExpectedLogits
from compat.parity.inputs import LENGTH, LONG, sequences
from compat.parity.report import InputResult, LogitsProof
from compat.user_code import exception_summary

Piece = tuple[int, int, Tensor]  # number of a sequence, position, logits (1, V)
ASCENDING = 3  # the number of the sequence that single prompts are prefixes of
STEPS = 8  # decode steps after a long prompt
GREEDY = 40  # tokens of the text that the decoder generates itself


def prove_decoder(model: HasDecoder, expected: ExpectedLogits) -> LogitsProof:
    """Compare the logits of prefill and of decode steps with the reference's.

    Args:
        model: creates a decoder for each input. Batches have at most `model.max_batch` rows, if it
            has this attribute.
        expected: computes and judges the logits.
    """
    return _DecoderProof(model, expected).run()


class _DecoderProof:
    def __init__(self, model: HasDecoder, expected: ExpectedLogits) -> None:
        self.model, self.expected = model, expected
        self.max_rows: int | None = getattr(model, "max_batch", None)
        self.config = model.decoder().config
        self.n_positions = self.config.n_positions

    def run(self) -> LogitsProof:
        rows = self.expected.add(sequences(self.config, self.n_positions))
        N, S = self.n_positions, min(LENGTH, self.n_positions)
        one, batch = (ASCENDING,), tuple(rows[1:][: self.max_rows])
        results = [
            self._result("decode steps alone", (1, S), lambda: self._decode(one, 1)),
            self._result("prefill, then decode steps", (1, S), lambda: self._decode(one, S // 2)),
            self._result("prompts of every length", (S, S), self._prefill),
            self._result("a batch", (len(batch), S), lambda: self._decode(batch, S // 3)),
            self._result("the full context", (1, N), self._full_context),
            self._result("greedy decoding", (1, min(S + GREEDY, N)), self._greedy),
        ]
        if len(batch) > 2:
            results.append(self._result("a batch that shrinks", (len(batch), S), self._shrinking))
        tried = {int(i) for row in self.expected.sequences for i in row}
        return LogitsProof(results, ids_tried=len(tried))

    def _result(
        self, name: str, shape: tuple[int, int], decode: Callable[[], Iterator[Piece]]
    ) -> InputResult:
        try:
            pieces = [(row, at, logits.cpu()) for row, at, logits in decode()]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # such as exit() in the user's code
            return InputResult(name, shape, error=exception_summary(error))
        V = self.config.vocab_size
        for *_, logits in pieces:
            if logits.shape != (1, V):
                fault = f"the decoder returned logits {list(logits.shape)} per row"
                return InputResult(name, shape, error=f"{fault}, but must return [1, {V}]")
        return InputResult(name, shape, self.expected.difference(pieces))

    def _prompt(self, row: int, length: int) -> list[int]:
        ids: list[int] = self.expected.sequences[row][:length].tolist()
        return ids

    def _next_ids(self, positions: list[tuple[int, int]]) -> Tensor:
        """Return the ids (B,) at these positions of these sequences."""
        return torch.stack([self.expected.sequences[row][at] for row, at in positions])

    def _decode(self, rows: tuple[int, ...], prompt: int) -> Iterator[Piece]:
        """Prefill prompts of one length, then run a decode step for each further id."""
        decoder, positions = self.model.decoder(), [(row, max(1, prompt)) for row in rows]
        yield from self._start(decoder, positions)
        longest = len(self.expected.sequences[rows[0]])
        yield from self._steps(decoder, positions, longest - max(1, prompt))

    def _start(self, decoder: Decoder, lengths: list[tuple[int, int]]) -> Iterator[Piece]:
        """Prefill prompts of these lengths from these sequences in a batch."""
        logits = decoder.start([self._prompt(row, length) for row, length in lengths])
        for (row, length), ours in zip(lengths, logits, strict=True):
            yield row, length - 1, ours[None]

    def _steps(
        self, decoder: Decoder, positions: list[tuple[int, int]], count: int
    ) -> Iterator[Piece]:
        """Run decode steps of a batch with the sequences' own ids, from these positions on."""
        for step in range(count):
            now = [(row, at + step) for row, at in positions]
            for (row, at), ours in zip(now, decoder.step(self._next_ids(now)), strict=True):
                yield row, at, ours[None]

    def _prefill(self) -> Iterator[Piece]:
        """Prefill prompts of all lengths in batches, without decode steps."""
        longest = len(self.expected.sequences[ASCENDING])
        every = [(ASCENDING, length) for length in range(1, longest + 1)]
        size = self.max_rows or longest
        for start in range(0, longest, size):
            yield from self._start(self.model.decoder(), every[start : start + size])

    def _full_context(self) -> Iterator[Piece]:
        """Prefill long prompts, and follow one of them by decode steps up to the last position."""
        N = self.n_positions
        for length in {max(1, N // 2), max(1, N // 4 + 1), N}:
            yield LONG, length - 1, self.model.decoder().start([self._prompt(LONG, length)])
        decoder, prompt = self.model.decoder(), max(1, N - STEPS)
        decoder.start([self._prompt(LONG, prompt)])
        for at in range(prompt, N):
            yield LONG, at, decoder.step(self._next_ids([(LONG, at)]))

    def _greedy(self) -> Iterator[Piece]:
        """Let the decoder generate a text itself, so that its own draft tokens are accepted."""
        prompt = self._prompt(ASCENDING, min(LENGTH, max(1, self.n_positions // 2)))
        decoder, ids = self.model.decoder(), list(prompt)
        found = [decoder.start([prompt])]
        for _ in range(min(GREEDY, self.n_positions - len(ids))):
            ids.append(int(found[-1][0].argmax()))
            found.append(decoder.step(torch.tensor(ids[-1:])))
        [row] = self.expected.add([torch.tensor(ids)])
        for at, ours in enumerate(found, start=len(prompt) - 1):
            yield row, at, ours

    def _shrinking(self) -> Iterator[Piece]:
        """Prefill three prompts in a batch, then run decode steps of two rows in another order."""
        decoder, longest = self.model.decoder(), len(self.expected.sequences[1])
        first, second, third = (
            (row, min(length, max(1, longest - 2))) for row, length in ((1, 3), (2, 7), (3, 5))
        )
        yield from self._start(decoder, [first, second, third])
        decoder.keep(torch.tensor([2, 0]))
        yield from self._steps(decoder, [third, first], longest - max(third[1], first[1]))
