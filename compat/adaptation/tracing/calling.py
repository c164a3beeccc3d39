"""How to call somebody's model, and where its logits are in what it returns."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compat.errors import AdaptError
from compat.parity.outputs import find_logits
from compat.user_code import is_users, users_frames

Forward = Callable[[nn.Module, Tensor], Tensor]

Arguments = Callable[[Tensor], dict[str, Any]]  # beside the ids

# A mask (T, T) in the conventions that people have: none, True to see, True to hide, to be added.
MASKS: tuple[Callable[[int], Tensor | None], ...] = (
    lambda T: None,
    lambda T: torch.ones(T, T, dtype=torch.bool).tril(),
    lambda T: torch.ones(T, T, dtype=torch.bool).triu(1),
    lambda T: torch.full((T, T), float("-inf")).triu(1),
)
TARGETS = ("targets", "target", "labels", "label", "y")


class _ProcessSettings:
    """torch's switch for the fused kernels of nn.MultiheadAttention, and a warning of torch's own.

    Both belong to the process. They are off while any thread needs them off, and then set to what
    they were before the first. All other warnings come through.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users, self.before = 0, True

    def off(self) -> None:
        with self.lock:
            if self.users == 0:
                self.before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                self.warnings = warnings.catch_warnings()
                self.warnings.__enter__()
                # torch.export about its own use of pytrees
                warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`")
            self.users += 1

    def restore(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.warnings.__exit__(None, None, None)
                torch.backends.mha.set_fastpath_enabled(self.before)


_settings = _ProcessSettings()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """No gradients, and none of the fused kernels that nn.MultiheadAttention takes in eval mode."""
    _settings.off()
    try:
        with torch.no_grad():
            yield
    finally:
        _settings.restore()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and without gradients, afterwards in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def reason(error: Exception) -> str:
    """What was raised, and the author's line that led to it."""
    lines = [f"{f.filename}:{f.lineno} {f.line}" for f in users_frames(error)]
    named = re.findall(r'File "(.+?)", line (\d+), in \w+\n\s*(.+)', str(error))
    lines += [f"{file}:{line} {text}" for file, line, text in named if is_users(file)]
    headline = (str(error).strip().splitlines() or [""])[0]
    where = f" at {lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {headline}{where}"


@dataclass(frozen=True)
class CallSignature:
    """One way of calling: `way(model, ids)` gives logits (B, T, V), or (B, 1, V).

    Args:
        arguments: beside the ids, made for the ids at hand.
        last: logits of the last position alone will do.
        targets: the ids are given as targets too, without which only the last position comes.
    """

    arguments: Arguments
    last: bool = False
    targets: bool = False

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        return find_logits(model(ids, **self.arguments(ids)), ids, self.last)


def default_forward(model: nn.Module, ids: Tensor) -> CallSignature:
    """The first way of calling that gives logits for these ids; for all positions if it can be.

    Where a mask is asked for, the first way with which no token sees a later one.

    Raises:
        AdaptError: none did.
    """
    tried: list[str] = []
    for last in (False, True):
        found = [way for text, way in _ways(model, last) if _works(model, way, ids, text, tried)]
        causal = (way for way in found if len(found) == 1 or _is_causal(model, way, ids))
        if found:
            return next(causal, found[0])
    raise AdaptError(
        f"{type(model).__name__} gives no logits:\n  " + "\n  ".join(dict.fromkeys(tried)) + "\n"
        "expected a float tensor (B, T, V) for ids (B, T); in Python, say how to get it: "
        "adapt(model, source, forward=lambda model, ids: …)"
    )


def _works(model: nn.Module, way: CallSignature, ids: Tensor, text: str, tried: list[str]) -> bool:
    try:
        with eval_mode(model), plain_kernels():
            way(model, ids)
    except Exception as error:
        if not way.last:
            tried.append(f"{text}: {reason(error)}")
        return False
    return True


def _is_causal(model: nn.Module, way: CallSignature, ids: Tensor) -> bool:
    """Whether another last token leaves all logits before it as they are."""
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    with eval_mode(model), plain_kernels():
        one, two = way(model, ids), way(model, other)
    return one.shape[1] > 1 and torch.allclose(one[:, :-1], two[:, :-1], rtol=1e-3, atol=1e-4)


def _ways(model: nn.Module, last: bool) -> list[tuple[str, CallSignature]]:
    """Calls to try: with the ids alone, with what else is asked for, with targets."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters[1:] if p.default is p.empty and p.kind in named]
    masks = MASKS if any("mask" in name for name in required) else MASKS[:1]
    call = f"model({', '.join(['ids', *required])})"
    ways = [
        (call, CallSignature(partial(_given, names=required, mask=mask), last)) for mask in masks
    ]
    if targets := [p.name for p in parameters if p.name in TARGETS]:
        given = CallSignature(lambda ids: {targets[0]: ids}, last, targets=True)
        ways.append((f"model(ids, {targets[0]}=ids)", given))
    return ways


def _given(ids: Tensor, names: list[str], mask: Callable[[int], Tensor | None]) -> dict[str, Any]:
    return {name: _made(name, ids, mask) for name in names}


def _made(name: str, ids: Tensor, mask: Callable[[int], Tensor | None]) -> Tensor | None:
    """An argument by what its name says: positions, a mask, targets; else None."""
    if "pos" in name:
        return torch.arange(ids.shape[1])
    if "mask" in name and "pad" not in name:
        return mask(ids.shape[1])
    return ids if name in TARGETS else None
