"""The reference's logits for the proof's sequences, with which a model's logits are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from compat.parity.compare import (
    MAX_ERROR_RATIO,
    MAX_POSITION_RATIO,
    Difference,
    position_errors,
    rounding,
)
from compat.parity.inputs import ProofInput
from compat.parity.reference import Reference

# The largest ratio of errors at the worst position of the long sequence. It has no float64 run, so
# this bounds the difference of two float32 runs, whose rounding errors grow with the length of the
# sums in attention.
MAX_LONG_RATIO = 4 * MAX_ERROR_RATIO
EXACT_UP_TO = 64  # ids in a sequence for which logits are also computed in float64


class ExpectedLogits:
    """The sequences of a proof and the reference's logits for them.

    Args:
        reference: the model that computes the logits in the compared model's data type.
        reference_error: a lower limit for the reference's relative error at its worst position; by
            default the error of rounding the result.

    Attributes:
        sequences: ids (T,) each.
        reference_error: the largest relative error of the reference against float64 at a position.
    """

    def __init__(self, reference: Reference, reference_error: float | None = None) -> None:
        smallest = rounding(reference.dtype) if reference_error is None else reference_error
        self.reference_error = smallest
        self.sequences: list[Tensor] = []
        self._reference = reference
        self._logits: list[Tensor] = []
        self._exact: list[Tensor | None] = []

    def add(self, sequences: Sequence[Tensor]) -> list[int]:
        """Run the reference on sequences, equal lengths in one batch, and return their numbers."""
        first = len(self.sequences)
        for length, group in groupby(sequences, key=len):
            batch = list(group)
            logits, exact = self._reference.logits(torch.stack(batch), exact=length <= EXACT_UP_TO)
            self.sequences += batch
            self._logits += list(logits)
            self._exact += [None] * len(batch) if exact is None else list(exact)
            if exact is not None:
                error = position_errors(logits, exact, exact)[2].item()
                self.reference_error = max(self.reference_error, error)
        return list(range(first, len(self.sequences)))

    def ids(self, item: ProofInput) -> Tensor:
        """Return the ids (B, T) of an input."""
        return torch.stack([self.sequences[row][: item.length] for row in item.rows])

    def difference(self, pieces: Iterable[tuple[int, int, Tensor]]) -> Difference:
        """Judge logits by their worst position.

        Args:
            pieces: the number of a sequence, the position of the first logits, and logits (T, V).
        """
        worst = torch.zeros(3, dtype=torch.float64)
        identical, calibrated = True, True
        for row, start, ours in pieces:
            positions = slice(start, start + len(ours))
            expected, exact = self._logits[row][positions], self._exact[row]
            calibrated = calibrated and exact is not None
            truth = expected if exact is None else exact[positions]
            identical = identical and torch.equal(ours, expected.to(ours.dtype))
            worst = torch.maximum(worst, position_errors(ours, expected, truth))  # NaN stays NaN
        max_abs, rel_rms, error = worst.tolist()
        bound = (MAX_POSITION_RATIO if calibrated else MAX_LONG_RATIO) * self.reference_error
        ratio = error / self.reference_error if calibrated else None
        return Difference(max_abs, rel_rms, identical, ratio, error, bound, error <= bound)
