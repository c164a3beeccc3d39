"""What activations and embeddings compute, measured on inputs chosen to tell formulas apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from compat.adaptation.mapping.views import token_view
from compat.adaptation.tracing.graph import Graph

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "relu_squared": lambda x: F.relu(x).square(),
    "mish": F.mish,
    "softplus": F.softplus,
    "selu": F.selu,
}


@dataclass(frozen=True)
class Activation:
    """What stands between the MLP's projections: a name, None if not known, and the function."""

    name: str | None
    function: Callable[[Tensor], Tensor] | None


def activation_of(graph: Graph, start: Node, end: Node) -> Activation:
    """The activation between two nodes, measured from −6 to 6."""
    source, target = token_view(graph, start), token_view(graph, end)
    if source is None or target is None or source.index.shape != target.index.shape:
        return Activation(None, None)

    def own(x: Tensor) -> Tensor:
        """The model's own, on an input of just its shape."""
        given = dict(zip(source.nodes, source.write(x), strict=True))
        return target.read(graph.run([end], given))

    x = torch.linspace(-6, 6, source.index.numel(), dtype=torch.float64)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    x = x.view(source.index.shape)
    y = own(x)
    slope = -own(torch.full_like(x, -1.0)).mean().item()

    def leaky(x: Tensor) -> Tensor:
        return F.leaky_relu(x, slope)

    known = {**ACTIVATIONS, f"leaky_relu with slope {slope:.4g}": leaky}
    errors = {name: (y - f(x)).abs().max().item() for name, f in known.items()}
    best = min(errors, key=lambda name: errors[name])
    return Activation(best, known[best]) if errors[best] < 2e-6 else Activation(None, own)


@dataclass(frozen=True)
class EmbeddingFormula:
    """token_scale · wte[ids] + positions.

    Args:
        token_scale: 1 in GPT-2.
        position_scale: 1 in GPT-2.
        offset: which row of the positions the first token gets; None without learned positions.
        added: (T, C) that is added and is no parameter, such as sinusoids; None for nothing.
    """

    token_scale: float
    position_scale: float
    offset: int | None
    added: Tensor | None


def embedding_of(
    graph: Graph, embed: Node, table: Node, positions: Node | None
) -> EmbeddingFormula | None:
    """Scale, positions and constants of the embedded text; None where the formula does not fit."""
    B, T = graph.shape
    view = token_view(graph, embed)
    if view is None:
        return None
    ids = {graph.input: torch.zeros(B, T, dtype=torch.long)}

    def run(filled: Callable[[Node], float | Tensor]) -> Tensor:
        def value(node: Node) -> Tensor:
            shape = graph.values[node].shape
            made = filled(node)
            if isinstance(made, Tensor):
                return made
            return torch.tensor(made, dtype=torch.float64).expand(shape)

        return view.read(graph.run([embed], ids, value))

    constant = run(lambda node: 0.0)
    tokens = run(lambda node: 1.0 if node is table else 0.0) - constant
    scale = tokens.reshape(-1)[0].item()
    if not torch.allclose(tokens, torch.full_like(tokens, scale)):
        return None
    added = constant[0] if constant.abs().max() > 0 else None
    if positions is None:
        return EmbeddingFormula(scale, 1.0, None, added)
    C = view.index.shape[-1]
    shape = graph.values[positions].shape
    axis = next(i for i, n in enumerate(shape) if n != 1 and (n != C or shape.numel() == C * C))
    size = [1] * len(shape)
    size[axis] = shape[axis]
    number = torch.arange(shape[axis], dtype=torch.float64).view(size).expand(shape)
    weight = run(lambda node: 1.0 if node is positions else 0.0) - constant
    factor = weight.reshape(-1)[0].item()
    if factor == 0:
        return EmbeddingFormula(scale, 1.0, None, added)
    row = (run(lambda node: number if node is positions else 0.0) - constant) / factor
    offset = round(row[0, 0, 0].item())
    expected = torch.arange(T, dtype=torch.float64)[:, None] + offset
    if not torch.allclose(row, expected.expand_as(row), atol=1e-4):
        return None
    return EmbeddingFormula(scale, factor, offset, added)
