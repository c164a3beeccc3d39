"""Deviations of attention: projections, rotation, scale, mask, softmax and heads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import ACTIVATIONS, Layer, Operand
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.attention_formula import (
    SOFTMAX_AXES,
    AttentionFormula,
    AttentionPiece,
    attention_of,
    described_bias,
    mask_code,
    rotation_of,
    scale_code,
    turns_equal_tokens,
    turns_with_position,
)
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import Changes, causal, combine
from compat.adaptation.diagnosis.registry import Detector, Deviation, detects, deviation, operations
from compat.adaptation.diagnosis.shifts import REVERSED, shifted_ids, shifted_tokens
from compat.adaptation.mapping.assignments import JOINS
from compat.adaptation.mapping.by_calls import ROLES
from compat.adaptation.mapping.linear_maps import function_between, merged, token_view
from compat.adaptation.tracing.contractions import SDPA, contraction
from compat.adaptation.tracing.graph import MOVES, SHIFTS, Place, kind, live_inputs, size
from compat.errors import listed
from compat.ops import Fused
from compat.user_models.synonyms import role_of

SOFTMAXES = frozenset({"softmax", "_softmax", "exp", *SDPA})
MASKS = frozenset({"masked_fill", "where", "add", "sub", "mul"})
SHIFTED = "confirmed: changing one token changes only the result at the shifted position"
# The codes of other orders in one parameter.
SWAPPED = {"kqv": "qk_swapped", "kq": "qk_swapped", "qvk": "kv_swapped", "vk": "kv_swapped"}
SPLITS = ("split", "chunk", "unbind", "split_with_sizes", "slice", "select")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "clone")


@dataclass
class LayerAttention:
    """Attention in one layer, as the detectors below see it."""

    context: DiagnosisContext
    i: int

    def __post_init__(self) -> None:
        self.graph = self.context.graph
        self.layer = self.context.anatomy.layers[self.i]
        self.op = self.layer.attention_ops[0]
        self.attention = attention = self.context.mapping.attentions[self.i]
        # The formulas of q, k and v, and of the operands of their products if it is indirect.
        self.measured = None if attention.over_heads else attention_of(self.graph, attention)
        self.inner = None if attention.inner is None else attention_of(self.graph, attention.inner)
        self.formula, inner = self.measured, self.inner
        if self.formula is None and inner is not None:
            # Something is applied to q, k and v before their products, whose formula is `inner`.
            explained = self.is_normalized or self.shift is not None or self.is_turned
            self.formula = inner if self.unsplit or explained else None
            if self.is_normalized:  # their own factor belongs to the scale
                self.formula = replace(inner, scale=inner.scale * self.factor_after_norms)

    @cached_property
    def piece(self) -> AttentionPiece:
        return AttentionPiece(self.graph, self.attention)

    @cached_property
    def inside(self) -> list[Node]:
        """The nodes from q, k and v to the heads."""
        op = self.op
        return self.graph.between([op.out.node], [op.q.node, op.k.node, op.v.node])

    @cached_property
    def before(self) -> list[Node]:
        """The operations between the projections and the products, of which GPT-2 has none."""
        ends = self.layer.qkv_ends
        if self.attention.indirect:  # without projections of gates
            ends = [*self.attention.q.nodes, *self.attention.k.nodes, *self.attention.v.nodes]
        return self.graph.on_paths(ends, operands_of(self.layer))

    @cached_property
    def unsplit(self) -> str:
        """Which of q, k and v are (B, T, C) reshaped to (B, H, T, D) without a transpose."""
        if not self.attention.indirect:
            return ""
        piece = self.piece
        plain = [piece.random(0), piece.random(1), piece.values(2)]
        found = piece.heads(*plain)
        reshaped = [x.transpose(1, 2).reshape(x.shape) for x in plain]
        scale = self.context.config.attention_scale(self.i)
        formula = self.inner or causal(piece.T, scale)
        for wrong in ("qkv", "q", "k", "v", "qk", "qv", "kv"):
            q, k, v = (reshaped[i] if x in wrong else plain[i] for i, x in enumerate("qkv"))
            if torch.allclose(found, formula.probabilities(q @ k.mT) @ v, rtol=1e-5, atol=1e-5):
                return wrong
        return ""

    @property
    def unknown(self) -> bool:
        """Whether q, k and v are not projected as in GPT-2."""
        module = f"h.{self.i}.attn.c_attn"
        return any(each.module == module for each in self.context.mapping.unknown)

    @cached_property
    def mixing(self) -> list[Node]:
        """The products of parameters with the scores or the probabilities of all heads."""
        T = self.graph.shape[1]
        return [
            n for n in self.inside
            if n in self.graph.live and contraction(n) is not None and size(n).count(T) > 1
            and len(live_inputs(self.graph, n)) == 1
            and self.op.scores in self.graph.ancestors[n]
        ]  # fmt: skip

    @cached_property
    def added_scores(self) -> Node | None:
        """The operation on the scores that reads those of an earlier layer."""
        above, op = self.graph.ancestors, self.op
        if op.others:
            return None
        layers = self.context.anatomy.layers[: self.i]
        others = {c.scores for layer in layers for c in layer.attention_ops if c.scores is not None}
        operands = {op.q.node, op.k.node, op.v.node}
        for n in self.inside:
            if n in self.graph.live and op.scores in above[n]:
                computed = (above[a] | {a} for a in live_inputs(self.graph, n))
                if any(others & each and not operands & each for each in computed):
                    return n
        return None

    @cached_property
    def added_terms(self) -> dict[str, Node]:
        """For q, k and v, the sum with a tensor that their projections do not compute, if any."""
        found: dict[str, Node] = {}
        if not self.attention.indirect:
            return found
        above, graph = self.graph.ancestors, self.graph
        for name, operand in zip("qkv", (self.op.q, self.op.k, self.op.v), strict=True):
            ends = {*getattr(self.attention, name).nodes}
            for n in graph.on_paths(ends, [operand.node]):
                terms = [a for a in live_inputs(graph, n) if not ends & (above[a] | {a})]
                if kind(n) in ("add", "sub", "lerp") and terms:
                    found[name] = n
        return found

    @cached_property
    def is_normalized(self) -> bool:
        """Whether the result does not depend on the norms of q and k."""
        if not self.attention.indirect:
            return False
        piece = self.piece
        q, k, v = piece.random(0), piece.random(1), piece.values(2)
        one, two = piece.heads(q, k, v), piece.heads(2 * q, 3 * k, v)
        return torch.allclose(one, two, rtol=1e-3, atol=1e-3 * one.abs().max().item())

    @cached_property
    def factor_after_norms(self) -> float:
        """What normalized q and k are multiplied by together before their product.

        It is 1 for unit vectors, and where weights of the norms hide the factor. A rotation with
        cosines in bfloat16 changes it by less than 1 %.
        """
        if self.attention.inner is None:
            return 1.0
        piece = self.piece
        large = piece.random(0, 1e4), piece.keys(1, 1e4)  # so that eps has no effect
        factor = 1.0
        for x in piece.operands(*large, piece.values(2))[:2]:
            rms = x.square().mean(-1).sqrt()
            if not torch.allclose(rms, rms.mean(), rtol=1e-2):
                return 1.0
            factor *= rms.mean().item()
        of_norms = (1.0, 1.0 / piece.D)  # of an RMSNorm, and of unit vectors
        return 1.0 if any(abs(factor / each - 1) < 1e-2 for each in of_norms) else factor

    @cached_property
    def mask_value(self) -> tuple[Node, float] | None:
        """The node that masks scores with a value that is too high, and this value."""
        if self.attention.indirect:
            return None
        if self.formula and (self.formula.hidden is None or self.formula.axis != -1):
            return None
        softmaxes = {*self.live(SOFTMAXES)}
        if self.formula is None and not softmaxes:
            return None
        for node in self.live(frozenset({"masked_fill", "where"})):
            if self.graph.ancestors[node] & softmaxes:
                break  # it sets weights and not scores
            constants = [
                a for a in node.all_input_nodes if a not in self.graph.live and not size(a)
            ]
            numbers = [a for a in node.args if isinstance(a, (int, float))]
            numbers += [value.item() for value in self.graph.run(constants, {})]
            if numbers and numbers[0] > -1e3:
                return node, float(numbers[0])
        if self.formula and self.formula.hidden is not None and self.masked:
            return self.masked[0], self.formula.hidden  # as in scores * mask
        return None

    @cached_property
    def added_mask(self) -> tuple[Node, float, float] | None:
        """The node that adds a mask, what it adds to later tokens' scores, and to all others."""
        if self.formula is not None or self.attention.indirect:
            return None
        masks = [
            (node, a) for node in self.live(frozenset({"add", "baddbmm", *SDPA}))
            for a in node.all_input_nodes
            if a not in self.graph.live and size(a)[-2:] == (self.graph.shape[1],) * 2
        ]  # fmt: skip
        for node, mask in masks:
            [value] = self.graph.run([mask], {})
            later = torch.ones(value.shape[-2:], dtype=torch.bool).triu(1)
            if value.dtype == torch.bool and kind(node) in SDPA:
                continue  # it selects scores, and is not added
            numbers, others = torch.unique(value[..., later]), torch.unique(value[..., ~later])
            if len(numbers) == len(others) == 1:
                hidden, seen = numbers.item(), others.item()
                if -1e3 < hidden - seen < math.inf:  # the softmax excludes what is lower
                    return node, hidden, seen
        return None

    @cached_property
    def is_softmaxed_twice(self) -> bool:
        """Whether a softmax of attention reads the result of another one."""
        if self.formula is not None or self.attention.indirect or self.op.others:
            return False
        softmaxes = self.live(SOFTMAXES)
        return any(self.graph.ancestors[n] & {*softmaxes} - {n} for n in softmaxes)

    @cached_property
    def is_unknown(self) -> bool:
        """Whether attention has no known formula, and nothing else explains why."""
        if self.formula is not None or self.unsplit or self.is_normalized:
            return False
        if self.attention.over_heads or self.mixing or self.added_scores:
            return False
        known = (self.mask_value, self.added_mask, self.shift, self.pairwise)
        return not self.adds_relative_scores and all(each is None for each in known)

    @property
    def has_other_formula(self) -> bool:
        """Whether the weights have no known formula, and are not the softmax of a softmax."""
        return self.is_unknown and not self.is_softmaxed_twice

    def _changes_values(self, formula: AttentionFormula) -> bool:
        """Return whether the heads are not the products of the weights with the projections."""
        piece = self.piece
        q, k, v = piece.random(0), piece.keys(1), piece.values(2)
        scores = q @ k.mT / self.attention.prescale
        expected = formula.probabilities(scores) @ v
        return not torch.allclose(piece.heads(q, k, v), expected, rtol=1e-4, atol=1e-5)

    @cached_property
    def changed_projections(self) -> list[Node]:
        """The operations that change q, k or v between their projections and their products.

        Activations are among them if the projections of positive numbers are not changed.
        """
        if not self.attention.indirect:
            return [n for n in self.before if kind(n) in ACTIVATIONS]
        changing = [n for n in self.before if kind(n) not in {*MOVES, *SPLITS, "getitem"}]
        if (formula := self.measured) is not None:
            operands = [op.v.node for op in self.layer.attention_ops]
            of_values = {*self.graph.on_paths(self.attention.v.nodes, operands)}
            return [n for n in changing if n in of_values and self._changes_values(formula)]
        if not self.has_other_formula or self.op.others:
            return []
        return [] if self.is_transposed or self.first_nan is not None else changing

    @cached_property
    def attends_to_later_tokens(self) -> bool:
        """Whether the values of the last token change what the tokens before it compute."""
        piece = self.piece
        q, k, v = piece.random(0), piece.keys(1), piece.values(2)
        other = v.clone()
        other[..., -1, :] += 1
        one, two = (piece.heads(q, k, values)[..., :-1, :] for values in (v, other))
        return not torch.allclose(one, two)

    @cached_property
    def weights(self) -> Tensor:
        """The weights of the values, (B, H, T, T), for random queries and keys."""
        return self.piece.probabilities(self.piece.random(0), self.piece.keys(1))

    @cached_property
    def first_nan(self) -> Node | None:
        """The first operation that computes NaN, if all weights are NaN."""
        if not self.weights.isnan().all():
            return None
        computed = [n for n in self.inside if size(n)]
        known = self.piece.known(self.piece.random(0), self.piece.keys(1))
        values = self.graph.run(computed, known)
        return next((n for n, v in zip(computed, values, strict=True) if v.isnan().any()), None)

    @property
    def is_transposed(self) -> bool:
        """Whether the weights of each key, and not those of each query, sum to 1."""
        if self.formula is not None or self.attention.indirect or self.op.others:
            return False
        sums, of_keys = self.weights.sum(-1), self.weights.sum(-2)
        ones = torch.ones_like(sums)
        return torch.allclose(of_keys, ones) and not torch.allclose(sums, ones)

    @cached_property
    def masked(self) -> list[Node]:
        """The operations that combine the scores with a mask (T, T)."""
        graph = self.graph
        return [
            n for n in self.live(MASKS | SDPA)
            if any(a not in graph.live and len(size(a)) > 1 for a in n.all_input_nodes)
        ]  # fmt: skip

    @cached_property
    def pairwise(self) -> Tensor | None:
        """The weights (B, H, T, T) if each depends on its own query and key only, or None.

        Examples are a sigmoid in place of the softmax, and scores that are used as weights.
        """
        if self.formula is not None or self.attention.indirect:
            return None
        piece = self.piece
        q, k = piece.random(0), piece.keys(1)
        others = q.clone(), k.clone()
        for other, fresh in zip(others, (piece.random(2), piece.keys(3)), strict=True):
            other[..., 0, :] = fresh[..., 0, :]
        weights = piece.probabilities(q, k)
        rows, columns = piece.probabilities(others[0], k), piece.probabilities(q, others[1])
        own = torch.allclose(weights[..., 1:, :], rows[..., 1:, :])
        own = own and torch.allclose(weights[..., 1:], columns[..., 1:])
        return weights if own and not torch.allclose(weights, columns) else None

    @cached_property
    def adds_relative_scores(self) -> bool:
        """Whether what is added to the scaled scores depends on the query and the positions.

        In this case the weights are not uniform for keys of zero, and other keys change the
        logarithms of the weights by c·q·k.
        """
        if self.formula is not None or self.attention.indirect or self.attention.over_heads:
            return False
        if self.mixing or self.added_scores or self.op.others:
            return False
        piece = self.piece
        q, k = piece.random(1, 0.3), piece.keys(2, 0.3)
        without, weights = piece.probabilities(q, piece.random(0, 0.0)), piece.probabilities(q, k)
        causal = torch.ones_like(weights[0, 0]).bool().tril()
        if not torch.equal(without > 0, causal.expand_as(without)):
            return False
        even = causal.to(without.dtype) / causal.sum(-1, keepdim=True)
        # The logarithms are known up to a constant of each query.
        change = torch.where(causal, weights.log() - without.log(), 0)
        change = torch.where(causal, change - change[..., :1], 0)
        scores = torch.where(causal, q @ k.mT - (q @ k.mT)[..., :1], 0)
        fitted = (change * scores).sum() / scores.square().sum() * scores
        agrees = torch.allclose(change, fitted, atol=1e-6)
        return agrees and not torch.allclose(without, even.expand_as(without))

    @cached_property
    def shift(self) -> tuple[str, int, Node] | None:
        """What is computed from another token, the distance to it, and a node of the shift."""
        graph, anatomy = self.graph, self.context.anatomy
        start = anatomy.layers[self.i - 1].out if self.i else anatomy.embed
        for name, begin, target in (
            ("the input of attention", start, Operand(self.layer.x1, (), 1, 2)),
            ("the query", self.layer.x1, self.op.q),
            ("the key", self.layer.x1, self.op.k),
            ("the value", self.layer.x1, self.op.v),
        ):
            moving = [n for n in graph.live_between([target.node], [begin]) if kind(n) in SHIFTS]
            distance = shifted_tokens(graph, begin, target) if moving else 0
            if distance:
                return name, distance, moving[0]
        return None

    def live(self, kinds: frozenset[str]) -> list[Node]:
        """Return the nodes inside that depend on the ids and are of these kinds."""
        return [n for n in self.inside if n in self.graph.live and kind(n) in kinds]

    @cached_property
    def is_turned(self) -> bool:
        """Whether q is rotated by its position after operations like a norm of q and k."""
        if self.unknown:
            x1 = self.layer.x1
            return len(size(x1)) == 3 and turns_equal_tokens(self.graph, x1, self.op.q)
        indirect = self.attention.indirect and not self.unsplit
        return indirect and turns_with_position(self.graph, self.attention, self.op.q)

    @property
    def own_attention(self) -> Changes:
        """The model's own function of q, k and v, as a change to the reference.

        If the formula of their products is known, only the operations before them are changed.
        """
        if self.formula is not None and self.attention.indirect:
            return Changes(operands={self.i: self._operands})
        return Changes(attention={self.i: self.piece.projected})

    def _operands(self, *qkv: Tensor) -> list[Tensor]:
        """Compute the operands of the products; the formula has the factor after norms."""
        q, k, v = self.piece.operands(*qkv)
        return [q / self.factor_after_norms if self.is_normalized else q, k, v]

    @property
    def scores_line(self) -> Place | None:
        products = [n for n in (self.op.scores, self.op.product) if n is not None]
        return source.running(self.graph, products)

    @property
    def softmax_line(self) -> Place | None:
        return source.running(self.graph, self.live(SOFTMAXES)) or self.scores_line

    def deviation(
        self,
        *lines: Place | None,
        changes: Changes | None = None,
        tap: str = "probs",
        message: str = "",
        code: str = "",
        **values: Any,
    ) -> Deviation:
        """Build a deviation of this layer.

        By default, the reference is changed to attention's formula, or to the model's own function
        if no formula is known.
        """
        if changes is None:
            formula = self.formula
            changes = Changes(attention={self.i: formula}) if formula else self.own_attention
        tap = f"h.{self.i}.{tap}"
        return Deviation(tap, lines, values, changes, message=message, code=code)


