"""Attention of unknown structure, or all blocks, found in the graph by their effect.

A token's hidden states depend on other tokens through attention alone. So it is where a change at
one token first changes the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.anatomy.dissect import GraphIndex
from compat.adaptation.tracing.contractions import product_behind
from compat.adaptation.tracing.graph import (
    MOVES,
    REDUCTIONS,
    Graph,
    adds_two,
    kind,
    live_inputs,
    live_users,
    meetings,
    random_values,
    size,
)
from compat.config import GPT2Config
from compat.dialects.linear import MultiHeadAttention, TransformerBlock

# The relative difference below which a value is unchanged, in float64.
SAME = 1e-9
# Attention has four matrices of C² parameters, and the MLP as many as eight.
MOST_IN_ATTENTION = 6


@dataclass(frozen=True)
class Span:
    """The nodes that compute hidden states (B, T, C) from others.

    Args:
        start: the input.
        end: the result.
        nodes: those that compute the result from the input, in order.
    """

    start: Node
    end: Node
    nodes: list[Node]


@dataclass(frozen=True)
class AttentionNodes(Span):
    """The attention of one layer.

    Args:
        start, end, nodes: as in `Span`.
        mixes: the first operation whose result at a token depends on another.
        attended: (T, T), whether a head's result at a token depends on the input at another.
        unmerged: the operations that merge the heads, if these mix tokens.
    """

    mixes: Node
    attended: Tensor
    unmerged: list[Node]


def own_attention(config: GPT2Config, count: int) -> nn.ModuleList:
    """Return GPT-2's attention, without dropout, for so many layers."""
    config = replace(config, attn_pdrop=0.0, resid_pdrop=0.0)
    return nn.ModuleList(MultiHeadAttention(config, layer) for layer in range(count))


def own_blocks(config: GPT2Config) -> nn.ModuleList:
    """Return a list of one module, all of GPT-2's blocks, without dropout."""
    config = replace(config, attn_pdrop=0.0, resid_pdrop=0.0)
    blocks = (TransformerBlock(config, layer) for layer in range(config.n_layer))
    return nn.ModuleList([nn.Sequential(*blocks)])


def attention_nodes(graph: Graph, unknown: Sequence[Node], width: int) -> list[AttentionNodes]:
    """Return the attention that computes these nodes, and that of other layers on the same lines.

    It is empty where attention and the MLP cannot be separated.
    """
    found = list(_Search(graph, width).layers())
    lines = {graph.place(n) for each in found if {*unknown} & {*each.nodes} for n in each.nodes}
    same = [each for each in found if any(graph.place(node) in lines for node in each.nodes)]
    matrices = [
        graph.values[node].numel()
        for each in same[:1]
        for node in graph.parameters_between([each.end], [each.start])
        if graph.values[node].ndim > 1
    ]
    return [] if sum(matrices) > MOST_IN_ATTENTION * width**2 else same


def nodes_of_blocks(graph: Graph, width: int) -> Span | None:
    """Return the nodes from the first residual connection to the last residual sum, if any."""
    shape = (*graph.shape, width)
    sums = [n for n in graph.nodes if n in graph.live and adds_two(graph, n, shape)]
    if not sums:
        return None
    start = min(live_inputs(graph, sums[0]), key=graph.order.__getitem__)
    *_, end = (node for node in meetings(graph, start) if node is start or node in sums)
    return Span(start, end, graph.live_between([end], [start])) if end is not start else None


