"""`adapt`: map a user's module to a checkpoint, load it, prove parity and diagnose deviations.

The five stages:

1. Trace: module → `Graph`, in `_adapt` (tracing/).
2. Recognise: `Graph` → `Anatomy` and `NormPlaces`, in `_map` (anatomy/).
3. Map: → `Assignments` and `Unmatched`, in `_map` (mapping/).
4. Prove: weights are loaded, taps and logits compared → `ParityReport`, in `_judge`.
5. Diagnose: → findings, in `diagnose` (diagnosis/).

If stages 1 to 3 fail, `_map_otherwise` and `_judge_by_calls` try other ways to build a name map.
"""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from compat.adaptation.anatomy.dissect import (
    NO_ATTENTION,
    Anatomy,
    NoHead,
    UnknownHead,
    UnknownPart,
    dissect,
)
from compat.adaptation.anatomy.norms import NormPlaces, place_norms
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.counterfactual import relative_rms
from compat.adaptation.diagnosis.diagnose import diagnose
from compat.adaptation.diagnosis.findings import (
    limits_of,
    mixed_types,
    no_forward,
    no_head,
    trained_wrongly,
    unexplained,
    unregistered,
    untraced,
)
from compat.adaptation.diagnosis.kv_cache import wrong_cache
from compat.adaptation.diagnosis.proof import end_to_end, parity_at_nodes
from compat.adaptation.diagnosis.survey import after, computed_by, survey, wrong_mask
from compat.adaptation.diagnosis.unknown_attention import (
    UnknownAttention,
    attention_replaced,
    unknown_attention,
)
from compat.adaptation.emit import to_name_map
from compat.adaptation.mapping.assignments import (
    Assignments,
    BatchFirst,
    Unmatched,
    drop_misfits,
    find_assignments,
)
from compat.adaptation.mapping.by_calls import map_by_calls
from compat.adaptation.mapping.embeddings import embedding_of
from compat.adaptation.mapping.module_taps import module_taps
from compat.adaptation.mapping.taps import find_taps
from compat.adaptation.part import of_part, takes_hidden_states, with_part
from compat.adaptation.result import Adaptation, Finding
from compat.adaptation.tracing.calling import (
    CallSignature,
    Convert,
    Forward,
    batch_sizes,
    check_model,
    find_signature,
    method_calls,
)
from compat.adaptation.tracing.flex_attention import plain_flex_attention
from compat.adaptation.tracing.graph import Graph, Place, kind, size
from compat.adaptation.tracing.plain_lists import registered
from compat.adaptation.tracing.record import Untraceable, to_graph
from compat.adaptation.tracing.rewrites import (
    SOFTMAXES,
    add_attention_first,
    add_biases_to_projections,
    drop_low_rank_terms,
    drop_repetitions_by_one,
    drop_zero_terms,
    keep_every_position,
    lift_derived_weights,
    look_up_rows,
    merge_stacked_products,
    remove_output_softmax,
    split_projections,
    split_stacked_parameters,
)
from compat.adaptation.tracing.watched import attention_at
from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.checkpoint.layout import HEAD, saved_name
from compat.config import HALF, GPT2Config, dtype_name
from compat.errors import AdaptError, CompatError
from compat.loading import fill, load_into
from compat.name_map import NameMap
from compat.parity import ParityReport
from compat.parity.check import converted, random_ids
from compat.parity.reference import Reference
from compat.tap import Tap
from compat.user_code import is_users
from compat.user_models.eval_mode import eval_mode

# Deviations with which two calls of a model differ, so that a decode step differs too.
UNSTEADY = {"dropout_always_on", "random_in_forward", "weights_changed"}
# Deviations that are unknown where it is unknown whether a module adds its input to its result.
OF_SHORTCUTS = {"missing_residual", "residual_from_norm", "missing_ln", "post_ln"}
# The relative RMS difference that a decode step may have from the logits of the same model without
# a cache, where these are not proved to be GPT-2's.
OWN_STEPS = 1e-3

BY_HAND = (
    "Rewrite this part as GPT-2 computes it, or write the name map by hand and load it with "
    "compat.load_into(model, name_map, source)."
)

Progress = Callable[[str], object]

# The number of parameters up to which gradients are compared; for larger models it takes seconds.
MOST_TRAINED = 50_000_000
# The number of logits up to which a model is called on as many sequences as it expects.
MOST_LOGITS = 500_000_000
# The length up to which a model that agrees on short ids is examined on longer ones.
LONGEST = 700
# The relative RMS error above which two calls compute different logits.
DIFFERS = 1e-3


