"""One model on several processes, each of which holds a part of the parameters.

Tensor parallelism (Shoeybi et al. 2019, §3) divides whole heads of q, k and v, the features of the
MLP and the rows of the vocabulary. The elements of each parameter that belong to a rank follow from
the name map: every element of a Hugging Face tensor is labelled with the rank that owns it, and the
row's operation is applied to the labels as to the weights. The parameter's placement is the one
that gives every rank exactly the elements with its label.

Parameters become DTensors. The functions below also accept DTensors from elsewhere, such as FSDP2's
`fully_shard`.

A *share* is the part of a parameter that one rank holds; a tensor that has shares is *divided*.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from compat.checkpoint.files import allocate
from compat.config import GPT2Config
from compat.errors import CheckpointError, ConfigError, described
from compat.name_map import NameMap, all_parameters, as_name_map
from compat.ops import views
from compat.validation import as_module, check_names, is_dropped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

# GPT-2's tensors that are divided, by the end of their name: the axis, and the number of equal
# pieces along it (3 for q, k and v). Each piece is divided among all ranks.
DIVIDED = {
    "attn.c_attn.weight": (1, 3),
    "attn.c_attn.bias": (0, 3),
    "attn.c_proj.weight": (0, 1),
    "mlp.c_fc.weight": (1, 1),
    "mlp.c_fc.bias": (0, 1),
    "mlp.c_proj.weight": (0, 1),
    "wte.weight": (0, 1),
    "lm_head.weight": (0, 1),
}


def distribute(model: nn.Module, name_map: NameMap, mesh: DeviceMesh) -> None:
    """Divide a model among the ranks of a mesh, by tensor parallelism. Every rank must call it.

    Parameters become DTensors, and each rank keeps its share of them; those on the meta device get
    their values from `load_into`, which reads only this share. The model takes and returns plain
    tensors, as before: every rank must call it with the same ids, and gets all logits. Inside, the
    hidden states are DTensors, and a plain tensor is treated as replicated on every rank. Active
    dropout is an error, because every rank would draw different random numbers.

    Create an optimizer afterwards, because the parameters are new objects.

    Args:
        model: a dialect's model, or any module.
        name_map: its name map, such as `Adaptation.name_map`.
        mesh: a mesh with one dimension, such as `init_device_mesh("cpu", (2,))`. For a mesh with
            more dimensions, pass one of them, such as `mesh["tp"]`.

    Raises:
        ConfigError: The model is not a module, the mesh has several dimensions, or the heads or the
            features of the MLP cannot be divided among so many ranks.
        NameMapError: Names do not fit.
    """
    model = as_module(model)
    name_map = as_name_map(name_map)
    check_mesh(mesh)
    parameters = all_parameters(model)
    n_layer = name_map.count_layers(parameters)
    check_names(model, name_map.expand(n_layer), parameters, name_map.expand_zeros(n_layer))
    config = getattr(model, "config", None)
    if isinstance(config, GPT2Config):
        check_heads(config, mesh.size())
    _place(model, placements(name_map, parameters, mesh.size()), mesh)
    if mesh.device_type == "cpu":
        _register_attention()
    model.__class__ = _divided_class(type(model), mesh.size())


def shard_blocks(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Shard a model by FSDP2, each of its blocks as one unit, and the rest as another.

    Parameters are divided by rows. Those whose rows `distribute` divided in pieces, such as fused
    q, k and v, are divided by columns.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def axis(parameter: nn.Parameter) -> Shard:
        cuts = parameter.placements if is_divided(parameter) else ()
        return Shard(int(any(cut == strided_shard(0, n) for cut in cuts for n in (2, 3))))

    for block in blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=axis)
    fully_shard(model, mesh=mesh, shard_placement_fn=axis)


def mesh_of_torchrun() -> DeviceMesh:
    """Connect all processes that torchrun started, by NCCL if each has a GPU and otherwise by gloo.

    Raises:
        ConfigError: torchrun did not start this process.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if not torch.distributed.is_torchelastic_launched():
        raise ConfigError(
            "this process is the only one. Start it with torchrun, as in "
            f"`torchrun --nproc-per-node 2 {' '.join(sys.argv)}`."
        )
    world, on_this_machine = (int(os.environ[n]) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    device = "cuda" if torch.cuda.device_count() >= on_this_machine else "cpu"
    return init_device_mesh(device, (world,))


def check_mesh(mesh: object) -> None:
    """Raise ConfigError unless `mesh` is a DeviceMesh of one dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f'mesh is {described(mesh)}, but must be a DeviceMesh, such as init_device_mesh("cpu", '
            "(2,)) of torch.distributed.device_mesh."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = (
            f"mesh[{names[-1]!r}]"
            if names
            else "one dimension of a mesh whose dimensions have names"
        )
        raise ConfigError(
            f"mesh has the shape {list(mesh.shape)}, but must have one dimension, among whose "
            f"ranks the heads are divided. Pass {example}."
        )


def check_heads(config: GPT2Config, ranks: int) -> None:
    """Raise ConfigError unless heads and features of the MLP are divisible among the ranks."""
    for name, size in (("n_head", config.n_head), ("d_inner", config.d_inner)):
        if size % ranks:
            divisors = [str(n) for n in range(1, config.n_head + 1) if not config.n_head % n]
            raise ConfigError(
                f"{name} is {size}, which cannot be divided among {ranks} ranks. Use a mesh whose "
                f"size divides both n_head and d_inner. The divisors of n_head = {config.n_head} "
                f"are {', '.join(divisors)}."
            )


# The plan


def placements(
    name_map: NameMap, parameters: dict[str, nn.Parameter], ranks: int
) -> dict[str, Placement]:
    """Return the placement of every parameter, by its name.

    All layers have the placements of the first one, because they have the same operations.
    """
    from torch.distributed.tensor import Replicate

    n_layer = name_map.count_layers(parameters)
    plan: dict[str, Placement] = dict.fromkeys(parameters, Replicate())
    for row in name_map.rows:
        layers = [row.at(i) for i in range(n_layer)] if "{i}" in row.hf else [row]
        cut = next((cut for end, cut in DIVIDED.items() if row.hf.endswith(end)), None)
        if cut is None or not layers or is_dropped(layers[0], parameters):
            continue
        owners = _owners(layers[0].hf_shape(parameters), *cut, ranks)
        for number, owner in enumerate(views(layers[0].op, owners)):
            placement = _placement(owner, ranks)
            plan.update((layer.ours[number], placement) for layer in layers)
    return plan


def _owners(shape: Sequence[int], axis: int, pieces: int, ranks: int) -> Tensor:
    """Return the rank that owns each element of a tensor. Each piece is divided among all ranks."""
    size = shape[axis] // pieces
    along = torch.arange(size, dtype=torch.int32) // -(-size // ranks)  # in chunks as DTensor's
    along = along.to(torch.int16).repeat(pieces)
    return along.view([-1 if i == axis else 1 for i in range(len(shape))]).expand(*shape)


def _placement(owners: Tensor, ranks: int) -> Placement:
    """Return the placement that gives every rank its elements, or else a copy on every rank.

    With any other placement the model would compute the same, since DTensors gather what an
    operation needs, but it would communicate more.
    """
    from torch.distributed.tensor import Replicate, Shard

    if owners.dtype == torch.int16:  # the operation moves elements and does not compute with them
        # Separate parameters, or two or three of q, k and v in one. A fused bias is small, and
        # FSDP2 cannot shard it again along the same axis.
        every_count = (1,) if owners.ndim == 1 else (1, 2, 3)
        for axis, size in enumerate(owners.shape):
            for pieces in every_count:
                if size % pieces == 0 and torch.equal(
                    owners, _owners(owners.shape, axis, pieces, ranks)
                ):
                    return Shard(axis) if pieces == 1 else strided_shard(axis, pieces)
    return Replicate()


def strided_shard(axis: int, pieces: int) -> Placement:
    """Return the placement that divides each of several equal pieces along an axis among all ranks.

    Raises:
        ConfigError: this version of torch does not have the placement, which is private.
    """
    try:
        from torch.distributed.tensor.placement_types import _StridedShard
    except ImportError as error:
        raise ConfigError(
            f"torch {torch.__version__} has no _StridedShard in "
            "torch.distributed.tensor.placement_types, by which compat divides fused q, k and v. "
            "Use the dialect 'linear', or the torch version of compat's constraints.txt."
        ) from error
    return _StridedShard(axis, split_factor=pieces)


def _place(model: nn.Module, plan: dict[str, Placement], mesh: DeviceMesh) -> None:
    """Replace every parameter by this rank's share of it; tied parameters remain tied."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in made:
                placement = plan[f"{path}.{name}" if path else name]
                if isinstance(module, _ConvNd):  # DTensor does not divide its features
                    placement = Replicate()
                share = distribute_tensor(old.detach(), mesh, [placement], src_data_rank=None)
                made[old] = nn.Parameter(share, old.requires_grad)
            setattr(module, name, made[old])


# The forward pass


class ReplicatePlainTensors(TorchFunctionMode):
    """In operations with divided tensors, treat a plain tensor as replicated on every rank.

    torch's own `implicit_replication` does this in the forward pass only, and nested uses end
    together when the first one ends. Here plain tensors are converted before autograd records them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        kwargs = kwargs or {}
        values = tree_leaves((args, kwargs))
        mesh = next((value.device_mesh for value in values if is_divided(value)), None)
        if mesh is None:
            return func(*args, **kwargs)

        def replicated(value: Any) -> Any:
            if not isinstance(value, Tensor) or is_divided(value):
                return value
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

        return func(*tree_map(replicated, args), **tree_map(replicated, kwargs))


@cache
def _register_attention() -> None:
    """Let DTensor divide torch's fused attention on the CPU by heads, as on other devices."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def by_heads(outputs: int, inputs: int, mask: Any) -> list[tuple[list[Any], list[Any]]]:
        """Return placements of outputs and inputs (B, H, T, D): replicated, or divided by heads."""
        masks = [] if mask is None else [mask]
        cut = [Shard(1) if m.ndim == 4 and m.shape[1] > 1 else Replicate() for m in masks]
        return [
            ([Replicate()] * outputs, [Replicate()] * (inputs + len(masks))),
            ([Shard(1)] * outputs, [Shard(1)] * inputs + cut),
        ]

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(forward)(lambda *_, attn_mask=None, **__: by_heads(2, 3, attn_mask))
    register_sharding(backward)(lambda *_, attn_mask=None, **__: by_heads(3, 6, attn_mask))


def _divided_class(cls: type[nn.Module], ranks: int) -> type[nn.Module]:
    """Return a subclass whose `forward` takes and returns plain tensors, with DTensors inside."""

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _check_dropout(self)
        with ReplicatePlainTensors():
            return tree_map(_plain, cls.forward(self, *args, **kwargs))

    own = {"forward": forward, "tensor_parallel_size": ranks, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _check_dropout(model: nn.Module) -> None:
    """Raise ConfigError if dropout is active: the ranks would draw different random numbers."""
    if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules()):
        raise ConfigError(
            "dropout is active, but in tensor parallelism every rank would draw different random "
            "numbers. Call model.eval(), which keeps gradients, or set the rates to 0."
        )


def _plain(output: Any) -> Any:
    """Return a model's output as a full tensor, or as the object with full tensors in it."""
    if not isinstance(output, Tensor) and hasattr(output, "__dict__"):
        vars(output).update(tree_map(whole, vars(output)))
    return whole(output)


# Divided tensors of any origin


def is_divided(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """Return the full tensor of a divided one. Every rank must call this. Others are unchanged."""
    return value.full_tensor() if is_divided(value) else value


def local(value: Any) -> Any:
    """Return this rank's share of a divided tensor; other values unchanged."""
    return value.to_local() if is_divided(value) else value


def reading_range(parameter: Tensor) -> slice:
    """Return the smallest range of axis 0 with all rows of this rank's share."""
    if not is_divided(parameter):
        return slice(None)
    rows = _held(parameter, 0)
    start = int(rows[0]) if len(rows) else 0
    return slice(start, int(rows[-1]) + 1 if len(rows) else 1)


def share_of(value: Tensor, parameter: Tensor, start: int = 0) -> Tensor:
    """Return this rank's share of the value for a divided parameter, or else the value.

    Args:
        value: plain, on any device.
        parameter: a DTensor or a plain tensor, of the value's shape.
        start: number of the value's first row, if it lacks rows that this rank does not hold.
    """
    if not is_divided(parameter):
        return value
    held = [_held(parameter, axis) for axis in range(value.ndim)]
    held[0] = held[0] - start
    shape = [len(indices) for indices in held]
    if list(value.shape) == shape or not prod(shape):
        return value.contiguous()[: shape[0]]
    # The allocator could not return temporary memory that lies between shares that remain.
    memory = allocate(prod(shape) * value.element_size())
    share: Tensor = torch.frombuffer(memory, dtype=value.dtype).view(shape)
    for runs in product(*map(_runs, held)):
        share[tuple(here for here, _ in runs)] = value[tuple(there for _, there in runs)]
    return share


def _runs(indices: Tensor) -> list[tuple[slice, slice]]:
    """Return ranges of consecutive indices: their places in the list, and the indices."""
    ends = [*((indices.diff() != 1).nonzero().flatten() + 1).tolist(), len(indices)]
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return [
        (slice(start, end), slice(int(indices[start]), int(indices[end - 1]) + 1))
        for start, end in pairs
    ]


def as_divided(share: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor with this share on this rank, divided like the parameter."""
    if not is_divided(parameter):
        return share
    from torch.distributed.tensor import DTensor

    divided: Tensor = DTensor.from_local(
        share,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return divided


def _held(parameter: DTensor, axis: int) -> Tensor:
    """Let torch divide the indices along an axis, and return those of this rank's share."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    every = torch.arange(parameter.shape[axis], device=parameter.device_mesh.device_type)
    along = every.view([-1 if i == axis else 1 for i in range(parameter.ndim)])
    cuts = [p if getattr(p, "dim", None) == axis else Replicate() for p in parameter.placements]
    share = distribute_tensor(along, parameter.device_mesh, cuts, src_data_rank=None)
    held: Tensor = share.to_local().flatten().cpu()
    return held


def is_writer(parameters: Iterable[Tensor]) -> bool:
    """Return whether this process writes the files of a divided model."""
    coordinates = [p.device_mesh.get_coordinate() for p in parameters if is_divided(p)]
    return not any(any(coordinate or ()) for coordinate in coordinates)


@contextmanager
def raising_together(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let all ranks of these parameters raise an error if one of them does in the block.

    Otherwise the others would wait for that rank in their next collective operation.

    Raises:
        CheckpointError: Another rank raised an error.
    """
    groups = _groups(parameters)
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    messages: list[str] = [] if error is None else [str(error)]
    for group in groups:
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, messages, group=group)
        messages = [message for found in gathered for message in found]
    if error is not None:
        raise error
    if messages:
        raise CheckpointError(messages[0])


def same_on_every_rank(value: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Return whether all ranks of these parameters pass the same plain tensor."""
    same = True
    for group in _groups(parameters):
        first = value.clone()
        torch.distributed.broadcast(first, group=group, group_src=0)
        differs = torch.tensor([not torch.equal(first, value)], device=value.device).int()
        torch.distributed.all_reduce(differs, group=group)
        same = same and not differs.item()
    return same


def _groups(parameters: Iterable[Tensor]) -> list[ProcessGroup]:
    """Return the groups of ranks that divide these parameters, one for each dimension."""
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_divided(p))
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2's root module keeps gathered after a forward pass.

    It keeps them for the backward pass, and until then they are the model's parameters: values that
    are written to them are lost, and an optimizer would train them instead of the shares.
    """
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
