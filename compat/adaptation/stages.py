"""The stages from a graph to a result: map_graph and map, load, prove, diagnose."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy, dissect
from compat.adaptation.anatomy.norms import NormPlaces, place_norms
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.counterfactual import DIFFERS, relative_rms
from compat.adaptation.diagnosis.diagnose import diagnose
from compat.adaptation.diagnosis.findings import trained_wrongly
from compat.adaptation.diagnosis.kv_cache import wrong_cache
from compat.adaptation.diagnosis.proof import end_to_end, parity_at_nodes
from compat.adaptation.emit import to_name_map
from compat.adaptation.inputs import example_length
from compat.adaptation.mapping.assignments import (
    Assignments,
    Unmatched,
    drop_misfits,
    find_assignments,
    names_without_tied_head,
)
from compat.adaptation.mapping.taps import find_taps, module_taps
from compat.adaptation.result import Adaptation, Finding
from compat.adaptation.tracing.calling import CallSignature, Forward, Wrapped, one_more
from compat.adaptation.tracing.graph import Graph, ShapeChanged, size
from compat.adaptation.tracing.record import to_graph
from compat.adaptation.tracing.replaced import WithReplaced
from compat.adaptation.tracing.rewrites import normalize
from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import saved_name
from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.loading import fill
from compat.name_map import NameMap
from compat.parity import ParityReport
from compat.parity.check import random_ids
from compat.parity.logits import Extent
from compat.parity.reference import Reference
from compat.tap import Tap
from compat.user_code import is_users
from compat.user_models.eval_mode import eval_mode

# Deviations with which two calls of a model differ, so that a decode step differs too.
UNSTEADY = {"dropout_always_on", "random_in_forward", "weights_changed"}
# The relative RMS difference that a decode step may have from the logits of the same model without
# a cache, where these are not proved to be GPT-2's.
OWN_STEPS = 1e-3
# The number of parameters up to which gradients are compared; for larger models it takes seconds.
MOST_TRAINED = 50_000_000
# The length up to which a model that agrees on short ids is examined on longer ones.
LONGEST = 700
# What a graph of an unknown form raises, one with other values than those it was traced with, and a
# model of a class of the user's that accepts no further module.
GRAPH_ERRORS = (RuntimeError, LookupError, ValueError, TypeError, AttributeError)

Progress = Callable[[str], object]
MakeReference = Callable[[Checkpoint, torch.dtype], Reference]


class Stages(dict[str, float]):
    """The seconds that each stage took; `progress` is called when one begins."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress


@contextmanager
def timed(seconds: Stages, stage: str) -> Iterator[None]:
    seconds.progress(stage)
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 3)


@dataclass
class Run:
    """One call of `adapt`: the model, the checkpoint, and how the model is called."""

    model: nn.Module
    checkpoint: Checkpoint
    call: Forward
    ids: Tensor  # (B, T), that the model is traced with
    seconds: Stages
    make_reference: MakeReference
    extent: Extent = "all"  # of the inputs on which logits are compared if hidden states agree

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def signature(self) -> CallSignature | None:
        """How the model is called without parts of compat's; None for the user's own function."""
        call = self.call.call if isinstance(self.call, Wrapped) else self.call
        return call if isinstance(call, CallSignature) else None

    def reference(self) -> Reference:
        return self.make_reference(self.checkpoint, next(iter(self.model.parameters())).dtype)

    def trace(self) -> Graph:
        return to_graph(self.model, self.call, self.ids)

    def logits(self, ids: Tensor) -> Tensor:
        with eval_mode(self.model):
            return self.call(self.model, ids)

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
            tensors=len(names_without_tied_head(self.checkpoint)),
            unmatched=list(unmatched),
            name_map=name_map,
            parity=parity,
            findings=findings,
            seconds=self.seconds,
            target=_target(type(self.model)),
            find_taps=find_taps,
        )


