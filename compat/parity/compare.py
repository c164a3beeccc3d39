"""Comparison of traces: tensors by the name of their tap, without any knowledge of models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compat.errors import ParityError

# The largest ratio of our RMS error against float64 to the reference's own: over a tensor, and at
# the worst position of each.
MAX_ERROR_RATIO = 2.0
MAX_POSITION_RATIO = 2 * MAX_ERROR_RATIO

# Without a float64 run: the RMS difference, in units of epsilon, that each piece of the model may
# add. Measured: 0.7 for a written-out layer norm, 0 for all other pieces.
PIECE_ROUNDINGS = 4.0

AT_ONCE = 1 << 16  # numbers that are converted to float64 at once, so that they stay in the cache
POSITIONS_AT_ONCE = 64  # positions whose logits are compared at once


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor of the model and the reference's.

    Args:
        max_abs: max|Δ|, in the tensor's own units.
        rel_rms: RMS of Δ over the RMS of the reference's tensor.
        bit_identical: whether no element differs.
        ratio: our RMS error over the reference's own, both against float64; None without float64.
        error: the number that is judged: our RMS error against float64 over the reference's RMS;
            without float64 the same as `rel_rms`.
        bound: the largest `error` that passes; None where the error is not judged.
        within: whether the difference passes: it is bit-identical, within the bound, or not judged.
    """

    max_abs: float
    rel_rms: float
    bit_identical: bool
    ratio: float | None
    error: float
    bound: float | None
    within: bool


@dataclass(frozen=True)
class TapResult:
    """The comparison at one tap.

    Args:
        tap: its name, such as "h.0.act".
        accumulated: both models run from the input ids.
        local: the piece that ends at the tap gets the reference's input; None if no piece could be
            run separately.
    """

    tap: str
    accumulated: Difference
    local: Difference | None

    @property
    def passed(self) -> bool:
        return self.accumulated.within and (self.local is None or self.local.within)


def compare(
    reference: Mapping[str, Tensor],
    accumulated: Mapping[str, Tensor],
    local: Mapping[str, Tensor] | None,
    exact: Mapping[str, Tensor] | None = None,
    exact_local: Mapping[str, Tensor] | None = None,
) -> list[TapResult]:
    """Compare a model's traces with the reference's at every tap of the model, in its order.

    Without float64 only local differences are judged: the growth of accumulated rounding errors
    depends on the weights, and if every piece is right, so is the whole model.

    Args:
        reference: the reference's trace.
        accumulated: the model's trace, run from the input ids.
        local: the model's trace, every piece fed with the reference's input; None if the pieces
            cannot be run separately.
        exact: the reference's trace in float64, run from the input ids; or None.
        exact_local: the reference's trace in float64, every piece fed with the reference's input;
            or None.

    Raises:
        ParityError: at a tap, the shape differs from the reference's.
    """
    for tap, ours in [*accumulated.items(), *(local or {}).items()]:
        if ours.shape != reference[tap].shape:
            raise ParityError(
                f"tap {tap} has shape {list(ours.shape)}, but must have "
                f"{list(reference[tap].shape)}. Name the module that computes this hidden state, "
                "with `item` or `part` if it returns several."
            )
    if exact is None:
        judged = {
            tap: difference(ours, reference[tap], None, None) for tap, ours in accumulated.items()
        }
        tolerances = _tolerances_without_float64(reference, accumulated)
    else:
        judged = dict(
            compare_accumulated(
                (tap, ours, reference[tap], exact[tap]) for tap, ours in accumulated.items()
            )
        )
        tolerances = {tap: rounding(reference[tap].dtype) for tap in accumulated}
    true = exact_local or {}
    judged_locally = {
        tap: difference(ours, reference[tap], true.get(tap), tolerances[tap])
        for tap, ours in (local or {}).items()
    }
    return [TapResult(tap, found, judged_locally.get(tap)) for tap, found in judged.items()]


def compare_accumulated(
    tensors: Iterable[tuple[str, Tensor, Tensor, Tensor]],
) -> Iterator[tuple[str, Difference]]:
    """Compare tensors against float64, in the order in which they are computed.

    With few values, as in a text of one token, the reference's error may by chance be smaller than
    rounding, or smaller at one tensor than at those before it.

    Args:
        tensors: tuples of a name, the model's tensor, the reference's, and the reference's in
            float64.
    """
    accumulated = 0.0
    for name, ours, reference, exact in tensors:
        measured = _measure(ours, reference, exact)
        accumulated = max(accumulated, rounding(reference.dtype), measured.reference_relative)
        yield name, measured.judged(accumulated)


def difference(
    ours: Tensor, reference: Tensor, exact: Tensor | None, tolerance: float | None
) -> Difference:
    """Measure a tensor against the reference's, and judge the error.

    With the float64 value, our RMS error may be up to MAX_ERROR_RATIO times the larger of the
    reference's own error and the tolerance. Without it, the RMS of Δ may be up to the tolerance.

    Args:
        ours: the model's tensor, with the reference's shape and data type.
        reference: the tensor to compare with.
        exact: the same tensor in float64, or None.
        tolerance: an error that is always allowed, over the reference's RMS; None: not judged.
    """
    return _measure(ours, reference, exact).judged(tolerance)


