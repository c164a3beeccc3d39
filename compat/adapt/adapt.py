"""`adapt`: from somebody's module and a checkpoint to a mapping, a proof and a diagnosis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adapt.adaptation import Adaptation
from compat.adapt.anatomy.dissect import dissect
from compat.adapt.anatomy.parts import Anatomy
from compat.adapt.anatomy.placement import NormPlaces, place_norms
from compat.adapt.diagnosis import source as source_lines
from compat.adapt.diagnosis.case import Case, Deviation
from compat.adapt.diagnosis.diagnose import deviations
from compat.adapt.diagnosis.findings import (
    finding,
    limits_of,
    to_findings,
    unexplained,
    without_effect,
)
from compat.adapt.diagnosis.leftovers import fused_kernels, left_in_training, leftovers
from compat.adapt.diagnosis.proof import (
    ask_witness,
    end_to_end,
    own_error,
    parity_at_nodes,
)
from compat.adapt.diagnosis.witness import nothing_to_explain
from compat.adapt.mapping.by_calls import map_by_calls
from compat.adapt.mapping.embedding import embedding_of
from compat.adapt.mapping.find import find_mapping
from compat.adapt.mapping.fit import Lost, keep_what_fits
from compat.adapt.mapping.homes import BatchFirst, Homes
from compat.adapt.mapping.rows import to_name_map
from compat.adapt.mapping.taps import find_taps
from compat.adapt.tracing.calling import Forward, Way, default_forward, eval_mode
from compat.adapt.tracing.canonical import drop_zero_terms
from compat.adapt.tracing.checks import check_model
from compat.adapt.tracing.ends import before_softmax, every_position
from compat.adapt.tracing.export import Untraceable, to_graph
from compat.adapt.tracing.graph import Graph, size
from compat.adapt.tracing.reparametrize import find_derived
from compat.checkpoint import Checkpoint, open_checkpoint
from compat.checkpoint.layout import saved_name
from compat.config import GPT2Config
from compat.errors import AdaptError, CompatError
from compat.loading import Source, fill, load_into
from compat.parity.check import HALF, Reference, in_float32, random_ids

Read = tuple[Graph, Anatomy, NormPlaces, Homes, Node | None, Lost]


@dataclass
class _Clock:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def adapt(
    model: nn.Module,
    source: Source,
    *,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
    example_length: int | None = None,
) -> Adaptation:
    """Find the mapping, load the weights into `model`, prove parity or say what is wrong.

    The model's own code is run; nothing of the checkpoint is. The model gets the weights and stays
    in the mode that it came in.

    Args:
        model: somebody's GPT-2, of the checkpoint's sizes, on the CPU.
        source: the checkpoint, as in `load_pretrained`.
        forward: `forward(model, input_ids)` gives logits (B, T, V) for ids (B, T); by default the
            model is called with ids, and the first such tensor in what it returns is taken.
        example_length: ids per sequence that the model is traced with; None chooses one that is
            no other size of the model.

    Raises:
        AdaptError: the model is no GPT-2, or cannot be traced or mapped; says why and where.
        CompatError: the checkpoint cannot be loaded.
    """
    check_model(model)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    dtype = next(model.parameters()).dtype
    if dtype not in HALF:
        return _adapted(model, checkpoint, forward, example_length)
    with in_float32(model):
        adaptation = _adapted(model, checkpoint, forward, example_length)
    return _confirmed_in_half(model, checkpoint, adaptation, forward, dtype)


def _confirmed_in_half(
    model: nn.Module,
    checkpoint: Checkpoint,
    adaptation: Adaptation,
    forward: Forward | None,
    dtype: torch.dtype,
) -> Adaptation:
    """The adaptation of the float32 copy, once the model itself agrees in its own data type."""
    if not adaptation.compatible or adaptation.parity is None:
        return adaptation
    ids = random_ids(checkpoint, 0, 2, _length(checkpoint.config))
    call = forward or _way(model, checkpoint, ids)[0]
    proof = end_to_end(model, call, Reference(checkpoint, dtype), short_only=True)
    name = str(dtype).removeprefix("torch.")
    report = replace(
        adaptation.parity, dtype=name, taps=[], logits=proof, float32=adaptation.parity
    )
    findings = list(adaptation.findings)
    if not proof.passed:
        words = f"the model agrees with the reference in float32, but not in {name}"
        findings.insert(0, unexplained("logits", None, words, report.headline))
    return replace(adaptation, parity=report, findings=findings)


def _adapted(
    model: nn.Module,
    checkpoint: Checkpoint,
    forward: Callable[[nn.Module, Tensor], Tensor] | None,
    example_length: int | None,
) -> Adaptation:
    """`adapt` for a model in float32 or float64."""
    clock, config = _Clock(), checkpoint.config
    with clock.stage("export"):
        ids = random_ids(checkpoint, 0, 2, example_length or _length(config))
        # The first and last ids may stand for padding, and be masked.
        ids = ids.clamp(min(2, config.vocab_size - 1), max(config.vocab_size - 3, 0))
        call, ids = (forward, ids) if forward else _way(model, checkpoint, ids)
        try:
            graph = to_graph(model, call, ids)
        except Untraceable as error:
            return _without_graph(model, call, ids, checkpoint, error)
    with clock.stage("map"):
        try:
            read = _read(graph, checkpoint)
        except BatchFirst as error:
            if forward is not None:
                raise
            call = _time_first(call)
            read = _read(to_graph(model, call, ids), checkpoint)
            both = {"wte.weight", "wpe.weight"} <= read[3].homes.keys()
            if both and not learned_positions(read[1], read[3]):
                raise error from None
        except AdaptError as error:
            return _without_anatomy(model, call, ids, checkpoint, error, clock)
    return _judged(model, call, ids, checkpoint, read, clock)


def _judged(
    model: nn.Module, call: Forward, ids: Tensor, checkpoint: Checkpoint, read: Read, clock: _Clock
) -> Adaptation:
    """Load by the homes that were found, compare, and say what is unlike GPT-2."""
    graph, anatomy, places, mapping, last_only, lost = read
    config, training = checkpoint.config, model.training
    name_map = to_name_map(graph, mapping, config)
    with clock.stage("load"):
        fill(model, name_map.expand(config.n_layer), checkpoint, zeros=name_map.zeros)
        graph.derive_again()
    with clock.stage("reference"):
        reference = Reference(checkpoint, next(model.parameters()).dtype)
        weights = _float64_weights(reference)
    case = Case(
        model,
        anatomy,
        places,
        mapping,
        config,
        weights,
        last_only=last_only,
        with_targets=isinstance(call, Way) and call.targets,
        fixed_length=ids.shape[1] if ids.shape[1] == config.n_positions else None,
        noise=_noise(model, call, ids) if graph.dropouts else "",
    )
    with clock.stage("logits"):
        logits = end_to_end(model, call, reference, case.room, case.fixed_length)
    with clock.stage("parity"):
        taps = find_taps(anatomy, mapping, places)
        report = parity_at_nodes(reference, case, taps, ids, logits)
    with clock.stage("diagnose"):
        found = deviations(case, lost)
        if report is not None and report and not any(deviation.apply for deviation in found):
            witness = nothing_to_explain(found)
        else:
            witness = ask_witness(case, found, reference, taps, ids, call)
        findings = to_findings(found, witness, own_error(reference, ids))
        findings += leftovers(case, taps, witness, findings, report, logits)
        if any(f.tap == "logits" and f.code == "unexplained" for f in findings):
            findings = fused_kernels(findings, model, call, reference, case)
        findings += left_in_training(model, call, training, ids)
        if report:  # the reach of a proof that failed is of no use
            findings = [without_effect(found) for found in findings] + limits_of(logits)
    return Adaptation(
        model=type(model).__name__,
        source=checkpoint.source,
        n_layer=config.n_layer,
        tensors=len(checkpoint.infos) - config.tie_word_embeddings,
        homeless=lost.names,
        name_map=name_map,
        parity=report,
        findings=findings,
        seconds=clock.seconds,
    )


def _without_graph(
    model: nn.Module, call: Forward, ids: Tensor, checkpoint: Checkpoint, error: Untraceable
) -> Adaptation:
    """A map by the order of module calls, and parity of the logits.

    Raises:
        Untraceable: there is no such map either.
    """
    try:
        name_map = map_by_calls(model, call, ids, checkpoint.config)
    except AdaptError as reason:
        raise Untraceable(f"{error}\nby the order of module calls: {reason}") from error
    load_into(model, name_map, checkpoint)
    reference = Reference(checkpoint, next(model.parameters()).dtype)
    proof = end_to_end(model, call, reference)
    with eval_mode(model):
        logits = {"logits": call(model, ids)}
    report = reference.report(type(model).__name__, ids, ["logits"], lambda forced: logits, proof)
    deviation = Deviation("untraced", None, source_lines.named(str(error)), {"found": str(error)})
    findings = [finding(deviation, "style", "")]
    if not report:
        words = "the logits differ from the reference's; without a graph the reason is not found"
        findings.insert(0, unexplained("logits", None, words, report.headline))
    else:
        findings += limits_of(proof)
    tied = checkpoint.config.tie_word_embeddings
    return Adaptation(
        model=type(model).__name__,
        source=checkpoint.source,
        n_layer=checkpoint.config.n_layer,
        tensors=len(checkpoint.infos) - tied,
        homeless=[],
        name_map=name_map,
        parity=report,
        findings=findings,
    )


def _without_anatomy(
    model: nn.Module,
    call: Forward,
    ids: Tensor,
    checkpoint: Checkpoint,
    error: AdaptError,
    clock: _Clock,
) -> Adaptation:
    """For a graph whose parts are not understood: other ways to a map, if one is right.

    Raises:
        AdaptError: none is; the error that was met in the graph, and the model as it was.
    """
    if error.__cause__ is not None:  # a fault of compat in reading the graph, to be reported
        raise error

    def rewritten(rewrite: Callable[[Graph], bool]) -> Adaptation | None:
        graph = to_graph(model, call, ids)
        if not rewrite(graph):
            return None
        return _judged(model, call, ids, checkpoint, _read(graph, checkpoint), clock)

    def by_calls() -> Adaptation:
        return _without_graph(model, call, ids, checkpoint, Untraceable(str(error)))

    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    attempts: tuple[Callable[[], Adaptation | None], ...] = (
        partial(rewritten, drop_zero_terms),
        partial(rewritten, partial(find_derived, scaled=True)),
        by_calls,
    )
    for attempt in attempts:
        with suppress(CompatError):
            found = attempt()
            if found:
                return found
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
    raise error


def _way(model: nn.Module, checkpoint: Checkpoint, ids: Tensor) -> tuple[Way, Tensor]:
    """How to call the model, on these ids or, if it takes no other, on a text of full length."""
    whole = random_ids(checkpoint, 0, 2, checkpoint.config.n_positions)
    few = ids % 16  # for a vocabulary smaller than the checkpoint's
    try:
        return default_forward(model, ids), ids
    except AdaptError:
        for others in (whole, few):
            with suppress(AdaptError):
                return default_forward(model, others), others
        raise


def _float64_weights(reference: Reference) -> dict[str, Tensor]:
    """The checkpoint's tensors by Hugging Face name; those of the float64 run, if there is one."""
    checkpoint = reference.checkpoint
    if reference.exact is not None:
        state = reference.exact.state_dict()
        return {name: state[saved_name(name)] for name in checkpoint.infos}
    return {name: checkpoint.read(name).double() for name in checkpoint.infos}