def operands_of(layer: Layer) -> list[Node]:
    """Return q, k and v in the products of a layer's attention."""
    return [operand.node for op in layer.attention_ops for operand in (op.q, op.k, op.v)]


def attention_in(context: DiagnosisContext, i: int) -> LayerAttention:
    """Return the attention of a layer, whose properties are computed once for all detectors."""
    if i not in context.attentions:
        context.attentions[i] = LayerAttention(context, i)
    found: LayerAttention = context.attentions[i]
    return found


def each_layer(detect: Callable[[LayerAttention], Deviation | None]) -> Detector:
    """Run a detector in every layer; one finding of each code has the lines of all of them."""

    @wraps(detect)
    def detect_all(context: DiagnosisContext) -> Iterator[Deviation]:
        found: dict[str, dict[int, Deviation]] = {}
        for i, _ in context.layers:
            if (hit := detect(attention_in(context, i))) is not None:
                found.setdefault(hit.code, {})[i] = hit
        for hits in found.values():
            changes = [hit.changes for hit in hits.values() if hit.changes]
            yield replace(
                next(iter(hits.values())),
                changes=combine(changes) if changes else None,
                lines=[line for hit in hits.values() for line in hit.lines],
                layers=list(hits),
            )

    return detect_all


def with_formula(
    detect: Callable[[LayerAttention, AttentionFormula], Deviation | None],
) -> Detector:
    """Run a detector in every layer whose formula is known."""

    @wraps(detect)
    def detect_one(layer: LayerAttention) -> Deviation | None:
        return None if layer.formula is None else detect(layer, layer.formula)

    return each_layer(detect_one)


