"""The result of a parity check: the numbers, the verdict, and a headline."""

from __future__ import annotations

import linecache
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from compat.display import HtmlPage
from compat.errors import ParityError, collapse_layers, listed
from compat.parity.compare import Difference, TapResult


@dataclass(frozen=True)
class Limit:
    """A limit of the proof, such as a condition that was always true, or never, on all inputs.

    Args:
        message: what the proof did not cover.
        file: the file of the user's code, or None if no line is known.
        line: the line in that file, from 1.
    """

    message: str
    file: str | None = None
    line: int | None = None

    @property
    def source_line(self) -> str:
        return linecache.getline(self.file, self.line or 0).strip() if self.file else ""


@dataclass(frozen=True)
class InputResult:
    """The comparison of the logits on one input.

    Args:
        name: a description of the input.
        input_shape: (B, T).
        logits: the difference at the worst position; None if the model did not return logits.
        error: what the model raised or returned instead.
        file, line: where the user's code raised it, if it did.
    """

    name: str
    input_shape: tuple[int, int]
    logits: Difference | None = None
    error: str = ""
    file: str | None = None
    line: int | None = None

    @property
    def passed(self) -> bool:
        return self.logits is not None and self.logits.within


@dataclass
class LogitsProof:
    """The comparisons of logits, and their limits.

    Args:
        inputs: one result per input.
        limits: conditions with only one reached outcome, and other limits of the proof.
        ids_tried: the number of ids of the vocabulary that occurred in an input.
        embedding: the comparison of the embedding of every id, if the model has a tap for it.
    """

    inputs: list[InputResult] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    ids_tried: int = 0
    embedding: InputResult | None = None

    def add_limit(self, message: str, file: str | None = None, line: int | None = None) -> None:
        """Add a limit unless it was added before."""
        limit = Limit(message, file, line)
        if limit not in self.limits:
            self.limits.append(limit)

    @property
    def failed(self) -> list[InputResult]:
        """The comparisons that did not pass."""
        embedding = [] if self.embedding is None else [self.embedding]
        return [result for result in (*self.inputs, *embedding) if not result.passed]

    @property
    def passed(self) -> bool:
        return bool(self.inputs) and not self.failed

    @property
    def _compared(self) -> list[Difference]:
        return [result.logits for result in self.inputs if result.logits is not None]

    @property
    def max_abs(self) -> float:
        """max|Δlogits| over all inputs."""
        return max((found.max_abs for found in self._compared), default=math.nan)

    @property
    def smallest_detectable(self) -> float:
        """The relative error of the logits of any one position that fails, whatever its sign.

        The model's own error adds to it or cancels part of it, and is therefore included.
        """
        bounds = [min(d.error, d.bound) + d.bound for d in self._compared if d.bound is not None]
        return max(bounds) if self.inputs and len(bounds) == len(self.inputs) else math.inf


@dataclass(frozen=True)
class WeightDifference:
    """A tensor of the checkpoint that the model holds with other values.

    Args:
        tensor: its Hugging Face name.
        max_abs: max|Δ|.
        rel_rms: RMS of Δ over the RMS of the checkpoint's tensor.
    """

    tensor: str
    max_abs: float
    rel_rms: float


@dataclass(frozen=True)
class GradientResult:
    """The comparison of the gradients of the parameters that hold one tensor.

    Args:
        tensor: its Hugging Face name.
        parameters: the names in the model.
        difference: the difference of the gradients of all these parameters together.
        unused: those of the parameters that the backward pass does not reach.
    """

    tensor: str
    parameters: tuple[str, ...]
    difference: Difference
    unused: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.difference.within


@dataclass
class GradientsProof:
    """The comparison of the gradients of all parameters.

    Args:
        results: one for each tensor, in the order of the backward pass.
        frozen: parameters with `requires_grad=False`, which were compared nevertheless.
        error: the exception that the model raised; nothing was compared then.
    """

    results: list[GradientResult] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def failed(self) -> list[GradientResult]:
        return [result for result in self.results if not result.passed]

    @property
    def passed(self) -> bool:
        return bool(self.results) and not self.failed

    @property
    def headline(self) -> str:
        """The verdict in one sentence, with the first divergence from the logits downwards."""
        total = len(self.results)
        if self.error:
            return f"its gradients could not be computed: {self.error}."
        if self.passed:
            return f"the gradients of all {total} tensors agree."
        first = self.failed[0]
        names, found = listed(first.parameters, 3), first.difference
        text = (
            "from the logits downwards, the first gradient that diverges is that of "
            f"{first.tensor}{'' if names == first.tensor else f' ({names})'}: "
        )
        if len(first.unused) == len(first.parameters):
            text += "the backward pass does not reach it"
        else:
            text += f"the error is {found.rel_rms:.2g} of its RMS"
            if found.ratio is not None and math.isfinite(found.ratio):
                text += f", {found.ratio:,.0f} times the reference's own"
        return f"{text}; {total - len(self.failed)} of {total} tensors pass."


