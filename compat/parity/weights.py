"""Comparison of a model's weights with those of the checkpoint."""

from __future__ import annotations

from torch import Tensor, nn

from compat.checkpoint import Checkpoint
from compat.export_view import hf_tensors
from compat.name_map import NameMap
from compat.parity.compare import rms
from compat.parity.report import WeightDifference


def weight_differences(
    model: nn.Module, name_map: NameMap | None, checkpoint: Checkpoint
) -> list[WeightDifference]:
    """Return the checkpoint's tensors whose values differ in the model, largest difference first.

    The checkpoint's values are rounded to the model's data type first.

    Raises:
        NameMapError: the map does not fit the model, or there is none.
        CheckpointError: a tensor has NaN or infinite values.
    """
    found = []
    for name, held in hf_tensors(model, name_map).items():
        if name in checkpoint.infos:
            ours, stored = held.view(), checkpoint.read(name)
            if (difference := _difference(name, ours, stored)) is not None:
                found.append(difference)
    return sorted(found, key=lambda difference: -difference.rel_rms)


def _difference(name: str, ours: Tensor, stored: Tensor) -> WeightDifference | None:
    part = tuple(slice(n) for n in ours.shape)  # of a model with fewer positions
    theirs = stored.to(ours.dtype)[part]
    if ours.shape != theirs.shape or bool((ours == theirs).all()):
        return None
    delta, scale = ours.double() - theirs.double(), rms(theirs.double())
    relative = rms(delta) / scale if scale else float("inf")
    return WeightDifference(name, delta.abs().max().item(), relative)