@dataclass(frozen=True)
class _Options:
    """Arguments of `adapt`."""

    forward: Forward | None
    example_length: int | None
    progress: Progress


@dataclass
class _Run:
    """One call of `adapt`: the model, the checkpoint, and how the model is called."""

    model: nn.Module
    checkpoint: Checkpoint
    call: Forward
    ids: Tensor  # (B, T), that the model is traced with
    seconds: _Stages

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def signature(self) -> CallSignature | None:
        """How the model is called without a head of compat's; None for the user's own function."""
        call = self.call.call if isinstance(self.call, _WithHead) else self.call
        return call if isinstance(call, CallSignature) else None

    def reference(self) -> Reference:
        return Reference(self.checkpoint, next(iter(self.model.parameters())).dtype)

    def result(
        self,
        name_map: NameMap,
        parity: ParityReport | None,
        findings: list[Finding],
        unmatched: Sequence[str] = (),
        find_taps: Callable[[], list[Tap]] = list,
    ) -> Adaptation:
        return Adaptation(
            model=type(self.model).__name__,
            source=self.checkpoint.source,
            n_layer=self.config.n_layer,
            tensors=len(self.checkpoint.infos) - self.config.tie_word_embeddings,
            unmatched=list(unmatched),
            name_map=name_map,
            parity=parity,
            findings=findings,
            seconds=self.seconds,
            target=_target(type(self.model)),
            find_taps=find_taps,
        )


@dataclass(frozen=True)
class _WithHead:
    """The call of a model that returns hidden states, with the token embedding as its head.

    Args:
        call: calls the model and returns its hidden states.
        table: the name of the token embedding.
    """

    call: Forward
    table: str

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        return self.call(model, ids) @ model.get_parameter(self.table).T


@dataclass(frozen=True)
class _OutputOf:
    """The call of a model that returns the hidden states which one of its modules computes.

    Args:
        call: calls the model.
        module: the path of the module.
    """

    call: Forward
    module: str

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: object, output: Any) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)

        with model.get_submodule(self.module).register_forward_hook(keep):
            self.call(model, ids)
        return outputs[-1]


@dataclass
class _Mapped:
    """What stages 2 and 3 found in a graph."""

    anatomy: Anatomy
    places: NormPlaces
    assignments: Assignments
    unmatched: Unmatched
    last_only: Node | None  # where all positions but the last were dropped


