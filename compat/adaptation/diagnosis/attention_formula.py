"""What attention computes between q, k, v and the heads, measured by running the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from compat.adaptation.anatomy.dissect import Operand
from compat.adaptation.mapping.assignments import Attention
from compat.adaptation.mapping.linear_maps import View, function_between, token_view
from compat.adaptation.tracing.graph import Graph, random_values, size
from compat.config import GPT2Config
from compat.errors import listed

SOFTMAX_AXES = {-2: "the queries", -3: "the heads", -4: "the batch"}  # other axes than GPT-2's
MOST_SLOPES = 8  # slopes in a message


@dataclass(frozen=True)
class AttentionFormula:
    """A softmax of masked and scaled scores.

    Args:
        allowed: (T, T), True where the query of a row attends to the key of a column.
        scale: the factor of q·k, the product over all operations.
        axis: the axis of (B, H, T, T) over which the softmax is computed; −1 in GPT-2.
        after: whether the mask is applied after the softmax, without renormalization.
        total: what the probabilities of a query sum up to, if they are multiplied by a number.
        bias: (H, T, T), what is added to the scores; or None.
        cap: c, if the scores s become c · tanh(s / c); or None.
        hidden: what the scores of hidden keys are set to, if the softmax does not exclude them.
        plus_one: 1 is added to the sum of exponentials, either as it is or after the highest
            score was subtracted from the scores ("max"); False in GPT-2.
    """

    allowed: Tensor
    scale: float
    axis: int = -1
    after: bool = False
    total: float = 1.0
    bias: Tensor | None = None
    cap: float | None = None
    hidden: float | None = None
    plus_one: bool | str = False

    def probabilities(self, scores: Tensor) -> Tensor:
        """Unscaled scores q·k (B, H, T, T) → probabilities (B, H, T, T)."""
        hidden = ~self.allowed
        scores = scores * self.scale
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        if self.bias is not None:
            scores = scores + self.bias
        if not self.after:
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(hidden, lowest if self.hidden is None else self.hidden)
        if self.plus_one == "max":
            scores = scores - scores.amax(-1, keepdim=True)
        if self.plus_one:
            return F.pad(scores, (1, 0)).softmax(-1)[..., 1:]
        probs = scores.softmax(self.axis) * self.total
        if self.after or (self.axis != -1 and self.hidden is None):
            # Where every score is hidden, the softmax is uniform, and its values do not count.
            return probs.masked_fill(hidden, 0)
        return probs


def scale_code(
    scale: float, expected: float, config: GPT2Config, tolerance: float
) -> tuple[str, dict[str, Any]]:
    """Return the code of a scale that is not the expected one, and the values for its message.

    The tolerance is relative.
    """
    code = "wrong_scale"
    if abs(scale - 1) < tolerance:
        code = "no_attn_scale"
    elif abs(scale * math.sqrt(config.n_embd) - 1) < tolerance:
        code = "scale_by_d_model"
    sizes = {"n_embd": config.n_embd, "d_head": config.d_head}
    return code, {"found": scale, "expected": expected, **sizes}


def mask_code(allowed: Tensor) -> tuple[str | None, dict[str, Any]]:
    """Return the code of a mask (T, T) and its message's values; None if the mask is causal."""
    T, every = len(allowed), torch.ones_like(allowed)
    if torch.equal(allowed, every.tril()):
        return None, {}
    if allowed.all():
        return "no_mask", {}
    width = int(allowed[-1].sum())
    if 1 < width < T and torch.equal(allowed, every.tril() & every.triu(1 - width)):
        return "sliding_window", {"found": width}
    # Of the deviating tokens, one that has several tokens before it.
    deviating = (allowed != every.tril()).any(-1).nonzero().flatten().tolist()
    token = next((row for row in deviating if row >= 5), deviating[-1])
    return "mask_off", {"token": token, "found": _attended(allowed[token])}


def _attended(row: Tensor) -> str:
    """Return the keys that one query attends to, in words."""
    tokens: list[int] = row.nonzero().flatten().tolist()
    if not tokens:
        return "no token"
    if len(tokens) == 1:
        return f"token {tokens[0]} only"
    if tokens == list(range(tokens[0], tokens[-1] + 1)):
        return f"tokens {tokens[0]} to {tokens[-1]}"
    return f"tokens {listed([str(token) for token in tokens])}"


