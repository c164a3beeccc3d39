"""The proof: comparison of every tap in the graph, and of the logits of the model itself."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.mapping.taps import Taps, trace_graph
from compat.adaptation.tracing.calling import Forward
from compat.parity import LogitsProof, ParityReport
from compat.parity.logits import Extent, prove_logits
from compat.parity.reference import Reference
from compat.user_models.eval_mode import eval_mode


def parity_at_nodes(
    reference: Reference, context: DiagnosisContext, taps: Taps, ids: Tensor
) -> ParityReport | None:
    """Compare every tap that has the reference's shape; the logits are not compared yet.

    None if no tensor was loaded, if the logits have another shape, or if the recorded operations
    fit only the values that they were recorded with, as where each expert of a mixture gets a
    number of tokens of its own.
    """
    if not context.mapping.by_tensor:
        return None
    expected, _ = reference.trace(ids)
    comparable = {
        name: view for name, view in taps.items()
        if name in expected and view.index.shape == expected[name].shape
    }  # fmt: skip
    if "logits" not in comparable:
        return None
    try:
        return reference.report(
            type(context.model).__name__,
            ids,
            list(comparable),
            lambda forced: trace_graph(context.graph, comparable, ids, forced),
            LogitsProof(),
        )
    except (RuntimeError, IndexError):
        return None


def end_to_end(
    model: nn.Module,
    call: Forward,
    reference: Reference,
    room: int | None = None,
    fixed_length: int | None = None,
    extent: Extent = "all",
) -> LogitsProof:
    """Return the comparison of logits on designed inputs, with the model in eval mode.

    Args:
        model: the module whose own `forward` is called.
        call: calls the model with ids and returns logits.
        reference: the checkpoint in `transformers`.
        room: the number of positions that both have; None for all of the checkpoint's.
        fixed_length: the only sequence length that the model accepts, if it accepts only one.
        extent: on which inputs, see `prove_logits`.
    """
    with eval_mode(model):
        return prove_logits(
            model,
            reference,
            call=partial(call, model),
            n_positions=room,
            fixed_length=fixed_length,
            extent=extent,
        )
