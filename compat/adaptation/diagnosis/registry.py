"""The registry of deviations: one entry holds the code, the severity, both texts and the detector.

To add a deviation, write a function that finds it in a `DiagnosisContext`, name it after the code,
decorate it with `@deviation(message, fix)`, and put it into the module for its part of GPT-2. If
the deviation changes numbers, the function also states the `Changes` with which a reference
computes the same, so that `counterfactual.run` can confirm the finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import Changes
from compat.adaptation.result import Severity
from compat.adaptation.tracing.graph import Place, kind
from compat.errors import listed


@dataclass
class Deviation:
    """One deviation, in all the layers that show it.

    Args:
        tap: the first tap that it changes, or None if it changes none.
        lines: the lines of the user's source, the main one first; None where a line is unknown.
        values: the values of the placeholders in the message and the fix.
        changes: make the same change to a reference; None if this is not possible.
        evidence: replaces the evidence of the counterfactual run.
        severity: replaces the severity of the entry.
        code: the entry's code; set by the registry, or by a detector of several codes.
        layers: the layers with the deviation, which are named if there are others without it.
        message: replaces the message of the entry.
    """

    tap: str | None
    lines: Sequence[Place | None] = ()
    values: dict[str, Any] = field(default_factory=dict)
    changes: Changes | None = None
    evidence: str = ""
    severity: Severity | None = None
    code: str = ""
    layers: Sequence[int] = ()
    message: str = ""


def operations(nodes: Sequence[Node], after: str, before: str) -> dict[str, Any]:
    """Return the values of an `extra_operation`, which GPT-2 does not have between two parts."""
    computed = listed(list(dict.fromkeys(map(kind, nodes))))
    return {"found": computed, "after": after, "before": before, "passed_on": True}


Detector = Callable[[DiagnosisContext], Iterable[Deviation]]


@dataclass(frozen=True)
class Code:
    """The texts of one kind of deviation; placeholders in braces are filled with its values.

    Args:
        severity: the default severity.
        message: what the user's code does, and what GPT-2 does.
        fix: code, or one imperative sentence.
    """

    severity: Severity
    message: str
    fix: str


CODES: dict[str, Code] = {}
DETECTORS: list[tuple[str, Detector]] = []


def deviation(
    message: str, fix: str, severity: Severity = "breaks", code: str | None = None
) -> Callable[[Detector], Detector]:
    """Add an entry to the registry. The decorated function is its detector, and its name the code.

    Args:
        message, fix, severity: as in `Code`.
        code: replaces the name of the function.
    """

    def register(detector: Detector) -> Detector:
        name = code or detector.__name__
        CODES[name] = Code(severity, message, fix)
        return detects(name)(detector)

    return register


def detects(code: str) -> Callable[[Detector], Detector]:
    """Add another detector to an entry. One of several codes sets that of each deviation."""

    def register(detector: Detector) -> Detector:
        DETECTORS.append((code, detector))
        return detector

    return register


def find_deviations(context: DiagnosisContext) -> list[Deviation]:
    """Run every detector. One that fails is reported and does not stop the others."""
    found: list[Deviation] = []
    failed: dict[str, list[str]] = {}  # the codes that could not be checked, by error
    results: dict[Detector, list[Deviation]] = {}  # some detect several codes, and run once
    for code, detector in DETECTORS:
        try:
            if detector not in results:
                results[detector] = list(detector(context))
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            failed.setdefault(f"{type(error).__name__}: {first_line}", []).append(code)
            continue
        deviations = [each for each in results[detector] if each.code in ("", code)]
        for each in deviations:
            each.code = code
            if len(each.layers) == len(context.layers):
                each.layers = ()
        found += deviations
    for text, codes in failed.items():
        values = {"codes": listed(list(dict.fromkeys(codes))), "found": text}
        found.append(Deviation(None, (), values, code="unexamined"))
    return found
