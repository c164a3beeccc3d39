"""What `adapt` found: the mapping, the proof, and every deviation with its place in the source."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from compat.errors import ParityError
from compat.name_map import NameMap
from compat.parity import ParityReport

Severity = Literal["breaks", "drifts", "limit", "info"]


@dataclass(frozen=True)
class Finding:
    """One deviation from GPT-2.

    Args:
        code: one of `compat.adaptation.CODES`.
        severity: "breaks" parity; "drifts" within the calibrated bound; "limit" says what the proof
            did not reach; "info" changes no number.
        tap: the first hidden state it changes, such as `h.0.act`; None where it changes none.
        file: of the model's author, or None where no line could be named.
        line: in that file, from 1.
        source_line: the text of the line.
        message: what it does, and what GPT-2 does.
        fix: what to change.
        evidence: the numbers behind it.
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


@dataclass(frozen=True)
class Adaptation:
    """The result of `adapt`.

    Args:
        model: the class of the model.
        source: of the weights.
        n_layer: layers of the checkpoint, to which `name_map` expands.
        tensors: how many tensors the checkpoint has, a tied head not counted.
        unmatched: the checkpoint's tensors that the model has no place for.
        name_map: which tensor went where; works for `load_into` and `to_hf_state_dict`.
        parity: the comparison at every tap found, or None where the model could not be run.
        findings: deviations, the breaking ones first.
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

    @property
    def compatible(self) -> bool:
        """Every tap and the logits on every input agree, and no finding breaks parity."""
        breaks = any(finding.severity == "breaks" for finding in self.findings)
        return self.parity is not None and self.parity.passed and not breaks

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
                where = f"{found.file}:{found.line}: " if found.file else ""
                raise ParityError(f"{where}{found.code}: {found.message}. Next step: {found.fix}")
        headline = (
            "its logits could not be compared" if self.parity is None else self.parity.headline
        )
        raise ParityError(f"{self.model} is not compatible with {self.source}: {headline}")

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
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
                for row in self.name_map.expand(self.n_layer)
            ],
            "parity": None if self.parity is None else self.parity.to_json(),
            "seconds": self.seconds,
        }
