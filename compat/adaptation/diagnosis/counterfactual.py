"""The numerical witness: the reference, with the deviations found, against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import ModifiedReference
from compat.adaptation.mapping.taps import Taps
from compat.parity.compare import rms
from compat.parity.trace import Trace
from compat.taps import tap_names

AGREES = 1e-6  # relative RMS error in float64, with room for constants rounded to float32


@dataclass
class Counterfactual:
    """What came out.

    Args:
        trusted: without deviations the variant computes what `transformers` does.
        explains: with all of them it computes the logits that the model does.
        error: max|Δlogits| between the two, the model run as its author wrote it.
        alone: for each deviation, how far it alone moves the logits (relative RMS).
        first: where model and variant first differ, and by how much (relative RMS), if they do.
    """

    trusted: bool
    explains: bool
    error: float
    alone: list[float]
    first: tuple[str, float] | None


def nothing_to_explain(found: Sequence[Deviation]) -> Counterfactual:
    """Where parity holds and no deviation changes a number, there is nothing to be confirmed."""
    return Counterfactual(True, True, 0.0, [0.0] * len(found), None)


def ask(
    case: DiagnosisContext,
    found: Sequence[Deviation],
    taps: Taps,
    ids: Tensor,
    exact: Tensor,
    logits: Tensor,
) -> Counterfactual:
    """Run the variants in float64.

    Args:
        case: the model.
        found: its deviations.
        taps: that the model shows.
        ids: (B, T), of the graph's shape.
        exact: the reference's logits, in float64 if there is such a run.
        logits: the model's own, in its data type.
    """
    weights = case.weights
    base = ModifiedReference(case.config, weights).trace(ids)
    plain = base["logits"]
    applied = [d for d in found if d.apply]
    whole = _traced(case, weights, applied, ids) if applied else base
    ours = _graph_trace(case, taps, ids)
    if whole is None:
        return Counterfactual(_trusted(plain, exact), False, float("nan"), [0.0] * len(found), None)
    if case.mapping.output_softmax is not None or case.graph.dropouts:
        logits = ours["logits"]  # as they would be without
    V, kept = min(whole["logits"].shape[-1], logits.shape[-1]), logits.shape[1]
    error = (whole["logits"][:, -kept:, :V] - logits[..., :V].double()).abs().max().item()
    first = _first_difference(case, taps, ours, whole)
    alone = [_alone(case, weights, d, ids, plain) for d in found]
    return Counterfactual(_trusted(plain, exact), first is None, error, alone, first)


def _trusted(plain: Tensor, reference: Tensor) -> bool:
    """Whether the variant without deviations is the reference, which may be one in float32."""
    return relative(plain, reference.double()) < (1e-9 if reference.dtype == plain.dtype else 1e-4)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """RMS of the difference over the RMS of the second."""
    scale = rms(theirs)
    return rms(ours - theirs) / scale if scale else float(rms(ours) > 0)


def _traced(
    case: DiagnosisContext, weights: Mapping[str, Tensor], found: Sequence[Deviation], ids: Tensor
) -> Trace | None:
    """The reference with these deviations; None where it cannot be run with them."""
    variant = ModifiedReference(case.config, weights)
    for deviation in found:
        assert deviation.apply is not None
        deviation.apply(variant)
    try:
        return variant.trace(ids)
    except (RuntimeError, LookupError, ValueError, TypeError):
        return None


def _graph_trace(case: DiagnosisContext, taps: Taps, ids: Tensor) -> Trace:
    """The model's taps in float64."""
    graph = case.graph
    nodes = list(dict.fromkeys(node for view in taps.values() for node in view.nodes))
    values = dict(zip(nodes, graph.run(nodes, {graph.input: ids}), strict=True))
    return {name: view.read([values[n] for n in view.nodes]) for name, view in taps.items()}


def _first_difference(
    case: DiagnosisContext, taps: Taps, ours: Trace, theirs: Trace
) -> tuple[str, float] | None:
    """The first tap at which the logits' difference begins; None where the logits agree."""
    V = min(theirs["logits"].shape[-1], ours["logits"].shape[-1])
    end = relative(ours["logits"][..., :V], theirs["logits"][..., :V])
    if end < AGREES:
        return None
    for name in tap_names(len(case.anatomy.layers)):
        if name in ours and name in theirs and ours[name].shape == theirs[name].shape:
            error = relative(ours[name].nan_to_num(), theirs[name])
            if not error < AGREES or ours[name].isnan().any():
                return name, error
    return "logits", end


def _alone(
    case: DiagnosisContext,
    weights: Mapping[str, Tensor],
    deviation: Deviation,
    ids: Tensor,
    plain: Tensor,
) -> float:
    if deviation.apply is None:
        return 0.0
    traced = _traced(case, weights, [deviation], ids)
    return float("inf") if traced is None else relative(traced["logits"], plain)
