"""Where the first non-finite value of a forward pass appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from compat.errors import GenerationError
from compat.tap import Tap, hook_tap


class NotFiniteError(GenerationError):
    """Some logits are NaN or infinite."""


@torch.no_grad()
def first_not_finite(
    model: nn.Module, taps: Sequence[Tap], run: Callable[[], object]
) -> tuple[str, str] | None:
    """Find the first tap with a non-finite value.

    Args:
        model: has the taps' modules. A tap whose module was removed is left out.
        taps: written out for every layer, in execution order.
        run: executes the model.

    Returns:
        The tap's name, and "NaN" or "an infinity". None if all values are finite.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    faults: dict[str, str] = {}

    def look(name: str, value: Tensor) -> None:
        if not torch.isfinite(value).all():
            faults[name] = "NaN" if value.isnan().any() else "an infinity"

    with ExitStack() as hooks:
        for tap in taps:
            if tap.module in modules:
                hooks.enter_context(hook_tap(modules[tap.module], tap, partial(look, tap.name)))
        run()
    return next(((tap.name, faults[tap.name]) for tap in taps if tap.name in faults), None)


def not_finite_message(found: tuple[str, str] | None, dtype: torch.dtype, n_tokens: int) -> str:
    """The error message for non-finite logits.

    Args:
        found: by `first_not_finite`.
        dtype: of the model.
        n_tokens: length of the context.
    """
    if found is None:
        return (
            "the model's logits are not finite, although a second forward pass of the same tokens "
            "is. Please report this."
        )
    tap, value = found
    if dtype == torch.float16:
        remedy = "float16 ends at 65,504. Load the model in float32 or bfloat16."
    else:
        remedy = "Check the weights up to there."
    return (
        f"the model's logits are not finite: in {dtype}, after {n_tokens} tokens, {tap} is the "
        f"first hidden state that contains {value}. {remedy}"
    )
