"""Checks before weights are loaded or saved: every name and shape fits, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import HEAD
from compat.errors import (
    CheckpointError,
    ConfigError,
    NameMapError,
    collapse_layers,
    counted,
    described,
    lines,
    listed,
)
from compat.name_map import NameMap, Row, all_parameters, names_of, sliced


def is_dropped(row: Row, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether the row is of a bias that the model lacks."""
    return row.hf.endswith(".bias") and not any(name in parameters for name in row.ours)


def is_quantized(parameter: Tensor) -> bool:
    """Return whether torchao quantized a parameter, which then supports few tensor operations."""
    return type(parameter).__module__.startswith("torchao.")


def as_module(model: object) -> nn.Module:
    """Return the module or, if it is wrapped by `torch.compile`, the wrapped module.

    Raises:
        ConfigError: The argument is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {described(model)}, but must be a torch.nn.Module.")
    return model._modules.get("_orig_mod") or model


def expand_rows(name_map: NameMap, checkpoint: Checkpoint) -> list[Row]:
    """Return the rows of all layers, which name exactly the checkpoint's tensors.

    A tied head needs no row.

    Raises:
        NameMapError: A tensor has no row, or a row no tensor.
    """
    rows = name_map.expand(checkpoint.config.n_layer)
    optional = {HEAD} if checkpoint.config.tie_word_embeddings else set()
    mapped, stored = {row.hf for row in rows} - optional, checkpoint.infos.keys() - optional
    _raise_if_any(
        f"the name map does not fit {checkpoint.weights}:",
        ("tensors have no row", [name for name in checkpoint.infos if name in stored - mapped]),
        ("rows name no tensor", sorted(mapped - stored)),
    )
    return rows


def rows_of_part(name_map: NameMap, part: str, checkpoint: Checkpoint) -> list[Row]:
    """Return the rows of a part, such as "h.3.attn", from the map of such a part in any layer.

    Raises:
        NameMapError: The checkpoint has no such part, or the rows are not those of its tensors.
    """
    layer = re.match(r"h\.\d+(?=\.|$)", part)
    rows = []
    for row in name_map.rows:
        hf = row.hf if layer is None else re.sub(r"^h\.(\d+|\{i\})(?=\.)", layer[0], row.hf)
        rows.append(Row(hf, row.ours, row.op))
    mapped = {row.hf for row in rows}
    stored = {name for name in checkpoint.infos if name.startswith(f"{part}.")}
    if not stored:
        raise NameMapError(
            f"{checkpoint.weights} has no part {part!r}. Pass h.0, h.0.attn, h.0.mlp, "
            "h.0.ln_1, h.0.ln_2 or ln_f, with the number of one of its layers."
        )
    _raise_if_any(
        f"the name map does not fit {part} of {checkpoint.weights}:",
        ("tensors have no row", sorted(stored - mapped)),
        ("rows name no tensor of this part", sorted(mapped - stored)),
    )
    return rows


def check_own_weights(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raise NameMapError if PEFT or torchao replaced parameters of the model."""
    if any(".lora_A." in name for name in parameters):
        raise NameMapError(
            f"{type(model).__name__} has LoRA layers of PEFT, whose weights are not merged. Pass "
            "the model that its `merge_and_unload()` returns."
        )
    if quantized := [name for name, parameter in parameters.items() if is_quantized(parameter)]:
        left = [
            f"{path}.{name}"
            for path, module in model.named_modules()
            if not isinstance(module, nn.Linear | nn.Embedding)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 2
        ]
        also = (
            f", and left out {listed(collapse_layers(left))}, because it supports nn.Linear only"
            if left
            else ""
        )
        raise NameMapError(
            f"torchao quantized {listed(collapse_layers(quantized))} of {type(model).__name__}"
            f"{also}, but weights must be floating-point numbers. Use the model as it was before "
            '`quantize_`, or quantize every layer with Engine(model, dtype="int8").'
        )


def check_names(
    model: nn.Module,
    rows: Sequence[Row],
    parameters: Mapping[str, Tensor],
    zeros: Sequence[str] = (),
) -> None:
    """Check that every parameter is in the map or tied to one that is, and the map's names exist.

    Biases that the model lacks are excepted.

    Raises:
        NameMapError: A parameter is not in the map, or a name of the map not in the model.
    """
    targets = [name for row in rows if not is_dropped(row, parameters) for name in row.ours]
    targets += zeros
    filled = {id(parameters[name]) for name in targets if name in parameters}
    _raise_if_any(
        f"the name map does not fit {type(model).__name__}:",
        ("of its names are not in the model", [n for n in targets if n not in parameters]),
        (
            "parameters of the model have no row",
            [name for name, parameter in parameters.items() if id(parameter) not in filled],
        ),
    )


def _raise_if_any(headline: str, *faults: tuple[str, list[str]], next_step: str = "") -> None:
    """Raise a NameMapError that lists the names with each fault, if there are any."""
    if found := counted(*faults):
        raise NameMapError(lines(headline, found) + next_step)


def check_fit(
    model: nn.Module, rows: Sequence[Row], checkpoint: Checkpoint, zeros: Sequence[str] = ()
) -> None:
    """Check that the rows can load a checkpoint into a model without losing anything.

    Raises:
        NameMapError: Names or shapes do not fit, or buffers lack values.
        CheckpointError: The model lacks biases that are not zero.
    """
    parameters = sliced(all_parameters(model), names_of(rows))
    check_own_weights(model, parameters)
    check_names(model, rows, parameters, zeros)
    if faults := [fault for row in rows for fault in _shape_faults(row, parameters, checkpoint)]:
        raise NameMapError(
            lines(f"{checkpoint.weights} does not fit {type(model).__name__}:", faults)
        )
    dropped = [row.hf for row in rows if is_dropped(row, parameters)]
    if lost := [name for name in dropped if checkpoint.read(name).count_nonzero()]:
        raise CheckpointError(
            f"{checkpoint.weights} has {len(lost)} biases that are not zero and that "
            f"{type(model).__name__} lacks: {listed(collapse_layers(lost))}. Add biases to the "
            "module."
        )
    check_buffers(model)


