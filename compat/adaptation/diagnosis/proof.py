"""The proof: every tap at the graph's nodes, and the logits of the model as its author runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.diagnosis.counterfactual import Counterfactual, ask, relative
from compat.adaptation.mapping.taps import Taps, trace_graph
from compat.adaptation.tracing.calling import Forward, eval_mode
from compat.parity import LogitsProof, ParityReport
from compat.parity.check import Reference
from compat.parity.logits import prove_logits


def parity_at_nodes(
    reference: Reference, case: DiagnosisContext, taps: Taps, ids: Tensor, logits: LogitsProof
) -> ParityReport | None:
    """The comparison at every tap whose shape is the reference's."""
    expected, _ = reference.trace(ids)
    shown = {
        name: view for name, view in taps.items()
        if name in expected and view.index.shape == expected[name].shape
    }  # fmt: skip
    if "logits" not in shown:
        return None
    return reference.report(
        type(case.model).__name__,
        ids,
        list(shown),
        lambda forced: trace_graph(case.graph, shown, ids, forced),
        logits,
    )


def end_to_end(
    model: nn.Module,
    call: Forward,
    reference: Reference,
    room: int | None = None,
    fixed_length: int | None = None,
    short_only: bool = False,
) -> LogitsProof:
    """The logits on designed inputs, the model in eval mode and called as its author meant it."""
    config = reference.checkpoint.config
    with eval_mode(model):
        return prove_logits(
            partial(call, model),
            model,
            reference,
            config,
            reference.dtype,
            room,
            fixed_length,
            short_only,
        )


def own_error(reference: Reference, ids: Tensor) -> float:
    expected, exact = reference.trace(ids)
    eps = torch.finfo(reference.dtype).eps
    return eps if exact is None else relative(expected["logits"].double(), exact["logits"])


def ask_witness(
    case: DiagnosisContext,
    found: Sequence[Deviation],
    reference: Reference,
    taps: Taps,
    ids: Tensor,
    call: Forward,
) -> Counterfactual:
    expected, exact = reference.trace(ids)
    with eval_mode(case.model):
        logits = call(case.model, ids).detach()
    truth = expected if exact is None else exact
    return ask(case, found, taps, ids, truth["logits"], logits)
