"""Other ways to examine a model in whose graph not all parts of a GPT-2 are recognised.

They change the graph, accept parts that GPT-2 does not have, put GPT-2's own part in place of an
unknown one, map by the order of calls, or report what single operations of the graph show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from compat.adaptation.anatomy.dissect import NO_ATTENTION, NoHead, UnknownHead, UnknownPart
from compat.adaptation.diagnosis.attention_nodes import (
    Span,
    attention_nodes,
    nodes_of_blocks,
    own_attention,
    own_blocks,
)
from compat.adaptation.diagnosis.counterfactual import DIFFERS, relative_rms
from compat.adaptation.diagnosis.findings import (
    limits_of,
    no_forward,
    no_head,
    unexplained,
    untraced,
)
from compat.adaptation.diagnosis.first_block import first_block
from compat.adaptation.diagnosis.proof import end_to_end
from compat.adaptation.diagnosis.survey import (
    missing_biases,
    norms_of_heads,
    softmaxes_of_scores,
    survey,
    wrong_mask,
    wrong_merge,
)
from compat.adaptation.inputs import find_call
from compat.adaptation.mapping.assignments import BatchFirst, names_without_tied_head
from compat.adaptation.mapping.by_calls import map_by_calls
from compat.adaptation.mapping.embeddings import embedding_of
from compat.adaptation.part import of_part, with_part
from compat.adaptation.result import Adaptation, Finding
from compat.adaptation.stages import GRAPH_ERRORS, Mapped, Run, examine, judge, map_graph
from compat.adaptation.tracing.calling import (
    CallSignature,
    MethodCalls,
    Wrapped,
    find_signature,
    head_methods,
)
from compat.adaptation.tracing.graph import REDUCTIONS, Graph, Place, kind, size, tensor_inputs
from compat.adaptation.tracing.record import Untraceable
from compat.adaptation.tracing.replaced import WithReplaced
from compat.adaptation.tracing.rewrites import (
    drop_low_rank_terms,
    drop_neutral_operands,
    lift_derived_weights,
    merge_stacked_products,
    split_projections,
)
from compat.adaptation.tracing.watched import attention_at
from compat.errors import AdaptError, CompatError
from compat.loading import load_into
from compat.name_map import NameMap
from compat.parity.outputs import find_logits
from compat.user_models.eval_mode import eval_mode, restore_weights, saved_weights

# Rewrites of a graph, and whether parts that GPT-2 does not have are accepted after them.
REWRITES: tuple[tuple[Callable[[Graph], bool], bool], ...] = (
    (drop_neutral_operands, False),
    (merge_stacked_products, False),
    (partial(lift_derived_weights, scaled=True), False),
    (drop_low_rank_terms, False),
    (drop_low_rank_terms, True),
    (lambda graph: True, True),
    (split_projections, True),
)

BY_HAND = (
    "Rewrite this part as GPT-2 computes it, or write the name map by hand and load it with "
    "compat.load_into(model, name_map, source)."
)


@dataclass(frozen=True)
class _WithHead(Wrapped):
    """The call of a model that returns hidden states, with the token embedding as its head.

    Args:
        call: calls the model and returns its hidden states.
        table: the name of the token embedding.
    """

    table: str

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        return self.call(model, ids) @ model.get_parameter(self.table).T


@dataclass(frozen=True)
class _WithMethod(Wrapped):
    """The call of a model that returns hidden states, and of its own method that makes them logits.

    Args:
        call: calls the model and returns its hidden states.
        method: the name of the method.
    """

    method: str

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        return find_logits(getattr(model, self.method)(self.call(model, ids)), ids)


def judge_with_head(run: Run, error: NoHead) -> Adaptation:
    """Judge a model that returns hidden states with its own method that makes them logits.

    Without such a method, GPT-2's head comes after them, the token embedding.
    """
    hidden = run.call
    for method in head_methods(run.model):
        run.call = _WithMethod(hidden, method)
        if _returns_logits(run):
            adaptation = _examined(run)
            found = no_forward(run.model, MethodCalls(("forward", method)))
            return replace(adaptation, findings=[found, *adaptation.findings])
    run.call = _WithHead(hidden, error.table)
    adaptation = _examined(run)
    if not isinstance(run.call, _WithHead):  # another call returns logits
        return adaptation
    return replace(adaptation, findings=[no_head(error), *adaptation.findings])


def _returns_logits(run: Run) -> bool:
    with suppress(Exception):
        return run.logits(run.ids).shape[2] == run.config.vocab_size
    return False


def _examined(run: Run) -> Adaptation:
    """Map and judge a model, in another way if its graph is not recognised."""
    try:
        return examine(run)
    except AdaptError as error:
        return judge_otherwise(run, error)


def judge_batch_first(run: Run, error: BatchFirst, accepts_others: bool = False) -> Adaptation:
    """Judge a model whose attention runs along the first axis of the ids.

    It is called with ids (T, B) if it adds positions along the first axis as well, and with ids
    (T,) if it has a causal mask for one sequence. Otherwise this is a mistake, and the rest is
    examined as it is with `batch_first=True`.
    """
    call = run.call
    try:
        return judge(run, _map_time_first(run, error, accepts_others))
    except BatchFirst:
        run.call = call
    if (adaptation := _of_one_sequence(run, accepts_others)) is not None:
        return adaptation
    surveyed = _survey(run, error)
    modules = [
        module for module in run.model.modules()
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first
    ]  # fmt: skip
    if not modules:
        return surveyed
    weights = saved_weights(run.model)
    with ExitStack() as changed, suppress(AdaptError):
        for module in modules:
            changed.enter_context(patch.object(module, "batch_first", True))
        run.call, run.ids = find_call(run.model, run.checkpoint, run.ids)
        adaptation = _examined(run)
        return replace(adaptation, findings=[surveyed.findings[0], *adaptation.findings])
    restore_weights(run.model, weights)
    run.call = call
    with suppress(CompatError):
        return _with_own_blocks(run, run.trace(), error, [])
    return surveyed


def _of_one_sequence(run: Run, accepts_others: bool) -> Adaptation | None:
    """Judge the model by a call with one sequence; None if it then attends to later tokens too."""
    weights = saved_weights(run.model)
    with suppress(AdaptError):
        alone = replace(run, call=find_signature(run.model, run.ids, CallSignature(rows=0)))
        adaptation = examine(alone, accepts_others)
        if all(finding.code != "no_mask" for finding in adaptation.findings):
            return adaptation
    restore_weights(run.model, weights)
    return None


def _map_time_first(run: Run, error: BatchFirst, accepts_others: bool) -> Mapped:
    """Trace and map the same model, called with ids (T, B).

    Raises:
        BatchFirst: called so, the model does not add positions, so it expects ids (B, T).
    """
    try:
        run.call = find_signature(run.model, run.ids, CallSignature(time_first=True))
        if _ignores_order(run):  # without positions and a mask, neither axis is known to be time
            raise error
    except AdaptError:
        raise error from None
    mapped = map_graph(run.trace(), run.checkpoint, accepts_others)
    tables = [mapped.assignments.by_tensor.get(name) for name in ("wte.weight", "wpe.weight")]
    if tables[0] is not None:
        (table,), positions = tables[0][0], tables[1][0][0] if tables[1] else None
        found = embedding_of(mapped.anatomy, table, positions)
        if found is None or found.by_batch:
            raise error from None
    return mapped


def _ignores_order(run: Run) -> bool:
    """Return whether the logits of reversed ids are those of the ids, reversed."""
    with eval_mode(run.model), torch.no_grad(), suppress(Exception):
        own, other = (run.call(run.model, ids) for ids in (run.ids, run.ids.flip(1)))
        return torch.allclose(own.flip(1), other, rtol=1e-4, atol=1e-4)
    return False


def judge_otherwise(run: Run, error: AdaptError) -> Adaptation:
    """Try other ways to map a graph whose parts are not recognised.

    The first map with which the model is compatible is used; without one, the first that can be
    loaded, which may include parts that GPT-2 does not have.

    If none works because of a single unknown part, the rest is examined with GPT-2's in its place.
    If that is not possible either, the model's own weights are restored, and the result contains
    the findings that the graph and the first block alone show.

    Raises:
        AdaptError: none works, for another reason. The error is the one that was raised for the
            graph.
    """
    if error.__cause__ is not None:  # a fault of compat in reading the graph, to be reported
        raise error
    before, unknown = saved_weights(run.model), error
    incompatible: tuple[Adaptation, list[Tensor]] | None = None  # with the weights it has loaded
    graph: Graph | None = None  # traced again only after it was changed
    for rewrite, accepts_others in REWRITES:
        with suppress(CompatError):
            graph = graph or run.trace()
            if not rewrite(graph):
                continue
            rewritten, graph = graph, None
            try:
                adaptation = _judge_rewritten(run, rewritten, accepts_others)
            except UnknownPart as found:
                unknown = found  # of the last rewrite, with which the most structures are accepted
                raise
            if adaptation:
                return adaptation
            if incompatible is None:
                incompatible = adaptation, saved_weights(run.model)
        restore_weights(run.model, before)
    with suppress(CompatError):
        if by_calls := judge_by_calls(run, Untraceable(str(error)), must_agree=True):
            return by_calls
    if incompatible is not None:
        adaptation, loaded = incompatible
        restore_weights(run.model, loaded)
        return adaptation
    if isinstance(error, UnknownPart) and isinstance(unknown, UnknownPart):
        with suppress(CompatError):
            return _with_own_part(run, unknown)
        restore_weights(run.model, before)
        return _with_first_block(run, _survey(run, unknown))
    restore_weights(run.model, before)
    raise AdaptError(f"{error}. {BY_HAND}") from error


def _judge_rewritten(run: Run, graph: Graph, accepts_others: bool) -> Adaptation:
    """Judge the model by its graph after a rewrite."""
    try:
        mapped = map_graph(graph, run.checkpoint, accepts_others)
    except BatchFirst as error:  # it has parts that GPT-2 does not have
        return judge_batch_first(run, error, accepts_others=True)
    return judge(run, mapped)


def _survey(run: Run, error: UnknownPart) -> Adaptation:
    """Report the deviations that the graph shows, without a map. The model keeps its weights."""
    graph = run.trace()
    attention = _unused_attention(run, graph, error)
    findings = survey(graph, run.model, run.config, error, graph.nodes, attention=attention)
    return run.result(NameMap(()), None, findings, names_without_tied_head(run.checkpoint))


def _unused_attention(run: Run, graph: Graph, error: UnknownPart) -> list[Place]:
    """Return the lines that compute attention, if none of it is in the graph."""
    if error.code != NO_ATTENTION or softmaxes_of_scores(graph):
        return []
    return attention_at(run.model, run.call, run.ids)


def _with_own_part(run: Run, error: UnknownPart) -> Adaptation:
    """Map, load and judge the model with GPT-2's own part in place of an unknown one.

    Raises:
        AdaptError: the rest cannot be mapped either.
    """
    graph = run.trace()
    if isinstance(error, UnknownHead):
        return _with_own_head(run, graph, error)
    unused = _unused_attention(run, graph, error)
    before = saved_weights(run.model)
    with suppress(CompatError, *GRAPH_ERRORS):
        if not unused:
            return _with_own_attention(run, graph, error)
    restore_weights(run.model, before)
    try:
        return _with_own_blocks(run, graph, error, unused)
    except GRAPH_ERRORS:
        raise error from None


def _with_own_attention(run: Run, graph: Graph, error: UnknownPart) -> Adaptation:
    """Judge the model with GPT-2's attention in place of the operations that compute it."""
    config = run.config
    unknown = attention_nodes(graph, graph.same(error.nodes), config.n_embd)
    if not unknown:
        raise error
    adaptation = _with_own_modules(run, unknown, own_attention(config, len(unknown)), _judge_partly)
    if finds_other_layers(adaptation):  # what was replaced was not attention
        raise error
    nodes = [node for each in unknown for node in each.nodes]
    mixing = [each.mixes for each in unknown]
    named = error
    if error.code == NO_ATTENTION:
        named = UnknownPart(str(error), mixing, error.code, error.values)
    surveyed = survey(graph, run.model, config, named, nodes, replaced_by="attention")
    start, end = graph.at(unknown[0].start), graph.at(unknown[0].end)
    ends = f"its input is computed{start}, its result{end}"
    surveyed[0] = replace(surveyed[0], evidence=f"{surveyed[0].evidence}; {ends}")
    attended = torch.stack([each.attended for each in unknown]).any(dim=0)
    surveyed += missing_biases(graph, run.model, unknown)
    surveyed += norms_of_heads(graph, run.model, unknown, config.n_embd // config.n_head)
    if masked := wrong_mask(graph, nodes, mixing, attended):
        surveyed.append(masked)
    if merging := [node for each in unknown for node in each.unmerged]:
        surveyed.append(wrong_merge(graph, merging))
    findings = _beside_own(adaptation.findings, surveyed, "attention")
    if any(map(_has_norm, unknown)):  # it was replaced together with the attention
        findings = [f for f in findings if f.code != "missing_ln" or "ln_1" not in str(f.tap)]
    return replace(adaptation, findings=findings)


def _has_norm(span: Span) -> bool:
    """Return whether operations that compute hidden states from others include a norm of these."""
    norms = (node for node in span.nodes if kind(node) in REDUCTIONS)
    return any(size(tensor_inputs(node)[0]) == size(span.start) for node in norms)


def _with_own_blocks(
    run: Run, graph: Graph, error: UnknownPart, unused: Sequence[Place]
) -> Adaptation:
    """Judge the embeddings, the last norm and the head, with GPT-2's blocks between them.

    Args:
        run, graph, error: the call of adapt, the model's graph, and the unknown part.
        unused: the lines of attention that does not reach the logits.
    """
    span = nodes_of_blocks(graph, run.config.n_embd)
    if span is None:
        raise error
    adaptation = _with_own_modules(run, [span], own_blocks(run.config), _judge_partly)
    surveyed = survey(graph, run.model, run.config, error, span.nodes, "blocks", unused)
    findings = _beside_own(adaptation.findings, surveyed, "blocks")
    return _with_first_block(run, replace(adaptation, findings=findings))


def _with_own_modules(
    run: Run,
    spans: Sequence[Span],
    modules: nn.ModuleList,
    examine_rest: Callable[[Run], Adaptation],
) -> Adaptation:
    """Judge the model with modules in place of these operations, whose tensors are not mapped."""
    model = run.model
    name = f"modules_of_compat_{len([*model.children()])}"  # other modules may be replaced already
    model.add_module(name, modules.to(next(model.parameters()).dtype))
    try:
        parts = [(span.start, span.end) for span in spans]
        own = replace(run, call=WithReplaced(run.call, parts, name))
        adaptation = examine_rest(own)
    finally:
        delattr(model, name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows = adaptation.name_map.expand(run.config.n_layer)
    rows = [row for row in rows if parameters.keys() >= {*row.ours}]
    mapped = {row.hf for row in rows}
    return replace(
        adaptation,
        name_map=NameMap(tuple(rows), adaptation.name_map.zeros),
        unmatched=[name for name in names_without_tied_head(run.checkpoint) if name not in mapped],
        parity=None,
        find_taps=list,
    )


def finds_other_layers(adaptation: Adaptation) -> bool:
    """Return whether a part was found to have another number of layers, and so is not one block."""
    return any(finding.code == "n_layer_mismatch" for finding in adaptation.findings)


def _judge_partly(run: Run) -> Adaptation:
    """Judge a model, and accept parts that GPT-2 does not have if it is not mapped without."""
    graph = run.trace()
    try:
        return judge(run, map_graph(graph, run.checkpoint))
    except UnknownPart:
        return judge(run, map_graph(graph, run.checkpoint, accepts_others=True))


def _with_first_block(run: Run, adaptation: Adaptation) -> Adaptation:
    """Add what the first block alone shows. The model keeps its weights."""
    weights = saved_weights(run.model)
    found = _of_first_block(run, adaptation.findings)
    restore_weights(run.model, weights)
    return replace(adaptation, findings=[*adaptation.findings, *found])


def _of_first_block(run: Run, known: Sequence[Finding]) -> list[Finding]:
    """Return what else differs in the first block, or in its attention if the block is unknown."""
    modules: list[tuple[nn.Module, str]] = []
    with suppress(Exception):  # the user's modules fail on other hidden states
        modules = first_block(run.model, run.call, run.ids, run.config)
    for module, name in modules:
        with suppress(Exception):
            adaptation = _judge_module(run, module, name)
            if finds_other_layers(adaptation):  # the module computes several blocks
                continue
            found = _beside_own(adaptation.findings, list(known), "other parts")[len(known) :]
            return [finding for finding in found if finding.severity == "breaks" and finding.file]
    return []


def _judge_module(run: Run, module: nn.Module, part: str) -> Adaptation:
    """Judge a module as a part of compat's own model."""
    whole, prefix = with_part(module, part, run.config)
    whole = whole.to(next(run.model.parameters()).dtype)
    call, ids = find_call(whole, run.checkpoint, run.ids)
    adaptation = _judge_partly(replace(run, model=whole, call=call, ids=ids))
    return of_part(adaptation, module, part, prefix)


def _with_own_head(run: Run, graph: Graph, error: UnknownHead) -> Adaptation:
    """Judge the model with the token embedding as its head."""
    (hidden,) = graph.same([error.hidden])
    table = run.model.get_parameter(error.table)
    head = nn.Linear(table.shape[1], table.shape[0], bias=False)
    head.weight = table
    nodes = graph.between([graph.output], [hidden])
    span = Span(hidden, graph.output, nodes)
    adaptation = _with_own_modules(run, [span], nn.ModuleList([head]), _examined)
    surveyed = survey(graph, run.model, run.config, error, nodes, replaced_by="head")
    return replace(adaptation, findings=_beside_own(adaptation.findings, surveyed, "head"))


def _beside_own(findings: Sequence[Finding], surveyed: list[Finding], part: str) -> list[Finding]:
    """Return the findings of an unknown part, then those of the rest, which has GPT-2's part.

    Parameters that only the unknown part uses are not reported as unused.
    """
    confirmed = f"confirmed, with GPT-2's {part} in place of yours:"
    known = {finding.code for finding in surveyed} | {"unused_parameters"}
    rest = [found for found in findings if found.code not in known]
    return surveyed + [
        replace(found, evidence=found.evidence.replace("confirmed:", confirmed)) for found in rest
    ]


def judge_by_calls(run: Run, error: Untraceable, must_agree: bool = False) -> Adaptation:
    """Map by the order of module calls, and compare only the logits.

    Args:
        run: the call of adapt.
        error: why the model's graph is not known.
        must_agree: stop if the logits of the traced ids differ, before other inputs are compared.

    Raises:
        Untraceable: the calls do not lead to a map either, or the logits differ and must not.
    """
    try:
        name_map = map_by_calls(run.model, run.call, run.ids, run.config)
    except AdaptError as reason:
        raise Untraceable(
            f"{error}. No name map follows from the order of module calls either, because "
            f"{reason}. {BY_HAND}"
        ) from error
    load_into(run.model, name_map, run.checkpoint)
    reference = run.reference()
    own = run.logits(run.ids)
    expected = reference.trace(run.ids)[0]["logits"][:, -own.shape[1] :]
    if must_agree and (own.shape != expected.shape or relative_rms(own, expected) > DIFFERS):
        raise error
    proof = end_to_end(run.model, run.call, reference)
    name = type(run.model).__name__
    report = reference.report(name, run.ids, ["logits"], lambda forced: {"logits": own}, proof)
    findings = [untraced(error)]
    if not report:
        words = "the logits differ from the reference's, but without a graph compat cannot find why"
        findings.insert(0, unexplained("logits", None, words, report.headline))
    else:
        findings += limits_of(proof)
    return run.result(name_map, report, findings)
