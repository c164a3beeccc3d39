"""Loading weights by name from a checkpoint into a model."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compat import sharding
from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.checkpoint.files import ALL
from compat.checkpoint.layout import EMBEDDING, HEAD, saved_name
from compat.collector import collector_paused
from compat.config import as_device, as_dtype
from compat.dialects import Block, Model, get_dialect
from compat.errors import CheckpointError, ConfigError, described, short_repr
from compat.export_view import hf_tensors
from compat.name_map import NameMap, Row, all_parameters, as_name_map, names_of, sliced
from compat.ops import Same, views
from compat.threads import two_threads
from compat.validation import as_module, check_fit, expand_rows, is_dropped, rows_of_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@collector_paused()
def load_pretrained(
    source: Source,
    dialect: str = "linear",
    *,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
    mmap: bool = True,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    mesh: DeviceMesh | None = None,
    parallel: Literal["tensor", "fsdp"] = "tensor",
) -> Model:
    """Return a GPT-2 in the blocks of a dialect, in eval mode, with the weights of a checkpoint.

    Args:
        source: "demo", a hub id such as `gpt2`, a folder, a weights file, or a Checkpoint.
        dialect: "linear" or "conv1d".
        revision, verify, n_head, mmap: see `open_checkpoint`. From a mapped file, the matrices of
            "linear" are transposed views, which are not contiguous.
        dtype: the data type of the parameters, such as torch.float16 or "float16"; None keeps the
            checkpoint's.
        device: the device of the parameters; with `mesh`, the device of the mesh.
        mesh: divides the model among the ranks of a mesh, all of which must call this function.
            Each rank keeps only its share in memory.
        parallel: "tensor" for tensor parallelism, see `distribute`; "fsdp" for FSDP2, `fully_shard`
            of every block, which gathers the weights of one block at a time.

    Raises:
        CompatError: The checkpoint or its config is not exactly a GPT-2; see `open_checkpoint`.
        ConfigError: The dialect, data type or device is unknown or cannot be used, or the model
            cannot be divided among the ranks of the mesh.
    """
    dtype, kind = as_dtype(dtype), get_dialect(dialect)
    if parallel not in ("tensor", "fsdp"):
        raise ConfigError(f"parallel is {short_repr(parallel)}, but must be 'tensor' or 'fsdp'.")
    if mesh is not None:
        sharding.check_mesh(mesh)
        device = mesh.device_type
    device = as_device(device)
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head, mmap=mmap)
    with torch.device("meta"), _SkipInit():
        model = kind.model_class(checkpoint.config)
    if mesh is not None and parallel == "fsdp":
        blocks = model.get_submodule(kind.block_path.removesuffix(".{i}"))
        sharding.shard_blocks(model, blocks.children(), mesh)
    elif mesh is not None:
        sharding.distribute(model, kind.name_map, mesh)
    rows = expand_rows(kind.name_map, checkpoint)
    check_fit(model, rows, checkpoint)
    fill(model, rows, checkpoint, dtype or checkpoint.dtype, device)
    return (model if mesh else model.to(device)).eval()


def load_block(
    source: Source,
    layer: int,
    dialect: str = "linear",
    *,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
) -> Block:
    """Return one TransformerBlock of a dialect, in eval mode, with the weights of a layer.

    Args:
        layer: number of the layer, from 0.
        source, dialect, revision, verify, n_head, dtype, device: as in `load_pretrained`.

    Raises:
        CompatError: As in `load_pretrained`.
        ConfigError: The checkpoint does not have this layer.
    """
    dtype, kind = as_dtype(dtype), get_dialect(dialect)
    device = as_device(device)
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    layer = _as_layer(layer, checkpoint.config.n_layer)
    with torch.device("meta"), _SkipInit():
        block = kind.block_class(checkpoint.config, layer)
    prefix = kind.block_path.format(i=layer) + "."
    rows = [
        Row(row.hf, tuple(name.removeprefix(prefix) for name in row.ours), row.op)
        for row in (row.at(layer) for row in kind.name_map.rows if "{i}" in row.hf)
    ]
    check_fit(block, rows, checkpoint)
    fill(block, rows, checkpoint, dtype or checkpoint.dtype, device)
    return block.to(device).eval()


def load_into(
    model: nn.Module,
    name_map: NameMap,
    source: Source,
    *,
    part: str | None = None,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
) -> None:
    """Load a checkpoint's weights into any module by a name map. The module's mode is kept.

    Every tensor must have a row and every parameter a tensor. Only a bias that the model lacks may
    be dropped, and only if it is zero. If anything does not fit, the model is left unchanged.
    Parameters keep their device and data type.

    Args:
        model: the module; a parameter on the meta device is replaced, any other written in place.
        name_map: its name map, such as `Adaptation.name_map`.
        part: which part the module is, if it is not a whole model, such as "h.3.attn". The name map
            is that of a part of the same kind, in any layer.
        source, revision, verify, n_head: see `open_checkpoint`.

    Raises:
        ConfigError: The model is not a module.
        NameMapError: Names or shapes do not fit (all are listed), or buffers lack values.
        CheckpointError: The model lacks biases that are not zero; see also `open_checkpoint`.
    """
    model = as_module(model)
    name_map = as_name_map(name_map)
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    ranks = getattr(model, "tensor_parallel_size", 1)  # of `distribute`
    sharding.check_heads(checkpoint.config, ranks)
    if part is None:
        rows = expand_rows(name_map, checkpoint)
    else:
        rows = rows_of_part(name_map, part, checkpoint)
    zeros = name_map.expand_zeros(checkpoint.config.n_layer)
    check_fit(model, rows, checkpoint, zeros)
    fill(model, rows, checkpoint, zeros=zeros)


def to_hf_state_dict(model: nn.Module, name_map: NameMap | None = None) -> dict[str, Tensor]:
    """Return the model's weights under Hugging Face's names and in its `[in, out]` layout.

    Names are those that `transformers` saves, with `transformer.` and without a head that equals
    the embedding. Biases that the model lacks are zeros. Tensors that need no rearrangement share
    the model's memory, like those of `state_dict()`.

    Args:
        model: a dialect's model, or any module with a name map.
        name_map: required for a module that is not a dialect's.

    Raises:
        NameMapError: The model needs a map and has none, or the map lacks parameters.
    """
    return {saved_name(name): tensor.make() for name, tensor in hf_tensors(model, name_map).items()}


class _SkipInit(TorchFunctionMode):
    """A mode that skips `torch.nn.init`, which would import torch's compiler on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _as_layer(layer: object, n_layer: int) -> int:
    """Return an integer of Python, NumPy or PyTorch as an int, in range; a bool is refused."""
    try:
        number = operator.index(None if isinstance(layer, bool) else layer)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < n_layer:
        raise ConfigError(
            f"layer is {described(layer)}, but must be an integer from 0 to {n_layer - 1}, the "
            "layers of the checkpoint."
        )
    return number


