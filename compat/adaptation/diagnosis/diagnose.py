"""The diagnosis: find the deviations, confirm them by counterfactual runs, report the rest."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from compat.adaptation.diagnosis import (
    attention,
    blocks,
    counterfactual,
    embeddings_and_head,
    execution,
    norms,
    parameters,
    source,
)
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.findings import (
    fused_kernels,
    left_in_training,
    leftovers,
    limits_of,
    to_findings,
    without_effect,
)
from compat.adaptation.diagnosis.registry import CODES, DETECTORS, Deviation, find_deviations
from compat.adaptation.mapping.taps import Taps
from compat.adaptation.result import Finding
from compat.adaptation.tracing.calling import Forward, plain_kernels
from compat.adaptation.tracing.graph import Place
from compat.parity import LogitsProof, ParityReport
from compat.parity.reference import Reference
from compat.tap import tap_names
from compat.user_models.eval_mode import eval_mode

__all__ = ["CODES", "diagnose"]

# Importing these modules fills the registry. Of findings with one severity at one tap, those of an
# earlier module come first, whichever module was imported first.
AREAS = (parameters, attention, norms, blocks, embeddings_and_head, execution)
_names = [area.__name__ for area in AREAS]
DETECTORS.sort(key=lambda entry: _names.index(entry[1].__module__))
for _code in dict.fromkeys(code for code, _ in DETECTORS):
    CODES[_code] = CODES.pop(_code)  # in the same order
# Deviations of a whole module of the user's: the lines that build the module are named as well.
OF_MODULES = {"rmsnorm", "gated_mlp", "sinusoidal_pos", "eps_value", "unbiased_var"}
SEVERITIES = ("breaks", "drifts", "limit", "info")


def diagnose(
    context: DiagnosisContext,
    call: Forward,
    ids: Tensor,
    training: bool,
    reference: Reference,
    taps: Taps,
    report: ParityReport | None,
    logits: LogitsProof,
) -> list[Finding]:
    """Return every deviation from GPT-2, the breaking ones first, then in execution order.

    Args:
        context: the model, loaded with the checkpoint's weights.
        call: calls the model with ids.
        ids: (B, T), of the shape that the graph was traced with.
        training: whether the model was passed in training mode.
        reference: the checkpoint in `transformers`.
        taps: the taps that the graph shows.
        report: the comparison of taps, or None if the logits have another shape.
        logits: the comparison of logits on designed inputs.
    """
    model, found = context.model, find_deviations(context)
    for each in found:
        each.lines = [*each.lines, *_further_lines(context, each)]
        layer = re.match(r"h\.(\d+)", each.tap or "")
        if layer and int(layer[1]) >= context.config.n_layer and each.changes is not None:
            each.changes = None
            each.evidence = "found in the graph, in a layer that the checkpoint does not have"
    expected, exact = reference.trace(ids)
    if report and not any(deviation.changes for deviation in found):  # nothing to explain
        result = counterfactual.Counterfactual(True, True, 0.0, [0.0] * len(found), None)
    else:
        with eval_mode(model), plain_kernels():  # those of the graph
            own = call(model, ids)
        truth = (expected if exact is None else exact)["logits"]
        result = counterfactual.run(context, found, taps, ids, truth, own)
    own_error = torch.finfo(reference.dtype).eps
    if exact is not None:
        own_error = counterfactual.relative_rms(expected["logits"].double(), exact["logits"])
    findings = to_findings(found, result, own_error)
    findings += leftovers(context, taps, found, result, findings, report, logits)
    findings = fused_kernels(findings, model, call, ids, reference, context)
    findings += left_in_training(model, call, training, ids)
    if report:  # the limits of a proof that failed do not matter
        findings = [without_effect(each) for each in findings] + limits_of(logits)
    order = {tap: place for place, tap in enumerate(tap_names(len(context.layers)))}

    def position(found: Finding) -> tuple[int, int]:
        tap = order.get(found.tap, len(order)) if found.tap else len(order)
        return SEVERITIES.index(found.severity), tap

    return sorted(findings, key=position)


def _further_lines(context: DiagnosisContext, found: Deviation) -> list[Place]:
    """Return the lines that build or call the user's modules in whose code a deviation is."""
    graph, model = context.graph, context.model
    if not found.lines or (place := found.lines[0]) is None:
        return []
    if found.code == "rope":  # q and k are rotated by one module
        layers = context.anatomy.layers
        return source.callers_below(graph, place, [n for layer in layers for n in layer.qkv])
    if found.code in ("inner_dim", "head_width"):
        return source.computed_sizes(model, place)
    if found.code not in OF_MODULES:
        return []
    lines = source.owners(graph, model, place)
    if found.code == "eps_value":
        eps = found.values["found"]
        lines += source.defaults(graph, model, place, eps) + source.keywords(model, "eps", eps)
    return lines
