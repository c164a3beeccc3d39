"""Taps: the points of a GPT-2 at which hidden states are compared, in execution order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
    """Where a model exposes one tap: the output of a module, or one of its positional inputs.

    Args:
        name: the tap. `{i}` stands for the layer, here and in `module`.
        module: path of the module, as in `model.named_modules()`.
        at: the module's "output" or "input".
        item: index of the positional input, or of the output where the module returns a tuple.
        part: 0, 1 or 2 selects q, k or v where one tensor holds them side by side.
    """

    name: str
    module: str
    at: Literal["input", "output"] = "output"
    item: int = 0
    part: int | None = None


def expand_taps(taps: Iterable[Tap], n_layer: int) -> list[Tap]:
    """Write the taps out for layers 0 … n_layer − 1, in execution order.

    Raises:
        ParityError: a tap's name is not one of `tap_names`.
    """
    order = {name: place for place, name in enumerate(tap_names(n_layer))}
    once = [tap for tap in taps if "{i}" not in tap.name]
    per_layer = [
        replace(tap, name=tap.name.format(i=i), module=tap.module.format(i=i))
        for i in range(n_layer)
        for tap in taps
        if "{i}" in tap.name
    ]
    if strange := [tap.name for tap in once + per_layer if tap.name not in order]:
        raise ParityError(f"unknown tap {strange[0]!r}; a block has {', '.join(BLOCK_TAPS)}")
    return sorted(once + per_layer, key=lambda tap: order[tap.name])


def hook_tap(
    module: nn.Module,
    tap: Tap,
    observe: Callable[[Tensor], object],
    forced: Tensor | None = None,
) -> RemovableHandle:
    """Call `observe` with the hidden state at a tap whenever the module runs.

    Args:
        module: the tap's module.
        tap: selects the output or input of the module.
        observe: called with the hidden state itself. Clone what is kept: in-place operations of
            the model may change it afterwards.
        forced: replaces the hidden state once it was observed.

    Returns:
        The handle of the forward hook, a context manager that removes it.
    """

    def selected(value: Tensor) -> Tensor:
        return value if tap.part is None else value.chunk(3, dim=-1)[tap.part]  # a view

    def on_output(_module: nn.Module, _args: Any, output: Any) -> Any:
        value = output[tap.item] if isinstance(output, tuple) else output
        observe(selected(value))
        if forced is None:
            return None
        value = value.clone()
        selected(value).copy_(forced)
        if not isinstance(output, tuple):
            return value
        return (*output[: tap.item], value, *output[tap.item + 1 :])

    def on_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
        observe(selected(args[tap.item]))
        if forced is not None:
            # In place: the residual connection around a norm holds the tensor that enters the norm.
            selected(args[tap.item]).copy_(forced)

    if tap.at == "input":
        return module.register_forward_pre_hook(on_input)
    return module.register_forward_hook(on_output)
