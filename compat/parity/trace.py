"""Traces: run a model, record its hidden states at the taps, and replace some of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from compat.dialects import dialect_of
from compat.errors import CompatError, ParityError, described, listed, short_repr
from compat.layers import fault_in_ids, id_tensor
from compat.parity.run_modes import random_states
from compat.sharding import reshard, whole
from compat.tap import BLOCK_TAPS, Tap, expand_taps, hook_taps
from compat.user_code import exception_summary
from compat.validation import as_module

Trace = dict[str, Tensor]
Patch = Mapping[str, Tensor | Callable[[Tensor], Tensor]]
Forward = Callable[[nn.Module, Tensor], object]

GPT2_OF_TRANSFORMERS = "transformers.models.gpt2."


def taps(model: nn.Module) -> list[str]:
    """List the taps of one of compat's models or of transformers' GPT-2, in execution order.

    Those of any other model are in `adapt(model, source).taps`. A GPT-2 of transformers has `probs`
    only with `attn_implementation="eager"`, because SDPA does not return them.

    Raises:
        ConfigError: the model is not a module.
        ParityError: the model is neither of these.
    """
    model = as_module(model)
    own = _own_taps(model)
    if own is None:
        raise _unknown_model(model)
    return [tap.name for tap in own]


def trace(
    model: nn.Module,
    input_ids: object,
    taps: Iterable[str | Tap] | None = None,
    *,
    patch: Patch | None = None,
    grad: bool = False,
    forward: Forward | None = None,
) -> Trace:
    """Run a model once and return its hidden states by the name of their tap.

    Args:
        model: one of compat's models, transformers' GPT-2, or any module.
        input_ids: (B, T), a tensor, array or list.
        taps: names such as "h.0.probs", or "h.{i}.probs" for every layer; by default all that
            `taps(model)` lists. For your own model, pass a `Tap` for each place, such as those of
            `adapt(model, source).taps`.
        patch: tensors that replace hidden states, by the name of their tap, or functions that
            return the replacement for a hidden state. The replacement has the same shape, data type
            and device, and everything after it is computed from it. The result contains the
            replacement.
        grad: keep the autograd graph: the hidden states get a `.grad` when a scalar that was
            computed from them is differentiated, as in `states["logits"].sum().backward()`, which
            also adds to the gradients of parameters that require them. Use
            `torch.autograd.grad(scalar, states["h.0.out"])` to leave these unchanged.
        forward: `forward(model, input_ids)` runs the model; by default `model(input_ids)`.

    Returns:
        Copies of the hidden states in execution order: "embed", "h.{i}.ln_1" and all others
        (B, T, C), "h.{i}.fc" and "h.{i}.act" (B, T, 4C), "h.{i}.probs" (B, H, T, T), "logits"
        (B, T, V). `q`, `k`, `v` and `heads` hold the heads side by side: `unflatten(-1, (H, -1))`
        separates them.

    Raises:
        ConfigError: the model is not a module.
        ParityError: the model does not have a tap; a patch has another shape, data type or device;
            the forward pass draws random numbers, as dropout does in training mode; or the model
            raised an exception.
        GenerationError: the model does not accept the ids.
    """
    with tracing(model, taps, patch=patch, grad=grad, forward=forward) as run:
        return run(input_ids)


@contextmanager
def tracing(
    model: nn.Module,
    taps: Iterable[str | Tap] | None = None,
    *,
    patch: Patch | None = None,
    grad: bool = False,
    forward: Forward | None = None,
) -> Iterator[Callable[[object], Trace]]:
    """Prepare a model for several traces; the block gets a function from ids (B, T) to a trace.

    In the block every call of the model is patched, including those of `generate`. Arguments and
    errors are those of `trace`.
    """
    model = as_module(model)
    patch = {} if patch is None else patch
    _check_patch(patch)
    modules, name = dict(model.named_modules(remove_duplicate=False)), type(model).__name__
    wanted, patches = _chosen(model, modules, taps, patch)
    every = list(dict.fromkeys([*wanted, *patches]))
    _check_modules(name, every, modules)
    if grad and torch.is_inference_mode_enabled():
        raise ParityError("grad=True needs autograd. Leave torch.inference_mode() around the call.")
    forward = forward or (lambda model, ids: model(ids))
    patch = {tap.name: value for tap, value in patches.items()}
    run = _Traced(model, forward, [tap.name for tap in wanted], patch, grad)
    with hook_taps(modules, every, run.at_tap):
        yield run


@dataclass(eq=False)
class _Traced:
    """Runs a model with hooks, which call `at_tap`."""

    model: nn.Module
    forward: Forward
    wanted: list[str]
    patches: Patch
    grad: bool
    running: bool = False
    draws: bool = False
    generators: tuple[object, ...] = ()
    states: Trace = field(default_factory=dict)
    unpatched: Trace = field(default_factory=dict)

    def __call__(self, input_ids: object) -> Trace:
        ids = id_tensor(input_ids, ParityError)
        if fault := fault_in_ids(ids, None):
            raise ParityError(fault)
        name = type(self.model).__name__
        self.running, self.states, self.unpatched = True, {}, {}
        self.generators, self.draws = random_states(), False
        try:
            with torch.set_grad_enabled(self.grad):
                _run(partial(self.forward, self.model), ids)
        finally:
            self.running = False
        if self.draws or self.generators != random_states():
            raise ParityError(
                f"the forward pass of {name} draws random numbers, as dropout does in training "
                "mode, so that a second trace would differ. Call model.eval()."
            )
        states = self.states
        _check_executed(name, [*self.wanted, *self.patches], states)
        self.states, self.unpatched = {}, {}
        return {tap: states[tap] for tap in self.wanted}

    def at_tap(self, tap: Tap, state: Tensor) -> Tensor | None:
        """Record a hidden state; return its replacement, if there is one."""
        if not isinstance(state, Tensor):
            raise ParityError(
                f"at tap {tap.name}, the {tap.place} is {described(state)}, but must be a tensor."
            )
        if not self.running:  # a call by the user in the block
            return self._patched(tap, state)
        if tap.name in self.states:
            return self._again(tap, state)
        patched = self._patched(tap, state)
        if patched is not None:
            self.unpatched[tap.name] = whole(state.detach()).clone()
        kept: Tensor = whole(state if patched is None else patched).clone()
        self.states[tap.name] = kept
        if not self.grad:
            return patched
        if kept.requires_grad:
            kept.retain_grad()
        else:  # of a model whose parameters are frozen
            kept.requires_grad_()
        return kept

    def _again(self, tap: Tap, state: Tensor) -> Tensor | None:
        """Accept only the same hidden state if the module already ran in this call."""
        kept = self.states[tap.name]
        before = self.unpatched.get(tap.name, kept)
        if _equal(state, before):
            return kept if self.grad or tap.name in self.patches else None
        if _equal(state, kept):  # it was replaced in place
            return None
        raise ParityError(
            f"at tap {tap.name}, the {tap.place} takes several values in one call of the model. "
            "Name a module that runs once."
        )

    def _patched(self, tap: Tap, state: Tensor) -> Tensor | None:
        """Return the checked replacement of a hidden state, or None if there is no patch."""
        patch = self.patches.get(tap.name)
        if patch is None:
            return None
        value = patch if isinstance(patch, Tensor) else self._call(patch, whole(state).clone())
        kind = "patch" if isinstance(patch, Tensor) else "value that the patch returned"
        if not isinstance(value, Tensor):
            raise ParityError(
                f"at tap {tap.name}, the {kind} is {described(value)}, but must be a tensor "
                f"{list(state.shape)}. Return the hidden state that replaces the argument."
            )
        found, expected = (
            f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
            for t in (value, state)
        )
        if found != expected:
            raise ParityError(
                f"at tap {tap.name}, the {kind} is {found}, but must be {expected}. Pass a tensor "
                "like the one that trace returns for this tap and these ids."
            )
        return value

    def _call(self, patch: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
        """Call the user's function, which may draw random numbers."""
        self.draws = self.draws or self.generators != random_states()
        value = patch(state)
        self.generators = random_states()
        return value