def fill(
    model: nn.Module,
    rows: Sequence[Row],
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    zeros: Sequence[str] = (),
) -> None:
    """Load the parameters that the rows name, without checking names and shapes.

    Args:
        model: the module; parameters that the rows do not name are left unchanged.
        rows: the name map, written out for every layer.
        checkpoint: the checkpoint from which tensors are read.
        dtype, device: those of the parameters; None keeps those of each parameter.
        zeros: names of parameters that become zero.

    Raises:
        CheckpointError: A tensor is not finite, or the model ties parameters for which the
            checkpoint has different tensors.
    """
    sharding.reshard(model)
    wholes = all_parameters(model)
    parameters = sliced(wholes, names_of(rows))
    rows = [row for row in rows if not is_dropped(row, parameters)]
    if checkpoint.config.tie_word_embeddings:
        rows = _without_tied_head(rows, parameters)
    with sharding.raising_together(parameters.values()):
        loaded = _read(rows, parameters, checkpoint, dtype, device)
    for name in zeros:
        old = parameters[name]
        loaded[id(old)] = _convert(name, torch.zeros(sharding.local(old).shape), old, dtype, device)
    for name, whole in wholes.items():
        if name not in parameters:  # its slices are loaded
            slices = [parameters[f"{name}[{i}]"] for i in range(len(whole))]
            shares = [loaded.get(id(part), part.detach()) for part in slices]
            loaded[id(whole)] = torch.stack(shares)
    _assign(model, loaded)


