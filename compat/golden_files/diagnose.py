"""Diagnosis of a candidate: which piece is wrong, and what it computes instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compat.adaptation.result import Finding
from compat.errors import collapse_layers, listed
from compat.golden_files.backward import readers_of
from compat.golden_files.bounds import error, fitted_factor
from compat.golden_files.codes import CODES, MESSAGES
from compat.golden_files.contents import DECODE_IDS, DECODE_LOGITS, GRADIENT, LOSS
from compat.golden_files.deviations import (
    Hypothesis,
    Proposal,
    Situation,
    hypotheses,
    step_logits,
)
from compat.golden_files.gradient_deviations import WrongGradient, loss_values, proposals
from compat.golden_files.pieces import (
    GPT2,
    MissingWeightError,
    cut,
    inputs_of,
    labelled_inputs,
    run_segment,
    segment,
    split_name,
)
from compat.parity import TapResult
from compat.tap import tap_names

if TYPE_CHECKING:
    from compat.golden_files.check import Comparison

# A hypothesis is accepted if its error is at most SLACK times the bound, or at most 1/EXPLAINED of
# the difference: some formulas amplify rounding errors more than GPT-2's.
SLACK, EXPLAINED = 2.0, 100.0
# It also has to reduce the difference by this factor, so that rounding errors are not explained.
LEAST = 2.0
# A segment of more than LONG taps is computed in float32 for a part of the ids. GPT-2 is causal, so
# a prefix is sufficient for hypotheses about pieces that compute each token from earlier ones.
LONG, PREFIX = 16, (2, 32)
ACROSS_TOKENS = {"embed", "probs", "heads"}
# The pieces in which ports deviate most often. They are tried first in long segments.
MOST_FREQUENT = "act ln_f embed logits probs attn resid_mid q "
JOINED = ("tensors", "part", "pairs")  # values that differ between the layers of one finding
SHOWN = 6  # tensors in a message
PROBED = 16  # values that are compared first in the search for an array's tap


@dataclass(frozen=True)
class Deviation:
    """A deviation at one tap.

    Args:
        tap: the tap at which it was found.
        code: the code of the deviation.
        values: the values for the placeholders of the code's message and fix.
        evidence: the sentence that confirms it.
        fix: replaces the fix of the code, if it is not None.
    """

    tap: str
    code: str
    values: dict[str, Any]
    evidence: str
    fix: str | None = None


def diagnose(comparison: Comparison, results: Sequence[TapResult]) -> list[Finding]:
    """Find the deviations that explain the differences, in execution order."""
    taps = set(tap_names(comparison.weights.config.n_layer))
    forward = [result for result in results if result.tap in taps]
    search, found = _Search(comparison, forward), list[Deviation]()
    failing = [result for result in forward if not result.accumulated.within]
    for result in failing:
        # A tap whose piece is right differs only because of earlier taps.
        if not result.local.within if result.local is not None else not found:
            found += search.explain(result)
    if not failing:  # otherwise wrong decode steps and gradients are a consequence
        for result in results:
            if not (result.accumulated.within or (result.local and result.local.within)):
                found += _wrong_gradient_or_step(comparison, result, found)
    compared = [split_name(result.tap) for result in forward]
    return [_finding(group, compared) for group in _groups(found)]


# Gradients and decode steps of a candidate whose forward pass is right


def _wrong_gradient_or_step(
    comparison: Comparison, result: TapResult, before: Sequence[Deviation]
) -> list[Deviation]:
    if result.tap == LOSS:
        return [_wrong_loss(comparison)]
    if result.tap == DECODE_LOGITS:
        return [_wrong_steps(comparison, result)]
    # If later gradients are unknown, all but the first wrong one may be its consequences.
    only = before[0].code if before and result.local is None else None
    return _wrong_gradient(comparison, result, only)


def _first_within(
    tap: str, value: Tensor, proposals: Iterable[Proposal], limit: float, evidence: str
) -> Deviation | None:
    """Return the first proposal whose difference from an array is at most `limit`."""
    for proposal in proposals:
        if (reached := error(value, proposal.value).rms) <= limit:
            return Deviation(tap, proposal.code, proposal.values, evidence.format(reached))
    return None


def _wrong_loss(c: Comparison) -> Deviation:
    # The candidate's logits are right, but unlike the reference's they may lack positions.
    recorded = "logits" in c.golden.arrays
    logits = c.golden.read("logits").double() if recorded else c.value("logits")
    proposals, limit = loss_values(logits, c.golden.ids), SLACK * c.bounds[LOSS].rms
    evidence = "the relative difference from that is {:.1g}"
    fix = "loss = cross_entropy(logits[:, :-1], ids[:, 1:])"
    return _first_within(LOSS, c.value(LOSS), proposals, limit, evidence) or Deviation(
        LOSS, "unexplained", {"found": "the loss does not follow from the logits"}, "", fix
    )


def _wrong_steps(c: Comparison, result: TapResult) -> Deviation:
    value, bound = c.value(DECODE_LOGITS), c.bounds[DECODE_LOGITS].rms
    expected = c.expected(DECODE_LOGITS).double()
    each = [error(value[:, n], expected[:, n]).rms for n in range(value.shape[1])]
    first = next((n for n, found in enumerate(each) if not found <= bound), 0)
    step = {"step": f"decode.logits[:, {first}]"}
    limit = max(SLACK * bound, result.accumulated.rel_rms / EXPLAINED)
    evidence = "the difference from such steps is {:.1g} of the RMS of the logits"
    try:
        proposals = step_logits(c.golden_weights, c.golden.read(DECODE_IDS), step)
        if deviation := _first_within(DECODE_LOGITS, value, proposals, limit, evidence):
            return deviation
        evidence = ""
    except MissingWeightError:
        evidence = "common mistakes of a KV cache were not tried. Pass the checkpoint with --model"
    found = f"the difference is {each[first]:.2g} of the RMS of the logits"
    return Deviation(DECODE_LOGITS, "kv_cache", {**step, "found": found}, evidence)


def _wrong_gradient(c: Comparison, result: TapResult, only: str | None) -> list[Deviation]:
    """Find the deviation that explains a wrong gradient; of the code `only`, if it is not None."""
    name, value = result.tap.removeprefix(GRADIENT), c.value(result.tap)
    plain = (result.local or result.accumulated).error
    limit = max(SLACK * c.bounds[result.tap].rms, plain / EXPLAINED)
    try:
        expected = c.backward.gradient(name)
    except LookupError:  # a weight or a tap was not recorded
        expected = c.golden.read(result.tap).double()
    tried = proposals(WrongGradient(c.backward, name, value, expected), only)
    evidence = "the difference from that is {:.1g} of its RMS"
    if deviation := _first_within(result.tap, value, tried, limit, evidence):
        return [deviation]
    if only is not None:
        return []
    found = f"the gradient of {name} does not follow from the gradients of "
    found += listed(readers_of(name, c.weights.config))
    fix = f"Compare your backward pass at {name} with GPT-2's."
    evidence = f"the difference is {plain:.2g} of its RMS"
    return [Deviation(result.tap, "unexplained", {"found": found}, evidence, fix)]


# Taps


class _Search:
    """Runs hypotheses on the arrays of one candidate."""

    def __init__(self, comparison: Comparison, results: Sequence[TapResult]) -> None:
        self.comparison = comparison
        self.n_layer = comparison.weights.config.n_layer
        self.first: dict[str, Hypothesis] = {}  # by name of the tap: the last one that was accepted
        self.compared = [result.tap for result in results]
        self.agreeing = [result.tap for result in results if result.accumulated.within]
        self.moved: dict[int, int] = {}  # the layer whose weights a layer uses instead of its own

    def explain(self, result: TapResult) -> list[Deviation]:
        """Find the deviations between a tap and the candidate's taps before it."""
        tap, c = result.tap, self.comparison
        value = c.value(tap)
        names, bound = c.segment(tap), c.bounds[tap]
        if not value.isfinite().all():
            return self._not_finite(tap, names, value, SLACK * max(bound.local, bound.rms))
        limit = SLACK * bound.local if len(names) == 1 else max(SLACK * bound.local, bound.rms)
        plain = (result.local or result.accumulated).error
        accepted = min(max(limit, plain / EXPLAINED), plain / LEAST)
        best = self._best(tap, names, value, accepted, limit / SLACK)
        if best is None:
            altered = self._scaled_zeroed_or_shifted(tap, names, value, min(limit, accepted / 2))
            return [self._other_tap(tap, value) or altered or self._unexplained(result, names)]
        hypothesis, reached = best
        for _, values in hypothesis.codes:
            if "other" in values and not values["part_of"]:
                self.moved[split_name(tap)[0]] = values["other"]
        precisely = f"to within {reached:.1g} of its RMS" if reached else "exactly"
        evidence = (
            f"with this one change, {tap} follows from {self._sources(names)} {precisely}, "
            f"and without it, the difference is {plain:.2g}"
        )
        if readers := self._readers(tap):
            evidence += (
                f". Since {readers[0]} agrees nevertheless, only the recorded array may be wrong, "
                "and not the computation"
            )
        return [
            Deviation(
                tap, code, _in_layer(values, tap), evidence, None if number else hypothesis.fix
            )
            for number, (code, values) in enumerate(hypothesis.codes)
        ]

    def _best(
        self, tap: str, names: Sequence[str], value: Tensor, limit: float, enough: float
    ) -> tuple[Hypothesis, float] | None:
        """Return the hypothesis that explains the finite values of a tap, and its error.

        Args:
            tap: the name of the tap.
            names: the segment of the tap.
            value: the candidate's array.
            limit: the largest error that is accepted.
            enough: the error at which the search ends early.
        """
        kind = split_name(tap)[1]
        tried = self._hypotheses(tap, names, value)
        if (same := self.first.get(kind)) is not None:  # accepted in an earlier layer
            tried = chain([same], tried)
        accepted: list[tuple[float, int, Hypothesis]] = []
        for number, hypothesis in enumerate(tried):
            computed = self._run(tap, hypothesis, len(names) > LONG)
            if computed is None or computed.ndim != value.ndim:
                continue
            part = value[tuple(slice(size) for size in computed.shape)]
            broken = ~part.isfinite()
            reached = error(part.masked_fill(broken, 0), computed.masked_fill(broken, 0)).rms
            if reached <= limit:
                accepted.append((reached, number, hypothesis))
                # Formulas of norms can give close results, so all of them are tried.
                if reached <= enough and ("ln_" not in tap or hypothesis is same):
                    break
        if not accepted:
            return None
        smallest = min(accepted, key=lambda entry: entry[0])[0]
        near = [entry for entry in accepted if entry[0] <= 1.2 * smallest]
        usual = [h.codes for h in self.first.values()]  # decides between close formulas of norms
        reached, _, hypothesis = min(
            near, key=lambda e: (e[2].codes not in usual, len(e[2].codes), e[1])
        )
        self.first[kind] = hypothesis
        return hypothesis, reached

    def _hypotheses(self, tap: str, names: Sequence[str], value: Tensor) -> Iterator[Hypothesis]:
        """Yield the hypotheses about the pieces of a segment, starting with the last piece."""
        kinds = list(dict.fromkeys(split_name(name)[1] for name in reversed(names)))
        if len(names) > LONG:
            kinds.sort(key=lambda kind: MOST_FREQUENT.find(kind) % len(MOST_FREQUENT))
        c, layer = self.comparison, split_name(names[0])[0]
        own = labelled_inputs(tap, self.n_layer) if len(names) == 1 else {}
        inputs = {label: c.value(name) for label, name in own.items()}
        situation = Situation(c.weights, tap, layer, value, inputs, self.moved.get(layer))
        for kind in kinds:
            yield from hypotheses(kind, situation)

    def _run(self, tap: str, hypothesis: Hypothesis, long: bool) -> Tensor | None:
        """Compute the tap under a hypothesis; None if that fails or does not affect the tap."""
        c, pieces = self.comparison, {**GPT2, **hypothesis.pieces}
        names = segment(tap, pieces, self.n_layer, c.known)
        if not {split_name(name)[1] for name in names} & hypothesis.pieces.keys():
            return None
        B, T = c.weights.ids.shape
        if long:
            B = min(B, PREFIX[0])
            T = T if ACROSS_TOKENS & hypothesis.pieces.keys() else min(T, PREFIX[1])
        dtype = torch.float32 if long else torch.float64
        weights = replace(c.weights.cut(B, T), dtype=dtype)

        def known(name: str) -> Tensor:
            return cut(name, c.value(name), B, T).to(dtype)

        try:
            return run_segment(names, pieces, weights, known).double()
        except (LookupError, RuntimeError):  # for example a missing weight, or mismatched shapes
            return None

    def _sources(self, names: Sequence[str]) -> str:
        """Return the candidate's taps from which a segment is computed, as text."""
        return listed(self._inputs(names)) or "the ids"

    def _inputs(self, names: Sequence[str]) -> list[str]:
        inputs = [
            own for name in names for own in inputs_of(name, GPT2, self.n_layer) if own not in names
        ]
        return list(dict.fromkeys(inputs))

    def _other_tap(self, tap: str, value: Tensor) -> Deviation | None:
        """Check whether the array contains the values of another golden tap."""
        c = self.comparison
        for other in c.golden.taps:
            if other == tap or c.golden.arrays[other].shape != c.golden.arrays[tap].shape:
                continue
            expected = c.expected(other).double()
            bound = c.golden.bound(other, expected.dtype).rms
            probe = value.flatten()[:PROBED], expected.flatten()[:PROBED]
            if error(*probe).rms < 100 * bound and error(value, expected).rms <= bound:
                evidence = f"the difference from {other} is {error(value, expected).rms:.1g}"
                values = {"found": other, "expected": tap}
                return Deviation(tap, "wrong_tap", values, evidence)
        return None

    def _scaled_zeroed_or_shifted(
        self, tap: str, names: Sequence[str], value: Tensor, limit: float
    ) -> Deviation | None:
        """Check whether the array differs by a factor, by dropout, by zeros or by a time shift."""
        expected = self.comparison.computed(names)
        if expected is None:
            expected = self.comparison.expected(tap).double()
        if expected.shape != value.shape:
            return None
        if (factor := fitted_factor(value, expected)) and _agrees(
            value, factor * expected, 2 * limit
        ):
            evidence = f"the remaining error is {error(value, factor * expected).rms:.1g} of it"
            code = "scaled_logits"
            if tap != "logits":  # later taps agree if only the recorded array has the factor
                followed = any(tap in inputs_of(n, GPT2, self.n_layer) for n in self.compared)
                wrong = followed and not self._readers(tap)
                code = "extra_factor" if wrong else "scaled_tap"
            return Deviation(tap, code, {"found": factor, "expected": tap}, evidence)
        kept = (value != 0) | (expected == 0)
        share = 1 - kept.double().mean().item()
        if 0 < share < 0.9 and (factor := fitted_factor(value[kept], expected[kept])):
            if _agrees(value, factor * expected * kept, 2 * limit):
                evidence = f"{share:.0%} of the values are 0, the others {factor:.3g} times GPT-2's"
                if abs(factor - 1) > 1e-3:
                    return Deviation(tap, "dropout_always_on", {}, evidence)
                values = {"found": self._zeroed(tap, ~kept), "tensors": tap}
                return Deviation(tap, "zeroed", values, evidence)
        if tap.endswith("probs") or value.shape[1] < 3:
            return None
        for where, mine, theirs in (
            ("before", value[:, 1:], expected[:, :-1]),
            ("after", value[:, :-1], expected[:, 1:]),
        ):
            if _agrees(mine, theirs, 2 * limit):
                found = f"the {split_name(tap)[1]} of each token are those of the token {where} it"
                evidence = f"the difference from those is {error(mine, theirs).rms:.1g}"
                return Deviation(tap, "time_shift", {"found": found}, evidence)
        return None

    def _zeroed(self, tap: str, zeros: Tensor) -> str:
        """Return the heads, channels or positions that are 0, as the subject of a sentence."""
        kind, heads = split_name(tap)[1], zeros.new_zeros(1)
        if kind == "probs":
            heads = zeros[:, :, -1].all(-1).all(0)  # (H,); the last query attends to all keys
        elif kind in ("q", "k", "v", "heads"):
            n_head = self.comparison.weights.config.n_head
            heads = zeros.view(*zeros.shape[:2], n_head, -1).all(-1).flatten(0, 1).all(0)
        for what, chosen in (
            ("head", heads),
            ("channel", zeros.flatten(0, -2).all(0)),
            ("position", zeros.flatten(2).all(-1).all(0)),
        ):
            if chosen.any():
                numbers = [str(number) for number in chosen.nonzero().flatten().tolist()]
                return f"{what} {listed(numbers, SHOWN)}"
        return "a part"

    def _readers(self, tap: str) -> list[str]:
        """Return the candidate's taps that are computed from a tap and are within their bounds."""
        return [name for name in self.agreeing if tap in inputs_of(name, GPT2, self.n_layer)]

    def _not_finite(
        self, tap: str, names: Sequence[str], value: Tensor, limit: float
    ) -> list[Deviation]:
        sources = [self.comparison.value(name) for name in self._inputs(names)]
        if not all(source.isfinite().all() for source in sources):
            return []  # the non-finite values come from an earlier tap
        wrong = (~value.isfinite()).nonzero()
        kind = "NaN" if value.isnan().any() else "infinite"
        found = (
            f"{tap} has {len(wrong):,} {kind} value{'s' * (len(wrong) > 1)}, the first at "
            f"{wrong[0].tolist()}"
        )
        expected, broken = self.comparison.computed(names), ~value.isfinite()
        follows = expected is None or _agrees(
            value.masked_fill(broken, 0), expected.masked_fill(broken, 0), limit
        )
        if len(wrong) < value.numel() and not follows:  # some values are finite, and wrong too
            if best := self._best(tap, names, value, limit, limit):
                evidence = f"{found}, and with this change, its finite values are right"
                codes = best[0].codes
                return [
                    Deviation(tap, code, _in_layer(values, tap), evidence) for code, values in codes
                ]
        fix = f"Look for a division by zero or an overflow between {tap} and the taps before it."
        return [Deviation(tap, "unexplained", {"found": found}, "", fix)]

    def _unexplained(self, result: TapResult, names: Sequence[str]) -> Deviation:
        tap, c, judged = result.tap, self.comparison, result.accumulated
        if result.local is None:
            found = f"{tap} is the first array that differs, and no known deviation explains it"
            evidence = "its piece could not be run on your own arrays, because "
            if c.computed(names) is None:
                evidence += "the golden file has no matrices. Pass the checkpoint with --model"
            else:
                evidence += f"{listed(list(names[:-1]), 4)} are missing"
        else:
            sources = self._sources(names)
            found = f"{tap} does not follow from {sources} by GPT-2's formula"
            evidence = f"the difference is {result.local.error:.2g} of its RMS"
            is_half = c.bounds[tap] != c.golden.bound(tap, c.golden.dtype)
            if is_half and judged.bound is not None and judged.error < 2 * judged.bound:
                evidence += (
                    ", which may be caused by rounding to half precision inside this piece. "
                    "Compare in float32 to be sure"
                )
        fix = f"Compare your code for {tap} with GPT-2's."
        return Deviation(tap, "unexplained", {"found": found}, evidence, fix)