class _Search:
    """Runs of a graph with changes at one token."""

    def __init__(self, graph: Graph, width: int) -> None:
        self.graph, self.shape = graph, (*graph.shape, width)
        self.index = GraphIndex(graph)
        self.noisy = cache(partial(_with_noise, graph))
        logits = size(graph.output)[-1:]
        nodes = [n for n in graph.nodes if n in graph.live and size(n)[-1:] != logits]
        self.values: dict[Node, Any] = dict(zip(nodes, self._run(nodes, {}), strict=True))

    def layers(self) -> Iterator[AttentionNodes]:
        """Yield the attention of each layer, the first one first."""
        start = next((node for node in self.values if size(node) == self.shape), None)
        while start is not None:
            mixed = self._mixed(start, self.shape[1] // 2)
            mixes = min(mixed, key=self.graph.order.__getitem__, default=None)
            end = None if mixes is None else self._end(mixes, mixed)
            if mixes is None or end is None:
                return
            first = self._input(start, end, mixed)
            nodes = self.graph.live_between([end], [first])
            heads = next((n for n in reversed(nodes) if n in mixed and self._is_of_heads(n)), end)
            attended, merged = self._attended(first, [heads, end])
            mixing = self.graph.live_between([end], [heads]) if (merged & ~attended).any() else []
            yield AttentionNodes(first, end, nodes, mixes, attended, mixing)
            start = end

    def _run(self, targets: list[Node], known: dict[Node, Any]) -> list[Any]:
        return self.graph.run(targets, known, self.noisy, finite=True)

    def _after(self, start: Node, position: int, targets: list[Node]) -> dict[Node, Any]:
        """Return the values of nodes after another value of `start` at one position."""
        above = self.graph.ancestors
        changed = self.values[start].clone()
        changed[:, position] = random_values(changed[:, position].shape)
        known = {n: value for n, value in self.values.items() if start not in above[n]}
        return dict(zip(targets, self._run(targets, {**known, start: changed}), strict=True))

    def _mixed(self, start: Node, position: int) -> set[Node]:
        """Return the nodes whose values for other tokens change too."""
        after = [n for n in self.values if start in self.graph.ancestors[n] and size(n)]
        found = set()
        for node, value in self._after(start, position, after).items():
            T = self.shape[1]
            axes = [axis for axis, length in enumerate(size(node)) if length == T]
            differs = _differs(value, self.values[node])
            if len(axes) == 1:
                differs = differs.movedim(axes[0], 0)[torch.arange(T) != position]
            if differs.any():
                found.add(node)
        return found

    def _is_of_heads(self, node: Node) -> bool:
        """Return whether a node is (B, H, T, D), or the same in another order."""
        return len(size(node)) == 4 and size(node).count(self.shape[1]) == 1

    def _attended(self, start: Node, ends: list[Node]) -> list[Tensor]:
        """Return (T, T) for each result, at which tokens it changes with the input at another."""
        T = self.shape[1]
        changed: list[list[Tensor]] = [[] for _ in ends]
        for position in range(T):
            values = self._after(start, position, ends)
            for end, found in zip(ends, changed, strict=True):
                differs = _differs(values[end], self.values[end]).movedim(size(end).index(T), 0)
                found.append(differs.flatten(1).any(dim=1))
        return [torch.stack(found, dim=1) for found in changed]

    def _end(self, mixes: Node, mixed: set[Node]) -> Node | None:
        """Return the last hidden states before the residual sum that mixed tokens compute alone."""
        hidden = (node for node in meetings(self.graph, mixes) if size(node) == self.shape)
        node = end = next(hidden, None)
        projected = False
        while node is not None:
            is_projection = node in self.index.projections
            if projected and (is_projection or kind(node) not in MOVES | {"add", "getitem"}):
                break
            projected |= is_projection
            end = node if size(node) == self.shape else end
            node = self._following(node, mixed)
        return end

    def _following(self, node: Node, mixed: set[Node]) -> Node | None:
        """Return the operation after a node, if it reads nothing but results of attention."""
        users = live_users(self.graph, node)
        if len(users) != 1 or prod(size(users[0])) != prod(self.shape):
            return None
        [user] = users
        only_mixed = all(a in mixed for a in live_inputs(self.graph, user))
        return user if only_mixed and kind(user) not in REDUCTIONS else None

    def _input(self, start: Node, end: Node, mixed: set[Node]) -> Node:
        """Return the last hidden states from which alone the result is computed, unprojected."""
        above, nodes = self.graph.ancestors, {end}
        while nodes != {start}:
            node = max(nodes, key=self.graph.order.__getitem__)
            before = {a for a in live_inputs(self.graph, node) if a is start or start in above[a]}
            nodes = nodes - {node} | before
            is_hidden = len(nodes) == 1 and not nodes & mixed and size(*nodes) == self.shape
            if is_hidden and product_behind(self.graph, *nodes) is None:
                return nodes.pop()
        return start


def _with_noise(graph: Graph, parameter: Node) -> Tensor:
    """Return the value of a parameter with noise, because it may be initialized with zeros."""
    value = graph.values[parameter]
    generator = torch.Generator().manual_seed(graph.order[parameter])
    return (value + 0.1 * torch.randn(value.shape, generator=generator)).double()


def _differs(one: Tensor, other: Tensor) -> Tensor:
    one, other = one.double(), other.double()  # a comparison's results are booleans
    return (one - other).abs() > SAME * other.abs().amax()
