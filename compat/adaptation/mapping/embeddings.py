"""Measure the formula by which a model computes its embeddings from tokens and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy
from compat.adaptation.mapping.linear_maps import View, token_view
from compat.adaptation.tracing.graph import DRAWS, kind, random_values, size


@dataclass(frozen=True)
class EmbeddingFormula:
    """token_scale · wte[ids] + position_scale · wpe[offset + t] + added.

    Args:
        token_scale: 1 in GPT-2.
        position_scale: 1 in GPT-2.
        offset: the row of the first token's position; None without learned positions.
        added: an added constant (T, C) that is not a parameter, such as sinusoids; or None. It is
            (B, T, C) if it is added by batch.
        from_tokens: positions are looked up in the token table, from row 0 on.
        rows: the row of each token's position if they are not consecutive; otherwise None.
        by_batch: all tokens of a sequence have the position of the sequence in the batch.
    """

    token_scale: float
    position_scale: float
    offset: int | None
    added: Tensor | None
    from_tokens: bool = False
    rows: tuple[int, ...] | None = None
    by_batch: bool = False


def embedding_of(anatomy: Anatomy, table: Node, positions: Node | None) -> EmbeddingFormula | None:
    """Measure the formula of the embeddings; None if no such formula fits, or numbers are drawn.

    A norm or a projection of the tokens alone is not a part of it, and is skipped.

    Args:
        anatomy: the parts of the model's graph.
        table, positions: the parameters of the token and the position table.
    """
    graph, embed, own = anatomy.graph, anatomy.embed, anatomy.own_input
    view = token_view(graph, embed)
    if view is None or any(kind(node) in DRAWS for node in graph.between([embed], [graph.input])):
        return None
    if own is not None and size(own) != size(anatomy.looked_up):
        return None
    computed = _Computed(anatomy, view, table, positions)
    constant = computed()
    found = _with_tokens(computed, table, constant)
    if found is None:
        return None
    if not torch.allclose(constant, constant[:1].expand_as(constant)):
        by_batch = torch.allclose(constant, constant[:, :1].expand_as(constant))
        formula = EmbeddingFormula(found.token_scale, 1.0, None, constant, by_batch=True)
        return formula if by_batch else None
    return found if positions is None else _with_positions(found, computed, positions, constant)


class _Computed:
    """The embeddings (B, T, C) of the traced ids, with one table filled and the others zero."""

    def __init__(self, anatomy: Anatomy, view: View, table: Node, positions: Node | None) -> None:
        self.anatomy, self.view, self.graph = anatomy, view, anatomy.graph
        # A parameter that is 1 everywhere is a factor. All others are terms, and set to zero.
        self.factors = {
            node for node in self.graph.parameters_between([anatomy.embed], [])
            if node not in (table, positions) and bool((self.graph.values[node] == 1).all())
        }  # fmt: skip

    def __call__(self, filled: Node | None = None, values: Tensor | None = None) -> Tensor:
        """Compute the embeddings with one table filled with these values, or with ones."""
        anatomy, graph = self.anatomy, self.graph

        def value(node: Node) -> Tensor:
            if node is filled and values is not None:
                return values
            number = 1.0 if node is filled or node in self.factors else 0.0
            return torch.tensor(number, dtype=torch.float64).expand(graph.values[node].shape)

        ids = {graph.input: graph.example}
        if anatomy.own_input is None:
            return self.view.read(graph.run([anatomy.embed], ids, value))
        [looked_up] = graph.run([anatomy.looked_up], ids, value)
        known = ids | {anatomy.own_input: looked_up}
        return self.view.read(graph.run([anatomy.embed], known, value))


def _with_tokens(computed: _Computed, table: Node, constant: Tensor) -> EmbeddingFormula | None:
    """Return the formula without positions; None if the tokens are not looked up and scaled."""
    graph, C = computed.graph, constant.shape[-1]
    T = graph.shape[1]
    tokens = computed(table) - constant
    scale = tokens.reshape(-1)[0].item()
    if scale == 0 or not torch.allclose(tokens, torch.full_like(tokens, scale)):
        return None
    shape = graph.values[table].shape
    # For a large table, float64 numbers would take twice as long to draw.
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    rows = values.movedim(_row_axis(shape, C), 0).reshape(-1, C)
    looked_up, own = computed(table, values) - constant, rows[graph.example]
    from_tokens = T <= len(rows) and torch.allclose(looked_up, own + rows[:T])
    if from_tokens:
        scale = 1.0
    else:
        # The ids may be shifted, which is another deviation, and the first row is then zero.
        is_set = looked_up.norm(dim=-1) > 1e-6
        is_other = torch.cdist(looked_up, scale * own).amin(-1) > 1e-5
        if (is_set & is_other).any():
            return None
    added = constant[0] if constant.abs().max() > 0 else None
    return EmbeddingFormula(scale, 1.0, None, added, from_tokens)


def _with_positions(
    found: EmbeddingFormula, computed: _Computed, table: Node, constant: Tensor
) -> EmbeddingFormula | None:
    """Return the formula with rows of the position table; None if they are not added."""
    shape, C = computed.graph.values[table].shape, constant.shape[-1]
    axis, T = _row_axis(shape, C), computed.graph.shape[1]
    factor = (computed(table) - constant).reshape(-1)[0].item()
    values = random_values(shape)
    vectors, sums = values.movedim(axis, 0).reshape(-1, C), computed(table, values) - constant
    if factor == 0:  # nothing is added, or something else is computed, such as their norm
        return found if torch.allclose(sums, torch.zeros_like(sums)) else None
    found = replace(found, position_scale=factor, from_tokens=False)
    broadcast = [-1 if i == axis else 1 for i in range(len(shape))]
    numbers = torch.arange(shape[axis], dtype=torch.float64).view(broadcast).expand(shape)
    row = (computed(table, numbers) - constant) / factor  # the number of each row that is added
    offset = round(row[0, 0, 0].item())
    consecutive = torch.arange(T, dtype=torch.float64)[:, None] + offset
    if torch.allclose(row, consecutive.expand_as(row), atol=1e-4):
        return replace(found, offset=offset)
    of_sequences = torch.arange(len(row), dtype=torch.float64)[:, None, None]
    if len(row) > 1 and torch.allclose(row, of_sequences.expand_as(row), atol=1e-4):
        return replace(found, by_batch=True)
    rows = row[0, :, 0].round().long()
    same = torch.allclose(row, rows[:, None].double().expand_as(row), atol=1e-4)
    if not same or rows.min() < 0 or rows.max() >= len(vectors):
        return None
    if not torch.allclose(sums, (factor * vectors[rows]).expand_as(sums)):
        return None
    return replace(found, rows=tuple(rows.tolist()))


def _row_axis(shape: Sequence[int], C: int) -> int:
    """Return the axis of the rows of a table of width C."""
    return next(i for i, n in enumerate(shape) if n != 1 and (n != C or prod(shape) == C * C))
