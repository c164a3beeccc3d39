"""From deviations and their numbers to findings that a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compat.adaptation.diagnosis.codes import CODES
from compat.adaptation.diagnosis.context import Deviation
from compat.adaptation.diagnosis.counterfactual import Counterfactual
from compat.adaptation.result import Finding, Severity
from compat.adaptation.tracing.graph import Place
from compat.parity import LogitsProof

RANK = {"breaks": 0, "drifts": 1, "limit": 2, "info": 3}


def to_findings(
    found: Sequence[Deviation], witness: Counterfactual, own_error: float
) -> list[Finding]:
    """The findings, the breaking ones first, then in the order of the text.

    Args:
        found: the deviations.
        witness: what the reference computes with them.
        own_error: of the reference's logits against float64, relative RMS; what moves them by less
            than twice that is drift.
    """
    findings = []
    numeric = [d for d in found if d.apply is not None]
    for deviation, alone in zip(found, witness.alone, strict=True):
        if deviation.code == "unexplained" and deviation.apply is not None and alone < 1e-12:
            continue  # a formula of its own that computes the same
        severity = _severity(deviation, alone, own_error)
        evidence = _evidence(deviation, alone, witness, numeric)
        findings.append(finding(deviation, severity, evidence))
    return sorted(findings, key=lambda f: RANK[f.severity])


def finding(deviation: Deviation, severity: Severity, evidence: str) -> Finding:
    code, place = CODES[deviation.code], deviation.place
    return Finding(
        code=deviation.code,
        severity=severity,
        tap=deviation.tap,
        file=place.file if place else None,
        line=place.line if place else None,
        source_line=place.text if place else None,
        message=code.message.format(**deviation.words),
        fix=code.fix.format(**deviation.words),
        evidence=evidence,
    )


def _severity(deviation: Deviation, alone: float, own_error: float) -> Severity:
    severity = deviation.severity or CODES[deviation.code].severity
    told = deviation.code not in ("unexplained", "softmax_output")
    if severity == "breaks" and told and deviation.apply is not None and alone <= 2 * own_error:
        return "drifts"
    return severity


def _evidence(
    deviation: Deviation, alone: float, witness: Counterfactual, numeric: Sequence[Deviation]
) -> str:
    """What the numbers say, in one sentence."""
    if "evidence" in deviation.words:
        return str(deviation.words["evidence"])
    if deviation.apply is None and _severity(deviation, alone, 0) == "info":
        return "seen in the graph; it changes no number"
    if deviation.apply is None:
        return "seen in the graph; the reference cannot be changed in the same way"
    if not witness.trusted:
        return "seen in the graph; not confirmed, because the reference could not be rebuilt"
    if not witness.explains:
        return f"seen in the graph; alone it moves the logits by {alone:.2g} of their RMS"
    if deviation.code == "softmax_output":
        return (
            f"confirmed: what it is applied to are the reference's logits, to {witness.error:.1g}"
        )
    if len(numeric) == 1:
        return (
            "confirmed: the reference with this one change reproduces your logits to "
            f"{witness.error:.1g}; the change moves them by {alone:.2g} of their RMS"
        )
    return (
        f"confirmed: the reference with this and {len(numeric) - 1} other "
        f"change{'s' if len(numeric) > 2 else ''} reproduces your logits to {witness.error:.1g}; "
        f"alone it moves them by {alone:.2g} of their RMS"
    )


def unexplained(tap: str | None, place: Place | None, words: str, evidence: str) -> Finding:
    deviation = Deviation("unexplained", tap, place, {"found": words})
    return finding(deviation, "breaks", evidence)


def without_effect(found: Finding) -> Finding:
    """A finding of a model whose logits all agree, where what it names can change no logit then.

    Extra parameters keep the values that they have, such as a layer scale of 1, and a table may
    have more rows than there are ids. `nan_to_num` changes no finite value.
    """
    if found.code in ("random_parameters", "vocab_mismatch"):
        evidence = "all logits agree with the values that the model has"
        return replace(found, severity="info", tap=None, evidence=evidence)
    if found.code == "changed_logits" and "nan_to_num" in found.message:
        evidence = "the logits were finite on all inputs of the proof"
        return replace(found, severity="limit", tap=None, evidence=evidence)
    return found


def limits_of(logits: LogitsProof) -> list[Finding]:
    """What the comparison of logits did not reach, as findings on their lines."""
    found = []
    for limit in logits.limits:
        place = Place(limit.file, limit.line or 0) if limit.file else None
        deviation = Deviation("not_compared", None, place, {"found": limit.message})
        found.append(finding(deviation, "limit", "seen while the model ran on the proof's inputs"))
    return found
