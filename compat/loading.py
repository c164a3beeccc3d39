"""Weights by name: from a checkpoint into a model, and back."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.checkpoint.layout import EMBEDDING, HEAD, saved_name
from compat.config import as_dtype
from compat.dialects import Block, Model, get_dialect
from compat.errors import (
    CheckpointError,
    ConfigError,
    NameMapError,
    collapse_layers,
    described,
    lines,
    listed,
    short_repr,
)
from compat.export_view import hf_tensors
from compat.name_map import NameMap, Row, as_name_map
from compat.validation import (
    check_buffers,
    check_dropped,
    check_module,
    check_names,
    check_shapes,
    is_dropped,
)

Source = str | Path | Checkpoint


def load_pretrained(
    source: Source,
    dialect: str = "linear",
    *,
    revision: str | None = None,
    verify: bool = False,
    mmap: bool = False,
    n_head: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """A GPT-2 in the blocks of a dialect, in eval mode, with the weights of a checkpoint.

    Args:
        source: "demo", a hub id such as `gpt2`, a folder, or a weights file beside its config.json.
        dialect: "linear" or "conv1d".
        revision: branch, tag or commit on the hub.
        verify: compare what came from the hub with its checksums.
        mmap: share the file's pages where nothing is rearranged; see `open_checkpoint`.
        n_head: the number of heads, for a minGPT or makemore file that has no config beside it.
        dtype: of the parameters, such as torch.float16 or "float16"; None keeps the checkpoint's.
        device: where the parameters go.

    Raises:
        CompatError: the checkpoint or its config is not exactly a GPT-2; see `open_checkpoint`.
        ConfigError: an unknown dialect or data type, or a device that cannot be used.
    """
    dtype, kind = as_dtype(dtype), get_dialect(dialect)
    _check_device(device)
    checkpoint = _opened(source, revision, verify=verify, mmap=mmap, n_head=n_head)
    with torch.device("meta"), _Unfilled():
        model = kind.model_class(checkpoint.config)
    _assign(model, _rows(kind.name_map, checkpoint), checkpoint, dtype or checkpoint.dtype, device)
    return model.to(device).eval()


def load_block(
    source: Source,
    layer: int,
    dialect: str = "linear",
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
) -> Block:
    """One TransformerBlock of a dialect, in eval mode, with the weights of layer `layer`, from 0.

    Takes the arguments of `load_pretrained` and raises the same errors, and a ConfigError where the
    checkpoint has no such layer.
    """
    dtype, kind = as_dtype(dtype), get_dialect(dialect)
    _check_device(device)
    checkpoint = _opened(source, revision)
    n_layer = checkpoint.config.n_layer
    layer = _layer_number(layer, n_layer)
    if not 0 <= layer < n_layer:
        raise ConfigError(
            f"layer {layer} is not in the checkpoint, which has layers 0 to {n_layer - 1}"
        )
    with torch.device("meta"), _Unfilled():
        block = kind.block_class(checkpoint.config, layer)
    here = kind.block_path.format(i=layer) + "."
    rows = [
        Row(row.hf, tuple(name.removeprefix(here) for name in row.ours), row.op)
        for row in (row.at(layer) for row in kind.name_map.rows if "{i}" in row.hf)
    ]
    _assign(block, rows, checkpoint, dtype or checkpoint.dtype, device)
    return block.to(device).eval()


def load_into(
    model: nn.Module, name_map: NameMap, source: Source, *, revision: str | None = None
) -> None:
    """Put a checkpoint's weights into any module, by a name map; its mode is left as it is.

    Every tensor of the checkpoint must find its place and every parameter its tensor; only a bias
    that the model does not have, and that is all zero, may be dropped. Nothing changes unless
    everything fits. Parameters keep their device and data type.

    Raises:
        ConfigError: the model is not a module.
        NameMapError: names or shapes that do not fit, all of them listed; buffers without values.
        CheckpointError: biases that the model has no place for; see also `open_checkpoint`.
    """
    check_module(model)
    name_map = as_name_map(name_map)
    checkpoint = _opened(source, revision)
    rows = _rows(name_map, checkpoint)
    zeros = name_map.expand_zeros(checkpoint.config.n_layer)
    _assign(model, rows, checkpoint, None, None, zeros)


def to_hf_state_dict(model: nn.Module, name_map: NameMap | None = None) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names and in its `[in, out]` layout.

    Names are those of a file that `transformers` saves: with `transformer.`, without a head that
    equals the embedding. Biases that the model lacks are written as zeros. Tensors that need no
    rearranging share the model's memory, as those of `state_dict()` do.

    Args:
        model: a dialect's model, or any module with a name map.
        name_map: needed for a module that is not a dialect's.

    Raises:
        NameMapError: no map, or parameters that the map does not name.
    """
    return {saved_name(name): tensor.make() for name, tensor in hf_tensors(model, name_map).items()}


