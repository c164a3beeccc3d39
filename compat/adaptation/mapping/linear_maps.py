"""What a linear piece of a graph does with its parameters, found by sending numbers through it.

Every element of every parameter gets a number of its own. Where the input is 1 in one channel and
0 in all others, the output shows the number of the very element that joins the two: no layout needs
to be known beforehand, and no name is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.mapping.views import View
from compat.adaptation.tracing.graph import Graph


@dataclass
class LinearMap:
    """out[n] = factor · (Σ_k weight[k, n]·in[k] + bias[n]), as places in the parameters.

    Args:
        parameters: whose elements are numbered from 1 on, one parameter after another.
        weight: (K, N) numbers.
        bias: (N,) numbers; 0 for none.
        factor: of weight and bias.
    """

    parameters: list[Node]
    weight: Tensor
    bias: Tensor
    factor: float


class Probe:
    """One linear piece, from `source` to `target`, and ways to send values through it."""

    def __init__(self, graph: Graph, source: View, target: View) -> None:
        self.graph, self.source, self.target = graph, source, target
        self.parameters = graph.parameters_between(target.nodes, source.nodes)
        self.first: dict[Node, int] = {}
        count = 1
        for node in self.parameters:
            self.first[node] = count
            count += graph.values[node].numel()

    def __call__(self, x: Tensor, numbered: bool) -> Tensor:
        """The output for x, the parameters all 1 or numbered."""

        def value(node: Node) -> Tensor:
            shape = self.graph.values[node].shape
            if not numbered:
                return torch.ones((), dtype=torch.float64).expand(shape)
            count = torch.arange(shape.numel(), dtype=torch.float64)
            return (count + self.first[node]).view(shape)

        given = dict(zip(self.source.nodes, self.source.write(x), strict=True))
        return self.target.read(self.graph.run(self.target.nodes, given, value))


def linear_map(graph: Graph, source: View, target: View, d_head: int = 0) -> LinearMap | None:
    """The map between two views (B, T, K) and (B, T, N); None if this is no linear map per token.

    Few channels are tried, and the numbers between them follow: along the channels, or within
    heads of `d_head` channels, they rise evenly. Where they don't, every channel is tried.
    """
    probe = Probe(graph, source, target)
    B, T, K = source.index.shape
    zero = torch.zeros(B, T, K, dtype=torch.float64)
    off = probe(zero, numbered=False)
    one = zero.clone()
    one[..., 0] = 1
    on = probe(one, numbered=False) - off
    factor = on.reshape(-1)[0].item()
    if factor == 0 or not torch.allclose(on, torch.full_like(on, factor), rtol=1e-9):
        return None
    each = torch.arange(1, B * T + 1, dtype=torch.float64).view(B, T, 1)
    if not torch.allclose(probe(one * each, False) - off, on * each, rtol=1e-9):
        return None  # some token sees another token's input
    bias = probe(zero, numbered=True) / factor
    numbers = _whole(bias[0, 0])
    if numbers is None or not torch.equal(bias.round(), numbers.expand_as(bias)):
        return None
    if not torch.allclose(off, (numbers != 0).double() * factor, rtol=1e-9):
        return None  # the sum of several biases
    weight = _weight(probe, bias, factor, K, d_head or K)
    if weight is None:
        return None
    return LinearMap(probe.parameters, weight, numbers.long(), factor)


def _weight(probe: Probe, bias: Tensor, factor: float, K: int, d_head: int) -> Tensor | None:
    """The numbers (K, N): of a few channels, continued; or of all, one after another."""
    B, T, _ = bias.shape
    channels = [0, 1 % K, d_head % K, K - 1]
    generator = torch.Generator().manual_seed(0)
    channels += torch.randint(K, (B * T,), generator=generator).tolist()
    channels = channels[: B * T]
    seen = _numbers(probe, bias, factor, channels, K)
    if seen is None:
        return None
    k = torch.arange(K)[:, None]
    along, across = seen[1] - seen[0], seen[2] - seen[0] if d_head < K else 0
    weight = seen[0] + (k % d_head) * along + (k // d_head) * across
    if K > 1 and torch.equal(weight[channels], seen):
        return weight.long()
    rows = [
        _numbers(probe, bias, factor, list(range(K))[start : start + B * T], K)
        for start in range(0, K, B * T)
    ]
    return None if any(r is None for r in rows) else torch.cat([r for r in rows if r is not None])


def _numbers(
    probe: Probe, bias: Tensor, factor: float, channels: list[int], K: int
) -> Tensor | None:
    """The numbers (len(channels), N): every token is given another channel."""
    B, T, _ = bias.shape
    x = torch.zeros(B * T, K, dtype=torch.float64)
    x[torch.arange(len(channels)), channels] = 1
    out = probe(x.view(B, T, K), numbered=True) / factor - bias
    found = _whole(out.reshape(B * T, -1)[: len(channels)])
    return None if found is None else found.long()


def _whole(x: Tensor) -> Tensor | None:
    """x as whole numbers, if that is what they are."""
    rounded = x.round()
    return rounded if torch.allclose(x, rounded, rtol=1e-9, atol=1e-3) else None
