"""Checks for four processes: tensor parallelism combined with FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from compat import (
    distribute,
    load_into,
    load_pretrained,
    open_checkpoint,
    save_pretrained,
    to_hf_state_dict,
)
from compat.dialects import DIALECTS
from compat.sharding import shard_blocks, whole
from tests.ranks import Check, Ranks

CHECKS: dict[str, Check] = {}
IDS = (torch.arange(24).view(4, 6) * 7) % 97


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def tensor_parallelism_combines_with_fsdp(ranks: Ranks) -> None:
    """Two pairs of processes: tensor parallelism within a pair, FSDP2 across the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    for name, kind in [("conv1d", DIALECTS["conv1d"])]:
        one = load_pretrained(ranks.folder / "tiny", name)
        with torch.device("meta"):
            many = kind.model_class(open_checkpoint(ranks.folder / "tiny").config).eval()
        distribute(many, kind.name_map, mesh["tensor"])
        shard_blocks(many, many.get_submodule(kind.block_path[:-4]).children(), mesh["fsdp"])
        load_into(many, kind.name_map, ranks.folder / "tiny")
        held = sum(p.to_local().numel() for p in many.parameters())  # type: ignore[operator]
        assert held < 0.35 * sum(p.numel() for p in one.parameters())
        mine = IDS[2 * mesh["fsdp"].get_local_rank() :][:2]  # each pair processes half of the batch
        assert (many(mine) - one(mine)).abs().max() < 1e-5
        for model, ids in ((one, IDS), (many, mine)):
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        for (path, p), q in zip(many.named_parameters(), one.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            error = (whole(p.grad) - q.grad).norm() / q.grad.norm().clamp(min=1e-3)
            assert error < 1e-4, (name, path, error)
        save_pretrained(many, ranks.folder / name)
        torch.distributed.barrier()
        saved = to_hf_state_dict(load_pretrained(ranks.folder / name))
        assert all(torch.equal(saved[k], v) for k, v in to_hf_state_dict(one).items())