def _noise(model: nn.Module, call: Forward, ids: Tensor) -> str:
    """By how much two runs in eval mode differ, in words."""
    with eval_mode(model):
        one, two = call(model, ids), call(model, ids)
    return f"two runs in eval mode differ by up to {(one - two).abs().max().item():.2g}"


def learned_positions(anatomy: Anatomy, mapping: Homes) -> bool:
    """The embedded text is the sum of rows for the tokens and for their positions."""
    (table,), _ = mapping.homes["wte.weight"]
    (positions,), _ = mapping.homes["wpe.weight"]
    return embedding_of(anatomy.graph, anatomy.embed, table, positions) is not None


def _check_vocabulary(anatomy: Anatomy, config: GPT2Config) -> None:
    """The output is as wide as the vocabulary, the model's own or the checkpoint's."""
    wide, table = size(anatomy.graph.output)[-1], anatomy.vocabulary
    if wide not in (table, config.vocab_size):
        raise AdaptError(
            f"the output has {wide} values per token, the vocabulary {table}: a classifier or the "
            "like; expected logits over the vocabulary"
        )


def _read(graph: Graph, checkpoint: Checkpoint) -> Read:
    """The anatomy of a graph, and a home for every tensor that finds one."""
    try:
        find_derived(graph)
        last_only, softmax = every_position(graph), before_softmax(graph)
        anatomy = dissect(graph)
        _check_vocabulary(anatomy, checkpoint.config)
        places = place_norms(anatomy)
        mapping = find_mapping(anatomy, places, checkpoint.config)
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise AdaptError(
            f"the model's graph has a form that compat does not know: {type(error).__name__}: "
            f"{error}; report it to the authors of compat, with the model"
        ) from error
    mapping.output_softmax = softmax
    lost = keep_what_fits(graph, mapping, checkpoint)
    return graph, anatomy, places, mapping, last_only, lost


def _time_first(call: Forward) -> Forward:
    """The same for a model that wants its ids as (T, B)."""

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        return call(model, ids.T).transpose(0, 1)

    return forward


def _length(config: GPT2Config) -> int:
    """A length that no other axis of the model has, so that axes can be told by their lengths."""
    sizes = {
        2, config.n_head, config.n_embd, config.d_head, config.d_inner, config.vocab_size,
        config.n_layer, 3, 3 * config.n_embd, 3 * config.d_head, 2 * config.n_head,
    }  # fmt: skip
    for length in (13, 11, 17, 19, 7, 5, 23):
        if length not in sizes and length <= config.n_positions:
            return length
    return min(9, config.n_positions)