@deviation(
    "q and k are rotated by their position (RoPE), but GPT-2 computes q·kᵀ without a rotation",
    "Remove the rotation. GPT-2's only positions are those of wpe.weight.",
)
@each_layer
def rope(layer: LayerAttention) -> Deviation | None:
    if not layer.attention.rotated and not layer.is_turned:
        return None
    letters = layer.attention.rotated or "qk"
    operands = [getattr(layer.op, letter).node for letter in letters]
    live = layer.graph.live_between(operands[:1], layer.layer.qkv)
    usual = [n for n in live if kind(n) in ("mul", "neg", "cat")]
    if layer.is_turned or not usual:  # after a norm, which multiplies too, or by a matrix
        graph = layer.graph
        others = [(n, a) for n in live for a in n.all_input_nodes if a not in graph.live]
        tables = [n for n, a in others if not graph.parameters_of[a]]
        usual = tables or [n for n, _ in others]
    place = source.running(layer.graph, usual or live)
    changes, message = None, ""
    if not layer.unknown:
        changes = _rotation(layer) if layer.attention.rotated else layer.own_attention
    if letters != "qk":
        verb = "is rotated by its" if len(letters) == 1 else "are rotated by their"
        message = (
            f"{listed([*letters])} {verb} position (RoPE), but GPT-2 rotates none of q, k and v"
        )
    return Deviation(f"h.{layer.i}.q", [place], changes=changes, message=message)


