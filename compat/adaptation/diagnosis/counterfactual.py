"""Counterfactual runs, which test whether a reference with the deviations equals the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import Changes, ModifiedReference, combine
from compat.adaptation.diagnosis.registry import Deviation
from compat.adaptation.mapping.taps import Taps
from compat.parity.compare import rms
from compat.parity.trace import Trace
from compat.tap import tap_names

DIFFERS = 1e-3  # the relative RMS error above which two calls compute different logits
AGREES = 1e-6  # relative RMS error in float64, with room for constants rounded to float32


@dataclass
class Counterfactual:
    """The result of the runs.

    Args:
        trusted: whether, without changes, the reference computes what `transformers` computes.
        explains: whether, with all changes, it computes the logits of the model.
        error: max|Δlogits| between the two; the model runs in its own data type.
        alone: by how much each deviation alone changes the logits, as a relative RMS error.
        first: the first tap at which the model and the reference with all changes differ, and by
            how much (relative RMS error); None if their logits agree.
    """

    trusted: bool
    explains: bool
    error: float
    alone: list[float]
    first: tuple[str, float] | None


def run(
    context: DiagnosisContext,
    found: Sequence[Deviation],
    taps: Taps,
    ids: Tensor,
    exact: Tensor,
    logits: Tensor,
) -> Counterfactual:
    """Run the reference in float64 with all changes, and with each alone.

    Args:
        context: what is known about the model.
        found: the model's deviations.
        taps: the taps that its graph shows.
        ids: (B, T), of the shape that the graph was traced with.
        exact: the logits of `transformers`, in float64 if it ran in float64.
        logits: the model's logits, in its data type.
    """
    plain = ModifiedReference(context.config, context.weights, Changes()).trace(ids)["logits"]
    # A reference that ran in float32 agrees only to within its own rounding error.
    bound = 1e-9 if exact.dtype == plain.dtype else 1e-4
    trusted = relative_rms(plain, exact.double()) < bound
    alone = []
    for deviation in found:
        moved = 0.0
        if deviation.changes is not None:
            trace = _trace(context, [deviation.changes], ids)
            moved = float("inf") if trace is None else relative_rms(trace["logits"], plain)
        alone.append(moved)
    changed = _trace(context, [d.changes for d in found if d.changes is not None], ids)
    ours = _graph_trace(context, taps, ids)
    if changed is None or ours is None or "logits" not in ours:
        return Counterfactual(trusted, False, float("nan"), alone, None)
    if context.mapping.output_softmax is not None or context.graph.dropouts or context.is_pooled:
        logits = ours["logits"]  # the graph runs without them
    V, T = min(changed["logits"].shape[-1], logits.shape[-1]), logits.shape[1]
    error = (changed["logits"][:, -T:, :V] - logits[..., :V].double()).abs().max().item()
    first = _first_difference(context, ours, changed)
    return Counterfactual(trusted, first is None, error, alone, first)


def relative_rms(ours: Tensor, theirs: Tensor) -> float:
    """Return the RMS of the difference over the RMS of `theirs`."""
    scale = rms(theirs)
    return rms(ours - theirs) / scale if scale else float(rms(ours) > 0)


def _trace(context: DiagnosisContext, changes: Sequence[Changes], ids: Tensor) -> Trace | None:
    """Return the taps of the reference with these changes; None if it cannot run with them."""
    try:
        trace = ModifiedReference(context.config, context.weights, combine(changes)).trace(ids)
        return trace if trace["logits"].shape[:-1] == ids.shape else None
    except (RuntimeError, LookupError, ValueError, TypeError):
        return None


def _graph_trace(context: DiagnosisContext, taps: Taps, ids: Tensor) -> Trace | None:
    """Run the model's graph in float64; None if the recorded operations do not fit its values."""
    graph = context.graph
    nodes = list(dict.fromkeys(node for view in taps.values() for node in view.nodes))
    try:
        values = dict(zip(nodes, graph.run(nodes, {graph.input: ids}), strict=True))
    except (RuntimeError, IndexError):
        return None
    return {name: view.read([values[n] for n in view.nodes]) for name, view in taps.items()}


def _first_difference(
    context: DiagnosisContext, ours: Trace, theirs: Trace
) -> tuple[str, float] | None:
    """Return the first tap that differs, and by how much; None if the logits agree."""
    V = min(theirs["logits"].shape[-1], ours["logits"].shape[-1])
    in_logits = relative_rms(ours["logits"][..., :V], theirs["logits"][..., :V])
    if in_logits < AGREES:
        return None
    for name in tap_names(len(context.anatomy.layers)):
        if name in ours and name in theirs and ours[name].shape == theirs[name].shape:
            error = relative_rms(ours[name].nan_to_num(), theirs[name])
            if not error < AGREES or ours[name].isnan().any():
                return name, error
    return "logits", in_logits
