"""Comparison of a model's weights with those of the checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from compat.checkpoint import Checkpoint
from compat.export_view import hf_tensors
from compat.name_map import NameMap
from compat.parity.compare import difference
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
            part = tuple(slice(n) for n in ours.shape)  # of a model with fewer positions
            theirs = stored.to(ours.dtype)[part]
            if ours.shape == theirs.shape and not torch.equal(ours, theirs):
                measured = difference(ours, theirs, None, None)
                found.append(WeightDifference(name, measured.max_abs, measured.rel_rms))
    return sorted(found, key=lambda each: -each.rel_rms)