def _agrees(value: Tensor, expected: Tensor, limit: float) -> bool:
    """Return whether the relative difference is at most `limit`."""
    return error(value, expected).rms <= limit


def _in_layer(values: Mapping[str, Any], tap: str) -> dict[str, Any]:
    """Return the values with the layer of the tap in the names of tensors."""
    layer, values = split_name(tap)[0], dict(values)
    if "other" in values:
        part, other = values.pop("part_of"), values.pop("other")
        subject = f"{tap} uses the {part}" if part else f"h.{layer} uses those"
        values["pairs"] = f"{subject} of h.{other}"
    if "tensors" in values:
        values["tensors"] = re.sub(r"\bh\.\d+\.", f"h.{layer}.", str(values["tensors"]))
    if "part" in values and tap.endswith((".q", ".k", ".v")):
        values["part"] = split_name(tap)[1]
    return values


def _groups(found: Sequence[Deviation]) -> list[list[Deviation]]:
    """Group the deviations that only differ in their layer."""
    groups: dict[str, list[Deviation]] = {}
    for each in found:
        groups.setdefault(f"{each.code} {_group_key(each)}", []).append(each)
    return list(groups.values())


def _group_key(each: Deviation) -> object:
    """Return a key that is equal for deviations that are reported as one finding."""
    if each.code == "scaled_gradient":
        return f"{each.values['found']:.3g}{each.values['cause']}"
    if each.code in ("unexplained", "scaled_tap"):
        return re.sub(r"\bh\.\d+\.", "", each.tap)
    if each.code == "extra_factor":
        return f"{each.values['found']:.4g}"
    if each.code == "wrong_tap":  # the same tap of another layer, or the input of the block
        (i, found), (j, expected) = (split_name(each.values[k]) for k in ("found", "expected"))
        return ("out", expected, 1) if found == "embed" and j == 0 else (found, expected, j - i)
    return {k: v for k, v in each.values.items() if k not in JOINED}