@dataclass
class Mapped:
    """What stages 2 and 3 found in a graph."""

    anatomy: Anatomy
    places: NormPlaces
    assignments: Assignments
    unmatched: Unmatched
    last_only: Node | None  # where all positions but the last were dropped


def map_graph(graph: Graph, checkpoint: Checkpoint, accepts_others: bool = False) -> Mapped:
    """Find which node is which part of a GPT-2, and which parameters hold which tensor.

    Raises:
        AdaptError: a part is missing, or a name map cannot express how a parameter is used.
    """
    config = checkpoint.config
    try:
        last_only, output_softmax = normalize(graph)
        anatomy = dissect(graph, accepts_others)
        width = size(graph.output)[-1]
        if width not in (anatomy.vocabulary, config.vocab_size) and 2 * width < anatomy.vocabulary:
            raise AdaptError(
                f"the output has {width} values per token and the token embedding has "
                f"{anatomy.vocabulary} rows, as in a classifier, but logits over the vocabulary "
                "were expected"
            )
        places = place_norms(anatomy)
        assignments = find_assignments(anatomy, places, config, accepts_others)
        assignments.output_softmax = output_softmax
        unmatched = drop_misfits(graph, assignments, checkpoint)
    except ShapeChanged:
        raise
    except GRAPH_ERRORS as error:
        raise AdaptError(
            "the model's graph has a form that compat does not know, which raised "
            f"{type(error).__name__}: {error}. Report it to the authors of compat, with the model."
        ) from error
    return Mapped(anatomy, places, assignments, unmatched, last_only)


def judge(run: Run, mapped: Mapped) -> Adaptation:
    """Load the weights, compare hidden states and logits, and diagnose what differs."""
    model, config, graph = run.model, run.config, mapped.anatomy.graph
    training, signature = model.training, run.signature
    name_map = to_name_map(graph, mapped.assignments, config)
    with timed(run.seconds, "load"):
        fill(model, name_map.expand(config.n_layer), run.checkpoint, zeros=name_map.zeros)
        graph.recompute_derived()
    with timed(run.seconds, "reference"):
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
        of_loss=signature is not None and signature.of_loss,
        input_shape=signature.input_shape if signature is not None else "",
        setup=signature.setup if signature is not None else "",
        output_shape="" if signature is None else signature.output_shape(model, run.ids),
        leaves_out_last=signature is not None and signature.convert is one_more,
        mask=signature.mask if signature is not None else "",
        fixed_length=None if length_error is None else run.ids.shape[1],
        length_error=length_error,
        noise=_noise(run) if graph.dropouts else "",
    )
    with timed(run.seconds, "parity"):
        taps = find_taps(mapped.anatomy, mapped.assignments, mapped.places)
        report = parity_at_nodes(reference, context, taps, run.ids)
    with timed(run.seconds, "logits"):
        # If hidden states differ, so do the logits, and further inputs show nothing new.
        agree = report is not None and all(tap.passed for tap in report.taps)
        extent = run.extent if agree and not isinstance(run.call, WithReplaced) else "first"
        logits = end_to_end(model, run.call, reference, context.room, context.fixed_length, extent)
        if extent == "all":
            reference.verify()  # the model's code may have changed torch while it ran
    if report is not None:
        report = replace(report, logits=logits)
    if agree and logits.failed:
        first = logits.failed[0]
        context.failed_input = f"{first.name} ({' × '.join(map(str, first.input_shape))} ids)"
    with timed(run.seconds, "diagnose"):
        findings = diagnose(context, run.call, run.ids, training, reference, taps, report, logits)
    if any(f.code == "unexplained" for f in findings) and context.failed_input:
        if (longer := _longer_ids(run, reference)) is not None:
            with suppress(AdaptError):
                return examine(replace(run, ids=longer))
    if report is not None and report.passed and all(f.severity != "breaks" for f in findings):
        if sum(p.numel() for p in model.parameters()) <= MOST_TRAINED:
            with timed(run.seconds, "gradients"):
                findings += trained_wrongly(model, run.call, run.ids, reference, name_map)
        with timed(run.seconds, "decode"):
            bound = report.smallest_detectable
            findings += wrong_cache(context, run.call, run.ids, reference, bound)
    elif not any(f.code in UNSTEADY for f in findings):
        with timed(run.seconds, "decode"):
            found = wrong_cache(context, run.call, run.ids, None, OWN_STEPS)
            findings += [f for f in found if f.code != "not_compared"]
    if context.with_targets and not context.of_loss:
        findings += _without_targets(run, findings)
    in_modules = partial(module_taps, model, run.call, graph, taps, run.ids)
    return run.result(name_map, report, findings, mapped.unmatched.names, in_modules)


