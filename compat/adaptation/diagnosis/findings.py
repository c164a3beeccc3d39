"""From deviations and the numbers of the counterfactual run to findings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from compat.adaptation.anatomy.dissect import NoHead
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.counterfactual import DIFFERS, Counterfactual, relative_rms
from compat.adaptation.diagnosis.proof import end_to_end
from compat.adaptation.diagnosis.registry import CODES, Deviation
from compat.adaptation.mapping.taps import Taps
from compat.adaptation.result import Adaptation, Finding, Severity
from compat.adaptation.tracing.calling import (
    Forward,
    MethodCalls,
    NoLogitsError,
    plain_kernels,
)
from compat.adaptation.tracing.graph import NAN_GUARDS, Place
from compat.adaptation.tracing.plain_lists import PlainList
from compat.adaptation.tracing.watched import changed_in_place_at, detached_at
from compat.config import dtype_name
from compat.errors import AdaptError, NameMapError, collapse_layers, listed
from compat.name_map import NameMap
from compat.parity import LogitsProof, ParityReport
from compat.parity.gradients import prove_gradients
from compat.parity.reference import Reference
from compat.tap import tap_names
from compat.user_code import MAKE_MODEL, exception_summary, users_frames
from compat.user_models.eval_mode import eval_mode

# Deviations whose formula is not known, which may compute the same as GPT-2's.
UNKNOWN_FORMULAS = {"other_attention", "other_norm"}
HOW_TO_CALL = (
    "Pass a function that returns the logits: adapt(model, source, forward=lambda model, ids: …), "
    'or --forward "model(ids)[0]"'
)


def finding(deviation: Deviation) -> Finding:
    code = CODES[deviation.code]
    known = [line.in_cell for line in deviation.lines if line]
    place = known[0] if known else None
    layers = collapse_layers([f"h.{i}." for i in deviation.layers])
    only = f" (only in {listed([name.rstrip('.') for name in layers])})" if layers else ""
    lines = [f"{line.file}:{line.line}" for line in known]
    return Finding(
        code=deviation.code,
        severity=deviation.severity or code.severity,
        tap=deviation.tap,
        file=place.file if place else None,
        line=place.line if place else None,
        source_line=place.text if place else None,
        message=(deviation.message or code.message).format(**deviation.values) + only,
        fix=code.fix.format(**deviation.values),
        evidence=deviation.evidence,
        values=deviation.values,
        also=list(dict.fromkeys(lines))[1:],
    )


def unexplained(tap: str | None, place: Place | None, message: str, evidence: str) -> Finding:
    values = {"found": message}
    return finding(Deviation(tap, [place], values, evidence=evidence, code="unexplained"))


def no_head(missing: NoHead) -> Finding:
    """Return the finding for a model that returns hidden states."""
    evidence, values = "compat added this head to compare the logits", {"table": missing.table}
    return finding(Deviation("logits", missing.lines, values, evidence=evidence, code="no_head"))


def no_forward(model: nn.Module, calls: MethodCalls) -> Finding:
    """Return the finding for a model whose logits other methods than `forward` compute."""
    code = "no_forward" if type(model).forward is nn.Module.forward else "logits_method"
    place = source.matching(model, rf"^class {type(model).__name__}\b")
    return finding(Deviation(None, [place], {"found": str(calls)}, code=code))


def partly_examined(error: AdaptError, parts: Sequence[str], is_built: bool) -> Finding:
    """Return the finding for a model that cannot be built or called, of which parts were examined.

    Args:
        error: what building or calling the model raised.
        parts: the parts in words.
        is_built: whether the model could be built.
    """
    text = error.tried[0] if isinstance(error, NoLogitsError) else str(error).partition("\n")[0]
    text = re.sub(r" at (?:(?! at ).)+:\d+ .*|\. The checkpoint has .*", "", text)
    place = re.search(r" at ((?:(?! at ).)+?):(\d+)[: ]", str(error))
    values = {
        "found": f"the call {text}" if isinstance(error, NoLogitsError) else text,
        "parts": listed(parts, len(parts)),
        "fix": HOW_TO_CALL if is_built else MAKE_MODEL,
    }
    lines = [Place(place[1], int(place[2]))] if place else []
    return finding(Deviation(None, lines, values, code="partly_examined"))


def untraced(error: Exception) -> Finding:
    """Return the finding for a model without a graph."""
    place = source.named(str(error))
    return finding(Deviation(None, [place], {"found": str(error)}, code="untraced"))


def mixed_types(model: nn.Module) -> Finding:
    """Return the finding for parameters of several data types."""
    by_type: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        by_type.setdefault(dtype_name(parameter.dtype), name)
    found = listed([f"{dtype} ({name})" for dtype, name in by_type.items()])
    place = source.built(model, list(by_type.values())[-1])
    evidence = "a copy that agrees is compared in its own types as well"
    values = {"found": found}
    return finding(Deviation(None, [place], values, evidence=evidence, code="mixed_types"))


def of_one_token(adaptation: Adaptation, line: Place) -> Adaptation:
    """Return the result for a model that takes one token per call, without the missing mask.

    Args:
        adaptation: the result for whole sequences.
        line: the assertion that a sequence has one token.
    """
    others = [f for f in adaptation.findings if f.code not in ("no_mask", "kv_cache")]
    severity: Severity = "limit" if any(f.severity == "breaks" for f in others) else "breaks"
    found = finding(Deviation("h.0.probs", [line], severity=severity, code="one_token"))
    return replace(adaptation, findings=[*others, found])


def continued(model: nn.Module, changed: Sequence[str]) -> Finding:
    """Return the finding for a model whose calls change attributes that later calls read."""
    named = "|".join(map(re.escape, changed))
    lines = source.mentions(model, rf"\bself\.({named})\b[^=(]*[-+*]?=[^=]")
    values = {"found": listed([f"self.{name}" for name in changed]), "name": changed[0]}
    return finding(Deviation(None, lines[::-1], values, code="continued"))


def unregistered(model: nn.Module, lists: Sequence[PlainList]) -> list[Finding]:
    """Return a finding for each line that keeps modules in Python lists."""
    by_line: dict[tuple[Place | None, str, str], list[str]] = {}
    for plain in lists:
        line = source.building(model, plain.path), type(plain.value).__name__, plain.name
        by_line.setdefault(line, []).append(plain.path)
    found = []
    for (place, kind, name), paths in by_line.items():
        each = "each of " if len(paths) > 1 else ""
        values = {"found": each + listed(collapse_layers(paths)), "kind": kind, "name": name}
        found.append(finding(Deviation(None, [place], values, code="plain_list")))
    return found


def to_findings(
    found: Sequence[Deviation], counterfactual: Counterfactual, own_error: float
) -> list[Finding]:
    """Return a finding for every deviation.

    Args:
        found: the deviations.
        counterfactual: what the reference computes with them.
        own_error: the relative RMS error of the reference's logits against float64. A deviation
            that moves the logits by at most twice as much is drift.
    """
    findings = []
    changes = sum(deviation.changes is not None for deviation in found)
    for deviation, alone in zip(found, counterfactual.alone, strict=True):
        changed = deviation.changes is not None
        if deviation.code in UNKNOWN_FORMULAS and changed and alone < 1e-12:
            continue  # it computes the same
        severity = deviation.severity or CODES[deviation.code].severity
        exact = {*UNKNOWN_FORMULAS, "extra_operation", "softmax_output"}
        can_drift = changed and deviation.code not in exact
        if severity == "breaks" and can_drift and alone <= 2 * own_error:
            severity = "drifts"
        evidence = _evidence(deviation, severity, alone, counterfactual, changes)
        findings.append(finding(replace(deviation, severity=severity, evidence=evidence)))
    return findings


def _evidence(
    deviation: Deviation,
    severity: Severity,
    alone: float,
    counterfactual: Counterfactual,
    changes: int,
) -> str:
    """Return how the deviation was confirmed, as a sentence.

    Args:
        deviation: the deviation.
        severity: the severity of the finding.
        alone: by how much the deviation alone moves the logits.
        counterfactual: the result with all deviations.
        changes: how many of the deviations change the reference.
    """
    if deviation.evidence:
        return deviation.evidence
    if deviation.changes is None and severity == "info":
        return "found in the graph, but it changes no numbers"
    if deviation.changes is None or not math.isfinite(alone):
        return "found in the graph, but the reference cannot be changed in the same way"
    if not counterfactual.trusted:
        return "found in the graph, but not confirmed, because the reference was not reproduced"
    moved = f"{alone:.2g} of their RMS"
    if not counterfactual.explains:
        return f"found in the graph, and this change alone moves the logits by {moved}"
    error = f"{counterfactual.error:.1g}"
    if deviation.code == "softmax_output":
        return f"confirmed: before the softmax, your logits equal the reference's to within {error}"
    if changes == 1:
        return (
            f"confirmed: with this one change, the reference reproduces your logits to within "
            f"{error}, and the change moves them by {moved}"
        )
    together = "both" if changes == 2 else f"all {changes}"
    return (
        f"confirmed: this change alone moves the logits by {moved}, and {together} together "
        f"reproduce yours to within {error}"
    )


def leftovers(
    context: DiagnosisContext,
    taps: Taps,
    found: Sequence[Deviation],
    counterfactual: Counterfactual,
    findings: Sequence[Finding],
    report: ParityReport | None,
    logits: LogitsProof,
) -> list[Finding]:
    """Return findings for the differences that no deviation explains."""
    left: list[Finding] = []
    tap, error = counterfactual.first or ("logits", 0.0)
    places = {name: place for place, name in enumerate(tap_names(len(context.layers)))}
    breaking = [f for f in findings if f.severity == "breaks"]
    unmodelled = {(d.code, d.tap) for d in found if d.changes is None}
    # A difference may be due to a deviation that the reference cannot be changed to reproduce.
    due = any((f.code, f.tap) in unmodelled for f in breaking)
    due = due and any(places.get(f.tap or "", 0) <= places[tap] for f in breaking)
    if counterfactual.trusted and counterfactual.first is not None and not due:
        node = max(taps[tap].nodes, key=context.graph.order.__getitem__)
        message = f"{tap} differs from the reference for a reason that compat does not know"
        evidence = f"the relative RMS error from the ids on is {error:.2g} in float64"
        local = next((t.local for t in report.taps if t.tap == tap), None) if report else None
        if local is not None:
            evidence += f", and the local error is {local.rel_rms:.2g}"
        left.append(unexplained(tap, context.graph.place(node), message, evidence))
    if breaking or left:
        return left
    if report is None or not all(tap.passed for tap in report.taps):
        first = None if report is None else report.first_divergence
        message = "parity fails, but compat found no deviation from GPT-2"
        left.append(unexplained(first, None, message, "" if report is None else report.headline))
    elif not report.passed:
        failed = logits.failed[0]
        B, T = failed.input_shape
        if failed.line is not None:
            values = {"found": failed.error, "input": f"{failed.name} ({B} × {T} ids)"}
            values["n_positions"] = str(context.config.n_positions)
            place, headline = Place(failed.file or "", failed.line), report.headline
            refused = Deviation("logits", [place], values, evidence=headline, code="refused_input")
            return [finding(refused)]
        message = (
            f"the model agrees with the reference on short random ids, but not on {failed.name} "
            f"({B} × {T} ids)"
        )
        left.append(unexplained("logits", None, message, report.headline))
    return left


def fused_kernels(
    findings: list[Finding],
    model: nn.Module,
    call: Forward,
    ids: Tensor,
    reference: Reference,
    context: DiagnosisContext,
) -> list[Finding]:
    """Report fused kernels of torch's encoder that compute other logits than its own code.

    They replace "unexplained" if the model agrees without them.
    """
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.TransformerEncoderLayer)]
    is_unexplained = any(f.tap == "logits" and f.code == "unexplained" for f in findings)
    if not layers:
        return findings
    with eval_mode(model):
        own = call(model, ids)
        with plain_kernels():
            plain, again = call(model, ids), call(model, ids)
    is_steady = relative_rms(again, plain) <= DIFFERS  # it is not if dropout is applied
    differs = is_steady and not relative_rms(own, plain) <= DIFFERS  # NaN differs too
    if not differs and not is_unexplained:
        return findings
    with plain_kernels():
        proof = end_to_end(model, call, reference, context.room, context.fixed_length)
    if not differs and not proof.passed:
        return findings
    first = next((n for n in context.graph.nodes if layers[0] in n.meta.get("modules", ())), None)
    called = None if first is None else context.graph.place(first)
    lines = [source.torch_layer(model, layers[0]), called]
    evidence = "observed: the logits are others without the fused kernel"
    if proof.passed:
        evidence = f"confirmed: without the fused kernel, max|Δlogits| is {proof.max_abs:.2g}"
        findings = [f for f in findings if f.code != "unexplained"]
    return [*findings, finding(Deviation("logits", lines, evidence=evidence, code="fast_path"))]


def left_in_training(model: nn.Module, call: Forward, training: bool, ids: Tensor) -> list[Finding]:
    """Return the finding for a model that differs or fails in the mode that it was built in."""
    if not training:
        return []
    try:
        with torch.no_grad():
            as_left = call(model, ids).detach()
    except Exception as error:
        places = [Place(frame.filename, frame.lineno or 0) for frame in users_frames(error)]
        evidence = f"in training mode, {exception_summary(error)}"
        return [finding(Deviation("embed", places[-1:], evidence=evidence, code="train_mode"))]
    with eval_mode(model):
        quiet, again = call(model, ids).detach(), call(model, ids).detach()
    if torch.equal(as_left, quiet) or not torch.equal(quiet, again):
        return []  # no difference, or one that is also there in eval mode
    moved = (as_left - quiet).abs().max().item()
    dropout = next((name for name, m in model.named_modules()
                    if isinstance(m, nn.Dropout) and m.p > 0), None)  # fmt: skip
    place = None if dropout is None else source.building(model, dropout)
    evidence = f"in training mode, the logits differ by up to {moved:.2g}"
    return [finding(Deviation("embed", [place], evidence=evidence, code="train_mode"))]


def without_effect(found: Finding) -> Finding:
    """Return a finding for a model in parity, whose deviation cannot have changed the logits.

    Extra parameters have values without an effect, such as a layer scale of 1, a table may have
    more rows than there are ids, and a guard against NaN does not change finite values.
    """
    if found.code in ("random_parameters", "vocab_mismatch"):
        evidence = "all logits agree with the values that the model has"
        return replace(found, severity="info", tap=None, evidence=evidence)
    if found.code == "changed_logits" and any(name in found.message for name in NAN_GUARDS):
        evidence = "the logits were finite on all inputs of the proof"
        return replace(found, severity="limit", tap=None, evidence=evidence)
    return found


def trained_wrongly(
    model: nn.Module,
    call: Forward,
    ids: Tensor,
    reference: Reference,
    name_map: NameMap,
) -> list[Finding]:
    """Return the finding for a model in parity whose gradients differ from the reference's."""
    with eval_mode(model):
        try:
            proof = prove_gradients(
                model, reference, name_map, ids, partial(call, model), same_suffices=True
            )
        except NameMapError:  # the model has parameters that GPT-2 does not have
            return []
    if not (proof.failed or proof.error):
        return []
    if "modified by an inplace operation" in proof.error:
        lines = changed_in_place_at(model, call, ids)
        deviation = Deviation(None, lines, evidence=proof.error, code="changed_in_place")
        return [finding(deviation)]
    lines, values = detached_at(model, call, ids), {"found": proof.headline.rstrip(".")}
    evidence = "confirmed: the gradients of the next-token loss were compared in float64"
    return [finding(Deviation(None, lines, values, evidence=evidence, code="wrong_gradient"))]


def limits_of(logits: LogitsProof) -> list[Finding]:
    """Return the findings for conditions that the comparison of logits did not cover."""
    evidence, findings = "observed while the model ran on the inputs of the proof", []
    for limit in logits.limits:
        place = Place(limit.file, limit.line or 0) if limit.file else None
        values = {"found": limit.message}
        deviation = Deviation(None, [place], values, evidence=evidence, code="not_compared")
        findings.append(finding(deviation))
    return findings
