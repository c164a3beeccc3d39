"""Comparison of traces: tensors by the name of their tap, without any knowledge of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compat.errors import ParityError

# The largest ratio of our RMS error against float64 to the reference's own.
MAX_ERROR_RATIO = 2.0

# Without a float64 run: the RMS difference, in units of epsilon, that each piece of the model may
# add. Measured: 0.7 for a written-out layer norm, 0 for all other pieces.
PIECE_ROUNDINGS = 4.0


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
    taps = list(accumulated)
    for tap, ours in [*accumulated.items(), *(local or {}).items()]:
        if ours.shape != reference[tap].shape:
            raise ParityError(
                f"tap {tap} has shape {list(ours.shape)}; expected {list(reference[tap].shape)}. "
                "Name the module that computes this hidden state, with `item` or `part` if it "
                "returns several."
            )
    if exact is None:
        tolerances = _tolerances_without_float64(reference, taps)
    else:
        tolerances = _tolerances_with_float64(reference, exact, taps)
    exact, exact_local = exact or {}, exact_local or {}
    return [
        TapResult(
            tap,
            difference(accumulated[tap], reference[tap], exact.get(tap), accumulated_tolerance),
            None
            if local is None
            else difference(local[tap], reference[tap], exact_local.get(tap), local_tolerance),
        )
        for tap, (accumulated_tolerance, local_tolerance) in tolerances.items()
    ]


def compare_accumulated(
    tensors: Iterable[tuple[str, Tensor, Tensor, Tensor]],
) -> Iterator[tuple[str, Difference]]:
    """Compare tensors against float64, in the order in which they are computed.

    Args:
        tensors: tuples of a name, the model's tensor, the reference's, and the reference's in
            float64.
    """
    accumulated = 0.0
    for name, ours, reference, exact in tensors:
        accumulated = max(accumulated, *_rounding_and_error(reference, exact))
        yield name, difference(ours, reference, exact, accumulated)


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
    identical = bool(torch.equal(ours, reference))
    ours, reference = ours.double(), reference.double()
    delta, scale, ratio = rms(ours - reference), rms(reference), None
    error = rel_rms = _ratio(delta, scale)
    within, bound = tolerance is None, tolerance
    if exact is not None and tolerance is not None:
        our_error, reference_error = rms(ours - exact), rms(reference - exact)
        within = our_error <= MAX_ERROR_RATIO * max(reference_error, tolerance * scale)
        ratio, error = _ratio(our_error, reference_error), _ratio(our_error, scale)
        bound = MAX_ERROR_RATIO * max(_ratio(reference_error, scale), tolerance)
    elif tolerance is not None:
        within = delta <= tolerance * scale
    max_abs = (ours - reference).abs().max().item()
    return Difference(max_abs, rel_rms, identical, ratio, error, bound, identical or within)


def _tolerances_with_float64(
    reference: Mapping[str, Tensor], exact: Mapping[str, Tensor], taps: Sequence[str]
) -> dict[str, tuple[float | None, float]]:
    """The tolerances of the accumulated and of the local error at every tap.

    Rounding the result costs a quarter epsilon, and the sums before it an epsilon of float32. With
    few values, as in a text of one token, the reference's error may by chance be smaller than that,
    or smaller at one tap than at the taps before it.
    """
    tolerances: dict[str, tuple[float | None, float]] = {}
    accumulated = 0.0
    for tap in taps:
        rounding, error = _rounding_and_error(reference[tap], exact[tap])
        accumulated = max(accumulated, rounding, error)
        tolerances[tap] = accumulated, rounding
    return tolerances


def _rounding_and_error(reference: Tensor, exact: Tensor) -> tuple[float, float]:
    """The error of rounding the result, and the relative error of the reference against float64.

    The error is relative to the exact value: a reference that underflows to zero has an infinite
    error relative to itself, which would allow anything after it.
    """
    rounding = torch.finfo(reference.dtype).eps / 4 + torch.finfo(torch.float32).eps
    return rounding, _ratio(rms(reference.double() - exact), rms(exact))


def _tolerances_without_float64(
    reference: Mapping[str, Tensor], taps: Sequence[str]
) -> dict[str, tuple[float | None, float]]:
    """The same without a float64 run, where the accumulated error is not judged.

    A model with few taps has long pieces, in which the errors of several of the reference's pieces
    add up.
    """
    tolerances: dict[str, tuple[float | None, float]] = {}
    order, previous = {tap: place for place, tap in enumerate(reference)}, -1
    for tap in taps:
        roundings = PIECE_ROUNDINGS * (order[tap] - previous) ** 0.5
        tolerances[tap] = None, roundings * torch.finfo(reference[tap].dtype).eps
        previous = order[tap]
    return tolerances


def rms(x: Tensor) -> float:
    """Root mean square over all elements."""
    return x.square().mean().sqrt().item()


def _ratio(numerator: float, denominator: float) -> float:
    if numerator == 0:
        return 0.0
    return numerator / denominator if denominator else float("inf")
