"""Where the logits are in what a model returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from compat.errors import AdaptError


def find_logits(
    output: Any, ids: Tensor, last: bool = False, vocab_size: int | None = None
) -> Tensor:
    """The float tensor (B, T, V) in what a model returns; (B, 1, V) with `last`.

    Raises:
        AdaptError: there is none.
    """
    B, T = ids.shape
    found = list(_tensors(output))
    floats = [tensor for tensor in found if tensor.is_floating_point()]
    for tensor in floats if last else ():
        if tensor.shape[:-1] in ((B,), (B, 1)):
            return tensor.view(B, 1, -1)
    whole = [tensor for tensor in floats if tensor.ndim == 3 and tensor.shape[:2] == (B, T)]
    if whole:  # of hidden states and logits, those of the vocabulary's width, else the wider
        return max(whole, key=lambda tensor: (tensor.shape[-1] == vocab_size, tensor.shape[-1]))
    for tensor in floats:
        if tensor.ndim == 2 and tensor.shape[0] == B * T:
            return tensor.view(B, T, -1)
    shapes = ", ".join(str(list(t.shape)) for t in found) or "no tensor"
    raise AdaptError(f"the model returned {shapes} for ids [{B}, {T}]; expected [{B}, {T}, V]")


def _tensors(output: Any) -> Iterator[Tensor]:
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
