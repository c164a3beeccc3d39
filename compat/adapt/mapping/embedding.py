"""The embedded text as a sum of a token's and a position's row, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from compat.adapt.mapping.views import token_view
from compat.adapt.tracing.graph import Graph


@dataclass(frozen=True)
class EmbeddingFormula:
    """token_scale · wte[ids] + positions.

    Args:
        token_scale: 1 in GPT-2.
        position_scale: 1 in GPT-2.
        offset: which row of the positions the first token gets; None without learned positions.
        added: a constant (T, C), such as sinusoids, that is added; None if nothing is.
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

    # A parameter that is 1 everywhere is a factor; all others are terms, and left out.
    factors = {
        node for node in graph.parameters_between([embed], [])
        if node not in (table, positions) and bool((graph.values[node] == 1).all())
    }  # fmt: skip

    def only(wanted: Node | None, filled: float | Tensor = 1.0) -> Tensor:
        """The embedded text with one table filled, and zeros in all others."""
        return run(lambda n: filled if n is wanted else 1.0 if n in factors else 0.0)

    constant = only(None)
    tokens = only(table) - constant
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
    weight = only(positions) - constant
    factor = weight.reshape(-1)[0].item()
    if factor == 0:
        return EmbeddingFormula(scale, 1.0, None, added)
    row = (only(positions, number) - constant) / factor
    offset = round(row[0, 0, 0].item())
    expected = torch.arange(T, dtype=torch.float64)[:, None] + offset
    if not torch.allclose(row, expected.expand_as(row), atol=1e-4):
        return None
    return EmbeddingFormula(scale, factor, offset, added)
