"""The result of `adapt`: the mapping, the proof, and every deviation with its line and its fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from compat.display import HtmlPage
from compat.errors import ParityError
from compat.name_map import NameMap
from compat.parity import ParityReport
from compat.tap import Tap
from compat.user_code import live_cell

Severity = Literal["breaks", "drifts", "limit", "info"]


@dataclass(frozen=True)
class Finding:
    """One deviation from GPT-2.

    Args:
        code: one of `compat.adaptation.CODES`.
        severity: "breaks" if parity fails because of it; "drifts" if the difference is within twice
            the rounding error of the reference; "limit" if the proof did not cover a condition;
            "info" if it does not change any number.
        tap: the first tap that it changes, such as `h.0.act`; None if it changes none.
        file: the file of the user's source; None if no line is known.
        line: the line in that file, counted from 1.
        source_line: the text of the line.
        message: what the user's code does, and what GPT-2 does.
        fix: code, or one imperative sentence.
        evidence: how the finding was confirmed.
        values: the values of the message's and the fix's placeholders, such as `found`.
        also: further lines with the same deviation, as `file:line`.
    """

    code: str
    severity: Severity
    tap: str | None
    file: str | None
    line: int | None
    source_line: str | None
    message: str
    fix: str
    evidence: str
    values: dict[str, Any] = field(default_factory=dict)
    also: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Adaptation(HtmlPage):
    """The result of `adapt`.

    Args:
        model: the name of the model's class.
        source: the checkpoint's source.
        n_layer: the number of layers of the checkpoint, to which `name_map` expands.
        tensors: the number of tensors in the checkpoint, without a tied head.
        unmatched: the tensors of the checkpoint that have no counterpart in the model.
        name_map: the parameters that hold each tensor, for `load_into` and `to_hf_state_dict`.
        parity: the comparison of taps and logits, or None if they cannot be compared or the
            model could not be mapped.
        findings: the breaking ones first, then in execution order.
        seconds: the time that each stage took.
        target: `FILE:Class` of the model, if its class is in a file.
        find_taps: computes `taps`.
    """

    model: str
    source: str
    n_layer: int
    tensors: int
    unmatched: list[str]
    name_map: NameMap
    parity: ParityReport | None
    findings: list[Finding]
    seconds: dict[str, float] = field(default_factory=dict)
    target: str | None = None
    find_taps: Callable[[], list[Tap]] = field(default=list, repr=False, compare=False)

    @cached_property
    def taps(self) -> list[Tap]:
        """The taps that modules of the model hold, for `trace`.

        Each was verified with a patch. A hidden state has no tap if no module returns or receives
        it, such as the input of a norm that is written as a function. The list is empty for a part,
        and for a model that could not be traced.
        """
        return self.find_taps()

    @property
    def compatible(self) -> bool:
        """Whether all taps and all logits agree and no finding breaks parity."""
        breaks = any(finding.severity == "breaks" for finding in self.findings)
        return self.parity is not None and self.parity.passed and not breaks

    @property
    def deviations(self) -> list[Finding]:
        """The findings whose deviations change numbers: those that break parity or drift."""
        return [finding for finding in self.findings if finding.severity in ("breaks", "drifts")]

    def __bool__(self) -> bool:
        return self.compatible

    def raise_if_failed(self) -> None:
        """Raise a ParityError that names the first breaking finding unless the model is compatible.

        Raises:
            ParityError: with the finding's line, message and fix.
        """
        if self.compatible:
            return
        for found in self.findings:
            if found.severity == "breaks":
                file = found.file and (live_cell(found.file) or found.file)
                where = f"{file}:{found.line}: " if file else ""
                raise ParityError(f"{where}{found.code}: {found.message}. Fix: {found.fix}")
        headline = self.why_unchecked if self.parity is None else self.parity.headline
        raise ParityError(f"{self.model} is not compatible with {self.source}: {headline}")

    @property
    def why_unchecked(self) -> str:
        """The reason why `parity` is None."""
        breaking = [found for found in self.findings if found.severity == "breaks"]
        first = breaking[0].code if breaking else "unknown_part"
        if first == "partly_examined":
            return "only parts of the model were examined"
        if first == "unknown_part":
            return "compat does not know a part of the model"
        if len(self.unmatched) == self.tensors:
            return f"the model cannot be mapped because of {first}"
        if any(name.endswith("attn.c_attn.weight") for name in self.unmatched):
            inside = (f.code for f in breaking if re.fullmatch(r"h\.\d+\.(q|heads)", f.tap or ""))
            # What has no tap and comes first was found in the graph of unknown attention.
            code = first if breaking[0].tap is None else next(inside, first)
            return f"the model's attention cannot be mapped because of {code}"
        return "its hidden states cannot be compared with the reference's"

    def patch(self, *, unsafe: bool = False) -> str | None:
        """Return edits of the model's source that make it compatible, as a unified diff.

        The model's class is imported again from its file and built in the checkpoint's sizes. The
        edits were proved on the checkpoint in a separate process. Nothing is written.

        Args:
            unsafe: also try edits that change the signature of a constructor.

        Returns:
            The diff; None if the model needs no edits, if none were found, or if its class is not
            in a file.

        Raises:
            CompatError: the class cannot be built from its file.
        """
        from compat.adaptation.repair.repair import Repair, Target, repair

        if self.target is None or not self.deviations:
            return None
        repaired = repair(Target(self.target), self.source, unsafe=unsafe)
        return repaired.diff if isinstance(repaired, Repair) else None

    def __repr__(self) -> str:
        """Return the verdict, and one line for each finding that is not of severity "info"."""
        mark = "✓" if self.compatible else "✗"
        mapped = f"{self.tensors - len(self.unmatched)} of {self.tensors} tensors mapped"
        shown = [found for found in self.findings if found.severity != "info"]
        lines = [f"<Adaptation {mark} {self.model} on {self.source}: {mapped}", *map(_line, shown)]
        if self.parity is not None and not any(found.severity == "breaks" for found in shown):
            lines.append(f"  {self.parity.headline}")
        return "\n".join(lines) + ">"

    def to_json(self, *, full: bool = False) -> dict[str, Any]:
        """Return the result as plain values, for `json.dumps`.

        Args:
            full: include the rows of every layer, and every tap, input and gradient.
        """
        rows = self.name_map.expand(self.n_layer) if full else self.name_map.rows
        return {
            "compatible": self.compatible,
            "model": self.model,
            "source": self.source,
            "mapped": self.tensors - len(self.unmatched),
            "tensors": self.tensors,
            "unmatched": self.unmatched,
            "findings": [asdict(finding) for finding in self.findings],
            "name_map": [
                {"tensor": row.hf, "operation": str(row.op), "parameters": list(row.ours)}
                for row in rows
            ],
            "parity": None if self.parity is None else self.parity.to_json(full=full),
            "seconds": self.seconds,
        }


def _line(found: Finding) -> str:
    """Return the place, the code and the message of a finding."""
    file = found.file and (live_cell(found.file) or found.file)
    where = f"{Path(file).name}:{found.line} " if file else ""
    return f"  {where}{found.code}: {found.message}"
