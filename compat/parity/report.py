"""What a parity check found: the numbers, the verdict, and one sentence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from compat.errors import ParityError
from compat.parity.compare import Difference, TapResult, count_identical
from compat.parity.conditions import Limit
from compat.parity.logits import InputResult, LogitsProof


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
        logits: the comparison of logits on designed inputs, and how far it reaches.
        notes: what limits the meaning of the comparison, such as weights that compat translated
            before `transformers` read them.
        float32: of a model in half precision the same report for a float32 copy of it, in which
            rounding hides no fault; else None.
    """

    model: str
    dialect: str
    dtype: str
    input_shape: tuple[int, int]
    calibrated: bool
    training: bool
    taps: list[TapResult]
    versions: dict[str, str]
    logits: LogitsProof
    notes: list[str] = field(default_factory=list)
    float32: ParityReport | None = None

    @property
    def passed(self) -> bool:
        """Every tap and the logits on every input are within their bounds, in float32 too."""
        copy = self.float32 is None or self.float32.passed
        return all(tap.passed for tap in self.taps) and self.logits.passed and copy

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_failed(self) -> None:
        """Raise a ParityError with the headline unless the check passed."""
        if not self.passed:
            raise ParityError(self.headline)

    @property
    def smallest_detectable(self) -> float:
        """The relative error of the logits at one position that would still have failed."""
        return min(r.logits.smallest_detectable for r in (self, self.float32) if r is not None)

    @property
    def limits(self) -> list[Limit]:
        """What the comparison did not reach, with the line of the user's code."""
        return [limit for r in (self, self.float32) if r is not None for limit in r.logits.limits]

    @property
    def first_divergence(self) -> str | None:
        """The first tap, in execution order, that is out of bounds; "logits" if none is, but the
        logits of another input are."""
        if self._first is not None:
            return self._first.tap
        if not self.logits.passed:
            return "logits"
        return None if self.float32 is None else self.float32.first_divergence

    @property
    def max_abs_diff(self) -> float:
        """max|Δ| of the logits, run from the input ids.

        Of a model that passes and has a tap for them, on the input of the taps; else the largest
        over all inputs.
        """
        last = self.taps[-1] if self.taps else None
        if self.passed and last is not None and last.tap == "logits":
            return last.accumulated.max_abs
        return self.logits.max_abs

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        if self._first is not None:
            return self._divergence(self._first)
        if self.logits.failed:
            return self._divergence_of_logits(self.logits.failed[0])
        if not self.logits.passed:
            return f"{self.dialect} was not compared: no input gave logits."
        if self.float32 is not None and not self.float32.passed:
            return f"In a float32 copy of the model, {self.float32.headline}"
        return self._parity()

    @property
    def _first(self) -> TapResult | None:
        return next((result for result in self.taps if not result.passed), None)

    def _parity(self) -> str:
        total, (far, near) = len(self.taps), count_identical(self.taps)
        text = f"{self.dialect} computes what transformers computes: "
        if total:
            identical = f"bit-identical at {far} from the ids on, at {near} locally"
            text += f"{total} of {total} taps, "
            text += f"{'all bit-identical' if far == near == total else identical}; "
        text += f"max|Δlogits| = {self.max_abs_diff:.2g}"
        proof = self.logits if self.float32 is None else self.float32.logits
        inputs = proof.inputs
        longest = max(result.input_shape[1] for result in inputs)
        return f"{text}; {len(inputs)} inputs of up to {longest:,} ids"

    def _divergence_of_logits(self, failed: InputResult) -> str:
        B, T = failed.input_shape
        text = f"{self.dialect} diverges from transformers on {failed.name} ({B} × {T} ids): "
        found = failed.logits
        if found is None:
            text += failed.error
        else:
            bound = "" if found.bound is None else f", the bound is {found.bound:.2g}"
            text += f"the relative error at the worst position is {found.error:.2g}{bound}"
        passed = sum(result.passed for result in self.logits.inputs)
        text += f"; {passed} of {len(self.logits.inputs)} inputs pass."
        return text + self._training_hint()

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
        return text + self._training_hint()

    def _training_hint(self) -> str:
        hint = " The model is in training mode: dropout is on; call eval()."
        return hint if self.training else ""

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
            "inputs": [_input(result) for result in self.logits.inputs],
            "embedding": None if self.logits.embedding is None else _input(self.logits.embedding),
            "ids_tried": self.logits.ids_tried,
            "smallest_detectable": _finite(self.smallest_detectable),
            "limits": [asdict(limit) for limit in self.limits],
            "notes": self.notes,
            "float32": None if self.float32 is None else self.float32.to_json(),
            "versions": self.versions,
        }


def _input(result: InputResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "input_shape": list(result.input_shape),
        "passed": result.passed,
        "error": result.error,
        "logits": None if result.logits is None else _plain(result.logits),
    }


def _plain(found: Difference) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(found).items()}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