def _equal(one: Tensor, two: Tensor) -> bool:
    with torch.no_grad():
        return one.shape == two.shape and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


def _own_taps(model: nn.Module) -> list[Tap] | None:
    """Return the taps of a dialect's model or of transformers' GPT-2; None for other modules."""
    if dialect := dialect_of(model):
        config: Any = model.config
        return expand_taps(dialect.taps, config.n_layer)
    if any(cls.__module__.startswith(GPT2_OF_TRANSFORMERS) for cls in type(model).__mro__):
        from compat.parity.transformers_gpt2 import taps_of  # importing transformers takes seconds

        return taps_of(model)
    return None


def _unknown_model(model: nn.Module) -> ParityError:
    return ParityError(
        f"{type(model).__name__} is not one of compat's models or a GPT-2 of transformers, whose "
        "taps are known. Pass taps=adapt(model, source).taps, or a list of places such as "
        'Tap("h.{i}.act", "blocks.{i}.mlp.act").'
    )


def _chosen(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    taps: Iterable[str | Tap] | None,
    patch: Patch,
) -> tuple[list[Tap], dict[Tap, Tensor | Callable[[Tensor], Tensor]]]:
    """Return the taps to record, and the patches by tap, of every layer."""
    taps = [taps] if isinstance(taps, (str, Tap)) else taps
    if taps is not None and not isinstance(taps, Iterable):
        raise ParityError(f"taps is {described(taps)}, but must be names or Taps.")
    chosen = [] if taps is None else list(taps)
    if strange := [tap for tap in chosen if not isinstance(tap, (str, Tap))]:
        raise ParityError(f"taps contains {described(strange[0])}, but must contain names or Taps.")
    places = _with_every_layer([tap for tap in chosen if isinstance(tap, Tap)], modules)
    own = _own_taps(model)
    if own is None and not places:
        raise _unknown_model(model)
    known = {tap.name: tap for tap in [*(own or []), *places]}
    wanted = set(known) if taps is None else {tap.name for tap in places}
    for name in chosen:
        wanted.update(_expanded(name, known, model) if isinstance(name, str) else ())
    patches = {name: patch[each] for each in patch for name in _expanded(each, known, model)}
    # A patch of a single layer takes precedence over one with `{i}`.
    patches |= {name: patch[name] for name in patches if name in patch}
    return (
        [tap for tap in known.values() if tap.name in wanted],
        {tap: patches[tap.name] for tap in known.values() if tap.name in patches},
    )