class _Unfilled(TorchFunctionMode):
    """No initial values: weights follow, and for random ones on meta torch imports its compiler."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _layer_number(layer: object, n_layer: int) -> int:
    """A whole number of Python, NumPy or PyTorch as an int; True is not one."""
    try:
        return operator.index(None if isinstance(layer, bool) else layer)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"layer is {described(layer)}; expected a whole number, 0 to {n_layer - 1}"
        ) from None


def _check_device(device: str | torch.device) -> None:
    """Before anything is read: torch knows the device and can use it.

    Raises:
        ConfigError: it does not, or cannot.
    """
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each kind of device fails in its own way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device is {short_repr(device)}, which torch cannot use: {reason}"
        ) from error


def _opened(source: Source, revision: str | None, **how: Any) -> Checkpoint:
    """The checkpoint, opened here unless it is open already, when it is too late to say how."""
    if not isinstance(source, Checkpoint):
        return open_checkpoint(source, revision, **how)
    if late := [name for name, value in {"revision": revision, **how}.items() if value]:
        raise CheckpointError(
            f"{source.source} is open already; give {listed(late)} to open_checkpoint"
        )
    return source


def _rows(name_map: NameMap, checkpoint: Checkpoint) -> list[Row]:
    """The map written out, naming exactly the checkpoint's tensors; a tied head may be left out."""
    rows = name_map.expand(checkpoint.config.n_layer)
    mapped, stored = {row.hf for row in rows}, set(checkpoint.infos)
    if checkpoint.config.tie_word_embeddings:
        stored.discard(HEAD)
        mapped.discard(HEAD)
    faults = []
    if unmatched := [name for name in checkpoint.infos if name in stored - mapped]:
        faults.append(f"{len(unmatched)} tensors have no row: {listed(collapse_layers(unmatched))}")
    if unknown := sorted(mapped - stored):
        faults.append(f"{len(unknown)} rows name no tensor: {listed(collapse_layers(unknown))}")
    if faults:
        raise NameMapError(lines(f"the name map does not fit {checkpoint.weights}:", faults))
    return rows


def _assign(
    model: nn.Module,
    rows: list[Row],
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    zeros: Sequence[str] = (),
) -> None:
    """Check that everything fits, then give every parameter its tensor.

    `dtype` and `device` None mean those that each parameter has now.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    check_names(model, rows, parameters, zeros)
    check_shapes(model, rows, parameters, checkpoint)
    check_dropped(model, rows, parameters, checkpoint)
    check_buffers(model)
    fill(model, rows, checkpoint, dtype, device, zeros)


def fill(
    model: nn.Module,
    rows: Sequence[Row],
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    zeros: Sequence[str] = (),
) -> None:
    """Give the parameters that the rows name their tensors, unchecked; all others stay as they are.

    Raises:
        CheckpointError: weights that are not finite, or different tensors for parameters that the
            model ties.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def make(row: Row) -> tuple[list[Tensor], str | None]:
        tensor, fault = checkpoint.take(row.hf)
        if fault:
            return [], fault
        pairs = zip(row.op.load(tensor), row.ours, strict=True)
        return [_converted(row.hf, m, parameters[name], dtype, device) for m, name in pairs], None

    rows = [row for row in rows if not is_dropped(row, parameters)]
    if checkpoint.config.tie_word_embeddings:
        rows = _without_tied_head(rows, parameters)
    # Memory comes page by page, which takes longer than to copy into it; two threads halve it.
    with ThreadPoolExecutor(max_workers=2) as pool:
        read = list((map if checkpoint.mmap else pool.map)(make, rows))
    if faults := [fault for _, fault in read if fault]:
        raise checkpoint.not_finite(faults)
    made: dict[int, tuple[str, nn.Parameter]] = {}
    for row, (tensors, _) in zip(rows, read, strict=True):
        for name, tensor in zip(row.ours, tensors, strict=True):
            old = parameters[name]
            new = nn.Parameter(tensor, old.requires_grad)
            # Parameters that the model ties stay one, and must get one and the same value.
            first, tied = made.setdefault(id(old), (name, new))
            if tied is not new and not torch.equal(tied, new):
                raise CheckpointError(
                    f"the model ties {name} to {first}, but {checkpoint.weights} has different "
                    "tensors for them; untie them in the model"
                )
    for name in zeros:
        old = parameters[name]
        zero = _converted(name, torch.zeros(old.shape), old, dtype, device)
        made[id(old)] = name, nn.Parameter(zero, old.requires_grad)
    _put(model, {place: new for place, (_, new) in made.items()})


def _put(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """A parameter on the meta device is replaced; any other is written into, and so stays the one
    that an optimizer holds. `made` goes by the `id` of the old one, so that tied ones stay tied."""
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if id(old) not in made:
                continue
            if old.is_meta:
                setattr(module, name, made[id(old)])
            else:
                with torch.no_grad():
                    old.copy_(made[id(old)])


def _without_tied_head(rows: list[Row], parameters: Mapping[str, Tensor]) -> list[Row]:
    """A model that ties its head as the checkpoint does gets the embedding, read once."""
    by_hf = {row.hf: row for row in rows}
    head, embedding = by_hf.get(HEAD), by_hf.get(EMBEDDING)
    if head is None or embedding is None or head.op != embedding.op:
        return rows
    pairs = zip(head.ours, embedding.ours, strict=False)
    tied = all(parameters[ours] is parameters[theirs] for ours, theirs in pairs)
    return [row for row in rows if row is not head] if tied else rows


def _converted(
    name: str,
    value: Tensor,
    old: Tensor,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> Tensor:
    """The value in the data type and on the device wanted, or those of the old parameter."""
    new = value.to(device or ("cpu" if old.is_meta else old.device), dtype or old.dtype)
    if new.dtype != value.dtype and not torch.isfinite(new).all():
        raise CheckpointError(
            f"{name} has values up to {value.abs().max().item():.6g}, beyond {new.dtype}; "
            "load it in a wider data type"
        )
    return new
