"""`adapt`: map a user's module to a checkpoint, load it, prove parity and diagnose deviations.

The five stages:

1. Trace: module → `Graph`, in `_adapt` (tracing/).
2. Recognise: `Graph` → `Anatomy` and `NormPlaces`, in `map_graph` (anatomy/).
3. Map: → `Assignments` and `Unmatched`, in `map_graph` (mapping/).
4. Prove: weights are loaded, taps and logits compared → `ParityReport`, in `judge`.
5. Diagnose: → findings, in `diagnose` (diagnosis/).

Stages 2 to 5 are in stages.py. What is done if one of the first three fails is in other_ways.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compat.adaptation.anatomy.dissect import NoHead
from compat.adaptation.diagnosis.findings import (
    continued,
    mixed_types,
    no_forward,
    of_one_token,
    unexplained,
    unregistered,
)
from compat.adaptation.diagnosis.proof import end_to_end
from compat.adaptation.inputs import example_length, find_call
from compat.adaptation.mapping.assignments import BatchFirst
from compat.adaptation.other_ways import (
    judge_batch_first,
    judge_by_calls,
    judge_otherwise,
    judge_with_head,
)
from compat.adaptation.part import of_part, with_part
from compat.adaptation.result import Adaptation
from compat.adaptation.stages import MakeReference, Progress, Run, Stages, judge, map_graph, timed
from compat.adaptation.tracing.calling import Forward, NoLogitsError, check_model, method_calls
from compat.adaptation.tracing.flex_attention import plain_flex_attention
from compat.adaptation.tracing.one_token import one_token_line, without_assertions
from compat.adaptation.tracing.plain_lists import registered
from compat.adaptation.tracing.record import Untraceable
from compat.adaptation.tracing.state import first_calls
from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.config import HALF, dtype_name
from compat.errors import AdaptError
from compat.parity.check import converted, random_ids
from compat.parity.logits import Extent
from compat.parity.reference import Reference
from compat.user_code import is_users
from compat.user_models.eval_mode import ModelState


@dataclass(frozen=True)
class Options:
    """Arguments of `adapt`, and what makes the reference: several runs can share one."""

    forward: Forward | None
    example_length: int | None
    progress: Progress
    make_reference: MakeReference
    extent: Extent = "all"


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
    options = Options(forward, example_length, progress or no_progress, Reference)
    open_source = partial(open_checkpoint, source, revision=revision, verify=verify, n_head=n_head)
    return adapt_with(model, open_source, part, options)


def no_progress(stage: str) -> None:
    """Do nothing when a stage begins."""


def adapt_with(
    model: nn.Module, open_source: Callable[[], Checkpoint], part: str | None, options: Options
) -> Adaptation:
    """Adapt a model as `adapt` does. The checkpoint is opened once the model is checked."""
    if not isinstance(model, nn.Module):
        check_model(model)
    with registered(model) as lists, plain_flex_attention():
        check_model(model)
        checkpoint = open_source()
        known = options.forward is not None or part is not None
        calls = None if known else method_calls(model, random_ids(checkpoint, 0, 2, 4))
        options = replace(options, forward=options.forward or calls)
        if part is not None:
            adaptation = _adapt_part(model, checkpoint, part, options)
        else:
            adaptation = _adapt_in_own_type(model, checkpoint, options)
    findings = unregistered(model, lists) + ([no_forward(model, calls)] if calls else [])
    return replace(adaptation, findings=[*findings, *adaptation.findings])


def _adapt_part(
    model: nn.Module, checkpoint: Checkpoint, part: str, options: Options
) -> Adaptation:
    """Adapt a single part."""
    whole, prefix = with_part(model, part, checkpoint.config)
    whole = whole.to(next(iter(model.parameters())).dtype)
    adaptation = _adapt_in_own_type(whole, checkpoint, replace(options, forward=None))
    return of_part(adaptation, model, part, prefix)


def _adapt_in_own_type(model: nn.Module, checkpoint: Checkpoint, options: Options) -> Adaptation:
    """Adapt a model in any data type. One in half precision is mapped in float32."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    by_width = sorted(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    narrow, wide, mixed = by_width[0], by_width[-1], len(dtypes) > 1
    if not mixed and narrow not in HALF:
        return _adapt(model, checkpoint, options)
    to = wide if mixed else torch.float32
    try:
        with converted(model, dtypes, to), _types_replaced(model, to):
            adaptation = _adapt(model, checkpoint, options)
    except AdaptError:
        adaptation = _adapt(model, checkpoint, options)  # the code relies on the data types
    adaptation = _confirm(model, checkpoint, adaptation, options, narrow)
    found = [mixed_types(model)] if mixed else []
    return replace(adaptation, findings=[*adaptation.findings, *found])