def _read(
    rows: Sequence[Row],
    parameters: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> dict[int, Tensor]:
    """Return this rank's shares of the parameters that the rows name, by the parameters' ids.

    The arguments and errors are those of `fill`.
    """
    divided = any(map(sharding.is_divided, parameters.values()))
    # nn.Linear reads views of the file's pages equally fast. Other devices get contiguous tensors:
    # there a view may be slow, or even wrong.
    maps = checkpoint.is_mapped and torch.device(device or "cpu").type == "cpu"

    def make(row: Row) -> tuple[list[Tensor], str | None]:
        """Return this rank's shares of the row's parameters, or a fault of the tensor."""
        reading = sharding.reading_range(parameters[row.ours[0]]) if row.op == Same() else ALL
        tensor, fault = checkpoint.take(row.hf, reading)
        if fault:
            return [], fault
        in_place = maps and all(parameters[name].is_meta for name in row.ours)
        made = views(row.op, tensor) if divided or in_place else row.op.load(tensor)
        shares = []
        for name, value in zip(row.ours, made, strict=True):
            share = sharding.share_of(value, parameters[name], reading.start or 0)
            shares.append(_convert(row.hf, share, parameters[name], dtype, device))
        return shares, None

    if divided or checkpoint.is_mapped:  # torch's own threads read mapped pages
        results = list(map(make, rows))
    else:  # first-touch page faults take most of the time; two threads halve it
        with two_threads() as pool:
            results = list(pool.map(make, rows))
    if faults := [fault for _, fault in results if fault]:
        raise checkpoint.not_finite(faults)
    loaded: dict[int, tuple[str, Tensor]] = {}  # by the parameter's id, so that ties are kept
    for row, (shares, _) in zip(rows, results, strict=True):
        for name, share in zip(row.ours, shares, strict=True):
            first, tied = loaded.setdefault(id(parameters[name]), (name, share))
            if tied is not share and not torch.equal(tied, share):
                raise CheckpointError(
                    f"the model ties {name} to {first}, but {checkpoint.weights} has "
                    "different tensors for them. Untie them in the model."
                )
    return {key: share for key, (_, share) in loaded.items()}


def _assign(model: nn.Module, shares: Mapping[int, Tensor]) -> None:
    """Give the parameters with these ids their values, and replace those on the meta device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if id(old) not in shares:
                continue
            share = shares[id(old)]
            if old.is_meta:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(sharding.as_divided(share, old), old.requires_grad)
                setattr(module, name, made[id(old)])
            else:  # in place, since an optimizer may hold the parameter
                with torch.no_grad():
                    sharding.local(old).copy_(share)


def _without_tied_head(rows: list[Row], parameters: Mapping[str, Tensor]) -> list[Row]:
    """Leave out the head if the model ties it to the embedding, so that it is read once."""
    by_hf = {row.hf: row for row in rows}
    head, embedding = by_hf.get(HEAD), by_hf.get(EMBEDDING)
    if head is None or embedding is None or head.op != embedding.op:
        return rows
    pairs = zip(head.ours, embedding.ours, strict=False)
    tied = all(parameters[ours] is parameters[theirs] for ours, theirs in pairs)
    return [row for row in rows if row is not head] if tied else rows


def _convert(
    name: str,
    value: Tensor,
    old: Tensor,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> Tensor:
    """Return the value in this data type and on this device, or in those of the parameter."""
    if device is None and old.is_meta:
        device = old.device_mesh.device_type if sharding.is_divided(old) else "cpu"
    new = value.to(device or old.device, dtype or old.dtype)
    if new.dtype != value.dtype and not torch.isfinite(new).all():
        raise CheckpointError(
            f"{name} has values up to {value.abs().max().item():.6g}, beyond {new.dtype}. Load it "
            "in a wider data type."
        )
    return new
