"""Comparison of a candidate's arrays with golden ones: verdict, local differences, findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from compat.checkpoint import Source
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS
from compat.config import HALF, dtype_name
from compat.errors import ParityError, listed
from compat.golden_files.backward import Backward, causal_part, readers_of
from compat.golden_files.bounds import Bound, Error, error
from compat.golden_files.candidate import Candidate, as_candidate, precision
from compat.golden_files.contents import GRADIENT, LOSS
from compat.golden_files.diagnose import diagnose
from compat.golden_files.file import CandidateSource, Golden, Rename
from compat.golden_files.layouts import LAYOUTS
from compat.golden_files.pieces import GPT2, MissingWeightError, Weights, cut, run_segment, segment
from compat.golden_files.report import GoldenReport
from compat.parity import Difference, InputResult, LogitsProof, TapResult
from compat.tap import tap_names


def check(
    golden: Golden, candidate: CandidateSource, model: Source | None, rename: Rename | None
) -> GoldenReport:
    """Compare a candidate's arrays with golden ones, see `Golden.check`."""
    found = as_candidate(golden, candidate, rename)
    if model is None and golden.source == "demo":  # which needs no download
        model = "demo"
    checkpoint = None if model is None else golden.open_model(model)
    comparison = Comparison(golden, found, golden.weights(checkpoint))
    results = comparison.results()
    notes = [*golden.metadata.get("notes", []), *found.notes, *comparison.notes]
    logits = LogitsProof()
    if comparison.logits is not None:
        B, T = golden.ids.shape
        logits.inputs.append(InputResult("the golden ids", (B, T), comparison.logits))
        logits.ids_tried = len(torch.unique(golden.ids))
    if checkpoint is None and not all(result.local for result in results):
        notes.append(
            "pieces with a matrix were not checked on the candidate's own inputs, because the "
            f"checkpoint was not passed. Pass it as model (--model {golden.source})"
        )
    return GoldenReport(
        source=golden.source,
        model_name=found.name,
        dtype=golden.metadata["dtype"],
        input_shape=(golden.ids.shape[0], golden.ids.shape[1]),
        calibrated=True,
        training=False,
        taps=results,
        versions=golden.metadata["versions"],
        logits=logits,
        notes=notes,
        findings=diagnose(comparison, results),
        recorded=len(golden.judged),
    )


