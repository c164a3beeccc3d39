"""Comparison of a user's KV cache: a decode step must give the logits of the whole sequence."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.embeddings_and_head import position_line
from compat.adaptation.diagnosis.findings import finding
from compat.adaptation.diagnosis.registry import Deviation
from compat.adaptation.result import Finding
from compat.adaptation.tracing.calling import CallSignature, describe_error, plain_kernels
from compat.adaptation.tracing.graph import Place
from compat.adaptation.tracing.state import as_constructed
from compat.adaptation.tracing.watched import AlignedCausalMask
from compat.parity.outputs import find_logits
from compat.parity.reference import Reference
from compat.user_models.eval_mode import eval_mode
from compat.user_models.synonyms import plain

# Names of arguments and methods, in lower case and without underscores.
CACHE = re.compile(r"(layer|kv)?(past|caches?|mems?)((key)?values?|kvs?|states?)?")
SWITCH = re.compile(r"(use|return|enable|with)(kv)?(cache|past)")
START = re.compile(
    r"start(pos|position|idx|index)?|(pos|position)?offset|(past|cached?)len(gth)?"
    r"|(cur|current)(pos|len)"
)
POSITIONS = re.compile(r"pos(ition)?s?(ids?)?")
RESET = re.compile(r"(reset|clear)(kv)?caches?")
STEPS = 3
EXPLAINED = 1e-3  # the relative error of the logits up to which a cause explains a step


@dataclass(frozen=True)
class Protocol:
    """The names of the arguments that a model needs for decoding with its cache.

    Args:
        cache: takes the cache that the previous call returned; None if the modules keep it.
        switch: turns the cache on, if it has to be turned on.
        start: takes the number of cached ids; None if there is no such argument.
        positions: takes the positions of the ids, perhaps optionally; None if there is no such
            argument.
    """

    cache: str | None
    switch: str | None
    start: str | None
    positions: str | None

    @property
    def step(self) -> str:
        """A decode step as code."""
        values = {self.cache: "cache", self.switch: "True", self.start: "T"}
        rest = [f"{name}={value}" for name, value in values.items() if name is not None]
        return f"model({', '.join(['ids[:, T:]', *rest])})"


@dataclass
class Decoding:
    """A model's decode steps with its cache, and its logits of the whole sequence.

    Args:
        model: the user's model.
        call: calls it.
        protocol: the names of the arguments for its cache.
        ids: (B, T).
        bound: the largest relative error of the logits at a position.
        with_positions: pass the positions even if they are optional.
    """

    model: nn.Module
    call: CallSignature
    protocol: Protocol
    ids: Tensor
    bound: float
    with_positions: bool = False

    def __post_init__(self) -> None:
        self.known = self.ids.shape[1] - STEPS  # the number of ids of the first call
        self.whole = self.call(self.model, self.ids)[:, self.known :]  # (B, STEPS, V)

    def error(self, found: Tensor) -> float:
        """Return the largest relative error of the steps' logits (B, STEPS, V) at a position."""
        return float(((found - self.whole).norm(dim=-1) / self.whole.norm(dim=-1)).max())

    def run(self) -> tuple[Tensor | None, str]:
        """Return the result of `steps`, with optional positions if it fails without these."""
        try:
            found, past = self.steps()
        except Exception:
            if not self.protocol.positions:
                raise
            found, past = None, ""
        else:
            if found is None or self.error(found) <= self.bound or not self.protocol.positions:
                return found, past
        self.with_positions = True
        again, past_again = self.steps()
        if found is None or again is None or self.error(again) <= self.bound:
            return again, past or past_again
        self.with_positions = False
        return found, past

    def steps(self, chunk: int = 1) -> tuple[Tensor | None, str]:
        """Return logits (B, STEPS, V) after the known ids, and code for the number of cached ids.

        None for the logits if no cache is returned, and "" for the code if it is not known.

        Args:
            chunk: the number of ids of each step.
        """
        protocol, model = self.protocol, self.model
        if protocol.cache is None:  # the modules keep it
            model = as_constructed(model)
            for name, method in inspect.getmembers(model, inspect.ismethod):
                if RESET.fullmatch(plain(name)) and not inspect.signature(method).parameters:
                    method()
        cache, past, logits = None, "", []
        starts = range(self.known, self.known + STEPS, chunk)
        for start, end in [(0, self.known), *((start, start + chunk) for start in starts)]:
            part = self.ids[:, start:end].contiguous()  # as of a prompt, for code that uses `view`
            arguments = {name: value(model, part) for name, value in self.call.arguments}
            if protocol.switch:
                arguments[protocol.switch] = True
            if protocol.start:
                arguments[protocol.start] = start
            if protocol.positions and (self.with_positions or protocol.positions in arguments):
                arguments[protocol.positions] = torch.arange(start, end).expand_as(part)
            if protocol.cache and start:
                arguments[protocol.cache] = cache
            output = model(part, **arguments)
            logits.append(find_logits(output, part, self.call.last))
            if protocol.cache:
                if (returned := _cache_in(output)) is None:
                    return None, ""
                cache = returned if cache is None else _joined(cache, returned, start, end - start)
                if not start and (length := _length_in(cache, protocol.cache, self.known)):
                    past = f"0 if {protocol.cache} is None else {length}"
        return torch.cat(logits[1:], dim=1), past

    def first_use(self) -> Place | None:
        """Return the first line of the model's `forward` that uses the cache."""
        forward = type(self.model).forward
        names = {self.protocol.cache, self.protocol.switch, self.protocol.start}
        try:
            lines, first = inspect.getsourcelines(forward)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            return None
        used = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names]
        return Place(inspect.getsourcefile(forward) or "", first + min(used, default=1) - 1)


