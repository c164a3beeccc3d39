"""What attention computes between q, k, v and the heads, measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.mapping.assignments import Attention
from compat.adaptation.mapping.linear_maps import View, token_view
from compat.adaptation.tracing.graph import Graph


@dataclass(frozen=True)
class AttentionFormula:
    """softmax over one axis of the masked, scaled scores; the mask at its place.

    Args:
        allowed: (T, T), True where query t (row) may see key s.
        scale: of q·k, everything counted.
        axis: of (B, H, T, S) that the softmax sums to one: −1 in GPT-2.
        after: the mask is applied after the softmax, without a renormalisation.
        error: max|Δ| of the probabilities from this formula, on random q and k.
    """

    allowed: Tensor
    scale: float
    axis: int = -1
    after: bool = False
    error: float = 0.0

    def probabilities(self, scores: Tensor) -> Tensor:
        """(B, H, T, S) of q·k, not scaled → probabilities."""
        hidden = ~self.allowed
        scores = scores * self.scale
        if not self.after:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        probs = scores.softmax(self.axis)
        if self.after or self.axis != -1:
            # Rows that are hidden as a whole are even after the softmax, and weigh nothing.
            return probs.masked_fill(hidden, 0)
        return probs


class AttentionPiece:
    """q, k, v → heads of one layer, run with values of our own."""

    def __init__(self, graph: Graph, attention: Attention) -> None:
        self.graph, self.attention = graph, attention
        self.B, self.H, self.T, self.D = attention.heads.index.shape

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All (B, H, T, D)."""
        given: dict[Node, Tensor] = {}
        held: dict[Node, list[tuple[View, Tensor]]] = {}
        a = self.attention
        for view, value in ((a.q, q), (a.k, k), (a.v, v)):
            given.update(zip(view.nodes, view.write(value), strict=True))
            for node in view.nodes:
                held.setdefault(node, []).append((view, value))
        return a.heads.read(self.graph.run(a.heads.nodes, given))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, T, S): how much each value counts, found by values that are 1 at one time."""
        columns = []
        for start in range(0, self.T, self.D):
            width = min(self.D, self.T - start)
            v = torch.zeros(self.T, self.D, dtype=torch.float64)
            v[torch.arange(start, start + width), torch.arange(width)] = 1
            v = v.expand(self.B, self.H, -1, -1)
            columns.append(self.heads(q, k, v)[..., :width])
        return torch.cat(columns, dim=-1)

    def random(self, seed: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.B, self.H, self.T, self.D)
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


# Over which axis of (B, H, T, S) the softmax goes, and whether the mask comes after it.
PLACES = ((-1, False), (-2, False), (-1, True), (-2, True), (-3, False), (-4, False))


def attention_of(graph: Graph, attention: Attention) -> AttentionFormula | None:
    """The formula of a layer's attention; None where none of those known fits."""
    piece = AttentionPiece(graph, attention)
    zero = piece.random(0, 0.0)
    even = piece.weights(zero, zero).nan_to_num()  # rows without a key may be 0/0
    if not torch.allclose(even, even[:1, :1].expand_as(even), atol=1e-9):
        return None
    seen = even[0, 0] > 1e-9
    # A query that sees no key gets all of them alike where hidden scores are finite.
    blind = seen & ~(seen.all(-1, keepdim=True) & ~seen.all())
    for allowed in (seen, blind):
        for axis, after in PLACES:
            formula = AttentionFormula(allowed, 1.0, axis, after)
            rows = allowed.any(-1)
            made = formula.probabilities(torch.zeros_like(even))[0, 0][rows]
            if torch.allclose(made, even[0, 0][rows], atol=1e-6):
                fitted = _with_scale(piece, formula)
                if fitted is not None:
                    return fitted
    return None


def _with_scale(piece: AttentionPiece, formula: AttentionFormula) -> AttentionFormula | None:
    """The scale by which q·k enters, from the logarithms of probabilities; checked on others."""
    q, k = piece.random(1, 0.3), piece.random(2, 0.3)
    probs, raw = piece.weights(q, k), q @ k.mT
    allowed = formula.allowed.expand_as(probs) & (probs > 0)
    logs = torch.where(allowed, probs, 1).log()
    axis = formula.axis
    count = allowed.sum(axis, keepdim=True).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(allowed, x, 0)
        return torch.where(allowed, x - x.sum(axis, keepdim=True) / count, 0)

    if formula.after:
        return _search_scale(piece, formula, probs, raw)
    logs, raw = centred(logs), centred(raw)
    scale = ((logs * raw).sum() / raw.square().sum()).item()
    return _checked(piece, formula, scale)


def _search_scale(
    piece: AttentionPiece, formula: AttentionFormula, probs: Tensor, raw: Tensor
) -> AttentionFormula | None:
    """Without all probabilities of a row, the ratios of those that are left."""
    allowed = formula.allowed
    first = allowed & (allowed.cumsum(-1) > 1)
    base = torch.where(allowed, probs, 1).log()
    logs, raws = base - base[..., :1], raw - raw[..., :1]
    logs, raws = torch.where(first, logs, 0), torch.where(first, raws, 0)
    scale = ((logs * raws).sum() / raws.square().sum()).item()
    return _checked(piece, formula, scale)


def _checked(
    piece: AttentionPiece, formula: AttentionFormula, scale: float
) -> AttentionFormula | None:
    q, k = piece.random(3), piece.random(4)
    found = AttentionFormula(formula.allowed, scale, formula.axis, formula.after)
    rows = formula.allowed.any(-1)
    ours, theirs = piece.weights(q, k), found.probabilities(q @ k.mT)
    error = (ours - theirs)[:, :, rows].abs().max().item()
    total = piece.attention.prescale * scale  # before the product and after it
    done = AttentionFormula(formula.allowed, total, formula.axis, formula.after, error)
    return done if error < 1e-5 else None


def rotation_of(
    graph: Graph, attention: Attention, x1: Node, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What q and k are multiplied by on their way from the projections, (T, D, D) each.

    None where it is no one matrix per position. Measured on random inputs of the projections.

    Args:
        graph: with the checkpoint's weights.
        attention: of one layer.
        x1: what the projections read.
        weight: of the fused projection, (C, 3·C).
        bias: (3·C,), or zeros.
    """
    source = token_view(graph, x1)
    if source is None:
        return None
    B, H, T, D = attention.q.index.shape
    found = []
    for place, (view, factor) in enumerate(
        ((attention.q, attention.q_factor), (attention.k, attention.k_factor))
    ):
        plain, turned = [], []
        for seed in range(-(-D // (B * H)) + 1):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(source.index.shape, generator=generator, dtype=torch.float64)
            given = dict(zip(source.nodes, source.write(x), strict=True))
            turned.append(view.read(graph.run(view.nodes, given)) / factor)
            y = (x @ weight + bias).chunk(3, dim=-1)[place]
            plain.append(y.view(B, T, H, D).transpose(1, 2))
        before, after = (torch.cat(t).permute(2, 0, 1, 3).flatten(1, 2) for t in (plain, turned))
        matrix = torch.linalg.lstsq(before, after).solution  # (T, D, D)
        if not torch.allclose(before @ matrix, after, rtol=1e-5, atol=1e-5):
            return None
        found.append(matrix)
    return found[0], found[1]