def _finding(group: Sequence[Deviation], compared: Sequence[tuple[int, str]]) -> Finding:
    """Return one finding for a deviation in several layers.

    Args:
        group: the deviation in each layer.
        compared: the layer and name of every tap that was compared.
    """
    first, code = group[0], CODES[group[0].code]
    joined = {"wrong_tap": ("found", "expected"), "extra_factor": ("expected",)}.get(
        first.code, JOINED
    )
    values: dict[str, Any] = {**first.values}
    for key in (key for key in joined if key in values):
        names = list(dict.fromkeys(str(each.values[key]) for each in group))
        in_words = key in ("part", "pairs")
        values[key] = listed(names, 12) if in_words else listed(collapse_layers(names), SHOWN)
    message = MESSAGES.get(first.code, code.message).format(**values)
    layers = sorted({split_name(each.tap)[0] for each in group if each.tap.startswith("h.")})
    places = {split_name(each.tap)[1] for each in group}
    if layers and any(name in places and i not in layers for i, name in compared):
        message += f" (only in {listed([f'h.{i}' for i in layers])})"
    fix = first.fix or code.fix.format(**values)
    return Finding(
        first.code, "breaks", first.tap, file=None, line=None, source_line=None,
        message=message, fix=fix, evidence=first.evidence, values=values,
    )  # fmt: skip
