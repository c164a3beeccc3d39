"""What must hold before weights are written: every name, every shape, nothing lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint
from compat.errors import CheckpointError, NameMapError, folded, lines, listed
from compat.name_map import Row


def is_dropped(row: Row, parameters: Mapping[str, Tensor]) -> bool:
    """A bias none of whose targets exist in the model."""
    return row.hf.endswith(".bias") and not any(name in parameters for name in row.ours)


def check_names(
    model: nn.Module,
    rows: Sequence[Row],
    parameters: Mapping[str, Tensor],
    zeros: Sequence[str] = (),
) -> None:
    """Every parameter is in the map, or tied to one, and every name of the map in the model.

    Biases that the model lacks are looked at elsewhere.
    """
    targets = [name for row in rows if not is_dropped(row, parameters) for name in row.ours]
    targets += zeros
    faults = []
    if absent := [name for name in targets if name not in parameters]:
        faults.append(f"{len(absent)} of its names are not in the model: {listed(folded(absent))}")
    filled = {id(parameters[name]) for name in targets if name in parameters}
    if unmapped := [name for name, parameter in parameters.items() if id(parameter) not in filled]:
        faults.append(
            f"{len(unmapped)} parameters of the model have no row: {listed(folded(unmapped))}"
        )
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        faults.append(
            f"{len(empty)} buffers are on the meta device, without values: {listed(folded(empty))}"
        )
    if faults:
        raise NameMapError(lines(f"the name map does not fit {type(model).__name__}:", faults))


def check_shapes(
    model: nn.Module, rows: list[Row], parameters: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    """What each row makes of the checkpoint's tensor has the shape that the model wants."""
    faults = []
    for row in rows:
        shape = checkpoint.infos[row.hf].shape
        try:
            made = row.op.load(torch.empty(shape, device="meta"))
        except NameMapError as error:
            faults.append(f"{row.hf}: {error}")
            continue
        if len(made) != len(row.ours):
            faults.append(
                f"{row.hf}: {row.op} makes {len(made)} tensors, the row names {len(row.ours)}"
            )
        elif not is_dropped(row, parameters):
            faults += [
                f"{name}: found {list(value.shape)} ({row.hf} {list(shape)}, {row.op}), "
                f"expected {list(parameters[name].shape)}"
                for name, value in zip(row.ours, made, strict=True)
                if value.shape != parameters[name].shape
            ]
    if faults:
        raise NameMapError(
            lines(f"{checkpoint.weights} does not fit {type(model).__name__}:", faults)
        )


def check_dropped(
    model: nn.Module, rows: list[Row], parameters: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    """Biases that the model has no place for are zero, so that leaving them out changes nothing."""
    dropped = [row.hf for row in rows if is_dropped(row, parameters)]
    if lost := [name for name in dropped if checkpoint.read(name).count_nonzero()]:
        raise CheckpointError(
            f"{checkpoint.weights} has {len(lost)} biases that {type(model).__name__} has no place "
            f"for and that are not zero: {listed(folded(lost))}; give the module its biases"
        )