class _Stages(dict[str, float]):
    """The seconds that each stage took; `progress` is called when one begins."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress


@contextmanager
def _timed(seconds: _Stages, stage: str) -> Iterator[None]:
    seconds.progress(stage)
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 3)


def adapt(
    model: nn.Module,
    source: Source,
    *,
    part: str | None = None,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
    example_length: int | None = None,
    progress: Progress | None = None,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
) -> Adaptation:
    """Map a module to a checkpoint, load the weights, and prove parity or report what differs.

    The model's code is executed; no code from the checkpoint is. The weights are loaded into the
    model, and its training or eval mode is kept.

    Args:
        model: your GPT-2, of the checkpoint's sizes, on the CPU.
        source: "demo", a hub id such as `gpt2`, a folder, a weights file, or a Checkpoint.
        part: what the module is, if it is not a whole model: "h.3", "h.3.attn", "h.3.mlp",
            "h.3.ln_1" or "ln_f". It is called with hidden states (B, T, C), and all other parts are
            compat's own.
        forward: `forward(model, input_ids)` returns logits (B, T, V) for ids (B, T). By default the
            model is called with ids, and its first output of that shape is used.
        example_length: number of ids per sequence with which the model is traced. By default a
            length that differs from all other sizes of the model.
        progress: called with the name of each stage when the stage begins.
        revision, verify, n_head: see `open_checkpoint`.

    Raises:
        AdaptError: the model is not a language model, or cannot be called, traced or mapped; the
            message says why and names the line.
        CompatError: the checkpoint cannot be loaded.
    """
    if not isinstance(model, nn.Module):
        check_model(model)
    with registered(model) as lists, plain_flex_attention():
        check_model(model)
        checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
        calls = None if forward or part else method_calls(model, random_ids(checkpoint, 0, 2, 4))
        options = _Options(forward or calls, example_length, progress or (lambda stage: None))
        if part is not None:
            adaptation = _adapt_part(model, checkpoint, part, options)
        else:
            adaptation = _adapt_in_own_type(model, checkpoint, options)
    findings = unregistered(model, lists) + ([no_forward(model, calls)] if calls else [])
    return replace(adaptation, findings=[*findings, *adaptation.findings])


def _adapt_part(
    model: nn.Module, checkpoint: Checkpoint, part: str, options: _Options
) -> Adaptation:
    """Adapt a single part."""
    whole, prefix = with_part(model, part, checkpoint.config)
    whole = whole.to(next(iter(model.parameters())).dtype)
    adaptation = _adapt_in_own_type(whole, checkpoint, replace(options, forward=None))
    return of_part(adaptation, model, part, prefix)


def _adapt_in_own_type(model: nn.Module, checkpoint: Checkpoint, options: _Options) -> Adaptation:
    """Adapt a model in any data type. One in half precision is mapped in float32."""
    dtype = next(iter(model.parameters())).dtype
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        by_width = sorted(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        try:
            with converted(model, dtypes, by_width[-1]), _types_replaced(model, by_width[-1]):
                adaptation = _adapt(model, checkpoint, options)
        except AdaptError:  # the code relies on the data types
            adaptation = _adapt(model, checkpoint, options)
        adaptation = _confirm(model, checkpoint, adaptation, options.forward, by_width[0])
        return replace(adaptation, findings=[*adaptation.findings, mixed_types(model)])
    if dtype not in HALF:
        return _adapt(model, checkpoint, options)
    with converted(model), _types_replaced(model, torch.float32):
        adaptation = _adapt(model, checkpoint, options)
    return _confirm(model, checkpoint, adaptation, options.forward, dtype)


@contextmanager
def _types_replaced(model: nn.Module, to: torch.dtype) -> Iterator[None]:
    """Replace half precision in the globals of the user's code, and in what its modules hold.

    Code such as `x.softmax(-1, dtype=DTYPE)` fails in a converted model otherwise.
    """
    modules = list(model.modules())
    own = (sys.modules.get(type(module).__module__) for module in modules)
    owners: list[Any] = [o for o in dict.fromkeys(own) if is_users(str(getattr(o, "__file__", "")))]
    held = {id(v): v for m in modules for v in vars(m).values() if _has_entries(v)}
    owners += [*modules, *held.values()]
    replaced = [
        (entries, name, value)
        for entries in (owner if isinstance(owner, dict) else vars(owner) for owner in owners)
        for name, value in list(entries.items())
        if isinstance(value, torch.dtype) and value in HALF
    ]
    for entries, name, _ in replaced:
        entries[name] = to
    try:
        yield
    finally:
        for entries, name, value in replaced:
            entries[name] = value


def _has_entries(value: object) -> bool:
    """Return whether a module's attribute may be a config."""
    other = isinstance(value, (type, Tensor, nn.Module))
    return isinstance(value, dict) or (hasattr(value, "__dict__") and not other)


def _adapt(model: nn.Module, checkpoint: Checkpoint, options: _Options) -> Adaptation:
    """Adapt a model in float32 or float64."""
    config, forward, seconds = checkpoint.config, options.forward, _Stages(options.progress)
    with _timed(seconds, "trace"):
        ids = random_ids(checkpoint, 0, 2, options.example_length or _example_length(config))
        # The first and last ids may be padding ids, which the model masks.
        ids = ids.clamp(min(2, config.vocab_size - 1), max(config.vocab_size - 3, 0))
        call, ids = (forward, ids) if forward else _signature(model, checkpoint, ids)
        run = _Run(model, checkpoint, call, ids, seconds)
        try:
            graph = to_graph(model, call, ids)
        except Untraceable as error:
            return _judge_by_calls(run, error)
    with _timed(seconds, "map"):
        try:
            mapped = _map(graph, checkpoint)
        except BatchFirst as error:
            if forward is not None:
                raise
            return _judge_batch_first(run, error)
        except NoHead as error:
            return _judge_with_head(run, error)
        except AdaptError as error:
            return _map_otherwise(run, error)
    return _judge(run, mapped)


def _judge_with_head(run: _Run, error: NoHead) -> Adaptation:
    """Judge a model that returns hidden states with GPT-2's head after it, the token embedding."""
    run.call = _WithHead(run.call, error.table)
    graph = to_graph(run.model, run.call, run.ids)
    adaptation = _examined(run, graph)
    return replace(adaptation, findings=[no_head(graph, error), *adaptation.findings])


