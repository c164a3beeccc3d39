"""Values of a graph in the reference's shape: which element of which node is which channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.parts import Core, Operand
from compat.adaptation.tracing.graph import Graph, size


@dataclass(frozen=True)
class View:
    """A value of the reference's shape, held by one or several nodes in an order of their own.

    Args:
        nodes: that hold it.
        index: of the reference's shape; where each of its elements lies in the nodes' values, laid
            end to end.
        factor: what the nodes' values are multiplied by, as where q is scaled before q·kᵀ.
    """

    nodes: tuple[Node, ...]
    index: Tensor
    factor: float = 1.0

    def read(self, values: Sequence[Tensor]) -> Tensor:
        """The nodes' values → the reference's shape."""
        flat = torch.cat([value.reshape(-1) for value in values])[self.index]
        return flat if self.factor == 1 else flat / self.factor

    def write(self, value: Tensor) -> list[Tensor]:
        """The reference's shape → the nodes' values."""
        flat = value.new_zeros(sum(prod(size(node)) for node in self.nodes))
        flat[self.index.reshape(-1)] = value.reshape(-1) * self.factor
        pieces = torch.split(flat, [prod(size(node)) for node in self.nodes])
        return [piece.reshape(size(n)) for piece, n in zip(pieces, self.nodes, strict=True)]


def token_view(graph: Graph, node: Node) -> View | None:
    """A node that holds one vector per token, as (B, T, N), by the lengths of its axes."""
    B, T = graph.shape
    shape, place = size(node), torch.arange(prod(size(node)))
    if not shape or prod(shape) % (B * T):
        return None
    if shape[0] == B * T:
        if node in graph.time_first:
            return View((node,), place.view(T, B, -1).transpose(0, 1))
        return View((node,), place.view(B, T, -1))
    axes = list(range(len(shape)))
    if shape[0] == T and B in shape[1:]:
        time, batch = 0, shape.index(B, 1)
    elif shape[0] == B and T in shape[1:]:
        batch, time = 0, shape.index(T, 1)
    else:
        return None
    rest = [axis for axis in axes if axis not in (batch, time)]
    return View((node,), place.view(shape).permute(batch, time, *rest).reshape(B, T, -1))


def slots(cores: Sequence[Core], shape: tuple[int, int]) -> list[tuple[int, int, int]] | None:
    """Where every head of every sequence is: (core, group, sequence), by sequence, then head.

    Groups are counted over the batch and head axes of a core's result, merged or not; the batch
    comes first in them, as in (B, H, T, D) and (B·H, T, D), or alone, as in (B, T, D).
    """
    B, _ = shape
    found = []
    for place, core in enumerate(cores):
        groups = prod(size(core.out.node)[axis] for axis in core.out.groups)
        if groups % B:
            return None
        found += [(place, group, group // (groups // B)) for group in range(groups)]
    return sorted(found, key=lambda slot: slot[2])


def head_view(cores: Sequence[Core], operands: Sequence[Operand], shape: tuple[int, int],
              factor: float = 1.0) -> View | None:  # fmt: skip
    """The operands of all heads as (B, H, T, D)."""
    B, T = shape
    found = slots(cores, shape)
    if found is None or len(found) % B:
        return None
    offsets, offset, pieces = [], 0, []
    for operand in operands:
        offsets.append(offset)
        offset += prod(size(operand.node))
    for place, group, _ in found:
        operand = operands[place]
        sizes = size(operand.node)
        index = torch.arange(prod(sizes)).view(sizes)
        index = index.permute(*operand.groups, operand.time, operand.d)
        index = index.reshape(-1, sizes[operand.time], sizes[operand.d])
        if group >= len(index):
            return None  # fewer keys than queries: shared between heads
        pieces.append(index[group] + offsets[place])
    if len({piece.shape for piece in pieces}) != 1 or pieces[0].shape[0] != T:
        return None
    nodes = tuple(operand.node for operand in operands)
    stacked = torch.stack(pieces).view(B, len(found) // B, *pieces[0].shape)
    return View(nodes, stacked, factor)


def merged(view: View) -> View:
    """(B, H, T, D) → (B, T, H·D)."""
    B, H, T, D = view.index.shape
    return View(view.nodes, view.index.transpose(1, 2).reshape(B, T, H * D), view.factor)