def _rotation(layer: LayerAttention) -> Changes | None:
    """Return the measured rotation; None if it could not be measured.

    It cannot be if the heads are not as wide as the checkpoint's.
    """
    context, name = layer.context, f"h.{layer.i}.attn.c_attn"
    if math.prod(layer.attention.q.index.shape[1::2]) != context.config.n_embd:
        return None
    weight, bias = context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    assigned = context.mapping.by_tensor
    if bias is None or f"{name}.bias" not in assigned:
        bias = torch.zeros(3 * context.config.n_embd, dtype=torch.float64)
    rotation = rotation_of(layer.graph, layer.attention, layer.layer.x1, weight, bias)
    return None if rotation is None else Changes(rotation={layer.i: rotation})


@deviation(
    "one projection computes both the key and the value, but GPT-2 has one projection for each",
    "heads = softmax(q @ k.transpose(-2, -1)) @ v",
)
@each_layer
def shared_kv(layer: LayerAttention) -> Deviation | None:
    changes = Changes(value_as_key={layer.i})
    shared = layer.attention.shared_kv
    return layer.deviation(layer.scores_line, changes=changes) if shared else None


@detects("missing_ln")
@each_layer
def unnormed(layer: LayerAttention) -> Deviation | None:
    if not (letters := layer.attention.raw):
        return None
    verb = "is" if len(letters) == 1 else "are"
    message = (
        f"{listed([*letters])} {verb} projected from the residual stream itself, but GPT-2 "
        "projects q, k and v from its norm, ln_1"
    )
    nodes = [n for n in layer.layer.qkv if layer.layer.x1 not in layer.graph.ancestors[n]]
    place = source.running(layer.graph, nodes)
    changes, tensors = Changes(unnormed={layer.i: letters}), f"h.{layer.i}.ln_1"
    return layer.deviation(
        place, changes=changes, tap="q", message=message, tensors=tensors, raw=letters
    )


@deviation(
    "the heads are merged without transposing them back, but GPT-2 concatenates the heads of each "
    "token",
    "heads.transpose(1, 2).contiguous().view(B, T, C)",
)
@each_layer
def no_head_merge_transpose(layer: LayerAttention) -> Deviation | None:
    if not layer.attention.unmerged:
        return None
    end = layer.layer.out_proj or layer.layer.attn
    merging = layer.graph.live_between([end], [layer.op.out.node])
    place = source.running(layer.graph, merging, *VIEWS) or layer.scores_line
    start, view = merged(layer.attention.heads), token_view(layer.graph, layer.layer.heads)
    assert view is not None  # found as one vector per token when the projection was mapped
    merge = function_between(layer.graph, start, view)
    return layer.deviation(
        place, changes=Changes(functions={f"h.{layer.i}.heads": [merge]}), tap="attn"
    )


@detects("extra_operation")
@each_layer
def changed_heads(layer: LayerAttention) -> Deviation | None:
    if not layer.attention.changed_heads:
        return None
    graph, start, end = layer.graph, merged(layer.attention.heads), layer.layer.heads
    ends = [op.out.node for op in layer.layer.attention_ops]
    nodes = [n for n in graph.on_paths(ends, [end]) if kind(n) not in MOVES | JOINS]
    if not nodes or (view := token_view(graph, end)) is None:
        return None
    changes = Changes(functions={f"h.{layer.i}.heads": [function_between(graph, start, view)]})
    values = operations(nodes, "the heads", "their projection")
    return layer.deviation(*map(graph.place, nodes), changes=changes, tap="attn", **values)


@deviation(
    "the input of attention is used as {found} without a projection, but GPT-2 projects q, k and v",
    "self.c_attn = nn.Linear({n_embd}, 3 * {n_embd})",
)
@each_layer
def no_qkv_projection(layer: LayerAttention) -> Deviation | None:
    if not (letters := layer.attention.unprojected):
        return None
    operands = [getattr(layer.op, letter).node for letter in letters]
    place = source.running(layer.graph, layer.graph.on_paths([layer.layer.x1], operands))
    place = place or layer.graph.place(layer.op.product)  # the product reads the input itself
    weights: dict[str, Tensor | None] = {}
    for tensor, empty in (("weight", torch.eye), ("bias", torch.zeros)):
        hf = f"h.{layer.i}.attn.c_attn.{tensor}"
        absent = layer.context.unmatched.partly.get(hf, "")
        if {*absent} >= {*letters}:
            parts = list(layer.context.weights[hf].chunk(3, dim=-1))
            for letter in absent:
                parts["qkv".index(letter)] = empty(parts[0].shape[-1], dtype=parts[0].dtype)
            weights[hf] = torch.cat(parts, dim=-1)
    values = {"found": listed([*letters]), "n_embd": layer.context.config.n_embd}
    tap = f"h.{layer.i}.{letters[0]}"
    return Deviation(tap, [place], values, Changes(weights=weights))