def examine(run: Run, accepts_others: bool = False) -> Adaptation:
    """Trace, map and judge a model. See `map_graph` for `accepts_others`."""
    return judge(run, map_graph(run.trace(), run.checkpoint, accepts_others))


def _without_targets(run: Run, findings: Sequence[Finding]) -> list[Finding]:
    """Return what breaks parity only in the call without targets, of the last position."""
    assert run.signature is not None
    plain: Forward = run.signature.without_targets()
    if isinstance(run.call, Wrapped):
        plain = replace(run.call, call=plain)
    of_last = replace(run, call=plain)
    with suppress(Exception):  # the call may require targets
        with_targets, without = (each.logits(run.ids)[:, -1:] for each in (run, of_last))
        if relative_rms(without, with_targets) > DIFFERS:
            adaptation = examine(of_last)
            known = {finding.code for finding in findings}
            return [
                replace(f, message=f"{f.message} (in the call without targets)")
                for f in adaptation.findings if f.severity == "breaks" and f.code not in known
            ]  # fmt: skip
    return []


def _length_error(run: Run) -> Exception | None:
    """Return what the model raises for one id less, or None."""
    T, raised = run.ids.shape[1], None
    # Some code fails at random, as in what it prints now and then.
    for _ in range(3 if T > 1 else 0):
        try:
            run.logits(run.ids[:, : T - 1])
            return None
        except Exception as error:
            raised = error
    return raised


def _float64_weights(reference: Reference) -> dict[str, Tensor]:
    """Return the checkpoint's tensors in float64, by Hugging Face name."""
    checkpoint = reference.checkpoint
    if reference.exact is not None:
        state = reference.exact.state_dict()
        return {name: state[saved_name(name)] for name in checkpoint.infos}
    return {name: checkpoint.read(name).double() for name in checkpoint.infos}


def _noise(run: Run) -> str:
    """Return the difference between two runs in eval mode, in words."""
    one, two = run.logits(run.ids), run.logits(run.ids)
    return f"two runs in eval mode differ by up to {(one - two).abs().max().item():.2g}"


def _target(cls: type) -> str | None:
    """Return `FILE:Class` of a class at the top level of a file that exists."""
    with suppress(TypeError, OSError):
        file = inspect.getsourcefile(cls)
        if file and Path(file).is_file() and is_users(file) and "." not in cls.__qualname__:
            return f"{file}:{cls.__qualname__}"
    return None


def _longer_ids(run: Run, reference: Reference) -> Tensor | None:
    """Find ids of a length at which the logits differ, as with a sliding window.

    Return None if they agree at all lengths up to `LONGEST`, or the model fails at one of them.
    """
    length = 2 * run.ids.shape[1]
    while length <= min(LONGEST, run.config.n_positions):
        ids = random_ids(run.checkpoint, 0, 2, example_length(run.config, length))
        try:
            own = run.logits(ids)
        except Exception:  # the comparison of logits has reported it
            return None
        expected = reference.trace(ids)[0]["logits"][:, -own.shape[1] :]
        if relative_rms(own, expected) > DIFFERS:
            return ids
        length *= 2
    return None