def wrong_cache(
    context: DiagnosisContext, call: object, ids: Tensor, reference: Reference | None, bound: float
) -> list[Finding]:
    """Return the finding for a KV cache that does not work.

    Args:
        context: what is known about the model.
        call: how the model is called; a user's own function does not show how a cache is passed.
        ids: (B, T).
        reference: the checkpoint in `transformers`, to find the cause; None for a model whose
            logits are not in parity with it.
        bound: the largest relative error of the logits at a position.
    """
    protocol = _protocol(context.model)
    if protocol is None or not isinstance(call, CallSignature) or ids.shape[1] < 2 * STEPS:
        return []
    with plain_kernels(), eval_mode(context.model):
        decoding = Decoding(context.model, call, protocol, ids, bound)
        try:
            found, past = decoding.run()
            if found is None:
                return []  # the caller has to create the cache, and the signature does not show how
        except Exception as error:
            why = describe_error(error)
            text = f"decoding with the KV cache, {protocol.step}, was not compared: {why}"
            place, values = decoding.first_use(), {"found": text}
            return [finding(Deviation(None, [place], values, code="not_compared"))]
        largest = decoding.error(found)
        if largest <= bound:
            return _wrong_chunk(decoding)
        cause = _causal_mask(decoding)
        if cause is None and reference:
            cause = next(_causes(decoding, reference, found[:1, 0]), None)
    values = {"found": "compat does not know why", "step": protocol.step, "past": past}
    deviation = Deviation("logits", [decoding.first_use()], values, code="kv_cache")
    if cause is None:
        deviation.severity = "limit"
        deviation.message = (
            "the logits of the decode step {step} with the KV cache differ from those of the whole "
            f"sequence by {largest:.2g} of their norm, for a reason that compat does not know"
        )
    else:
        values["found"] = cause.text
        place = cause.place or (position_line(context) if cause.is_position else None)
        deviation.lines = [place] if place else deviation.lines
        deviation.evidence = (
            f"confirmed: {cause.evidence}, and its logits differ from those of the whole sequence "
            f"by {largest:.2g} of their norm"
        )
    return [finding(deviation)]


def _wrong_chunk(decoding: Decoding) -> list[Finding]:
    """Return the finding for a cache with which steps of one id work, and steps of several do not.

    A step that raises an exception cannot be taken for a right one, so it is not reported.
    """
    try:
        found, _ = decoding.steps(STEPS)
    except Exception:
        return []
    if found is None or (largest := decoding.error(found)) <= decoding.bound:
        return []
    values = {"step": decoding.protocol.step, "found": f"{largest:.2g}", "number": STEPS}
    evidence = "observed: steps of one id agree with the whole sequence"
    lines = [decoding.first_use()]
    return [finding(Deviation(None, lines, values, evidence=evidence, code="kv_cache_chunk"))]


def _protocol(model: nn.Module) -> Protocol | None:
    """Return the protocol that the model's signature shows; None if it has no cache."""
    parameters = list(inspect.signature(model.forward).parameters)[1:]
    cache, switch, start, positions = (
        next((name for name in parameters if pattern.fullmatch(plain(name))), None)
        for pattern in (CACHE, SWITCH, START, POSITIONS)
    )
    kept = [name for module in model.modules() for name in (*vars(module), *module._buffers)]
    if cache is None and not ((switch or start) and any("cache" in name for name in kept)):
        return None
    return Protocol(cache, switch, start, positions)


