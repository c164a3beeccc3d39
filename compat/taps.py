"""Taps: the places of a GPT-2 at which hidden states are compared, in execution order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from compat.errors import ParityError

BLOCK_TAPS = (
    "ln_1", "q", "k", "v", "probs", "heads", "attn", "resid_mid", "ln_2", "fc", "act", "mlp", "out",
)  # fmt: skip


def tap_names(n_layer: int) -> list[str]:
    """All taps of a model with `n_layer` blocks, in execution order."""
    blocks = [f"h.{i}.{tap}" for i in range(n_layer) for tap in BLOCK_TAPS]
    return ["embed", *blocks, "ln_f", "logits"]


@dataclass(frozen=True)
class Tap:
    """The location of one tap in a model: the output of a module, or its first input.

    Args:
        name: name of the tap; `{i}` stands for the layer, here and in `module`.
        module: path of the module, as in `model.named_modules()`.
        at: its "output" or its "input".
        item: index of the tensor, if a module returns a tuple.
        part: index of the third, if one tensor holds q, k and v along its last axis.
    """

    name: str
    module: str
    at: Literal["input", "output"] = "output"
    item: int = 0
    part: int | None = None


def expand_taps(taps: Iterable[Tap], n_layer: int) -> list[Tap]:
    """Return the taps of all layers 0 … n_layer − 1, in execution order.

    Raises:
        ParityError: The name of a tap is not one of `tap_names`.
    """
    order = {name: place for place, name in enumerate(tap_names(n_layer))}
    once = [tap for tap in taps if "{i}" not in tap.name]
    per_layer = [
        replace(tap, name=tap.name.format(i=i), module=tap.module.format(i=i))
        for i in range(n_layer)
        for tap in taps
        if "{i}" in tap.name
    ]
    if unknown := [tap.name for tap in once + per_layer if tap.name not in order]:
        raise ParityError(f"unknown tap {unknown[0]!r}; a block has {', '.join(BLOCK_TAPS)}.")
    return sorted(once + per_layer, key=lambda tap: order[tap.name])
