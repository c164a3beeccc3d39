"""Norms, fused or written out in any order of operations: where they are, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.tracing.graph import Graph, kind, size

KERNELS = frozenset("layer_norm native_layer_norm rms_norm _fused_rms_norm".split())

REDUCTIONS = KERNELS | frozenset(
    """
    mean var std var_mean std_mean sum norm linalg_vector_norm group_norm native_group_norm
    """.split()
)


@dataclass(frozen=True)
class Norm:
    """One norm: its input, its result, and its parameters told apart by what they do."""

    start: Node
    end: Node
    scale: Node | None
    shift: Node | None


@dataclass(frozen=True)
class NormFormula:
    """What a norm computes, scale and shift apart.

    Args:
        centred: the mean is subtracted; RMSNorm does not.
        unbiased: the variance is over C − 1.
        eps: added to the variance, or to its root if `eps_outside`.
    """

    centred: bool = True
    unbiased: bool = False
    eps: float = 1e-5
    eps_outside: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C)."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        C = x.shape[-1]
        var = x.square().sum(-1, keepdim=True) / (C - 1 if self.unbiased else C)
        root = var.sqrt() + self.eps if self.eps_outside else (var + self.eps).sqrt()
        return x / root


def norms_between(graph: Graph, start: Node, end: Node) -> list[Norm]:
    """The norms on the way from one node to another, in their order."""
    found: list[tuple[Node, Node]] = []
    consumed = False  # the norm at hand has met a parameter: a reduction now begins another
    for first, last in pairwise(_waypoints(graph, start, end)):
        piece = graph.between([last], [first])
        reduces = any(kind(node) in REDUCTIONS for node in piece if node in graph.live)
        parameters = any(node in graph.names for node in piece)
        if reduces and (not found or consumed):
            found.append((first, last))
            consumed = parameters or any(kind(node) in KERNELS for node in piece)
        elif found and (reduces or parameters or not consumed):
            found[-1] = found[-1][0], last
            consumed = consumed or parameters
    return [_with_parameters(graph, first, last) for first, last in found]


def _waypoints(graph: Graph, start: Node, end: Node) -> list[Node]:
    """The nodes that every way from start to end passes, both included."""
    inner = [n for n in graph.between([end], [start]) if n in graph.live]
    path = [start, *[n for n in inner if start in graph.ancestors[n]]]
    place = {node: i for i, node in enumerate(path)}
    waypoints, reach = [], 0
    for i, node in enumerate(path):
        if i >= reach and size(node):  # a kernel's tuple is no value; its first item follows
            waypoints.append(node)
        reach = max([reach, *(place[user] for user in node.users if user in place)])
    return waypoints


def _with_parameters(graph: Graph, start: Node, end: Node) -> Norm:
    """A parameter that makes the result vanish when it is zero is the scale, another the shift."""
    scale = shift = None
    parameters = graph.parameters_between([end], [start])
    x = _sample(graph, start)
    for node in parameters:

        def value(other: Node, node: Node = node) -> Tensor:
            filled = graph.values[other].double()
            return torch.zeros_like(filled) if other is node else torch.ones_like(filled)

        [out] = graph.run([end], {start: x}, value)
        token = out.reshape(-1)
        if torch.allclose(token, token[0].expand_as(token), atol=1e-9):
            scale = node
        else:
            shift = node
    return Norm(start, end, scale, shift)


def _sample(graph: Graph, node: Node, size_of: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return size_of * torch.randn(size(node), generator=generator, dtype=torch.float64)


def own_formula(graph: Graph, norm: Norm) -> Callable[[Tensor], Tensor]:
    """What the model's norm makes of an input of just its shape, with scale 1 and shift 0."""

    def run(x: Tensor) -> Tensor:
        def value(node: Node) -> Tensor:
            filled = graph.values[node].double()
            return torch.zeros_like(filled) if node is norm.shift else torch.ones_like(filled)

        return graph.run([norm.end], {norm.start: x}, value)[0]

    return run


def formula_of(graph: Graph, norm: Norm) -> NormFormula | None:
    """The formula, measured on inputs of several sizes; None for something that is no norm."""
    axis = len(size(norm.start)) - 1
    run = own_formula(graph, norm)
    x = _sample(graph, norm.start) + 0.7
    if run(x).shape != x.shape:
        return None
    C = x.shape[axis]
    for centred in (True, False):
        y = x - x.mean(axis, keepdim=True) if centred else x
        var = y.square().mean(axis, keepdim=True)

        def root(factor: float, y: Tensor = y) -> Tensor:
            """What y is divided by, per token, when the input is scaled by `factor`."""
            divided: Tensor = (y * factor).norm(dim=axis) / run(x * factor).norm(dim=axis)
            return divided

        r = root(1e4)
        if not torch.allclose(run(x * 1e4) * r.unsqueeze(axis), y * 1e4, rtol=1e-6, atol=1e-3):
            continue
        ratio = (r.square() / (var.squeeze(axis) * 1e8)).mean().item()
        unbiased = abs(ratio - C / (C - 1)) < abs(ratio - 1)
        if abs(ratio - (C / (C - 1) if unbiased else 1)) > 1e-6:
            return None
        found = _fit_eps(root, var.squeeze(axis) * ratio)
        if found is None:
            return None
        formula = NormFormula(centred, unbiased, *found)
        return formula if torch.allclose(run(x), formula(x), rtol=1e-7, atol=1e-9) else None
    return None


def _fit_eps(root, var: Tensor) -> tuple[float, bool] | None:  # type: ignore[no-untyped-def]
    """What is added to the variance, or else to its root: the one that is the same at all sizes."""
    small = (1e-2, 3e-3, 1e-3)
    inside = torch.stack([root(f).square() - var * f**2 for f in small])
    outside = torch.stack([root(f) - (var * f**2).sqrt() for f in small])
    for values, is_outside in ((inside, False), (outside, True)):
        eps = values.median().item()
        if (values - eps).abs().max() <= 1e-4 * abs(eps) + 1e-13:
            return (float(f"{eps:.4g}") if eps > 1e-14 else 0.0), is_outside
    return None
