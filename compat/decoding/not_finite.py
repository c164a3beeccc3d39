"""Location of the first non-finite value of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compat.errors import GenerationError
from compat.tap import Tap, hook_taps


class NotFiniteError(GenerationError):
    """Some logits are NaN or infinite."""


@torch.no_grad()
def first_not_finite(
    model: nn.Module, taps: Sequence[Tap], run: Callable[[], object]
) -> tuple[str, str] | None:
    """Find the first tap with a non-finite value.

    Args:
        model: the model that contains the taps' modules. Taps of removed modules are skipped.
        taps: the taps of every layer, in execution order.
        run: executes the model.

    Returns:
        The name of the tap, and "NaN" or "an infinity"; None if all values are finite.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    faults: dict[str, str] = {}

    def look(tap: Tap, value: Tensor) -> None:
        if not torch.isfinite(value).all():
            faults[tap.name] = "NaN" if value.isnan().any() else "an infinity"

    with hook_taps(modules, [tap for tap in taps if tap.module in modules], look):
        run()
    return next(((tap.name, faults[tap.name]) for tap in taps if tap.name in faults), None)


def not_finite_message(found: tuple[str, str] | None, dtype: torch.dtype, n_tokens: int) -> str:
    """Return the error message for non-finite logits.

    Args:
        found: the result of `first_not_finite`.
        dtype: the data type of the model.
        n_tokens: the length of the context.
    """
    if found is None:
        return (
            "the model's logits are not finite, but those of a second forward pass of the same "
            "tokens are. Please report this."
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