def _shape_faults(
    row: Row, parameters: Mapping[str, Tensor], checkpoint: Checkpoint
) -> Iterator[str]:
    """Yield differences between the shapes that the operation makes and those of the parameters."""
    shape = checkpoint.infos[row.hf].shape
    try:
        made = row.op.load(torch.empty(shape, device="meta"))
    except NameMapError as error:
        yield f"{row.hf}: {error}"
        return
    except Exception as error:  # the operation may be the user's own
        yield f"{row.hf}: {row.op} fails with {type(error).__name__}: {error}"
        return
    if len(made) != len(row.ours):
        yield f"{row.hf}: {row.op} makes {len(made)} tensors, but the row names {len(row.ours)}"
    elif not is_dropped(row, parameters):
        for name, value in zip(row.ours, made, strict=True):
            if value.shape != parameters[name].shape:
                yield (
                    f"{name}: found {list(value.shape)} ({row.hf} {list(shape)}, {row.op}), "
                    f"expected {list(parameters[name].shape)}"
                )


def check_buffers(model: nn.Module) -> None:
    """Check that every buffer has values, since loading fills parameters only.

    Two kinds of buffers have none: those on the meta device (with tensors that are plain
    attributes), and those that `to_empty` moved from there and that were not filled since. PyTorch
    does not mark the latter. A buffer is assumed to be one of them if all of this holds:

    - No in-place operation ever wrote to it (`Tensor._version` is 0), and it is not a view.
    - Nor did one write to the weight matrices of the smallest module around it that has some.
      `nn.Linear`, `nn.Embedding` and `torch.nn.init` initialise in place, so that models built on
      a real device pass.
    - These matrices do not look like weights: all are constant, or one has values that are typical
      of uninitialised memory.

    An emptied buffer is therefore overlooked if the weights around it were initialised after
    `to_empty`, if the model was copied or pickled since, or if the memory still holds the weights
    of an earlier model.

    Raises:
        NameMapError: Buffers have no values.
    """
    _raise_if_any(
        f"{type(model).__name__} has buffers that no checkpoint fills:",
        ("buffers are on the meta device, without values", _tensors_on_meta(model)),
        (
            "buffers were moved from the meta device by to_empty and not filled since",
            [name for name, scope in _unwritten_buffers(model) if _is_emptied(scope)],
        ),
        next_step="\nBuild the model on a real device, or write their values in place "
        "(`buffer.copy_(…)`) before loading.",
    )


def _tensors_on_meta(model: nn.Module) -> list[str]:
    """Return names of buffers, and of tensors that are plain attributes, on the meta device."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, value in (module._buffers | vars(module)).items()
        if isinstance(value, Tensor) and value.is_meta
    ]


def _unwritten_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield buffers never written in place, with the smallest module around that has matrices.

    If no matrix of the model was ever written, that module is the whole model, because more
    matrices are stronger evidence.
    """
    whole = not any(_is_written(matrix) for matrix in _matrices(model))
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer._is_view() or _is_written(buffer):
            continue
        path = [] if whole else name.split(".")[:-1]
        while path and not _are_conclusive(_matrices(model.get_submodule(".".join(path)))):
            path.pop()
        yield name, model.get_submodule(".".join(path))


def _are_conclusive(matrices: Sequence[Tensor]) -> bool:
    """Return whether matrices show that they were emptied. One may be constant on purpose."""
    return len(matrices) > 1 or any(
        matrix.is_meta or _is_written(matrix) or not _is_constant(matrix) for matrix in matrices
    )


def _is_emptied(module: nn.Module) -> bool:
    """Return whether the weight matrices of a module look like uninitialised memory."""
    matrices = _matrices(module)
    if not matrices or any(matrix.is_meta or _is_written(matrix) for matrix in matrices):
        return False
    # The biases of heads, (H, D), are matrices too, and initialised to zero.
    values = [matrix for matrix in matrices if not _is_constant(matrix)]
    return not values or not all(_has_weights(matrix) for matrix in values)


def _is_constant(matrix: Tensor) -> bool:
    return bool((matrix == matrix.flatten()[:1]).all())


def _matrices(module: nn.Module) -> list[Tensor]:
    matrices = [p.detach() for p in module.parameters() if p.ndim > 1 and p.is_floating_point()]
    # For a model that is divided among several processes, the share of this process.
    return [m.to_local() if hasattr(m, "to_local") else m for m in matrices]


def _is_written(tensor: Tensor) -> bool:
    """Return whether an in-place operation wrote to a tensor. Inference tensors have no version."""
    return not tensor.is_inference() and tensor._version > 0


def _has_weights(matrix: Tensor) -> bool:
    """Return whether values look like weights: of common magnitude, and mostly not zero.

    Uninitialised memory holds zeros, or addresses, which read as subnormal numbers, as very large
    ones or as NaN.
    """
    size = matrix.abs()
    least = 0.0 if matrix.dtype == torch.float16 else torch.finfo(matrix.dtype).tiny
    proper = (size == 0) | ((size >= least) & (size < 1e4))
    return bool(proper.all()) and 2 * int(size.count_nonzero()) > size.numel()