@dataclass(frozen=True)
class _Measured:
    """A tensor against the reference's and the one in float64; the numbers are RMS.

    Args:
        identical: whether no element differs.
        max_abs: max|ours − reference|.
        delta: ours − reference.
        scale: the reference.
        against_exact: ours − exact, and reference − exact; None without float64.
        exact_scale: the one in float64.
    """

    identical: bool
    max_abs: float
    delta: float
    scale: float
    against_exact: tuple[float, float] | None
    exact_scale: float

    @property
    def reference_relative(self) -> float:
        """The relative error of the reference against float64.

        It is relative to the exact value: a reference that underflows to zero has an infinite error
        relative to itself, which would allow anything after it.
        """
        _, reference_error = self.against_exact or (0.0, 0.0)
        return quotient(reference_error, self.exact_scale)

    def judged(self, tolerance: float | None) -> Difference:
        """Judge the error, as in `difference`."""
        ratio = None
        error = rel_rms = quotient(self.delta, self.scale)
        within, bound = tolerance is None, tolerance
        if self.against_exact is not None and tolerance is not None:
            our_error, reference_error = self.against_exact
            within = our_error <= MAX_ERROR_RATIO * max(reference_error, tolerance * self.scale)
            ratio, error = quotient(our_error, reference_error), quotient(our_error, self.scale)
            bound = MAX_ERROR_RATIO * max(quotient(reference_error, self.scale), tolerance)
        elif tolerance is not None:
            within = self.delta <= tolerance * self.scale
        within = self.identical or within
        return Difference(self.max_abs, rel_rms, self.identical, ratio, error, bound, within)


def _measure(ours: Tensor, reference: Tensor, exact: Tensor | None) -> _Measured:
    """Measure a tensor; the error of one that is identical to the reference is the reference's."""
    identical = bool(torch.equal(ours, reference))
    largest = torch.zeros((), dtype=torch.float64)
    delta = scale = our_error = reference_error = exact_scale = 0.0
    flat = [t.reshape(-1) for t in (ours, reference, reference if exact is None else exact)]
    for parts in zip(*(torch.split(t, AT_ONCE) for t in flat), strict=True):
        mine, theirs, true = (part.double() for part in parts)
        scale += _sum_of_squares(theirs)
        if not identical:
            delta += _sum_of_squares(mine - theirs)
            largest = torch.maximum(largest, (mine - theirs).abs().max())  # NaN stays NaN
        if exact is not None:
            exact_scale += _sum_of_squares(true)
            reference_error += _sum_of_squares(theirs - true)
            if not identical:
                our_error += _sum_of_squares(mine - true)
    if identical:
        delta = 0.0 if math.isfinite(scale) else math.nan  # as ∞ − ∞
        our_error = reference_error
    n = reference.numel()
    delta, scale, our_error, reference_error, exact_scale = (
        math.sqrt(total / n) for total in (delta, scale, our_error, reference_error, exact_scale)
    )
    max_abs = delta if identical else largest.item()
    against_exact = None if exact is None else (our_error, reference_error)
    return _Measured(identical, max_abs, delta, scale, against_exact, exact_scale)


def position_errors(ours: Tensor, expected: Tensor, truth: Tensor) -> Tensor:
    """Measure the worst position of values (…, T, V) against expected and true ones.

    The arithmetic is as wide as the widest of the data types, and at least float32. The long
    sequence has no float64 logits, so that it is compared in float32.

    Returns:
        (3,): max|Δ| from `expected`, and the relative errors of the worst position against
        `expected` and against `truth`. A NaN in the arguments is a NaN here.
    """
    worst = torch.zeros(3, dtype=torch.float64)
    dtype = torch.promote_types(torch.promote_types(ours.dtype, truth.dtype), torch.float32)
    tiny = torch.finfo(dtype).tiny
    flat = (t.reshape(-1, t.shape[-1]) for t in (ours, expected, truth))
    for parts in zip(*(torch.split(t, POSITIONS_AT_ONCE) for t in flat), strict=True):
        mine, theirs, true = (part.to(dtype) for part in parts)
        delta = mine - theirs
        rel_rms = error = (delta.norm(dim=-1) / theirs.norm(dim=-1).clamp(min=tiny)).max()
        if truth is not expected:
            error = ((mine - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=tiny)).max()
        found = torch.stack([delta.abs().max(), rel_rms, error])
        worst = torch.maximum(worst, found.double())
    return worst


def _sum_of_squares(x: Tensor) -> float:
    return torch.dot(x, x).item()


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of rounding to a data type, a quarter epsilon, or float32 sums."""
    return torch.finfo(dtype).eps / 4 + torch.finfo(torch.float32).eps


def _tolerances_without_float64(
    reference: Mapping[str, Tensor], taps: Iterable[str]
) -> dict[str, float]:
    """Return the tolerance of the local error at every tap.

    A model with few taps has long pieces, in which the errors of several of the reference's pieces
    add up.
    """
    tolerances: dict[str, float] = {}
    order, previous = {tap: place for place, tap in enumerate(reference)}, -1
    for tap in taps:
        roundings = PIECE_ROUNDINGS * (order[tap] - previous) ** 0.5
        tolerances[tap] = roundings * torch.finfo(reference[tap].dtype).eps
        previous = order[tap]
    return tolerances


def rms(x: Tensor) -> float:
    """Return the root mean square over all elements."""
    return x.square().mean().sqrt().item()


def quotient(numerator: float, denominator: float) -> float:
    """Return the quotient; 0 / 0 is 0, and any other number over 0 is infinite."""
    if numerator == 0:
        return 0.0
    return numerator / denominator if denominator else float("inf")
