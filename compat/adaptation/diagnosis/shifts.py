"""Detection of values that are computed from the wrong token, by changing one token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Operand
from compat.adaptation.mapping.linear_maps import token_view
from compat.adaptation.tracing.graph import Graph

# Stands for a distance that differs from token to token, because the tokens are reversed.
REVERSED = float("inf")


def shifted_tokens(graph: Graph, start: Node, target: Operand) -> int:
    """Return the distance from a target back to the tokens (B, T, C) that it is computed from.

    0 if there is no shift, or if the target depends on several tokens.
    """
    view = token_view(graph, start)
    if view is None:
        return 0
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(view.index.shape, generator=generator, dtype=torch.float64)
    place = one.shape[1] // 2
    two = one.clone()
    two[:, place] += torch.randn(one.shape[-1], generator=generator, dtype=torch.float64)
    before, after = (graph.run([target.node], view.node_values(x))[0] for x in (one, two))
    return _distance(before, after, target.time, place)


def shifted_ids(graph: Graph, embed: Node) -> float:
    """Return the distance from the embedding (B, T, C) back to its ids, as for `shifted_tokens`.

    `REVERSED` if each token is embedded at the mirrored position.
    """
    view = token_view(graph, embed)
    if view is None:
        return 0
    T, one = graph.shape[1], graph.example
    before = view.read(graph.run(view.nodes, {graph.input: one}))

    def distance(place: int) -> int:
        two = one.clone()
        two[:, place] = one[:, place].roll(1) if len(set(one[:, place].tolist())) > 1 else one[:, 0]
        return _distance(before, view.read(graph.run(view.nodes, {graph.input: two})), 1, place)

    middle = T // 2
    found = distance(middle)
    is_mirrored = T > 4 and found == T - 1 - 2 * middle and distance(1) == T - 3
    return REVERSED if is_mirrored else found


def _distance(before: Tensor, after: Tensor, axis: int, place: int) -> int:
    """Return the distance from the changed place to the only one that changed with it."""
    if before.ndim <= axis:
        return 0
    changed = (before != after).movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
    return changed[0] - place if len(changed) == 1 else 0
