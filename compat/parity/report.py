"""What a parity check found: the numbers, the verdict, and one sentence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from compat.parity.compare import Difference, TapResult, count_identical


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`; `to_json` has the same fields.

    Args:
        model: the source of the weights.
        dialect: the dialect, or the class of somebody else's model.
        dtype: of both models, such as "float32".
        input_shape: (B, T) of the ids that both models were run on.
        calibrated: whether errors were judged against a float64 run of the reference.
        training: whether our model was in training mode, in which dropout is at work.
        taps: one result per tap, in execution order.
        versions: of compat, torch, transformers and Python.
    """

    model: str
    dialect: str
    dtype: str
    input_shape: tuple[int, int]
    calibrated: bool
    training: bool
    taps: list[TapResult]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        return all(tap.passed for tap in self.taps)

    @property
    def first_divergence(self) -> str | None:
        """The first tap, in execution order, that is out of bounds."""
        return None if self._first is None else self._first.tap

    @property
    def max_abs_diff(self) -> float:
        """max|Δ| of the logits, run from the input ids."""
        return self.taps[-1].accumulated.max_abs

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return self._parity() if self._first is None else self._divergence(self._first)

    @property
    def _first(self) -> TapResult | None:
        return next((result for result in self.taps if not result.passed), None)

    def _parity(self) -> str:
        total, (far, near) = len(self.taps), count_identical(self.taps)
        identical = f"bit-identical at {far} from the ids on, at {near} locally"
        return (
            f"{self.dialect} computes what transformers computes: {total} of {total} taps, "
            f"{'all bit-identical' if far == near == total else identical}; "
            f"max|Δlogits| = {self.max_abs_diff:.2g}"
        )

    def _divergence(self, first: TapResult) -> str:
        kind, worse = "local", first.local
        if first.local.within:
            kind, worse = "accumulated", first.accumulated
        passed = sum(result.passed for result in self.taps)
        text = f"{self.dialect} diverges from transformers at {first.tap}: {kind} error "
        text += f"{worse.rel_rms:.2g} of the tensor's RMS"
        if worse.ratio is not None:
            text += f", {worse.ratio:,.{0 if worse.ratio >= 10 else 1}f} times the reference's own"
        text += f"; {passed} of {len(self.taps)} taps pass."
        if self.training:
            text += " The model is in training mode: dropout is on; call eval()."
        return text

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; a number that is not finite becomes None."""
        return {
            "passed": self.passed,
            "model": self.model,
            "dialect": self.dialect,
            "dtype": self.dtype,
            "input_shape": list(self.input_shape),
            "calibrated": self.calibrated,
            "max_abs_diff": _finite(self.max_abs_diff),
            "first_divergence": self.first_divergence,
            "taps": [
                {
                    "tap": result.tap,
                    "accumulated": _plain(result.accumulated),
                    "local": _plain(result.local),
                    "passed": result.passed,
                }
                for result in self.taps
            ],
            "versions": self.versions,
        }


def _plain(found: Difference) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(found).items()}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
