"""What must hold before weights are written: every name, every shape, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint
from compat.errors import (
    CheckpointError,
    ConfigError,
    NameMapError,
    collapse_layers,
    described,
    lines,
    listed,
)
from compat.name_map import Row


def is_dropped(row: Row, parameters: Mapping[str, Tensor]) -> bool:
    """A bias none of whose targets exist in the model."""
    return row.hf.endswith(".bias") and not any(name in parameters for name in row.ours)


def check_module(model: object) -> None:
    """What is to be loaded into, or saved, is a module.

    Raises:
        ConfigError: it is anything else.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {described(model)}; expected a torch.nn.Module")


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
        faults.append(
            f"{len(absent)} of its names are not in the model: {listed(collapse_layers(absent))}"
        )
    filled = {id(parameters[name]) for name in targets if name in parameters}
    if unmapped := [name for name, parameter in parameters.items() if id(parameter) not in filled]:
        faults.append(
            f"{len(unmapped)} parameters of the model have no row: "
            f"{listed(collapse_layers(unmapped))}"
        )
    if faults:
        raise NameMapError(lines(f"the name map does not fit {type(model).__name__}:", faults))


def check_buffers(model: nn.Module) -> None:
    """Every buffer has values, since loading by a name map fills parameters only.

    Refused are buffers, and tensors that are plain attributes, on the meta device, and buffers
    that `to_empty` has moved from there and that nobody has filled since. PyTorch does not mark
    the latter. A buffer counts as one of them if nothing was ever written to it in place
    (`Tensor._version` is 0), it is not a view, and the weight matrices of the model, or of the
    smallest module around it that has some, were never written either and do not hold what an
    initialisation or a checkpoint gives: all of them are constant, or one has values that only
    unwritten memory has.
    The constructors of `nn.Linear` and `nn.Embedding` and the functions of `torch.nn.init` write in
    place, so models built on a real device pass.

    A buffer that was emptied is not recognised if the weights around it were written between
    `to_empty` and this call, as an initialisation of the weights alone does, if the model was
    copied or pickled in between, or if the memory still holds the weights of an earlier model.

    Raises:
        NameMapError: buffers without values, by name.
    """
    faults = []
    if on_meta := _tensors_on_meta(model):
        faults.append(
            f"{len(on_meta)} buffers are on the meta device, without values: "
            f"{listed(collapse_layers(on_meta))}"
        )
    if unfilled := [name for name, scope in _unwritten_buffers(model) if _is_emptied(scope)]:
        faults.append(
            f"{len(unfilled)} buffers were moved from the meta device by to_empty and have had no "
            f"values since: {listed(collapse_layers(unfilled))}"
        )
    if faults:
        raise NameMapError(
            lines(f"{type(model).__name__} has buffers that no checkpoint fills:", faults)
            + "\nBuild the model on a real device, or write their values in place "
            "(`buffer.copy_(…)`) before loading."
        )


def _tensors_on_meta(model: nn.Module) -> list[str]:
    """Buffers and tensors that are plain attributes of a module; parameters are filled."""
    named = [
        (prefix, name, value)
        for prefix, module in model.named_modules()
        for name, value in (module._buffers | vars(module)).items()
    ]
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, name, value in named
        if isinstance(value, Tensor) and value.is_meta
    ]


def _unwritten_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Buffers that were never written in place, with the smallest module with matrices around.

    Where no matrix of the model was ever written, it is the model: more matrices show more.
    """
    whole = not any(_is_written(matrix) for matrix in _matrices(model))
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer._is_view() or _is_written(buffer):
            continue
        path = [] if whole else name.split(".")[:-1]
        while path and not _tells(_matrices(model.get_submodule(".".join(path)))):
            path.pop()
        yield name, model.get_submodule(".".join(path))


def _tells(matrices: Sequence[Tensor]) -> bool:
    """Whether they show if they were emptied; a single constant one may have been made so."""
    return len(matrices) > 1 or any(
        matrix.is_meta or _is_written(matrix) or not _is_constant(matrix) for matrix in matrices
    )


def _is_emptied(module: nn.Module) -> bool:
    """Whether the weight matrices of a module show that `to_empty` made them and nothing since."""
    matrices = _matrices(module)
    if not matrices or any(matrix.is_meta or _is_written(matrix) for matrix in matrices):
        return False
    # Biases of heads, (H, D), are matrices too, and zero at first.
    values = [matrix for matrix in matrices if not _is_constant(matrix)]
    return not values or not all(_has_weights(matrix) for matrix in values)


def _is_constant(matrix: Tensor) -> bool:
    return bool((matrix == matrix.flatten()[:1]).all())


def _matrices(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters() if p.ndim > 1 and p.is_floating_point()]


def _is_written(tensor: Tensor) -> bool:
    """Whether an in-place operation ever wrote to it; inference tensors do not count versions."""
    return not tensor.is_inference() and tensor._version > 0


def _has_weights(matrix: Tensor) -> bool:
    """Whether values are as weights are: of common size, and most of them other than zero.

    Memory that was not written holds zeros, or addresses, which read as subnormal numbers, as
    immense ones or as NaN.
    """
    size = matrix.abs()
    least = 0.0 if matrix.dtype == torch.float16 else torch.finfo(matrix.dtype).tiny
    proper = (size == 0) | ((size >= least) & (size < 1e4))
    return bool(proper.all()) and 2 * int(size.count_nonzero()) > size.numel()


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
        except Exception as error:  # the op may be of the user's own
            faults.append(f"{row.hf}: {row.op} fails with {type(error).__name__}: {error}")
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
            f"for and that are not zero: {listed(collapse_layers(lost))}; give the module its "
            f"biases"
        )