def _examined(run: _Run, graph: Graph) -> Adaptation:
    """Map and judge a model, in another way if its graph is not recognised."""
    try:
        return _judge(run, _map(graph, run.checkpoint))
    except AdaptError as error:
        return _map_otherwise(run, error)


def _map(graph: Graph, checkpoint: Checkpoint, partial: bool = False) -> _Mapped:
    """Find which node is which part of a GPT-2, and which parameters hold which tensor.

    Raises:
        AdaptError: a part is missing, or a name map cannot express how a parameter is used.
    """
    config = checkpoint.config
    try:
        split_stacked_parameters(graph)
        add_biases_to_projections(graph)
        add_attention_first(graph)
        drop_repetitions_by_one(graph)
        look_up_rows(graph)
        lift_derived_weights(graph)
        last_only, output_softmax = keep_every_position(graph), remove_output_softmax(graph)
        anatomy = dissect(graph, partial)
        width = size(graph.output)[-1]
        if width not in (anatomy.vocabulary, config.vocab_size) and 2 * width < anatomy.vocabulary:
            raise AdaptError(
                f"the output has {width} values per token and the token embedding has "
                f"{anatomy.vocabulary} rows, as in a classifier, but logits over the vocabulary "
                "were expected"
            )
        places = place_norms(anatomy)
        assignments = find_assignments(anatomy, places, config, partial)
        assignments.output_softmax = output_softmax
        unmatched = drop_misfits(graph, assignments, checkpoint)
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise AdaptError(
            "the model's graph has a form that compat does not know, which raised "
            f"{type(error).__name__}: {error}. Report it to the authors of compat, with the model."
        ) from error
    return _Mapped(anatomy, places, assignments, unmatched, last_only)


def _judge(run: _Run, mapped: _Mapped) -> Adaptation:
    """Load the weights, compare hidden states and logits, and diagnose what differs."""
    model, config, graph = run.model, run.config, mapped.anatomy.graph
    training, signature = model.training, run.signature
    name_map = to_name_map(graph, mapped.assignments, config)
    with _timed(run.seconds, "load"):
        fill(model, name_map.expand(config.n_layer), run.checkpoint, zeros=name_map.zeros)
        graph.recompute_derived()
    with _timed(run.seconds, "reference"):
        reference = run.reference()
        weights = _float64_weights(reference)
    length_error = _length_error(run)
    context = DiagnosisContext(
        model,
        mapped.anatomy,
        mapped.places,
        mapped.assignments,
        config,
        weights,
        mapped.unmatched,
        last_only=mapped.last_only,
        with_targets=signature is not None and signature.targets,
        input_shape=signature.input_shape if signature is not None else "",
        output_shape="" if signature is None else signature.output_shape(model, run.ids),
        mask=signature.mask if signature is not None else "",
        fixed_length=None if length_error is None else run.ids.shape[1],
        length_error=length_error,
        noise=_noise(run) if graph.dropouts else "",
    )
    with _timed(run.seconds, "logits"):
        logits = end_to_end(model, run.call, reference, context.room, context.fixed_length)
    with _timed(run.seconds, "parity"):
        taps = find_taps(mapped.anatomy, mapped.assignments, mapped.places)
        report = parity_at_nodes(reference, context, taps, run.ids, logits)
    if report is not None and logits.failed and all(tap.passed for tap in report.taps):
        first = logits.failed[0]
        context.failed_input = f"{first.name} ({' × '.join(map(str, first.input_shape))} ids)"
    with _timed(run.seconds, "diagnose"):
        findings = diagnose(context, run.call, run.ids, training, reference, taps, report, logits)
    if any(f.code == "unexplained" for f in findings) and context.failed_input:
        if (longer := _longer_ids(run, reference)) is not None:
            longer_run = replace(run, ids=longer)
            with suppress(AdaptError):
                return _judge(longer_run, _map(to_graph(model, run.call, longer), run.checkpoint))
    if report is not None and report.passed and all(f.severity != "breaks" for f in findings):
        if sum(p.numel() for p in model.parameters()) <= MOST_TRAINED:
            with _timed(run.seconds, "gradients"):
                findings += trained_wrongly(model, run.call, run.ids, reference, name_map)
        with _timed(run.seconds, "decode"):
            bound = report.smallest_detectable
            findings += wrong_cache(context, run.call, run.ids, reference, bound)
    elif not any(f.code in UNSTEADY for f in findings):
        with _timed(run.seconds, "decode"):
            found = wrong_cache(context, run.call, run.ids, None, OWN_STEPS)
            findings += [f for f in found if f.code != "not_compared"]
    if context.with_targets:
        findings += _without_targets(run, findings)
    in_modules = partial(module_taps, model, run.call, graph, taps, run.ids)
    return run.result(name_map, report, findings, mapped.unmatched.names, in_modules)


