"""The largest difference from the reference that passes, and its calibration.

A correct port adds the terms of a dot product in another order than the reference; in C, usually
one after the other in float32. The writer of a golden file therefore measures three errors against
float64: the reference's accumulated error, its error in every piece alone, and the error of
projections that are summed sequentially. The bound is twice the larger error for the port, plus the
reference's own error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compat.config import HALF
from compat.golden_files.pieces import PROJECTIONS, Weights, head_name, projection, split_name
from compat.parity.compare import MAX_ERROR_RATIO, MAX_POSITION_RATIO, quotient, rounding

# In half precision, implementations round at different places: some keep a product in float32
# until its bias is added, others round inside a norm. The simulation is only one of them.
HALF_ROUNDINGS = 4.0
# An array of zeros has the error 1. If rounding alone may cause half of that, nothing is judged.
LARGEST_BOUND = 0.5
SMALLEST_ROW = 1e-3  # the error of a smaller row is divided by this share of the RMS of all rows
ELEMENTS = 1 << 22  # compared in float64 at once
SAMPLED, SAMPLED_COLUMNS = 8, 4096  # rows and columns of a projection that are summed sequentially


@dataclass(frozen=True)
class Error:
    """The difference between two arrays.

    Args:
        rms: the RMS of the difference over the RMS of the second array.
        worst: the same for the row with the largest error; a row is a vector along the last axis.
        max_abs: the largest absolute difference.
        identical: whether no element differs.
    """

    rms: float
    worst: float
    max_abs: float
    identical: bool


def error(ours: Tensor, reference: Tensor) -> Error:
    """Measure the difference between two arrays of one shape. It is NaN if either contains NaN."""
    rows = [t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1) for t in (ours, reference)]
    step = max(1, ELEMENTS // rows[0].shape[1])
    squares = torch.zeros(2, dtype=torch.float64)
    per_row, max_abs, identical = [], torch.zeros((), dtype=torch.float64), True
    for mine, theirs in zip(*(torch.split(t, step) for t in rows), strict=True):
        mine, theirs = mine.double(), theirs.double()
        delta = mine - theirs
        found = torch.stack([delta.square().sum(-1), theirs.square().sum(-1)])  # (2, rows)
        squares += found.sum(-1)
        per_row.append(found)
        max_abs = torch.maximum(max_abs, delta.abs().max())
        identical = identical and torch.equal(mine, theirs)
    deltas, sizes = torch.cat(per_row, dim=1)
    smallest = SMALLEST_ROW**2 * squares[1] / len(rows[0])
    worst = (deltas / sizes.maximum(smallest)).nan_to_num(nan=0.0, posinf=math.inf).max()
    if deltas.isnan().any():
        worst = worst * math.nan
    delta, size = squares.sqrt().tolist()
    return Error(quotient(delta, size), worst.sqrt().item(), max_abs.item(), identical)


def fitted_factor(ours: Tensor, reference: Tensor) -> float:
    """Return the factor by which `reference` is closest to `ours`, by least squares."""
    size = reference.square().sum().item()
    return (ours * reference).sum().item() / size if size else 0.0


@dataclass(frozen=True)
class Bound:
    """The largest differences that pass at one tap, for one data type of the candidate.

    All but `own` are NaN if the rounding errors of half precision are too large to judge the tap.

    Args:
        own: the reference's own error against float64, by which reports divide differences.
        rms: the largest `Error.rms` of the difference from the reference.
        worst: the largest `Error.worst` of the difference from the reference.
        local: the largest difference from the piece in float64 on the candidate's own inputs.
    """

    own: float
    rms: float
    worst: float
    local: float


class Calibration:
    """Computes the bounds of the taps of one run, in execution order.

    Args:
        dtype: the data type of the run.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.rounding, self.half = rounding(dtype), dtype in HALF
        self.accumulated = self.rounding
        self.sums = 1.0  # the largest error of sequential sums over the reference's, so far

    def bound(
        self, found: Tensor, exact: Tensor, local: float = 0.0, plain: float | None = None
    ) -> Bound:
        """Return the bound of the next tap.

        Args:
            found: the tap in the run.
            exact: the tap in float64.
            local: the error of the piece that computes the tap.
            plain: the error of the same piece with sequential sums, if it is a projection.
        """
        own = error(found, exact)
        local = max(local, self.rounding)
        if plain is not None:
            self.sums = max(self.sums, plain / local)
        # If a tap has few values, its error can be smaller by chance than that of earlier taps.
        self.accumulated = max(self.accumulated, own.rms)
        worst = max(own.worst, self.accumulated)
        factor = HALF_ROUNDINGS if self.half else self.sums
        rms = (1 + MAX_ERROR_RATIO * factor) * self.accumulated
        local = MAX_ERROR_RATIO * max(local * factor, plain or 0.0)
        if self.half and not rms <= LARGEST_BOUND:
            return Bound(own.rms, math.nan, math.nan, math.nan)
        return Bound(own.rms, rms, (1 + MAX_POSITION_RATIO * factor) * worst, local)


def plain_sum_error(tap: str, weights: Weights, x: Tensor) -> float | None:
    """Measure the error of a projection that adds its products one after the other in float32.

    The error is measured on a sample of rows of the piece's input (B, T, in), which includes the
    first row. It is None if the tap is not the result of a projection.
    """
    i, name = split_name(tap)
    if name == "logits":
        matrix = weights.read(head_name(weights.config)).T
        bias = matrix.new_zeros(matrix.shape[1])
    elif name in PROJECTIONS:
        matrix, bias = projection(weights, i, name)
    else:
        return None
    rows = x.reshape(-1, x.shape[-1])
    rows = rows[:: max(1, len(rows) // SAMPLED)][:SAMPLED]
    columns = slice(None, None, max(1, matrix.shape[1] // SAMPLED_COLUMNS))
    matrix, bias = matrix[:, columns].float().contiguous(), bias[columns].float()
    truth = rows.double() @ matrix.double() + bias.double()
    total = bias.repeat(len(rows), 1)
    for k in range(len(matrix)):
        total.addr_(rows[:, k].float(), matrix[k])
    return error(total, truth).rms
