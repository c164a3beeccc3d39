"""Which homes the checkpoint's tensors fit into, and which tensors are left without one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from compat.adaptation.mapping.assignments import Assignments
from compat.adaptation.tracing.graph import Graph
from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import EMBEDDING, HEAD
from compat.errors import NameMapError
from compat.ops import Fused


@dataclass
class Unmatched:
    """What of a checkpoint finds no place, and why.

    Args:
        names: of all such tensors.
        shapes: those whose parameter has another shape: found, expected.
        shared: those whose parameters hold another tensor already: its name.
        nodes: parameters whose tensors do not fit, or that the checkpoint has no layer for.
        partly: fused biases of which the model holds a part.
    """

    names: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)
    partly: dict[str, str] = field(default_factory=dict)


def keep_what_fits(graph: Graph, mapping: Assignments, checkpoint: Checkpoint) -> Unmatched:
    """Drop the homes that the checkpoint's tensors do not fit into, and note the tensors."""
    lost, holder = Unmatched(), dict[Node, str]()
    for hf, (nodes, op) in list(mapping.by_tensor.items()):
        if hf not in checkpoint.infos:
            lost.nodes |= set(nodes)
            del mapping.by_tensor[hf]
            continue
        wanted = [list(graph.values[node].shape) for node in nodes]
        shape = checkpoint.infos[hf].shape
        try:
            made = [list(t.shape) for t in op.load(torch.empty(shape, device="meta"))]
        except (NameMapError, RuntimeError):
            made = [list(shape)]
        if taken := [holder[node] for node in nodes if node in holder]:
            lost.shared[hf] = taken[0]
        elif made != wanted:
            lost.shapes[hf] = wanted[0], made[0]
            lost.nodes |= set(nodes)
        else:
            holder.update(dict.fromkeys(nodes, hf))
            if isinstance(op, Fused) and hf.endswith("bias") and (absent := _absent(op)):
                lost.partly[hf] = absent
            continue
        del mapping.by_tensor[hf]
    tied = {HEAD} if checkpoint.config.tie_word_embeddings else set()
    if HEAD in checkpoint.infos.keys() - tied and not {HEAD} & {*mapping.by_tensor, *lost.shapes}:
        lost.shared[HEAD] = EMBEDDING  # the model ties its head
    lost.names = [hf for hf in checkpoint.infos if hf not in mapping.by_tensor and hf not in tied]
    return lost


def _absent(op: Fused) -> str:
    """Which of q, k and v no part holds."""
    return "".join(x for x in "qkv" if not any(x in part.qkv for part in op.parts))
