"""Taps: the points of a GPT-2 at which hidden states are compared, in execution order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from compat.errors import ParityError

Edit = Callable[[Tensor], Tensor | None]
SOFTMAXES = (torch.softmax, Tensor.softmax, F.softmax)

BLOCK_TAPS = (
    "ln_1", "q", "k", "v", "probs", "heads", "attn", "resid_mid", "ln_2", "fc", "act", "mlp", "out",
)  # fmt: skip

# Taps that several modules read. If such a tap is the input of one of them, it is replaced in
# place, so that all of them get the replacement.
SHARED = ("embed", "ln_1", "resid_mid", "out")


def tap_names(n_layer: int) -> list[str]:
    """Return all taps of a model with `n_layer` blocks, in execution order."""
    blocks = [f"h.{i}.{tap}" for i in range(n_layer) for tap in BLOCK_TAPS]
    return ["embed", *blocks, "ln_f", "logits"]


@dataclass(frozen=True)
class Tap:
    """The place of one tap in a model: a value that a module returns, receives or computes.

    Args:
        name: the tap. `{i}` stands for the layer, here and in `module`.
        module: path of the module, as in `model.named_modules()`.
        at: the module's "output", one of its positional arguments, "input", or the result of the
            "softmax" that it computes, for the probabilities of attention written out.
        item: index of the positional input, or of the output where the module returns a tuple.
        part: 0, 1 or 2 selects q, k or v where one tensor holds them side by side.
    """

    name: str
    module: str
    at: Literal["input", "output", "softmax"] = "output"
    item: int = 0
    part: int | None = None

    @property
    def place(self) -> str:
        """The module and its value, in words."""
        part = "" if self.part is None else f", part {self.part}"
        return f"{self.at} of {self.module or 'the model'}{part}"


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
        raise ParityError(f"unknown tap {strange[0]!r}. A block has {', '.join(BLOCK_TAPS)}")
    return sorted(once + per_layer, key=lambda tap: order[tap.name])


def hook_taps(
    modules: Mapping[str, nn.Module],
    taps: Iterable[Tap],
    edit: Callable[[Tap, Tensor], Tensor | None],
) -> ExitStack:
    """Do as `hook_tap` at several taps of one model; `edit` is called with the tap, too.

    Args:
        modules: the modules of the model by their path, those of the taps among them.
    """
    with ExitStack() as hooks:
        for tap in taps:
            hooks.enter_context(hook_tap(modules[tap.module], tap, partial(edit, tap)))
        return hooks.pop_all()


def hook_tap(module: nn.Module, tap: Tap, edit: Edit) -> ExitStack:
    """Call `edit` with the hidden state at a tap whenever the module runs.

    Args:
        module: the tap's module.
        tap: selects the hidden state.
        edit: called with the hidden state itself. Clone it to keep it, because in-place operations
            of the model may change it afterwards. If it returns a tensor, that replaces the hidden
            state for the following modules; None leaves it unchanged.

    Returns:
        A context manager that removes the hooks.
    """

    def selected(value: Tensor) -> Tensor:
        if tap.part is None:
            return value
        N = value.shape[-1] // 3
        return value.narrow(-1, tap.part * N, N)  # a view, into which autograd lets one write

    def edited(value: Tensor) -> Tensor | None:
        replacement = edit(selected(value))
        if replacement is None:
            return None
        if tap.part is not None:  # the parts of a divided tensor are not views of it
            parts = list(value.chunk(3, dim=-1))
            parts[tap.part] = replacement
            replacement = torch.cat(parts, dim=-1)
        return value.clone().copy_(replacement)

    def in_tuple(values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        value = edited(values[tap.item])
        return None if value is None else (*values[: tap.item], value, *values[tap.item + 1 :])

    def on_output(_module: nn.Module, _args: Any, output: Any) -> Any:
        return in_tuple(output) if isinstance(output, tuple) else edited(output)

    def on_input(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        if len(args) <= tap.item:
            raise ParityError(
                f"tap {tap.name}: module {tap.module!r} is called with {len(args)} positional "
                f"arguments, so there is none with index {tap.item}. Name another module."
            )
        if tap.name.rpartition(".")[2] not in SHARED:
            return in_tuple(args)
        # In place, because the residual connection uses the tensor that enters the norm.
        value = selected(args[tap.item])
        replacement = edit(value)
        if replacement is not None:
            value.copy_(replacement)
        return None

    hooks = ExitStack()
    if tap.at == "output":
        hooks.enter_context(module.register_forward_hook(on_output))
    elif tap.at == "input":
        hooks.enter_context(module.register_forward_pre_hook(on_input))
    else:
        mode = _OnSoftmax(edited)
        hooks.enter_context(module.register_forward_pre_hook(mode.begin))
        hooks.enter_context(module.register_forward_hook(mode.end, always_call=True))
    return hooks


class _OnSoftmax(TorchFunctionMode):
    """A mode that replaces the result of every softmax by what a function returns for it."""

    def __init__(self, edited: Edit) -> None:
        super().__init__()
        self.edited = edited

    def begin(self, _module: nn.Module, _args: Any) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        replacement = self.edited(result) if func in SOFTMAXES else None
        return result if replacement is None else replacement
