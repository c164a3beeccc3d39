"""Where the first value comes up that is not finite, once the logits are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from compat.dialects import Model, dialect_of
from compat.errors import GenerationError
from compat.taps import Tap, expand_taps


class NotFiniteError(GenerationError):
    """Logits of which some are NaN or infinite."""


def why_not_finite(
    found: tuple[str, str] | None, dtype: torch.dtype, context: Sequence[int]
) -> str:
    """The message for logits that are not finite.

    Args:
        found: the first tap with such a value, and "NaN" or "an infinity".
        dtype: of the model.
        context: the ids that lead to it.
    """
    headline = "the model's logits are not finite"
    if found is None:
        return f"{headline}, although they are when computed anew; please report this"
    tap, value = found
    if dtype == torch.float16:
        remedy = "float16 ends at 65,504: load in float32 or bfloat16"
    else:
        remedy = "check the weights up to there"
    return (
        f"{headline}; in {dtype}, after {len(context)} ids, {tap} is the first hidden state "
        f"with {value} in it; {remedy}"
    )


@torch.no_grad()
def first_not_finite(model: Model, input_ids: Tensor) -> tuple[str, str] | None:
    """The first tap of ids (B, T) with a value that is not finite, and "NaN" or "an infinity"."""
    dialect = dialect_of(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    taps = expand_taps(dialect.taps, n_blocks(model)) if dialect else []
    taps = [tap for tap in taps if tap.module in modules]  # parts of the model may be replaced
    faults: dict[str, str] = {}
    with ExitStack() as hooks:
        for tap in taps:
            hooks.enter_context(_watch(modules[tap.module], tap, faults))
        model(input_ids)
    return next(((tap.name, faults[tap.name]) for tap in taps if tap.name in faults), None)


def n_blocks(model: Model) -> int:
    """How many the model has, which may differ from its config once some were removed or added."""
    dialect = dialect_of(model)
    if dialect is None:
        return model.config.n_layer
    blocks = model.get_submodule(dialect.block_path.removesuffix(".{i}"))
    return len(blocks._modules)  # children() would count a block that stands there twice once


def _watch(module: nn.Module, tap: Tap, faults: dict[str, str]) -> Any:
    """Note a fault when the module runs; the handle is a context manager."""

    def look(value: Tensor) -> None:
        value = value if tap.part is None else value.chunk(3, dim=-1)[tap.part]
        if not torch.isfinite(value).all():
            faults[tap.name] = "NaN" if value.isnan().any() else "an infinity"

    if tap.at == "input":
        return module.register_forward_pre_hook(lambda _, args: look(args[tap.item]))
    return module.register_forward_hook(lambda _, args, output: look(output))
