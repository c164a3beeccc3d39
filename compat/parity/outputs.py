"""Finding the logits in what a model returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from torch import Tensor

from compat.errors import AdaptError


def find_logits(
    output: Any, ids: Tensor, last: bool = False, vocab_size: int | None = None
) -> Tensor:
    """Return the logits in what a model returned.

    Args:
        output: a tensor, or containers, data classes, models of pydantic and objects with `logits`
            that hold tensors.
        ids: the ids (B, T) for which the model returned it.
        last: look for logits of the last position first, (B, V) or (B, 1, V).
        vocab_size: V, which distinguishes logits from hidden states. Without it the widest tensor
            is returned, and of a list of tensors of one shape the last, as of the logits after each
            block.

    Returns:
        A float tensor (B, T, V), or (B, 1, V) with `last`. Further axes of size 1 are removed.

    Raises:
        AdaptError: the output does not contain such a tensor.
    """
    B, T = ids.shape
    if isinstance(output, list) and all(isinstance(each, Tensor) for each in output):
        output = output[-1] if len({each.shape for each in output}) == 1 else output
    found = list(_tensors(output))
    floats = [tensor for tensor in found if tensor.is_floating_point()]
    final = [t.view(B, 1, -1) for t in floats if t.shape[:-1] in ((B,), (B, 1))]
    if last and final:
        return final[0]
    squeezed = [_without_extra_axes(t, B, T) for t in floats]
    every_position = [t for t in squeezed if t.ndim == 3 and t.shape[:2] == (B, T)]
    every_position += [t.view(B, T, -1) for t in floats if t.ndim == 2 and len(t) == B * T]
    every_position = every_position or [t.mT for t in floats if _has_time_last(t, B, T)]
    if not every_position:
        every_position = [t.transpose(0, 1) for t in floats if _is_time_first(t, B, T)]

    def likelihood(tensor: Tensor) -> tuple[bool, int]:
        width = tensor.shape[-1]
        return width == vocab_size, width

    # Beside wider logits of the last position, the others are hidden states, as of a KV cache.
    best = max([*every_position, *final], key=likelihood, default=None)
    if best is not None and best.shape[1] == T:
        return best
    shapes = ", ".join(str(list(t.shape)) for t in found) or "no tensor"
    raise AdaptError(
        f"the model returned {shapes} for ids [{B}, {T}], but must return [{B}, {T}, V]"
    )


def other_shape(output: Any, ids: Tensor) -> str:
    """Return the shape of the logits in what a model returned, if it is not (B, T, V)."""
    B, T = ids.shape
    tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    if any(t.ndim > 2 and {B, T} <= {*t.shape[:-1]} for t in tensors):
        first = [_without_extra_axes(t, B, T).shape[:2] == (B, T) for t in tensors]
        is_time_first = not any(first) and any(_is_time_first(t, B, T) for t in tensors)
        return "(T, B, V)" if is_time_first else ""
    if any(t.ndim == 2 and len(t) == B * T for t in tensors):
        return "(B·T, V)"
    return "(B, V, T)" if any(_has_time_last(t, B, T) for t in tensors) else ""


def _has_time_last(tensor: Tensor, B: int, T: int) -> bool:
    """Return whether a tensor may hold logits (B, V, T), as `F.cross_entropy` expects them."""
    return tensor.ndim == 3 and tensor.shape[0] == B and tensor.shape[2] == T != tensor.shape[1]


def _is_time_first(tensor: Tensor, B: int, T: int) -> bool:
    """Return whether a tensor may hold logits (T, B, V)."""
    return tensor.ndim == 3 and tensor.shape[:2] == (T, B) != (B, T)


def _without_extra_axes(tensor: Tensor, B: int, T: int) -> Tensor:
    """Return logits such as (1, B, T, V) as (B, T, V); any other tensor itself."""
    ones = [axis for axis, length in enumerate(tensor.shape) if length == 1]
    for axes in combinations(ones, max(tensor.ndim - 3, 0)):
        if tensor.squeeze(axes).shape[:2] == (B, T):
            return tensor.squeeze(axes)
    return tensor


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output, those of the key `logits` first."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for key in sorted(output, key=lambda key: key != "logits"):
            yield from _tensors(output[key])
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(output):
        yield from _tensors({f.name: getattr(output, f.name) for f in dataclasses.fields(output)})
    elif hasattr(output, "logits"):
        yield from _tensors(output.logits)
    elif hasattr(output, "model_fields"):  # of pydantic
        yield from _tensors(vars(output))