def _check_patch(patch: object) -> None:
    if not isinstance(patch, Mapping):
        raise ParityError(
            f"patch is {described(patch)}, but must be a dictionary from names of taps to tensors "
            "or functions."
        )
    for name, value in patch.items():
        if not (isinstance(value, Tensor) or callable(value)):
            raise ParityError(
                f"the patch of {short_repr(name)} is {described(value)}, but must be a tensor or a "
                "function from the hidden state to its replacement."
            )


def _expanded(written: object, known: Mapping[str, Tap], model: nn.Module) -> list[str]:
    """Return the names that a name stands for: one for every layer if it contains `{i}`."""
    found = [name for name in known if written in (name, _in_any_layer(name))]
    if found:
        return found
    if str(written).endswith("probs") and not any(name.endswith("probs") for name in known):
        raise ParityError(
            f"{type(model).__name__} has no tap {short_repr(written)}, because its attention is "
            "fused, as in SDPA, or not a softmax of one module. A GPT-2 of transformers has it if "
            'it is loaded with attn_implementation="eager".'
        )
    blocks = sorted({name.split(".")[1] for name in known if name.startswith("h.")}, key=int)
    there = f"It has {len(known)} taps"
    there += f", in h.{blocks[0]} to h.{blocks[-1]} and outside of them" if blocks else ""
    near = difflib.get_close_matches(str(written), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ParityError(
        f"{type(model).__name__} has no tap {short_repr(written)}.{hint} {there}. Those of a block "
        f"are named {listed(BLOCK_TAPS, 20)}."
    )


def _in_any_layer(name: str) -> str:
    """Replace the layer by `{i}`: "h.{i}.act" for "h.3.act"."""
    head, _, rest = name.partition(".")
    return f"h.{{i}}.{rest.partition('.')[2]}" if head == "h" else name


class _AllRecorded(Exception):
    """Raised to end a forward pass once every tap was recorded."""


@torch.no_grad()
def record(
    model: nn.Module,
    taps: Iterable[Tap],
    input_ids: Tensor,
    *,
    forced: Mapping[str, Tensor] | None = None,
    stop_early: bool = False,
) -> Trace:
    """Run `model(input_ids)` once and return a copy of the hidden state at every tap.

    It differs from `trace` in what comparisons need: every hidden state is recorded as the model
    computes it, and nothing is checked.

    Args:
        model: any module that takes ids (B, T). It runs in its current mode.
        taps: the taps to record. A tap with `{i}` in its name is recorded in every layer.
        input_ids: token ids (B, T).
        forced: hidden states by the name of their tap. Each is recorded as the model computes it,
            and then replaced by the forced one, on which the following modules work.
        stop_early: end the forward pass once every tap was recorded.

    Raises:
        ConfigError: the model is not a module.
        ParityError: a tap names a module that does not exist or was not executed, or the model
            raised an exception.
    """
    model = as_module(model)
    modules, name = dict(model.named_modules(remove_duplicate=False)), type(model).__name__
    taps = _with_every_layer(taps, modules)
    _check_modules(name, taps, modules)
    recorded: Trace = {}

    def edit(tap: Tap, value: Tensor) -> Tensor | None:
        recorded[tap.name] = whole(value.detach()).clone()
        if stop_early and len(recorded) == len(taps):
            raise _AllRecorded
        return None if forced is None else forced.get(tap.name)

    with hook_taps(modules, taps, edit), suppress(_AllRecorded):
        _run(model, input_ids)
    reshard(model)
    _check_executed(name, [tap.name for tap in taps], recorded)
    return {tap.name: recorded[tap.name] for tap in taps}


def _check_modules(name: str, taps: Iterable[Tap], modules: Mapping[str, nn.Module]) -> None:
    if unknown := [tap for tap in taps if tap.module not in modules]:
        raise ParityError(
            f"{name} has no module {unknown[0].module!r}, which tap {unknown[0].name} names. Pass "
            "a path from model.named_modules()."
        )


def _check_executed(name: str, taps: Iterable[str], recorded: Trace) -> None:
    if missing := [tap for tap in dict.fromkeys(taps) if tap not in recorded]:
        raise ParityError(
            f"{name} did not execute the modules of its taps {listed(missing)}. Name modules that "
            "the forward pass calls."
        )


def _with_every_layer(taps: Iterable[Tap], modules: Mapping[str, nn.Module]) -> list[Tap]:
    """Return the taps; those with `{i}` are expanded to every layer whose module exists."""
    taps = list(taps)
    per_layer = [tap.module for tap in taps if "{i}" in tap.name and "{i}" in tap.module]
    if not per_layer:
        return taps
    exists = (any(path.format(i=i) in modules for path in per_layer) for i in count())
    n_layer = next(i for i, found in enumerate(exists) if not found)
    return expand_taps(taps, max(n_layer, 1))


def _run(call: Callable[[Tensor], object], input_ids: Tensor) -> None:
    try:
        call(input_ids)
    except (KeyboardInterrupt, CompatError, _AllRecorded):
        raise
    except BaseException as error:  # such as exit() in the user's code
        raise ParityError(
            f"{exception_summary(error).rstrip('.')}. Call the model with ids of shape "
            f"{list(input_ids.shape)} to see the whole traceback."
        ) from error