def described_bias(bias: Tensor) -> str:
    """Return a bias (H, T, T) that is added to the scores, 0 for a token itself, as a clause."""
    T = bias.shape[-1]
    by_distance = torch.stack([bias[:, -1, T - 1 - d] for d in range(T)], dim=-1)  # (H, T)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    expected = by_distance[:, distance].tril()
    if not torch.allclose(bias.tril(), expected, rtol=1e-3, atol=1e-3):
        return "a bias that depends on the positions of query and key is added to the scores"
    slopes = -by_distance[:, 1] if T > 1 else by_distance[:, 0]
    if torch.allclose(by_distance, -slopes[:, None] * torch.arange(T), rtol=1e-3, atol=1e-3):
        shown = ", ".join(f"{slope:.4g}" for slope in slopes[:MOST_SLOPES].tolist())
        return f"the scores of the heads decrease by {shown} per token of distance (ALiBi)"
    return "a bias that depends on the distance of query and key is added to the scores"


class AttentionPiece:
    """Attention of one layer as a function of q and k (B, H, T, D), and of v (B, H, T, W)."""

    def __init__(self, graph: Graph, attention: Attention) -> None:
        self.graph, self.attention = graph, attention
        self.B, self.H, self.T, self.W = attention.heads.index.shape
        self.D = attention.q.index.shape[3]

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the result of the model's own operations, (B, H, T, W)."""
        return self._computed([self.attention.heads], q, k, v)[0]

    def projected(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the result for the projections, whose factors `heads` does not apply."""
        return self.heads(self.attention.q_factor * q, self.attention.k_factor * k, v)

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Compute the operands of the products from the projections, for indirect attention."""
        inner = self.attention.inner
        assert inner is not None
        q, k = self.attention.q_factor * q, self.attention.k_factor * k
        return self._computed([inner.q, inner.k, inner.v], q, k, v)

    def known(self, q: Tensor, k: Tensor, v: Tensor | None = None) -> dict[Node, Tensor]:
        """Return the values of the nodes that hold q, k and v; by default, v is random."""
        known: dict[Node, Tensor] = {}
        views = (self.attention.q, self.attention.k, self.attention.v)
        for view, value in zip(views, (q, k, self.values(2) if v is None else v), strict=True):
            for node, part in zip(view.nodes, view.write(value), strict=True):
                # A node that holds several of them, as a fused projection does, is their sum.
                known[node] = known[node] + part if node in known else part
        return known

    def _computed(self, ends: Sequence[View], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        known = self.known(q, k, v)
        nodes = list(dict.fromkeys(node for end in ends for node in end.nodes))
        values = dict(zip(nodes, self.graph.run(nodes, known), strict=True))
        return [end.read([values[node] for node in end.nodes]) for end in ends]

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the weight of every value, (B, H, T, T), measured with one-hot values."""
        columns = []
        for start in range(0, self.T, self.W):
            width = min(self.W, self.T - start)
            v = torch.zeros(self.T, self.W, dtype=torch.float64)
            v[torch.arange(start, start + width), torch.arange(width)] = 1
            v = v.expand(self.B, self.H, -1, -1)
            columns.append(self.heads(q, k, v)[..., :width])
        return torch.cat(columns, dim=-1)

    def random(self, seed: int, scale: float = 1.0) -> Tensor:
        """Return random queries, which are equal for heads that share one."""
        view = self.attention.q
        return view.read(view.write(scale * self._random(seed, self.D)))

    def values(self, seed: int) -> Tensor:
        """Return random values."""
        return self._random(seed, self.W)

    def keys(self, seed: int, scale: float = 1.0) -> Tensor:
        """Return random keys, which are equal for heads that share one."""
        view = self.attention.k
        return view.read(view.write(scale * self._random(seed, self.D)))

    def _random(self, seed: int, width: int) -> Tensor:
        return random_values((self.B, self.H, self.T, width), seed)


# The axis of the softmax, and whether the mask is applied after it, in the order of the attempts.
ATTEMPTS = ((-1, False), (-2, False), (-1, True), (-2, True), (-3, False), (-4, False))


def attention_of(graph: Graph, attention: Attention) -> AttentionFormula | None:
    """Measure the formula of a layer's attention; None if no formula of this form fits."""
    piece = AttentionPiece(graph, attention)
    zero = piece.random(0, 0.0)
    even = piece.probabilities(zero, zero).nan_to_num()  # rows without a key may be 0/0
    total = _total(even)
    even = even / total
    if not torch.allclose(even, even[:1, :1].expand_as(even), atol=1e-9):
        return _biased(piece, even * total)
    seen = even[0, 0] > 1e-9
    # With a finite mask, a query without a key attends to all keys alike.
    without_blind = seen & ~(seen.all(-1, keepdim=True) & ~seen.all())
    for allowed in (seen, without_blind):
        for axis, after in ATTEMPTS:
            formula = AttentionFormula(allowed, 1.0, axis, after, total)
            rows = allowed.any(-1)
            expected = formula.probabilities(torch.zeros_like(even))[0, 0][rows] / total
            if torch.allclose(expected, even[0, 0][rows], atol=1e-6):
                if found := _fitted(piece, formula):
                    return found
    found = _with_other_mask(piece) or _over_heads(piece) or _unusual(piece, seen, total)
    return found or _biased(piece, even * total)


def _with_other_mask(piece: AttentionPiece) -> AttentionFormula | None:
    """Fit a mask that sets scores to a value that the softmax does not exclude."""
    zero, high = piece.random(0, 0.0), piece.random(0, 0.0)
    high[..., 0] = 1e3  # all products are high, so the softmax excludes what they are replaced by
    allowed = piece.probabilities(high, high)[0, 0] > 1e-9
    probs = piece.probabilities(zero, zero)[0, 0]
    if allowed.all() or not (allowed.any(-1).all() and (probs > 0).all()):
        return None
    row = int((~allowed).any(-1).nonzero()[0])
    value = (probs[row][~allowed[row]][0] / probs[row][allowed[row]][0]).log().item()
    return _fitted(piece, AttentionFormula(allowed, 1.0, hidden=value))


def _over_heads(piece: AttentionPiece) -> AttentionFormula | None:
    """Fit a softmax over the heads or the batch, after a mask with a finite value.

    It is the same value for all of them, so hidden keys have the same probability everywhere.
    """
    q, k = piece.random(1), piece.keys(2)
    probs = piece.probabilities(q, k)
    for axis in (-3, -4):
        allowed = (probs - 1 / probs.shape[axis]).abs().amax((0, 1)) > 1e-6
        if allowed.any() and not allowed.all():
            lowest = torch.finfo(probs.dtype).min
            if found := _fitted(piece, AttentionFormula(allowed, 1.0, axis, hidden=lowest)):
                return found
    return None


def _unusual(piece: AttentionPiece, seen: Tensor, total: float) -> AttentionFormula | None:
    """Fit a softmax of capped scores, or one with 1 more in its sum."""
    usual = AttentionFormula(seen, 1.0)
    for formula in (replace(usual, plus_one=True), replace(usual, plus_one="max")):
        if found := _fitted(piece, formula):
            return found
    row = next((i for i, keys in enumerate(seen) if keys.sum() > 1), None)
    if row is None:
        return None
    one, two = seen[row].nonzero().flatten()[:2].tolist()

    def score(x: float) -> float:
        """Return what the score x of the second of two keys becomes if that of the first is 0."""
        q, k = piece.random(0, 0.0), piece.random(0, 0.0)
        q[..., row, 0], k[..., two, 0] = x, 1
        probs = piece.probabilities(q, k)[0, 0, row]
        return (probs[two].log() - probs[one].log()).item()

    cap, scale = score(1e9), score(1e-3) / 1e-3
    if 0 < cap < 600:  # beyond, exp overflows
        return _confirmed(piece, replace(usual, scale=scale, cap=cap, total=total))
    return None


def _biased(piece: AttentionPiece, even: Tensor) -> AttentionFormula | None:
    """Fit the formula with a bias, from the probabilities where all products q·k are 0.

    It hides later tokens, so that it is not a mask with a value that is too high.
    """
    if not torch.allclose(even, even[:1].expand_as(even), atol=1e-12):
        return None
    seen = even[0] > 0
    allowed = seen[0]
    if allowed.triu(1).any() or (seen != allowed).any() or not allowed.any(-1).all():
        return None
    own = even[0].log().diagonal(dim1=-2, dim2=-1)[..., None]
    bias = torch.where(seen, even[0].log() - own, 0)
    return _fitted(piece, AttentionFormula(allowed, 1.0, bias=bias))


def _total(probs: Tensor) -> float:
    """Return the sum of every row that is not zero; 1 if the rows have different sums."""
    sums = probs.sum(-1)
    sums = sums[sums.abs() > 1e-9]
    total = sums.mean().item() if sums.numel() else 1.0
    same = torch.allclose(sums, torch.full_like(sums, total), rtol=1e-6)
    return total if same and total > 0 and abs(total - 1) > 1e-6 else 1.0


def _fitted(piece: AttentionPiece, formula: AttentionFormula) -> AttentionFormula | None:
    """Fit the scale of a formula, and return the formula if it is then confirmed."""
    return _confirmed(piece, replace(formula, scale=_fit_scale(piece, formula)))


def _fit_scale(piece: AttentionPiece, formula: AttentionFormula) -> float:
    """Fit the factor of q·k by least squares from the logarithms of probabilities."""
    q, k = piece.random(1, 0.3), piece.keys(2, 0.3)
    probs, scores = piece.probabilities(q, k) / formula.total, q @ k.mT
    used = formula.allowed.expand_as(probs) & (probs > 0)
    logs = torch.where(used, probs, 1).log()
    if formula.bias is not None:
        logs = logs - formula.bias
    if formula.after:
        # The rest of a row is unknown, but its probabilities have the ratios of the softmax.
        used = formula.allowed & (formula.allowed.cumsum(-1) > 1)
        logs, scores = logs - logs[..., :1], scores - scores[..., :1]
    else:
        # The softmax determines the logarithms up to a constant.
        count = used.sum(formula.axis, keepdim=True).clamp(min=1)
        scores = torch.where(used, scores, 0)
        logs = logs - logs.sum(formula.axis, keepdim=True) / count
        scores = scores - scores.sum(formula.axis, keepdim=True) / count
    logs, scores = torch.where(used, logs, 0), torch.where(used, scores, 0)
    return ((logs * scores).sum() / scores.square().sum()).item()


def _confirmed(piece: AttentionPiece, formula: AttentionFormula) -> AttentionFormula | None:
    """Return the formula if it predicts the probabilities on other random q and k, else None.

    Its scale then includes the factor that is applied to q and k before the views of them.
    """
    if not formula.allowed.any():
        return None
    q, k = piece.random(3), piece.keys(4)
    difference = piece.probabilities(q, k) - formula.probabilities(q @ k.mT)
    error = difference[:, :, formula.allowed.any(-1)].abs().max().item()
    if not error < 1e-5:
        return None
    return replace(formula, scale=piece.attention.prescale * formula.scale)


def turns_with_position(graph: Graph, attention: Attention, q: Operand) -> bool:
    """Return whether q's direction, but not its norm, depends on the position, as in a rotation.

    Attention was traced from the projections, so only what follows them is considered.

    Args:
        graph: the model's graph.
        attention: one layer's attention, whose views are the results of the projections.
        q: an operand of its first product.
    """
    B, H, T, D = attention.q.index.shape
    if D % 2:
        return False
    # 1, −1, 1, …, which no reshaping of (B, T, C) changes.
    x = (1 - 2 * (torch.arange(D, dtype=torch.float64) % 2)).expand(B, H, T, D)

    def later(x: Tensor) -> Tensor:
        [found] = graph.run([q.node], attention.q.node_values(x), finite=True)
        return found.movedim(q.time, 0)[T // 2 :].flatten(1)  # after tokens without a predecessor

    # A term would be added to zeros too.
    return _turned(later(x)) and not _differ(later(torch.zeros_like(x)))


def turns_equal_tokens(graph: Graph, x1: Node, q: Operand) -> bool:
    """Return the same for projections of unknown structure, from their input x1 (B, T, C)."""
    x = random_values(size(x1)[-1:]).expand(size(x1))
    [found] = graph.run([q.node], {x1: x}, finite=True)
    rows = found.movedim(q.time, 0)
    return _turned(rows[len(rows) // 2 :].flatten(1))


def _turned(rows: Tensor) -> bool:
    """Return whether rows differ, but not their norms.

    A cumulative sum changes the norm too; cosines in bfloat16 change it by less than 1 %.
    """
    return _differ(rows) and not _differ(rows.norm(dim=1), rtol=0.02)


def _differ(rows: Tensor, rtol: float = 1e-6) -> bool:
    return not torch.allclose(rows, rows[:1].expand_as(rows), rtol=rtol, atol=1e-9)


def rotation_of(
    graph: Graph, attention: Attention, x1: Node, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Measure the matrices by which q and k are multiplied at each position, (T, D, D) each.

    They are measured on random inputs of the projections. Return None if there are none.

    Args:
        graph: the model's graph, with the checkpoint's weights.
        attention: the attention of one layer.
        x1: the node that the projections read.
        weight: the weight of the fused projection, (C, 3·C).
        bias: its bias or zeros, (3·C,).
    """
    source = token_view(graph, x1)
    if source is None:
        return None
    B, H, T, D = attention.q.index.shape
    found = []
    for third, view, factor in (
        (0, attention.q, attention.q_factor),
        (1, attention.k, attention.k_factor),
    ):
        plain, rotated = [], []
        for seed in range(-(-D // (B * H)) + 1):
            x = random_values(source.index.shape, seed)
            rotated.append(function_between(graph, source, view)(x) / factor)
            y = (x @ weight + bias).chunk(3, dim=-1)[third]
            plain.append(y.view(B, T, H, D).transpose(1, 2))
        before, after = (torch.cat(t).permute(2, 0, 1, 3).flatten(1, 2) for t in (plain, rotated))
        matrix = torch.linalg.lstsq(before, after).solution  # (T, D, D)
        if not torch.allclose(before @ matrix, after, rtol=1e-5, atol=1e-5):
            return None
        found.append(matrix)
    return found[0], found[1]
