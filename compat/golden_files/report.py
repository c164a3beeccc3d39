"""The report of a comparison with golden arrays: a parity report with named deviations."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from compat.adaptation.result import Finding
from compat.parity import ParityReport, TapResult


@dataclass(frozen=True, repr=False)
class GoldenReport(ParityReport):
    """The result of `Golden.check`; `to_json` has the same fields.

    The accumulated difference at a tap is the difference between the candidate's array and the
    golden one. The local difference is that between the candidate's array and the result of GPT-2's
    formula on the candidate's own inputs. Accumulated differences alone determine the verdict;
    local differences show which piece is wrong.

    Args:
        findings: the deviations from GPT-2 that explain the differences, in execution order.
        recorded: the number of arrays for which the golden file has bounds.
    """

    findings: list[Finding] = field(default_factory=list)
    recorded: int = 0

    @property
    def has_logits(self) -> bool:
        """Whether the logits were compared."""
        return bool(self.logits.inputs)

    @property
    def passed(self) -> bool:
        """Whether arrays were compared and all of them are within their bounds."""
        return bool(self.taps) and not self._wrong

    @property
    def first_divergence(self) -> str | None:
        """The first array in execution order that is not within its bounds."""
        return self._wrong[0].tap if self._wrong else None

    @property
    def _wrong(self) -> list[TapResult]:
        return [tap for tap in self.taps if not tap.accumulated.within]

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        wrong = self._wrong
        count = f"{len(self.taps) - len(wrong)} of {len(self.taps)} arrays pass"
        if len(self.taps) < self.recorded:
            count += f", and {self.recorded - len(self.taps)} were not compared"
        if not wrong:
            text = f"{self.model_name} agrees with transformers on {self.source}: {count}"
            if self.has_logits:
                return f"{text}; max|Δlogits| = {self.max_abs_diff:.2g}."
            return f"{text}. The logits were not compared."
        text = f"{self.model_name} diverges from transformers on {self.source} at {wrong[0].tap}: "
        found = wrong[0].accumulated
        if math.isfinite(found.error) and found.bound:
            text += f"the difference is {found.rel_rms:.2g} of the array's RMS, "
            times = found.error / found.bound
            text += f"{times:,.{0 if times >= 10 else 1}f} times the bound"
        else:
            text += "it has NaN or infinite values"
        return f"{text}; {count}."

    def __repr__(self) -> str:
        """Return the verdict, the headline, and one line for each finding."""
        lines = [f"<GoldenReport {'✓' if self.passed else '✗'} {self.headline}"]
        lines += [f"  {each.tap} {each.code}: {each.message}" for each in self.findings]
        return "\n".join(lines) + ">"

    def to_json(self, *, full: bool = False) -> dict[str, Any]:
        """Return the report as plain values; a non-finite number becomes None.

        Args:
            full: include every array, instead of the verdict and the arrays out of bounds.
        """
        return {
            **super().to_json(full=full),
            "recorded": self.recorded,
            "has_logits": self.has_logits,
            "findings": [asdict(finding) for finding in self.findings],
        }