def _without_targets(run: _Run, findings: Sequence[Finding]) -> list[Finding]:
    """Return what breaks parity only in the call without targets, of the last position."""
    assert run.signature is not None
    plain: Forward = run.signature.without_targets()
    if isinstance(run.call, _WithHead):
        plain = replace(run.call, call=plain)
    with suppress(Exception):  # the call may require targets
        with eval_mode(run.model):
            with_targets, without = (call(run.model, run.ids)[:, -1:] for call in (run.call, plain))
        if relative_rms(without, with_targets) > DIFFERS:
            graph = to_graph(run.model, plain, run.ids)
            adaptation = _judge(replace(run, call=plain), _map(graph, run.checkpoint))
            known = {finding.code for finding in findings}
            return [
                replace(f, message=f"{f.message} (in the call without targets)")
                for f in adaptation.findings if f.severity == "breaks" and f.code not in known
            ]  # fmt: skip
    return []


def _judge_batch_first(run: _Run, error: BatchFirst, partial: bool = False) -> Adaptation:
    """Judge a model whose attention runs along the first axis of the ids.

    It is called with ids (T, B) if it adds positions along the first axis as well. Otherwise this
    is a mistake, and the rest is examined as it is with `batch_first=True`.
    """
    call = run.call
    try:
        return _judge(run, _map_time_first(run, error, partial))
    except BatchFirst:
        run.call = call
    surveyed = _survey(run, error)
    modules = [
        module for module in run.model.modules()
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first
    ]  # fmt: skip
    with _batch_first(modules), suppress(AdaptError):
        if not modules:
            return surveyed
        run.call, run.ids = _signature(run.model, run.checkpoint, run.ids)
        adaptation = _examined(run, to_graph(run.model, run.call, run.ids))
        return replace(adaptation, findings=[surveyed.findings[0], *adaptation.findings])
    return surveyed


@contextmanager
def _batch_first(modules: Sequence[nn.MultiheadAttention]) -> Iterator[None]:
    """Let these modules take tensors (B, T, C) in the body."""
    for module in modules:
        module.batch_first = True
    try:
        yield
    finally:
        for module in modules:
            module.batch_first = False


def _map_time_first(run: _Run, error: BatchFirst, partial: bool) -> _Mapped:
    """Trace and map the same model, called with ids (T, B).

    Raises:
        BatchFirst: called so, the model does not add positions, so it expects ids (B, T).
    """
    try:
        run.call = find_signature(run.model, run.ids, time_first=True)
    except AdaptError:
        raise error from None
    mapped = _map(to_graph(run.model, run.call, run.ids), run.checkpoint, partial)
    tables = [mapped.assignments.by_tensor.get(name) for name in ("wte.weight", "wpe.weight")]
    if tables[0] is not None:
        (table,), positions = tables[0][0], tables[1][0][0] if tables[1] else None
        found = embedding_of(mapped.anatomy, table, positions)
        if found is None or found.by_batch:
            raise error from None
    return mapped