@contextmanager
def _types_replaced(model: nn.Module, to: torch.dtype) -> Iterator[None]:
    """Replace half precision in the globals of the user's code, and in what its modules hold.

    Code such as `x.softmax(-1, dtype=DTYPE)` fails in a converted model otherwise. So do tensors
    that are not buffers, such as those of a cache, and code that sets torch's default data type.
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
        if (isinstance(value, torch.dtype) and value in HALF)
        or (isinstance(value, Tensor) and value.dtype in HALF)
    ]
    for entries, name, value in replaced:
        entries[name] = value.to(to) if isinstance(value, Tensor) else to
    default = torch.get_default_dtype()
    torch.set_default_dtype(to if default in HALF else default)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        for entries, name, value in replaced:
            entries[name] = value


def _has_entries(value: object) -> bool:
    """Return whether a module's attribute may be a config."""
    other = isinstance(value, (type, Tensor, nn.Module))
    return isinstance(value, dict) or (hasattr(value, "__dict__") and not other)


def _adapt(model: nn.Module, checkpoint: Checkpoint, options: Options) -> Adaptation:
    """Adapt a model in float32 or float64."""
    config, forward, seconds = checkpoint.config, options.forward, Stages(options.progress)
    state, one_token = ModelState(model), None
    with ExitStack() as changes:
        with timed(seconds, "trace"):
            ids = random_ids(checkpoint, 0, 2, options.example_length or example_length(config))
            # The first and last ids may be padding ids, which the model masks.
            ids = ids.clamp(min(2, config.vocab_size - 1), max(config.vocab_size - 3, 0))
            try:
                call, ids = (forward, ids) if forward else find_call(model, checkpoint, ids)
            except NoLogitsError as error:
                if (one_token := one_token_line(error)) is None:
                    raise
                changes.enter_context(without_assertions(model))
                call, ids = find_call(model, checkpoint, ids)
        run = Run(model, checkpoint, call, ids, seconds, options.make_reference, options.extent)
        continues = changes.enter_context(first_calls(model, state, call, ids))
        adaptation = _judged(run, is_found=forward is None)
    if one_token is not None:
        adaptation = of_one_token(adaptation, one_token)
    findings = [continued(model, continues)] if continues else []
    return replace(adaptation, findings=[*adaptation.findings, *findings])


def _judged(run: Run, is_found: bool) -> Adaptation:
    """Trace, map, prove and diagnose a model.

    Args:
        run: the model, and how it is called.
        is_found: whether compat has found how it is called.
    """
    with timed(run.seconds, "trace"):
        try:
            graph = run.trace()
        except Untraceable as error:
            return judge_by_calls(run, error)
    with timed(run.seconds, "map"):
        try:
            mapped = map_graph(graph, run.checkpoint)
        except BatchFirst as error:
            if not is_found:
                raise
            return judge_batch_first(run, error)
        except NoHead as error:
            return judge_with_head(run, error)
        except AdaptError as error:
            return judge_otherwise(run, error)
    return judge(run, mapped)


def _confirm(
    model: nn.Module,
    checkpoint: Checkpoint,
    adaptation: Adaptation,
    options: Options,
    dtype: torch.dtype,
) -> Adaptation:
    """Confirm the result of a copy in a wider type by comparing the model's own logits.

    The reference runs in `dtype`, the narrowest type of the model.
    """
    if not adaptation.compatible or adaptation.parity is None:
        return adaptation
    ids = random_ids(checkpoint, 0, 2, example_length(checkpoint.config))
    call = options.forward or find_call(model, checkpoint, ids)[0]
    proof = end_to_end(model, call, options.make_reference(checkpoint, dtype), extent="short")
    name = dtype_name(dtype)
    report = replace(
        adaptation.parity, dtype=name, taps=[], logits=proof, float32=adaptation.parity
    )
    findings = list(adaptation.findings)
    if not proof.passed:
        words = f"a copy of the model in a wider type agrees with the reference, but not in {name}"
        findings.insert(0, unexplained("logits", None, words, report.headline))
    return replace(adaptation, parity=report, findings=findings)
