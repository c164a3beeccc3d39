"""What the deviations found do not explain, and what only running the model shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.diagnosis.counterfactual import Counterfactual
from compat.adaptation.diagnosis.findings import finding, unexplained
from compat.adaptation.diagnosis.proof import end_to_end
from compat.adaptation.mapping.taps import Taps
from compat.adaptation.result import Finding
from compat.adaptation.tracing.calling import Forward, eval_mode, plain_kernels
from compat.parity import LogitsProof, ParityReport
from compat.parity.check import Reference

# With these a difference remains that no change to the reference makes up for.
NOT_MODELLED = (
    "random_parameters",
    "inner_dim",
    "n_embd_mismatch",
    "random_in_forward",
    "n_layer_mismatch",
    "vocab_mismatch",
    "changed_logits",
)


def leftovers(
    case: DiagnosisContext,
    taps: Taps,
    witness: Counterfactual,
    findings: Sequence[Finding],
    report: ParityReport | None,
    logits: LogitsProof,
) -> list[Finding]:
    """What the findings do not explain: the first tap that differs, and by how much."""
    silent = all(f.code not in NOT_MODELLED for f in findings)
    left: list[Finding] = []
    tap: str | None
    if witness.trusted and witness.first is not None and silent:
        tap, error = witness.first
        node = max(taps[tap].nodes, key=case.graph.order.__getitem__)
        local = next((t.local for t in report.taps if t.tap == tap), None) if report else None
        words = f"{tap} differs from the reference for a reason that is not known here"
        evidence = f"relative RMS error {error:.2g} from the ids on, in float64"
        if local is not None:
            evidence += f"; local error {local.rel_rms:.2g}"
        left.append(unexplained(tap, case.graph.place(node), words, evidence))
    breaks = any(f.severity == "breaks" for f in [*findings, *left])
    if breaks:
        return left
    if report is None or not all(tap.passed for tap in report.taps):
        tap = None if report is None else report.first_divergence
        left.append(unexplained(tap, None, "parity fails though nothing unusual was found",
                                "" if report is None else report.headline))  # fmt: skip
    elif not report.passed:
        failed = logits.failed[0]
        B, T = failed.input_shape
        left.append(unexplained(
            "logits", None,
            f"the model agrees with the reference on short random ids, but not on {failed.name} "
            f"({B} × {T} ids)",
            report.headline,
        ))  # fmt: skip
    return left


def fused_kernels(
    findings: list[Finding],
    model: nn.Module,
    call: Forward,
    reference: Reference,
    case: DiagnosisContext,
) -> list[Finding]:
    """If the model agrees as soon as torch's fused encoder layer is off, that is the reason."""
    with plain_kernels():
        slow = end_to_end(model, call, reference, case.room, case.fixed_length)
    if not slow.passed:
        return findings
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
    path = next((name for name, m in model.named_modules() if isinstance(m, kinds)), "")
    place = source.building(model, path) if path else None
    if place is not None:
        place = source.mention(place.file, "TransformerEncoderLayer") or place
    evidence = f"confirmed: with the fused kernel off, max|Δlogits| is {slow.max_abs:.2g}"
    return [
        finding(Deviation("fast_path", "logits", place), "breaks", evidence)
        if f.code == "unexplained" else f
        for f in findings
    ]  # fmt: skip


def left_in_training(model: nn.Module, call: Forward, training: bool, ids: Tensor) -> list[Finding]:
    """Whether the mode that the constructor leaves the model in changes its logits."""
    if not training:
        return []
    with torch.no_grad():
        as_left = call(model, ids).detach()
    with eval_mode(model):
        quiet, again = call(model, ids).detach(), call(model, ids).detach()
    if torch.equal(as_left, quiet) or not torch.equal(quiet, again):
        return []  # no difference, or one that eval mode does not end
    moved = (as_left - quiet).abs().max().item()
    dropout = next((name for name, m in model.named_modules()
                    if isinstance(m, nn.Dropout) and m.p > 0), None)  # fmt: skip
    place = None if dropout is None else source.building(model, dropout)
    deviation = Deviation("train_mode", "embed", place)
    return [finding(deviation, "info", f"as constructed, the logits differ by up to {moved:.2g}")]