def _map_otherwise(run: _Run, error: AdaptError) -> Adaptation:
    """Try other ways to map a graph whose parts are not recognised.

    The first map with which the model is compatible is used; without one, the first that can be
    loaded, which may include parts that GPT-2 does not have.

    If none works because of a single unknown part, the rest is examined with GPT-2's in its place.
    If that is not possible either, the model's own weights are restored, and the result contains
    the findings that the graph shows.

    Raises:
        AdaptError: none works, for another reason. The error is the one that was raised for the
            graph.
    """
    if error.__cause__ is not None:  # a fault of compat in reading the graph, to be reported
        raise error

    def rewritten(rewrite: Callable[[Graph], bool], partial: bool = False) -> Adaptation | None:
        graph = to_graph(run.model, run.call, run.ids)
        return _judge(run, _map(graph, run.checkpoint, partial)) if rewrite(graph) else None

    by_graph: tuple[Callable[[], Adaptation | None], ...] = (
        lambda: rewritten(drop_zero_terms),
        lambda: rewritten(merge_stacked_products),
        lambda: rewritten(lambda graph: lift_derived_weights(graph, scaled=True)),
        lambda: rewritten(drop_low_rank_terms),
        lambda: rewritten(lambda graph: True, partial=True),
        lambda: rewritten(split_projections, partial=True),
    )
    parameters = list(run.model.parameters())

    def values() -> list[Tensor]:
        return [parameter.detach().clone() for parameter in parameters]

    def restore(values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    before, incompatible, unknown = values(), None, error
    for attempt in by_graph:
        with suppress(CompatError):
            try:
                adaptation = attempt()
            except BatchFirst as found:  # it has parts that GPT-2 does not have
                adaptation = _judge_batch_first(run, found, partial=True)
            except UnknownPart as found:
                unknown = found  # of the last attempt, which accepts the most structures
                raise
            if adaptation:
                return adaptation
            if adaptation is not None and incompatible is None:
                incompatible = adaptation, values()
        restore(before)
    with suppress(CompatError):
        if by_calls := _judge_by_calls(run, Untraceable(str(error))):
            return by_calls
    if incompatible is not None:
        adaptation, loaded = incompatible
        restore(loaded)
        return adaptation
    if isinstance(error, UnknownPart) and isinstance(unknown, UnknownPart):
        with suppress(CompatError):
            return _with_own_part(run, unknown)
        restore(before)
        return _survey(run, unknown)
    restore(before)
    raise AdaptError(f"{error}. {BY_HAND}") from error


def _survey(run: _Run, error: UnknownPart) -> Adaptation:
    """Report the deviations that the graph shows, without a map. The model keeps its weights."""
    graph = to_graph(run.model, run.call, run.ids)
    attention = _unused_attention(run, graph, error)
    findings = survey(graph, run.model, run.config, error, graph.nodes, attention=attention)
    return run.result(NameMap(()), None, findings, _names(run.checkpoint))


def _unused_attention(run: _Run, graph: Graph, error: UnknownPart) -> list[Place]:
    """Return the lines that compute attention, if none of it is in the graph."""
    of_scores = (n for n in graph.live if size(n)[-2:] == 2 * (run.ids.shape[1],))
    if error.code != NO_ATTENTION or any(kind(node) in SOFTMAXES for node in of_scores):
        return []
    return attention_at(run.model, run.call, run.ids)


def _with_own_part(run: _Run, error: UnknownPart) -> Adaptation:
    """Map, load and judge the model with GPT-2's attention or head in place of an unknown one.

    Raises:
        AdaptError: no modules compute the unknown part, or the rest cannot be mapped either.
    """
    graph = to_graph(run.model, run.call, run.ids)
    if isinstance(error, UnknownHead):
        return _with_own_head(run, graph, error)
    unknown: list[UnknownAttention] = []
    if not _unused_attention(run, graph, error):
        with suppress(Exception):  # the user's modules fail on other hidden states
            unknown = unknown_attention(run.model, run.call, run.ids, error.nodes, run.config)
    if not unknown:
        raise error
    return _with_own_attention(run, graph, error, unknown)


def _with_own_attention(
    run: _Run, graph: Graph, error: UnknownPart, unknown: Sequence[UnknownAttention]
) -> Adaptation:
    """Judge the model with GPT-2's attention in place of the modules that compute it."""
    config, model = run.config, run.model
    with attention_replaced(model, unknown, config):
        own = to_graph(model, run.call, run.ids)
        try:
            adaptation = _judge(run, _map(own, run.checkpoint))
        except UnknownPart:
            adaptation = _judge(run, _map(own, run.checkpoint, partial=True))
    findings = adaptation.findings
    if not all(each.shortcut_known for each in unknown):
        findings = [found for found in findings if found.code not in OF_SHORTCUTS]
    part = "block" if unknown[0].has_mlp else "attention"
    nodes = computed_by(graph, [each.path for each in unknown])
    surveyed = survey(graph, model, config, error, nodes, replaced_by=part)
    attended = torch.stack([each.attended for each in unknown]).any(dim=0)
    if part == "attention" and (masked := wrong_mask(graph, nodes, attended)):
        surveyed.append(masked)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows = adaptation.name_map.expand(config.n_layer)
    rows = [row for row in rows if parameters.keys() >= {*row.ours}]
    mapped = {row.hf for row in rows}
    return replace(
        adaptation,
        findings=_beside_own(findings, surveyed, part),
        name_map=NameMap(tuple(rows), adaptation.name_map.zeros),
        unmatched=[name for name in _names(run.checkpoint) if name not in mapped],
        parity=None,
        find_taps=list,
    )


def _with_own_head(run: _Run, graph: Graph, error: UnknownHead) -> Adaptation:
    """Judge the model with the token embedding as its head."""
    own = replace(run, call=_WithHead(_OutputOf(run.call, error.module), error.table))
    adaptation = _examined(own, to_graph(own.model, own.call, own.ids))
    nodes = after(graph, error.nodes)
    surveyed = survey(graph, run.model, run.config, error, nodes, replaced_by="head")
    findings = _beside_own(adaptation.findings, surveyed, "head")
    return replace(adaptation, findings=findings, parity=None, find_taps=list)


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


def _names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the checkpoint's tensors, without a tied head."""
    tied = {HEAD} if checkpoint.config.tie_word_embeddings else set()
    return [name for name in checkpoint.infos if name not in tied]


def _judge_by_calls(run: _Run, error: Untraceable) -> Adaptation:
    """Map by the order of module calls, and compare only the logits.

    Raises:
        Untraceable: the calls do not lead to a map either.
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
    proof = end_to_end(run.model, run.call, reference)
    with eval_mode(run.model):
        logits = {"logits": run.call(run.model, run.ids)}
    name = type(run.model).__name__
    report = reference.report(name, run.ids, ["logits"], lambda forced: logits, proof)
    findings = [untraced(error)]
    if not report:
        words = "the logits differ from the reference's, but without a graph compat cannot find why"
        findings.insert(0, unexplained("logits", None, words, report.headline))
    else:
        findings += limits_of(proof)
    return run.result(name_map, report, findings)


def _confirm(
    model: nn.Module,
    checkpoint: Checkpoint,
    adaptation: Adaptation,
    forward: Forward | None,
    dtype: torch.dtype,
) -> Adaptation:
    """Confirm the result of a copy in a wider type by comparing the model's own logits.

    The reference runs in `dtype`, the narrowest type of the model.
    """
    if not adaptation.compatible or adaptation.parity is None:
        return adaptation
    ids = random_ids(checkpoint, 0, 2, _example_length(checkpoint.config))
    call = forward or _signature(model, checkpoint, ids)[0]
    proof = end_to_end(model, call, Reference(checkpoint, dtype), short_only=True)
    name = dtype_name(dtype)
    report = replace(
        adaptation.parity, dtype=name, taps=[], logits=proof, float32=adaptation.parity
    )
    findings = list(adaptation.findings)
    if not proof.passed:
        words = f"a copy of the model in a wider type agrees with the reference, but not in {name}"
        findings.insert(0, unexplained("logits", None, words, report.headline))
    return replace(adaptation, parity=report, findings=findings)


# Ids, how many sequences of them are passed at once, and what converts them; see `find_signature`.
Inputs = tuple[Tensor, int | None, Convert | None]


def _signature(
    model: nn.Module, checkpoint: Checkpoint, ids: Tensor
) -> tuple[CallSignature, Tensor]:
    """Return how to call the model, and on which ids.

    If these ids fail, the model is called on full length, on ids below 16 that every table has, on
    a length that the error names, on 32-bit ids, on ids that are floating-point numbers, on one-hot
    vectors, on ids (T, B) if it then returns logits (B, V), on one sequence without the axis of the
    batch, and on the numbers of sequences that it may expect, also of full length.

    Raises:
        AdaptError: none of them works.
    """
    try:
        return find_signature(model, ids), ids
    except AdaptError as error:
        config = checkpoint.config
        if takes_hidden_states(model, config):
            raise AdaptError(
                f"{type(model).__name__} takes hidden states (B, T, C), not ids. Pass which part "
                'of a GPT-2 it is, part="h.0.attn" or --part h.0.attn. The parts are h.0, '
                "h.0.attn, h.0.mlp, h.0.ln_1, h.0.ln_2 and ln_f"
            ) from None
        full_length = random_ids(checkpoint, 0, 2, config.n_positions)

        def one_hot(ids: Tensor) -> Tensor:
            return F.one_hot(ids, config.vocab_size).to(next(iter(model.parameters())).dtype)

        others: list[Inputs]
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        others = [(full_length, None, None), (ids % min([16, *tables]), None, None)]
        mismatches = re.findall(r"size of tensor \w \((\d+)\)|\bsize (\d+)\b", str(error))
        lengths = dict.fromkeys(int(number) for pair in mismatches for number in pair if number)
        others += [
            (random_ids(checkpoint, 0, 2, length), None, None) for length in lengths
            if length < config.n_positions and length not in _sizes(config)
        ]  # fmt: skip
        others += [(ids, None, convert) for convert in (Tensor.int, Tensor.float, one_hot)]
        if found := _first_signature(model, others):
            return found
        with suppress(AdaptError):
            time_first = find_signature(model, ids, time_first=True)
            if time_first.last:  # logits (B, V), which a model of one sequence does not return
                return time_first, ids
        others = [(ids, 0, None), (full_length, 0, None)]
        for rows in batch_sizes(model):
            if rows * config.n_positions * config.vocab_size < MOST_LOGITS:
                full_length = random_ids(checkpoint, 0, rows, config.n_positions)
                others += [(full_length[:, : ids.shape[1]], rows, None), (full_length, rows, None)]
        if found := _first_signature(model, others):
            return found
        raise


def _first_signature(
    model: nn.Module, others: Sequence[Inputs]
) -> tuple[CallSignature, Tensor] | None:
    """Return the first signature that works with one of these inputs, and its ids."""
    for ids, rows, convert in others:
        with suppress(AdaptError):
            return find_signature(model, ids, rows, convert), ids
    return None


def _length_error(run: _Run) -> Exception | None:
    """Return what a model that does not accept the usual length raises for one id less, or None."""
    T = run.ids.shape[1]
    if T != _example_length(run.config) and T > 1:
        try:
            with eval_mode(run.model):
                run.call(run.model, run.ids[:, : T - 1])
        except Exception as error:
            return error
    return None


def _float64_weights(reference: Reference) -> dict[str, Tensor]:
    """Return the checkpoint's tensors in float64, by Hugging Face name."""
    checkpoint = reference.checkpoint
    if reference.exact is not None:
        state = reference.exact.state_dict()
        return {name: state[saved_name(name)] for name in checkpoint.infos}
    return {name: checkpoint.read(name).double() for name in checkpoint.infos}


def _noise(run: _Run) -> str:
    """Return the difference between two runs in eval mode, in words."""
    with eval_mode(run.model):
        one, two = run.call(run.model, run.ids), run.call(run.model, run.ids)
    return f"two runs in eval mode differ by up to {(one - two).abs().max().item():.2g}"


def _target(cls: type) -> str | None:
    """Return `FILE:Class` of a class at the top level of a file that exists."""
    with suppress(TypeError, OSError):
        file = inspect.getsourcefile(cls)
        if file and Path(file).is_file() and is_users(file) and "." not in cls.__qualname__:
            return f"{file}:{cls.__qualname__}"
    return None


def _longer_ids(run: _Run, reference: Reference) -> Tensor | None:
    """Find ids of a length at which the logits differ, as with a sliding window.

    Return None if they agree at all lengths up to `LONGEST`, or the model fails at one of them.
    """
    length = 2 * run.ids.shape[1]
    while length <= min(LONGEST, run.config.n_positions):
        ids = random_ids(run.checkpoint, 0, 2, _example_length(run.config, length))
        try:
            with eval_mode(run.model):
                own = run.call(run.model, ids)
        except Exception:  # the comparison of logits has reported it
            return None
        expected = reference.trace(ids)[0]["logits"][:, -own.shape[1] :]
        if relative_rms(own, expected) > DIFFERS:
            return ids
        length *= 2
    return None


def _sizes(config: GPT2Config) -> set[int]:
    """Return the lengths of axes that are not those of the positions."""
    return {
        1, 2, config.n_head, config.n_embd, config.d_head, config.d_inner, config.vocab_size,
        config.n_layer, 3, 3 * config.n_embd, 3 * config.d_head, 2 * config.n_head,
    }  # fmt: skip


def _example_length(config: GPT2Config, least: int = 0) -> int:
    """Return a length that no other axis of the model has, so that it identifies the axis."""
    sizes = _sizes(config)
    for length in range(least, config.n_positions) if least else (13, 11, 17, 19, 7, 5, 23):
        if length not in sizes and length <= config.n_positions:
            return length
    return min(least or 9, config.n_positions)