@deviation(
    "q, k or v is reshaped from (B, T, C) to heads without a transpose, which mixes tokens and "
    "heads, but GPT-2 splits the channels of each token",
    "q.view(B, T, H, D).transpose(1, 2)",
)
@each_layer
def no_head_split_transpose(layer: LayerAttention) -> Deviation | None:
    if layer.attention.over_heads:
        message = (
            "q, k and v are passed to attention as (B, T, H, D), so each token attends from head "
            "to head and reads no other token, but GPT-2's heads attend to tokens"
        )
        changes = layer.own_attention
        return layer.deviation(layer.scores_line, changes=changes, tap="heads", message=message)
    if not layer.unsplit:
        return None
    operand = getattr(layer.op, layer.unsplit[0])
    path = layer.graph.ancestors[operand.node] | {operand.node}
    place = source.running(layer.graph, [n for n in layer.before if n in path], *VIEWS)
    place = place or layer.scores_line
    return layer.deviation(place, changes=layer.own_attention, tap="heads")


@deviation(
    "{n_head} query heads share {found} of keys and values, but in GPT-2 every query head "
    "has its own, so c_attn cannot be loaded",
    "self.c_attn = nn.Linear({n_embd}, 3 * {n_embd})",
)
@each_layer
def grouped_query_attention(layer: LayerAttention) -> Deviation | None:
    kv_heads = layer.attention.kv_heads
    if not kv_heads:
        return None
    place = layer.graph.place(layer.op.k.node) or layer.scores_line
    keys = layer.graph.between([layer.op.k.node], [layer.layer.x1])
    projections = [n for n in layer.layer.qkv if n in keys]
    built = layer.context.built_between(projections, [layer.layer.x1])
    lines = [place, source.running(layer.graph, projections), built]
    values = {
        "found": f"{kv_heads} head{'s' * (kv_heads > 1)}",
        "n_head": layer.attention.q.index.shape[1],
        "n_embd": layer.context.config.n_embd,
    }
    return Deviation(f"h.{layer.i}.q", lines, values)


@deviation(
    "q and k are normalized before their product, but GPT-2 uses them as they are projected",
    "Remove the normalization of q and k.",
)
@each_layer
def qk_norm(layer: LayerAttention) -> Deviation | None:
    if layer.unsplit or not layer.is_normalized:
        return None
    kinds = ("layer_norm", "rms_norm", "_fused_rms_norm", "linalg_vector_norm", "norm", "rsqrt")
    graph, model = layer.graph, layer.context.model
    norms = [n for n in layer.before if kind(n) in kinds]
    place = source.running(graph, norms)
    place = place or source.running(graph, layer.before, "div", "mul", "sum", "mean")
    of_modules = [source.submodule_call(graph, model, n, layer.op.product) for n in norms]
    calls = [line for line in of_modules if line is not None]
    lines = [*calls, place or layer.scores_line, *source.calls(graph, layer.before, place)]
    return layer.deviation(*lines, changes=layer.own_attention)


@deviation(
    "masked scores are set to {found:g}, which the softmax does not exclude, so tokens attend to "
    "later tokens, but GPT-2 sets them to the lowest value of the data type",
    'scores.masked_fill(mask, float("-inf"))',
)
@each_layer
def mask_value(layer: LayerAttention) -> Deviation | None:
    found = layer.mask_value or layer.added_mask
    if found is None:
        return None
    node, value, *others = found
    message = ""
    if layer.mask_value is None:
        added = f", and {others[0]:g} to all others" if others[0] else ""
        message = (
            f"the mask adds {{found:g}} to the scores of later tokens{added}, so the softmax does "
            "not exclude them, but GPT-2 sets them to the lowest value of the data type"
        )
    return layer.deviation(layer.graph.place(node), message=message, found=value)


@deviation(
    "{found}, but GPT-2 computes it from the token itself",
    "Remove the shift.",
)
@each_layer
def time_shift(layer: LayerAttention) -> Deviation | None:
    if layer.shift is None:
        return None
    name, distance, node = layer.shift
    found = f"{name} of each token is computed from {_distant(distance)}"
    place = layer.graph.place(node)
    indirect = layer.attention.indirect and layer.formula is not None
    changes = layer.own_attention if indirect else None
    norm, order = layer.context.places.named.get(f"h.{layer.i}.ln_1"), layer.graph.order
    tap = "ln_1" if norm is not None and order[node] < order[norm.end] else "q"
    return Deviation(f"h.{layer.i}.{tap}", [place], {"found": found}, changes, evidence=SHIFTED)


def _distant(distance: int) -> str:
    tokens = f"the token {abs(distance)} position{'s' * (abs(distance) > 1)}"
    return f"{tokens} {'before' if distance > 0 else 'after'} it"


@detects("time_shift")
def shifted_embedding(context: DiagnosisContext) -> Iterator[Deviation]:
    graph, embed = context.graph, context.anatomy.embed
    moving = [n for n in graph.live_between([embed], [graph.input]) if kind(n) in SHIFTS]
    if moving and (distance := shifted_ids(graph, embed)):
        of = "the token at the mirrored position, because the ids are reversed"
        of = of if distance == REVERSED else _distant(int(distance))
        found = f"the embedding of each token is computed from {of}"
        place = source.running(graph, moving)
        yield Deviation("embed", [place], {"found": found}, evidence=SHIFTED)


@deviation(
    "the weights of the values {found}, but GPT-2 computes them as the softmax of the masked and "
    "scaled scores q·kᵀ",
    'weights = scores.masked_fill(mask, float("-inf")).softmax(dim=-1)',
)
@each_layer
def other_attention(layer: LayerAttention) -> Deviation | None:
    if not layer.has_other_formula or layer.changed_projections:
        return None
    lines = [layer.graph.place(layer.op.product)]
    if layer.op.others:
        scores = [*layer.op.others, *([layer.op.scores] if layer.op.scores else [])]
        lines += map(layer.graph.place, scores)
        found = f"are computed from {1 + len(layer.op.others)} products of queries and keys, "
        summed = len(layer.live(SOFTMAXES)) == 1
        found += "which are added before the softmax" if summed else "as in differential attention"
    elif layer.first_nan is not None:
        return None
    elif layer.is_transposed:
        found = "are transposed before they are multiplied with v"
    elif layer.attention.indirect:
        found = "depend on other tokens than the query and the keys"
    else:
        found, lines = "have a formula that is unknown to compat", [layer.scores_line]
    result = layer.deviation(*lines, found=found)
    if layer.op.others and layer.unknown:  # its projections have other widths, too
        return replace(result, tap=f"h.{layer.i}.q", changes=None)
    return result


@deviation(
    "{found} computes NaN here, as in 0 · inf, so every logit is NaN",
    'scores = scores.masked_fill(mask, float("-inf"))',
)
@each_layer
def nan_scores(layer: LayerAttention) -> Deviation | None:
    if not layer.has_other_formula or layer.op.others:
        return None
    if (node := layer.first_nan) is None:
        return None
    return Deviation(f"h.{layer.i}.probs", [layer.graph.place(node)], {"found": kind(node)})