class Comparison:
    """The comparison of a candidate with golden arrays.

    Args:
        golden: the golden arrays.
        candidate: the arrays of the candidate.
        weights: the weights of the pieces.
    """

    def __init__(self, golden: Golden, candidate: Candidate, weights: Weights) -> None:
        B, T = golden.ids.shape
        short = any(entry.short for entry in candidate.entries.values())
        self.length = T - 1 if short else T  # of the sequences that are compared
        self.golden, self.candidate, self.golden_weights = golden, candidate, weights
        self.weights = weights.cut(B, self.length)
        self.notes: list[str] = []
        if short:
            self.notes.append(
                f"compared at {T - 1} of {T} positions, because the candidate seems to have run on "
                "input_ids[:, :-1]"
            )
        self._plain: list[str] = []  # norms stored before weight and bias are applied
        self.logits: Difference | None = None
        self.bounds: dict[str, Bound] = {}
        self._precision = torch.float64  # the narrowest one so far, in execution order
        self._narrowed = ""
        self._layouts: dict[str, list[str]] = {}

    def results(self) -> list[TapResult]:
        """Compare every array that both have, in execution order."""
        found, unjudged = [], []
        for name in self.golden.judged:
            if name in self.candidate.entries:
                result = self._compare(name)
                if math.isnan(self.bounds[name].rms):
                    unjudged.append(name)
                else:
                    found.append(result)
        dtype = dtype_name(self._precision)
        if self._narrowed:
            self.notes.append(
                f"{self._narrowed} has {dtype} values, so the bounds for {dtype} apply to it and "
                "to all later arrays, and small deviations stay undetected"
            )
        if unjudged:
            text = f"rounding to {dtype} alone may cause an error of 50% in {listed(unjudged, 4)}"
            if not found:
                raise ParityError(
                    f"no array can be compared, because {text}. Compute and store them in float32."
                )
            self.notes.append(f"not compared, because {text}")
        if self._plain:
            self.notes.append(
                "weight and bias were applied to norms that were stored without them: "
                + listed(self._plain, 3)
            )
        for text, names in self._layouts.items():
            self.notes.append(f"read as [{text}]: {listed(names, 3)}")
        return found

    def _compare(self, name: str) -> TapResult:
        entry = self.candidate.entries[name]
        expected = self.expected(name)
        expected = expected[:, -1:] if entry.last_only else expected
        options = [n for n, x in enumerate(entry.layouts) if x.text == self._stored_as]
        options = options or list(range(len(entry.layouts))) or [0]
        measured = []
        for number in options:
            entry.chosen = number
            value = self._value(name)
            if name.startswith(GRADIENT):  # entries without an effect are not compared
                value = causal_part(name, value) + (expected - causal_part(name, expected))
            measured.append((error(value, expected), number))
        # Several layouts have the same shape if sizes are equal, such as B and T.
        best, entry.chosen = min(
            measured, key=lambda found: (math.isnan(found[0].rms), found[0].rms)
        )
        if entry.norm is not None:
            self._plain.append(name)
            if (other := error(self._value(name), expected)).rms < best.rms:
                best = other
            else:
                self._plain.pop()
        if entry.layouts and (layout := entry.layouts[entry.chosen]).text != layout.canonical:
            self._layouts.setdefault(layout.text, []).append(name)
        bound = self.bounds[name] = self._bound(name)
        accumulated = _judged(best, bound.own, bound.rms, bound.worst)
        if name == "logits":  # judged by the worst position
            self.logits = replace(accumulated, ratio=None, error=best.worst, bound=bound.worst)
        local = self._local(name, accumulated.within)
        return TapResult(name, accumulated, local)

    def _bound(self, name: str) -> Bound:
        found = precision(self.candidate.read(name))
        if found in HALF:
            if self._precision not in HALF:
                self._narrowed = name
            if found == torch.bfloat16 or self._precision not in HALF:
                self._precision = found
        return self.golden.bound(name, self._precision)

    def known(self, name: str) -> bool:
        """Return whether the candidate has a tap at every position."""
        entry = self.candidate.entries.get(name)
        return entry is not None and not entry.last_only

    def value(self, name: str) -> Tensor:
        """Return the candidate's array in float64."""
        value = self._value(name).double()
        return causal_part(name, value) if name.startswith(GRADIENT) else value

    def expected(self, name: str) -> Tensor:
        """Return the golden array at the positions that are compared."""
        expected = self.golden.read(name)
        if name in self.golden.taps:
            expected = cut(name, expected, len(expected), self.length)
        return expected

    def _value(self, name: str) -> Tensor:
        value = self.candidate.read(name)
        if name in self.golden.taps:
            value = cut(name, value, len(value), self.length)
        if name in self._plain:
            norm = self.candidate.entries[name].norm
            value = value * self.weights[f"{norm}.weight"] + self.weights[f"{norm}.bias"]
        return value

    @cached_property
    def _stored_as(self) -> str | None:
        """The layout of the candidate's matrices, as shown by those that are not square."""
        texts = [
            [x.text for x in entry.layouts]
            for name, entry in self.candidate.entries.items()
            if not name.endswith((EMBEDDING, POSITIONS, HEAD))
        ]
        known = {text for [text] in (t for t in texts if len(t) == 1) if text in LAYOUTS["matrix"]}
        return known.pop() if len(known) == 1 else None

    @cached_property
    def backward(self) -> Backward:
        """The backward pass on the golden hidden states and the candidate's gradients."""

        def known(tap: str) -> Tensor | None:
            name = GRADIENT + tap
            return self.value(name) if name in self.candidate.entries else None

        return Backward(self.golden_weights, self.golden, known)

    def segment(self, tap: str) -> list[str]:
        """Return the taps to compute for a tap from the candidate's own ones, itself included."""
        return segment(tap, GPT2, self.weights.config.n_layer, self.known)

    def computed(self, names: Sequence[str]) -> Tensor | None:
        """Compute a segment by GPT-2's formulas; None if a weight is not available."""
        try:
            return run_segment(names, GPT2, self.weights, self.value)
        except MissingWeightError:
            return None

    def _local(self, name: str, within: bool) -> Difference | None:
        """Measure the difference of a tap from GPT-2's formula on the candidate's own inputs."""
        n_layer = self.weights.config.n_layer
        if name.startswith(GRADIENT) and not within:
            return self._local_gradient(name)
        if name not in tap_names(n_layer) or self.candidate.entries[name].last_only:
            return None
        names = self.segment(name)
        if "embed" in names and len(names) > 1:
            return None  # the segment would start at the ids, so the difference is not local
        expected = self.computed(names)
        if expected is None:
            return None
        bound = self.bounds[name]
        largest = bound.local if len(names) == 1 else max(bound.local, bound.rms)
        found = error(self.value(name), expected)
        judged = _judged(found, bound.own, largest, math.inf)
        if within and not judged.within:
            # The accumulated difference alone determines the verdict.
            judged = replace(judged, bound=None, within=True)
        return judged

    def _local_gradient(self, name: str) -> Difference | None:
        """Measure the difference of a wrong gradient from the one that later gradients imply."""
        own = name.removeprefix(GRADIENT)
        readers = readers_of(own, self.weights.config)
        if not all(reader == LOSS or self.backward.known(reader) is not None for reader in readers):
            return None
        try:
            expected = self.backward.gradient(own)
        except LookupError:  # a weight or a tap was not recorded
            return None
        bound = self.bounds[name]
        return _judged(error(self.value(name), expected), bound.own, bound.rms, math.inf)


def _judged(found: Error, own: float, largest: float, worst: float) -> Difference:
    """Return the difference, with the error and the bound whose ratio is largest."""
    judged, bound = found.rms, largest
    if found.worst * largest > found.rms * worst:
        judged, bound = found.worst, worst
    within = found.rms <= largest and found.worst <= worst
    ratio = found.rms / own if own else None
    return Difference(
        found.max_abs, found.rms, found.identical, ratio, judged, bound, found.identical or within
    )