def _length_in(cache: Any, name: str, known: int) -> str:
    """Return code for the number of cached ids, such as `cache[0][0].shape[-2]`, or ""."""
    if isinstance(cache, Tensor):
        axes = [axis - cache.ndim for axis, n in enumerate(cache.shape) if n == known]
        axis = -2 if -2 in axes else next(iter(axes), 0)
        return f"{name}.shape[{axis}]" if axis else ""
    if isinstance(cache, (list, tuple)):
        cache = dict(enumerate(cache))
    entries = cache if isinstance(cache, Mapping) else {}
    found = (_length_in(value, f"{name}[{key!r}]", known) for key, value in entries.items())
    return next((code for code in found if code), "")


def _cache_in(output: Any) -> Any:
    """Return what a model returned as its cache, beside the logits."""
    if isinstance(output, Tensor):
        return None
    if hasattr(output, "_asdict"):
        output = output._asdict()
    if isinstance(output, (list, tuple)):
        output = dict(enumerate(output))
    entries = output if isinstance(output, Mapping) else vars(output)
    named = [value for name, value in entries.items() if CACHE.fullmatch(plain(str(name)))]
    single = (Tensor, int, float, str)
    others = [value for value in entries.values() if not isinstance(value, single)]
    stacked = [v for v in entries.values() if isinstance(v, Tensor) and v.ndim > 3]
    return next((value for value in [*named, *others, *stacked] if value is not None), None)


def _joined(old: Any, new: Any, known: int, more: int) -> Any:
    """Return the cache after a step. Entries for the step's ids only are appended to the past ones.

    Args:
        old: holds keys and values of `known` ids.
        new: was returned by the step.
        known, more: the numbers of ids that were cached, and of the step.
    """
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.ndim == new.ndim:
        pairs = list(zip(old.shape, new.shape, strict=True))
        axes = [axis for axis, pair in enumerate(pairs) if pair[0] != pair[1]]
        if len(axes) == 1 and pairs[axes[0]] == (known, more):
            return torch.cat((old, new), dim=axes[0])
    elif type(new) in (list, tuple) and type(old) is type(new) and len(old) == len(new):
        joined = [_joined(a, b, known, more) for a, b in zip(old, new, strict=True)]
        return joined if isinstance(new, list) else tuple(joined)
    return new


@dataclass(frozen=True)
class Cause:
    """A known mistake that explains the logits of a step."""

    text: str
    is_position: bool = False
    place: Place | None = None
    evidence: str = "the reference reproduces the step"


def _causal_mask(decoding: Decoding) -> Cause | None:
    """Return the cause if the steps are right with causal masks aligned with the last key."""
    with AlignedCausalMask() as masks:
        found, _ = decoding.steps()
    if not masks.places or found is None or decoding.error(found) > decoding.bound:
        return None
    return Cause(
        "is_causal=True lets the only query of a step attend to the first cached key alone",
        place=masks.places[0],
        evidence="with a causal mask that is aligned with the last key, the steps are right",
    )


def _causes(decoding: Decoding, reference: Reference, found: Tensor) -> Iterator[Cause]:
    """Yield the known mistakes that could explain the first step's logits, `found`, (1, V)."""
    N = decoding.known
    ids = decoding.ids[:1, : N + 1]  # N cached ids and the step's

    def explains(logits: Tensor) -> list[int]:  # (rows, V) → rows
        errors = (logits - found).norm(dim=-1) / found.norm(dim=-1)
        return torch.nonzero(errors < EXPLAINED).flatten().tolist()

    if explains(decoding.call(decoding.model, ids[:, -1:])[:, -1]):
        yield Cause("the step ignores the cached keys and values")
    tried = min(reference.checkpoint.config.n_positions, 2 * N + 2)
    positions = torch.arange(N + 1).repeat(tried, 1)  # a row for each position of the step's id
    positions[:, -1] = torch.arange(tried)
    output = reference.model(ids.repeat(tried, 1), position_ids=positions)
    for position in explains(output.logits[:, -1]):
        yield Cause(f"the id after {N} cached ids gets position {position} instead of {N}", True)
    shown = 1 - torch.eye(N + 1, dtype=torch.long)  # each row hides one of the cached ids,
    shown[-1] = 0  # and the last row hides all of them
    shown[:, -1] = 1
    for position in dict.fromkeys((N, N - 1, 0)):
        prefix = reference.model(ids[:, :-1].repeat(N + 1, 1), use_cache=True)
        output = reference.model(
            ids[:, -1:].repeat(N + 1, 1),
            position_ids=torch.full((N + 1, 1), position),
            attention_mask=shown,
            past_key_values=prefix.past_key_values,
        )
        for row in explains(output.logits[:, -1]):
            hidden = "any of them" if row == N else f"the one at {row}"
            too = "" if position == N else f", and it gets position {position}"
            yield Cause(f"the id after {N} cached ids does not attend to {hidden}{too}")