@detects("extra_operation")
@each_layer
def changed_projections(layer: LayerAttention) -> Deviation | None:
    if not layer.changed_projections:
        return None
    place = source.running(layer.graph, layer.changed_projections)
    values = operations(
        layer.changed_projections, "the projections of q, k and v", "their products"
    )
    if layer.attention.indirect:
        return layer.deviation(place, changes=layer.own_attention, **values)
    return Deviation(f"h.{layer.i}.q", [place], values)


@detects("extra_operation")
@each_layer
def added_term(layer: LayerAttention) -> Deviation | None:
    if not layer.added_terms or not layer.is_normalized:  # then changed_projections reports it
        return None
    names = list(layer.added_terms)
    message = (
        f"a tensor is added to the {'projection' if len(names) == 1 else 'projections'} of "
        f"{listed(names)}, such as an embedding of the ids, but GPT-2 adds none"
    )
    lines = map(layer.graph.place, layer.added_terms.values())
    changes = layer.own_attention
    return layer.deviation(*lines, changes=changes, message=message, passed_on=True)


@deviation(
    "the softmax is computed over {found}, but GPT-2 computes it over the keys",
    "scores.softmax(dim=-1)",
)
@with_formula
def softmax_dim(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if formula.axis == -1:
        return None
    nodes = layer.live(SOFTMAXES)
    place = source.torch_built(layer.context.model, nodes) or layer.softmax_line
    found = layer.deviation(place, found=SOFTMAX_AXES[formula.axis])
    return replace(found, changes=None) if layer.weights.isnan().any() else found


@deviation(
    "{found}, so the weights of a query do not sum to 1, but GPT-2 computes them with a softmax",
    "scores.softmax(dim=-1)",
)
@with_formula
def other_softmax(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if not formula.plus_one:
        return None
    ends = layer.live(frozenset({"div", "mul", *SOFTMAXES}))
    place = source.running(layer.graph, reversed(ends))
    calls = source.calls(layer.graph, ends, place)
    return layer.deviation(place, *calls, found="the softmax adds 1 to the sum of exponentials")


@detects("other_softmax")
@each_layer
def repeated_softmax(layer: LayerAttention) -> Deviation | None:
    """Detect a softmax of attention weights."""
    if not layer.is_unknown or not layer.is_softmaxed_twice:
        return None
    place = source.running(layer.graph, layer.live(SOFTMAXES)[-1:])
    message = "a softmax is applied to the result of a softmax, but GPT-2 applies one softmax"
    return layer.deviation(place, message=message)


@detects("no_mask")
@each_layer
def no_mask_of_unknown_attention(layer: LayerAttention) -> Deviation | None:
    if not layer.is_unknown or layer.attention.indirect or layer.is_transposed:
        return None
    if layer.first_nan is not None or not layer.attends_to_later_tokens:
        return None
    return layer.deviation(layer.softmax_line)


@detects("other_softmax")
@each_layer
def no_softmax(layer: LayerAttention) -> Deviation | None:
    """Detect weights that are a function of each score."""
    if layer.pairwise is None:
        return None
    functions = layer.live(ACTIVATIONS)
    found = f"the {kind(functions[0])} of each score is" if functions else "each score is"
    place = source.running(layer.graph, functions) or layer.scores_line
    found += " the weight of its value"
    return layer.deviation(place, found=found)


@detects("no_mask")
@each_layer
def no_mask_without_softmax(layer: LayerAttention) -> Deviation | None:
    if layer.pairwise is None or (layer.pairwise.triu(1) == 0).all():
        return None
    return layer.deviation(layer.softmax_line)


@deviation(
    "{found} is applied to the attention scores, but GPT-2's softmax reads them unchanged",
    "scores = (q @ k.transpose(-2, -1)) / math.sqrt({d_head})",
)
@with_formula
def changed_scores(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if formula.cap is None:
        return None
    place = source.running(layer.graph, layer.live(frozenset({"tanh"}))) or layer.scores_line
    found = f"a soft cap at ±{formula.cap:.6g}"
    return layer.deviation(place, found=found, d_head=layer.context.config.d_head)


@detects("changed_scores")
@each_layer
def added_scores(layer: LayerAttention) -> Deviation | None:
    if layer.added_scores is None:
        return None
    message = (
        "the scores of an earlier layer are added to the attention scores, but GPT-2's softmax "
        "reads those of its own layer"
    )
    place, d_head = layer.graph.place(layer.added_scores), layer.context.config.d_head
    changes = layer.own_attention
    return layer.deviation(place, changes=changes, message=message, found="a sum", d_head=d_head)


@detects("extra_projection")
@each_layer
def mixed_heads(layer: LayerAttention) -> Deviation | None:
    if not layer.mixing:
        return None
    message = (
        "the attention scores or probabilities of different heads are mixed (talking heads), but "
        "GPT-2's heads are independent of each other"
    )
    lines, changes = map(layer.graph.place, layer.mixing), layer.own_attention
    values = {"branch": "attention", "next": "the MLP"}
    return layer.deviation(*lines, changes=changes, message=message, **values)


@deviation(
    "{found}, but GPT-2's scores do not depend on the distance",
    "scores = q @ k.transpose(-2, -1) / math.sqrt(d_head)  # without a bias",
)
@with_formula
def position_bias(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if formula.bias is None:
        return None
    graph = layer.graph

    def is_bias(value: Tensor) -> bool:
        return bool(((value != 0) & (value.abs() < 1e3)).any())

    adds = [
        n for n in layer.live(frozenset({"add", "sub", *SDPA}))
        if any(map(is_bias, graph.run([a for a in n.all_input_nodes if a not in graph.live], {})))
    ]  # fmt: skip
    place = source.running(graph, adds) or layer.softmax_line
    model, product = layer.context.model, layer.op.product
    calls = (source.submodule_call(graph, model, node, product) for node in adds[:1])
    return layer.deviation(place, *calls, found=described_bias(formula.bias))


@detects("position_bias")
@each_layer
def relative_scores(layer: LayerAttention) -> Deviation | None:
    if not layer.adds_relative_scores:
        return None
    above, key = layer.graph.ancestors, layer.op.k.node
    sums = [n for n in layer.live(frozenset({"add"})) if len(live_inputs(layer.graph, n)) == 2]
    of_key = {n: [key in above[a] | {a} for a in live_inputs(layer.graph, n)] for n in sums}
    adding = [n for n in sums if sum(of_key[n]) == 1]
    place = source.running(layer.graph, adding) or layer.scores_line
    found = "a term that depends on the query and the position of the key is added to the scores"
    return layer.deviation(place, found=found)


@deviation(
    "the attention weights are multiplied by {found:.4g} after the softmax, but GPT-2's weights "
    "sum to 1",
    "scores.softmax(dim=-1) @ v",
)
@with_formula
def scaled_probs(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if formula.total == 1:
        return None
    softmax, above = {*layer.live(SOFTMAXES)}, layer.graph.ancestors
    scaled = layer.live(frozenset({"mul", "div"}))
    factors = [n for n in scaled if softmax & above[n]]
    place = source.running(layer.graph, factors) or layer.softmax_line
    return layer.deviation(place, found=formula.total)


@deviation(
    "the mask is applied after the softmax, {effect}, but GPT-2 masks the scores before it",
    'scores.masked_fill(mask, float("-inf")).softmax(dim=-1)',
)
@with_formula
def mask_after_softmax(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if not formula.after:
        return None
    masks = reversed(layer.live(frozenset({"mul", "masked_fill", "where"})))
    place = source.running(layer.graph, masks) or layer.scores_line
    return layer.deviation(place, effect="so the probabilities do not sum to 1")


@detects("mask_after_softmax")
def renormalized_mask(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect a mask after the softmax whose rows are divided by their sums (equivalent)."""
    if not context.layers:
        return
    layer = attention_in(context, 0)
    softmaxes = {n for n in layer.inside if kind(n) in SOFTMAXES}
    masks = [node for node, _ in _masks_like_gpt2(layer)]
    late = [node for node in masks if context.graph.ancestors[node] & softmaxes]
    if layer.op.scores is not None and late == masks and late:  # none hides them before it
        values = {"effect": "and the rows are divided by their sums, which is equivalent"}
        yield Deviation(None, [source.running(context.graph, late)], values, severity="info")


@deviation(
    "masked scores are set to {found:g}, which changes nothing unless a visible score is as low, "
    "but GPT-2 uses the lowest value of the data type",
    "torch.finfo(scores.dtype).min",
    severity="info",
)
def finite_mask(context: DiagnosisContext) -> Iterator[Deviation]:
    masks = _masks_like_gpt2(attention_in(context, 0)) if context.layers else ()
    for node, values in masks:
        lowest = min(value.min().item() for value in values)
        if -1e30 < lowest <= -1e3:
            place = context.graph.place(node)
            yield Deviation(None, [place], {"found": lowest})
            return


def _masks_like_gpt2(layer: LayerAttention) -> Iterator[tuple[Node, list[Tensor]]]:
    """Yield the operations that mask the same positions as GPT-2, with the values that they apply.

    The values are tensors and numbers that do not depend on the ids. Masks of other positions are
    separate deviations.
    """
    graph, formula = layer.graph, layer.formula
    if formula is None or formula.after or formula.axis != -1 or formula.allowed.all():
        return
    for node in layer.live(MASKS | SDPA):
        constants = [a for a in node.all_input_nodes if a not in graph.live and size(a)]
        sign = -1 if kind(node) == "sub" else 1
        values = [sign * value.double() for value in graph.run(constants, {})]
        values += [torch.tensor(a).double() for a in node.args if isinstance(a, float)]
        if values:
            yield node, values


@deviation(
    "there is no causal mask, so every token attends to the tokens after it, but GPT-2 masks them",
    'scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))',
)
@with_formula
def no_mask(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    if not formula.allowed.all():
        return None
    place = layer.softmax_line
    unused = place and source.unused_result(place, {"masked_fill"})
    if unused is None:
        return layer.deviation(place)
    message = (
        "masked_fill does not change the scores in place, and its result is not used, so every "
        "token attends to the tokens after it, but GPT-2 masks them"
    )
    return layer.deviation(unused, place, message=message)


@with_formula
def _other_mask(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    """Detect a mask that hides other keys than GPT-2's."""
    code, values = mask_code(formula.allowed)
    if code in (None, "no_mask") or (formula.axis != -1 and layer.weights.isnan().any()):
        return None  # a softmax over another axis of −∞ alone computes NaN, whatever the mask
    # The line that creates the mask, and the one that applies it.
    applied = source.running(layer.graph, layer.masked) or layer.softmax_line
    found = layer.deviation(_mask_line(layer), applied, code=code, **values)
    without_keys = layer.weights.isnan().all(-1)[0, 0].nonzero()  # tokens without a visible score
    if len(without_keys):  # nothing can be compared with NaN
        message = (
            f"token {int(without_keys[0])} attends to no token, so its probabilities are NaN, but "
            "in GPT-2 each token attends to itself and to all tokens before it"
        )
        return replace(found, changes=None, message=message)
    return found


for _code, _message in (
    (
        "sliding_window",
        "each token attends only to the last {found} tokens, but in GPT-2 it attends to all tokens "
        "up to itself",
    ),
    (
        "mask_off",
        "token {token} attends to {found}, but in GPT-2 it attends to tokens 0 to {token}",
    ),
):
    _fix = "mask = torch.ones(T, T, dtype=torch.bool).triu(diagonal=1)  # True: hidden"
    deviation(_message, _fix, code=_code)(_other_mask)


def _mask_line(layer: LayerAttention) -> Place | None:
    """Return the line that creates the mask or its buffer."""
    graph, model = layer.graph, layer.context.model
    constant = [n for n in layer.inside if n not in graph.live]
    makers = [n for n in constant if kind(n) in ("tril", "triu", "ge", "gt", "le", "lt")]
    if makers and (place := source.running(graph, makers)):
        return place
    for node in constant:
        if node in graph.buffers and (place := source.building(model, graph.buffers[node])):
            return source.near(place, r"\btri[lu]?\(")
    return None


@with_formula
def _other_scale(layer: LayerAttention, formula: AttentionFormula) -> Deviation | None:
    """Detect a scale that differs from the checkpoint's."""
    config, scale = layer.context.config, formula.scale
    tolerance = 1e-2 if layer.is_normalized else 1e-6
    if layer.unknown and abs(scale - 1) < 1e-6:
        return None  # q may be scaled before the place from which attention is known
    # If the number of heads differs, the expected scale is that of the model's head size.
    expected = config.attention_scale(layer.i) * math.sqrt(config.d_head / layer.piece.D)
    if abs(scale - expected) <= tolerance * abs(expected):
        return None
    code, values = scale_code(scale, expected, config, tolerance)
    return layer.deviation(_scale_line(layer), code=code, **values)


def _scale_line(layer: LayerAttention) -> Place | None:
    """Return the line that multiplies scores, q or k by a number, or else that of the scores."""
    graph, op = layer.graph, layer.op
    before = graph.between([op.q.node, op.k.node], layer.layer.qkv)
    numbers = [
        n for n in [*before, *layer.inside]
        if n in graph.live and kind(n) in ("mul", "div")
        and all(size(a) == () for a in n.all_input_nodes[1:])
    ]  # fmt: skip
    return source.running(graph, numbers) or layer.scores_line


for _code, _message, _fix in (
    (
        "no_attn_scale",
        "the attention scores are not scaled, but GPT-2 divides them by √{d_head}",
        "(q @ k.transpose(-2, -1)) / math.sqrt({d_head})",
    ),
    (
        "scale_by_d_model",
        "the attention scores are divided by √{n_embd}, the embedding width, but GPT-2 divides "
        "them by √{d_head}, the head size",
        "(q @ k.transpose(-2, -1)) / math.sqrt({d_head})",
    ),
    (
        "wrong_scale",
        "the attention scores are multiplied by {found:.6g}, but GPT-2 multiplies them by "
        "{expected:.6g}",
        "(q @ k.transpose(-2, -1)) * {expected:.6g}",
    ),
):
    deviation(_message, _fix, code=_code)(_other_scale)


@deviation(
    "{what} are computed in {found}, but GPT-2 computes them in the model's data type",
    "Keep the cast, which improves the accuracy in half precision.",
    severity="info",
)
def attn_upcast(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect a cast of the scores, which only the source shows in a float32 model."""
    if not context.layers:
        return
    graph, layer = context.graph, context.anatomy.layers[0]
    operands, ends = operands_of(layer), [op.out.node for op in layer.attention_ops]
    # A rotation in float32 may return the model's type.
    starts = operands if context.mapping.attentions[0].rotated else layer.qkv
    for node in graph.between([*ends, *operands], starts):
        place = graph.place(node) if node in graph.live else None
        cast = place and re.search(r"\.(float|double)\(\)|torch\.(float32|float64)", place.text)
        if cast:
            dtype = cast[2] or {"float": "float32", "double": "float64"}[cast[1]]
            what = "the attention weights" if "softmax" in cast.string else "the attention scores"
            yield Deviation(None, [place], {"found": dtype, "what": what})
            return


@deviation("the model has {heads}, but the checkpoint has {expected}", "n_head={expected}")
def n_head_mismatch(context: DiagnosisContext) -> Iterator[Deviation]:
    expected = context.config.n_head
    by_layer = [attention.q.index.shape[1] for attention in context.mapping.attentions]
    for found in dict.fromkeys(by_layer):
        if found == expected:
            continue
        layers = [i for i, n_head in enumerate(by_layer) if n_head == found]
        op = context.anatomy.layers[layers[0]].attention_ops[0]
        place = context.graph.place(op.q.node)
        heads = "1 head" if found == 1 else f"{found} heads"
        width = context.mapping.attentions[layers[0]].q.index.shape[3]
        is_as_wide = found * width == context.config.n_embd
        heads += "" if is_as_wide else f" of {width} channels"
        values = {"found": found, "heads": heads, "expected": expected}
        pattern = rf"(\w+) *= *{found}\b"
        written = [
            line for line in source.mentions(context.model, pattern)
            if any(role_of(name) == "n_head" for name in re.findall(pattern, line.text))
        ]  # fmt: skip
        can_change = is_as_wide and len(layers) == len(by_layer)
        changes = Changes(n_head=found) if can_change else None
        lines = [place, *written]
        yield Deviation(f"h.{layers[0]}.probs", lines, values, changes, layers=layers)


@deviation(
    "q, k and v are stored head by head, but Hugging Face stores all of q, then k, then v",
    "Load the weights with this name map, which reorders them.",
    severity="info",
)
def head_interleaved_qkv(context: DiagnosisContext) -> Iterator[Deviation]:
    op = _fused(context)
    axes = [part.axes for part in op.parts if "h" in part.axes] if op else []
    if any("q" in a and a.index("h") < a.index("q") for a in axes):
        kinds = ("view", "reshape", "_unsafe_view", "unflatten", "split", "chunk")
        yield Deviation(None, [_split_line(context, *kinds)])


def _fused(context: DiagnosisContext) -> Fused | None:
    """Return how q, k and v of the first layer are stored in one parameter, if they are."""
    assigned = context.mapping.by_tensor.get("h.0.attn.c_attn.weight")
    return assigned[1] if assigned is not None and isinstance(assigned[1], Fused) else None


def _split_line(context: DiagnosisContext, *kinds: str) -> Place | None:
    """Return the line that splits the projection into q, k and v, or else that builds it."""
    graph, layer = context.graph, context.anatomy.layers[0]
    live = graph.live_between(operands_of(layer), layer.qkv)
    return source.running(graph, live, *kinds) or context.owner_of("h.0.attn.c_attn.weight")


def _swapped(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect two of q, k and v with exchanged names or order in the parameter."""
    if "h.0.attn.c_attn.weight" not in context.mapping.by_tensor:
        return
    op, layer, named = _fused(context), context.anatomy.layers[0], _named_roles(context)
    stored = [part.qkv for part in op.parts] if op else []
    for code, one, other in (("qk_swapped", "q", "k"), ("kv_swapped", "k", "v")):
        order = next((order for order in stored if SWAPPED.get(order) == code), "")
        if order and not context.mapping.attentions[0].shared_kv:
            message = (
                f"{', '.join(order[:-1])} and {order[-1]} are stored in this order in one "
                "parameter, but Hugging Face stores q, then k, then v"
            )
            yield Deviation(None, [_split_line(context, *SPLITS)], message=message, code=code)
        if named.get(one) == other or named.get(other) == one:
            path = context.graph.between([getattr(layer.attention_ops[0], one).node], [layer.x1])
            place = source.running(context.graph, [n for n in layer.qkv if n in path])
            yield Deviation(None, [place], code=code)


def _named_roles(context: DiagnosisContext) -> dict[str, str]:
    """Return which of q, k and v the name of each one's parameter suggests."""
    graph, layer = context.graph, context.anatomy.layers[0]
    operands = {role: [getattr(op, role).node for op in layer.attention_ops] for role in "qkv"}
    parameters = {r: {*graph.parameters_between(n, [layer.x1])} for r, n in operands.items()}
    roles: dict[str, str] = {}
    for role, nodes in parameters.items():
        shared = set().union(*(parameters[x] for x in parameters if x != role))
        names = [graph.names[n] for n in nodes - shared]
        suggested = {x for name in names for x, pattern in ROLES.items() if pattern.search(name)}
        if len(suggested) == 1:
            roles[role] = suggested.pop()
    return roles


for _code, _name, _other in (("qk_swapped", "query", "key"), ("kv_swapped", "key", "value")):
    deviation(
        f"the parameter that is named as the {_name} is used as the {_other}, so compat mapped "
        "both parameters by their use",
        f"Load the weights with this name map, or swap {_name[0]} and {_other[0]}.",
        severity="info",
        code=_code,
    )(_swapped)