@dataclass(frozen=True, repr=False)
class ParityReport(HtmlPage):
    """The result of `check_parity`; `to_json(full=True)` has the same fields.

    Args:
        source: the checkpoint, as it was passed to `check_parity`.
        model_name: the dialect, or the class of the user's model.
        dtype: the data type of both models, such as "float32".
        input_shape: (B, T) of the ids on which the taps were compared.
        calibrated: whether hidden states were judged against a float64 run of the reference.
        training: whether the model was in training mode, in which dropout is active.
        taps: one result per tap, in execution order.
        versions: the versions of compat, torch, transformers and Python.
        logits: the comparison of logits on designed inputs.
        notes: facts that restrict the comparison, such as that compat translated the weights
            before `transformers` read them.
        float32: for a model in half precision, the report of the same model with its parameters in
            float32, where rounding hides no fault; otherwise None.
        gradients: the comparison of gradients, if it was requested; those of a model in half
            precision are in `float32`.
        weights: the tensors whose values differ between a failing model and the checkpoint, such as
            after fine-tuning, sorted by the difference. Empty without a name map.
    """

    source: str
    model_name: str
    dtype: str
    input_shape: tuple[int, int]
    calibrated: bool
    training: bool
    taps: list[TapResult]
    versions: dict[str, str]
    logits: LogitsProof
    notes: list[str] = field(default_factory=list)
    float32: ParityReport | None = None
    gradients: GradientsProof | None = None
    weights: list[WeightDifference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every tap, the logits on every input and the gradients are in bounds."""
        float32_passed = self.float32 is None or self.float32.passed
        trains = self.gradients is None or self.gradients.passed
        predicts = all(tap.passed for tap in self.taps) and self.logits.passed
        return predicts and trains and float32_passed

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_failed(self) -> None:
        """Raise an error unless the check passed.

        Raises:
            ParityError: the check did not pass; the message is the headline.
        """
        if not self.passed:
            raise ParityError(self.headline)

    @property
    def smallest_detectable(self) -> float:
        """The relative error of the logits at one position that would still have failed."""
        return min(proof.smallest_detectable for proof in self._proofs)

    @property
    def limits(self) -> list[Limit]:
        """What the comparison did not cover, with the lines of the user's code."""
        return [limit for proof in self._proofs for limit in proof.limits]

    @property
    def first_divergence(self) -> str | None:
        """The first tap, in execution order, that is out of bounds.

        It is "logits" if no tap is, but the logits of another input are, and "gradient of" a tensor
        if all logits are in bounds; None if the check passed.
        """
        return self._outcome[0]

    @property
    def max_abs_diff(self) -> float:
        """max|Δlogits|, with both models run from the input ids.

        If the model passes and has a tap for its logits, the input is that of the taps; otherwise
        it is the largest value over all inputs.
        """
        last = self.taps[-1] if self.taps else None
        if self.passed and last is not None and last.tap == "logits":
            return last.accumulated.max_abs
        return self.logits.max_abs

    @property
    def headline(self) -> str:
        """The verdict in one sentence, after one about weights that are not the checkpoint's."""
        return f"{self._other_weights()}{self._outcome[1]}"

    def _other_weights(self) -> str:
        if not self.weights:
            return ""
        names, most = [found.tensor for found in self.weights], self.weights[0]
        n = len(names)
        differ = f"{n} tensors differ" if n > 1 else "1 tensor differs"
        return (
            f"{self.model_name} has other weights than {self.source}: {differ} "
            f"({listed(collapse_layers(sorted(names)), 6)}), {most.tensor} by "
            f"{most.rel_rms:.2g} of its RMS{' and the others by less' if n > 1 else ''}. Load the "
            "checkpoint into the model to compare its code alone. With these weights, "
        )

    @property
    def _outcome(self) -> tuple[str | None, str]:
        """The first divergence, see `first_divergence`, and the verdict in one sentence."""
        for result in self.taps:
            if not result.passed:
                return result.tap, self._divergence_at(result)
        if self.logits.failed:
            return "logits", self._divergence_on(self.logits.failed[0])
        if not self.logits.passed:
            return "logits", f"{self.model_name} was not compared, because no input fits it."
        if self.gradients is not None and not self.gradients.passed:
            failed = self.gradients.failed
            return f"gradient of {failed[0].tensor}" if failed else "gradients", (
                f"{self.model_name} computes what transformers computes, but trains differently: "
                f"{self.gradients.headline}{self._training_hint()}"
            )
        if self.float32 is not None and not self.float32.passed:
            text = f"With its parameters in float32, {self.float32.headline}"
            return self.float32.first_divergence, text
        return None, self._agreement()

    @property
    def _last(self) -> ParityReport:
        """The report in float32, of a model in half precision; otherwise this one."""
        return self if self.float32 is None else self.float32

    @property
    def _proofs(self) -> list[LogitsProof]:
        return [self.logits] if self.float32 is None else [self.logits, self.float32.logits]

    def _agreement(self) -> str:
        text = f"{self.model_name} computes what transformers computes: "
        if total := len(self.taps):
            accumulated = sum(result.accumulated.bit_identical for result in self.taps)
            local = sum(bool(result.local and result.local.bit_identical) for result in self.taps)
            identical = f"{accumulated} bit-identical from the input ids on"
            if any(result.local for result in self.taps):
                identical += f" and {local} locally"
            if accumulated == local == total:
                identical = "all bit-identical"
            text += f"{total} of {total} taps pass, {identical}; "
        inputs = self._last.logits.inputs
        longest = max(result.input_shape[1] for result in inputs)
        text += f"max|Δlogits| = {self.max_abs_diff:.2g}; "
        if len(inputs) == 1:
            text += f"1 input of {longest:,} ids passes"
        else:
            text += f"{len(inputs)} inputs of up to {longest:,} ids pass"
        trained = self._last.gradients
        return f"{text}." if trained is None else f"{text}; {trained.headline}"

    def _divergence_on(self, failed: InputResult) -> str:
        B, T = failed.input_shape
        found, inputs = failed.logits, self.logits.inputs
        text = f"{self.model_name} diverges from transformers on {failed.name} ({B} × {T} ids): "
        if found is None:
            text += failed.error
        else:
            text += f"the relative error at the worst position is {found.error:.2g}"
            text += "" if found.bound is None else f", and the bound is {found.bound:.2g}"
        passed = sum(result.passed for result in inputs)
        return f"{text}; {passed} of {len(inputs)} inputs pass.{self._training_hint()}"

    def _divergence_at(self, first: TapResult) -> str:
        kind, found = "accumulated", first.accumulated
        if first.local is not None and not first.local.within:
            kind, found = ("local", first.local)
        text = f"{self.model_name} diverges from transformers at {first.tap}: the {kind} error is "
        text += f"{found.rel_rms:.2g} of the tensor's RMS"
        if found.ratio is not None:
            digits = 0 if found.ratio >= 10 else 1
            text += f", {found.ratio:,.{digits}f} times the reference's own"
        passed = sum(result.passed for result in self.taps)
        return f"{text}; {passed} of {len(self.taps)} taps pass.{self._training_hint()}"

    def _training_hint(self) -> str:
        if not self.training:
            return ""
        return " The model is in training mode, in which dropout is active. Call model.eval()."

    def __repr__(self) -> str:
        """Return the verdict, and the sentence that gives the reason."""
        return f"<ParityReport {'✓' if self.passed else '✗'} {self.headline}>"

    def to_json(self, *, full: bool = False) -> dict[str, Any]:
        """Return the report as plain values; a number that is not finite becomes None.

        Args:
            full: every tap, input and gradient, instead of the verdict and those out of bounds.
        """
        embedding = self.logits.embedding
        inputs, taps, trained = self.logits.inputs, self.taps, self.gradients
        if not full:
            inputs = [result for result in inputs if not result.passed]
            taps = [result for result in taps if not result.passed]
        found: dict[str, Any] = _finite(
            {
                "passed": self.passed,
                "headline": self.headline,
                "source": self.source,
                "model_name": self.model_name,
                "dtype": self.dtype,
                "input_shape": self.input_shape,
                "calibrated": self.calibrated,
                "max_abs_diff": self.max_abs_diff,
                "first_divergence": self.first_divergence,
                "taps": [_with_verdict(result) for result in taps],
                "inputs": [_with_verdict(result) for result in inputs],
                "embedding": None if embedding is None else _with_verdict(embedding),
                "ids_tried": self.logits.ids_tried,
                "smallest_detectable": self.smallest_detectable,
                "limits": [asdict(limit) for limit in self.limits],
                "notes": self.notes,
                "weights": [asdict(found) for found in self.weights],
                "gradients": None if trained is None else _gradients_json(trained, full),
                "float32": None if self.float32 is None else self.float32.to_json(full=full),
                "versions": self.versions,
            }
        )
        return found


def _gradients_json(proof: GradientsProof, full: bool) -> dict[str, Any]:
    results = [_with_verdict(result) for result in (proof.results if full else proof.failed)]
    return {**asdict(proof), "passed": proof.passed, "results": results}


def _with_verdict(result: TapResult | InputResult | GradientResult) -> dict[str, Any]:
    return {**asdict(result), "passed": result.passed}


def _finite(value: Any) -> Any:
    """Return a value for JSON: tuples become lists, and numbers that are not finite None."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
