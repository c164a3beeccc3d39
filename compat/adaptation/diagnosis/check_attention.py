"""Deviations of attention: scale, mask, softmax, rotation, heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Layer
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.attention_formula import (
    AttentionFormula,
    AttentionPiece,
    attention_of,
    rotation_of,
)
from compat.adaptation.diagnosis.context import Apply, Deviation, DiagnosisContext, sizes_of
from compat.adaptation.diagnosis.modified_reference import ModifiedReference
from compat.adaptation.tracing.contractions import SDPA
from compat.adaptation.tracing.graph import Graph, Place, kind, size
from compat.config import GPT2Config


def of_attention(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, config = case.graph, case.config
    seen: dict[str, Deviation] = {}
    for i, layer in case.layers:
        attention = case.mapping.attentions[i]
        formula = attention_of(graph, attention)
        for code, words, place, apply in _attention_codes(case, i, layer, formula):
            if code not in seen:
                tap = f"h.{i}.attn" if code == "no_head_merge_transpose" else f"h.{i}.probs"
                if code == "rope":
                    tap = f"h.{i}.q"
                seen[code] = Deviation(code, tap, place, words, _Several())
            several = seen[code].apply
            assert isinstance(several, _Several)
            several.changes.append(apply)
    yield from seen.values()
    yield from _harmless_masks(case)
    if attention_upcast := _upcast(case):
        yield attention_upcast
    heads = case.mapping.attentions[0].q.index.shape[1]
    if heads != config.n_head:
        place = source.running(graph, [case.anatomy.layers[0].cores[0].q.node])
        words = {"found": heads, "expected": config.n_head}

        def fewer(variant: ModifiedReference) -> None:
            variant.n_head = heads

        yield Deviation("n_head_mismatch", "h.0.probs", place, words, fewer)


def _value_as_key(i: int) -> Apply:
    def apply(variant: ModifiedReference) -> None:
        for name in (f"h.{i}.attn.c_attn.weight", f"h.{i}.attn.c_attn.bias"):
            if name in variant.weights:
                q, _, v = variant.weights[name].chunk(3, dim=-1)
                variant.weights = {**variant.weights, name: torch.cat([q, v, v], dim=-1)}

    return apply


SOFTMAXES = {"softmax", "_softmax", "exp", *SDPA}


class _Several:
    """The changes of several layers."""

    def __init__(self) -> None:
        self.changes: list[Apply] = []

    def __call__(self, variant: ModifiedReference) -> None:
        for change in self.changes:
            change(variant)


def _attention_codes(
    case: DiagnosisContext, i: int, layer: Layer, formula: AttentionFormula | None
) -> Iterator[tuple[str, dict[str, Any], Place | None, Apply]]:
    graph, config = case.graph, case.config
    core, attention = layer.cores[0], case.mapping.attentions[i]
    inside = [n for n in graph.between([core.out.node], [core.q.node, core.k.node, core.v.node])]
    products = [n for n in (core.scores, core.product) if n is not None]
    at_scores = source.running(graph, products)
    if attention.rotated:
        turning = graph.between([core.q.node], layer.qkv)
        place = source.running(graph, [n for n in turning if n in graph.live], "mul", "neg", "cat")
        yield "rope", {}, place, _rope(case, i, layer)
    if attention.shared_kv:
        yield "shared_kv", {}, at_scores, _value_as_key(i)
    if attention.unmerged:
        place = source.running(graph, _after(graph, core.out.node, layer), "view", "reshape",
                               "_unsafe_view", "flatten", "clone")  # fmt: skip
        yield "no_head_merge_transpose", {}, place or at_scores, lambda v: v.unmerged.add(i)
    if formula is None:
        unknown = {"found": "attention computes no masked softmax of scaled scores that is known"}
        own = AttentionPiece(graph, attention).heads
        yield "unexplained", unknown, at_scores, lambda v: v.attention.update({i: own})
        return

    def apply(variant: ModifiedReference) -> None:
        variant.attention[i] = formula

    softmaxes = [n for n in inside if n in graph.live and kind(n) in SOFTMAXES]
    T = formula.allowed.shape[0]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    masks = [n for n in inside if kind(n) in ("masked_fill", "where", "add", "mul", "sub")]
    if formula.axis != -1:
        over = {-2: "the queries", -3: "the heads", -4: "the batch"}[formula.axis]
        place = source.running(graph, softmaxes) or at_scores
        yield "softmax_dim", {"found": over}, torch_built(case, softmaxes, place), apply
    if formula.after:
        after = [n for n in reversed(inside) if n in graph.live and kind(n) in
                 ("mul", "masked_fill", "where")]  # fmt: skip
        effect = {"effect": "so that rows no longer sum to one"}
        yield "mask_after_softmax", effect, source.running(graph, after) or at_scores, apply
    if formula.allowed.all():
        yield "no_mask", {}, source.running(graph, softmaxes) or at_scores, apply
    elif not torch.equal(formula.allowed, causal):
        yield "mask_off", {"found": _seen(formula.allowed)}, _mask_place(case, masks, inside), apply
    # With another number of heads the scale is that of their own size.
    d_head = attention.q.index.shape[-1]
    expected = config.attention_scale(i) * math.sqrt(config.d_head / d_head)
    if abs(formula.scale - expected) > 1e-6 * abs(expected):
        words = {**sizes_of(config), "found": formula.scale, "expected": expected}
        yield _scale_code(formula.scale, config), words, _scale_place(case, layer, inside), apply


def _harmless_masks(case: DiagnosisContext) -> Iterator[Deviation]:
    """Masks that are not GPT-2's in the first layer, though they hide just what GPT-2's hide."""
    graph, core = case.graph, case.anatomy.layers[0].cores[0]
    formula = attention_of(graph, case.mapping.attentions[0])
    if formula is None or formula.after or formula.axis != -1 or formula.allowed.all():
        return
    inside = graph.between([core.out.node], [core.q.node, core.k.node, core.v.node])
    masks = [n for n in inside if n in graph.live and kind(n) in MASKING]
    softmaxes = {n for n in inside if kind(n) in SOFTMAXES}
    late = [n for n in masks if graph.ancestors[n] & softmaxes and _masked_with(graph, n)]
    if core.scores is not None and late:
        words = {"effect": "and divides by what is left, which is exact"}
        place = source.running(graph, late)
        yield Deviation("mask_after_softmax", None, place, words, severity="info")
    for node in masks:
        lowest = min([0.0, *(value.min().item() for value in _masked_with(graph, node))])
        if -1e30 < lowest <= -1e3:
            yield Deviation("finite_mask", None, source.running(graph, [node]), {"found": lowest})
            return


MASKING = {"masked_fill", "where", "add", "sub", "mul", *SDPA}


def _masked_with(graph: Graph, node: Node) -> list[Tensor]:
    """The tensors and numbers, not made of the ids, that a node joins with the scores."""
    dead = [a for a in node.all_input_nodes if a not in graph.live and size(a)]
    sign = -1 if kind(node) == "sub" else 1
    values = [sign * value.double() for value in graph.run(dead, {})]
    numbers = [a for a in node.args if isinstance(a, float)]
    filled = [torch.tensor(number).double() for number in numbers]
    return values + filled


def _scale_code(scale: float, config: GPT2Config) -> str:
    if abs(scale - 1) < 1e-6:
        return "no_attn_scale"
    by_width = 1 / math.sqrt(config.n_embd)
    return "scale_by_d_model" if abs(scale - by_width) < 1e-6 * by_width else "wrong_scale"


def _scale_place(case: DiagnosisContext, layer: Layer, inside: list[Node]) -> Place | None:
    """A product with a number, on the scores or on q and k before; else the scores themselves."""
    graph, core = case.graph, layer.cores[0]
    before = graph.between([core.q.node, core.k.node], layer.qkv)
    live = [n for n in [*before, *inside] if n in graph.live]
    numbers = [
        n for n in live
        if kind(n) in ("mul", "div") and all(size(a) == () for a in n.all_input_nodes[1:])
    ]  # fmt: skip
    products = [n for n in (core.scores, core.product) if n is not None]
    return source.running(graph, numbers) or source.running(graph, products)


def _after(graph: Graph, node: Node, layer: Layer) -> list[Node]:
    """The nodes between attention's product and its output projection."""
    end = layer.out_proj or layer.attn
    return [n for n in graph.between([end], [node]) if n in graph.live]


def torch_built(case: DiagnosisContext, nodes: list[Node], place: Place | None) -> Place | None:
    """Of a torch module among the nodes, the line that builds it."""
    built = (source.torch_module(case.model, n) for n in nodes if n in case.graph.live)
    return next((p for p in built if p), place)


def _mask_place(case: DiagnosisContext, masks: list[Node], inside: list[Node]) -> Place | None:
    """Where the mask is made: its tril or triu, or its buffer; else where it is applied."""
    graph = case.graph
    dead = [n for n in inside if n not in graph.live]
    makers = [n for n in dead if kind(n) in ("tril", "triu", "ge", "gt", "le", "lt")]
    if place := (source.running(graph, makers) if makers else None):
        return place
    for node in dead:
        if node in graph.buffers and (place := source.building(case.model, graph.buffers[node])):
            return source.naming(place, "tri")
    return source.running(graph, [n for n in masks if n in graph.live]) or source.running(
        graph, [n for n in inside if n in graph.live]
    )


def _seen(allowed: Tensor) -> str:
    """What token 5 sees, in words."""
    row = allowed[min(5, len(allowed) - 1)].nonzero().flatten().tolist()
    if not row:
        return "nothing"
    if row == list(range(row[0], row[-1] + 1)):
        return f"{row[0]} to {row[-1]}"
    return ", ".join(map(str, row))


def _rope(case: DiagnosisContext, i: int, layer: Layer) -> Apply:
    """The rotation that was measured, and no positions where the model has no place for them."""
    weight, bias = (case.weights.get(f"h.{i}.attn.c_attn.{x}") for x in ("weight", "bias"))
    if weight is None or f"h.{i}.attn.c_attn.bias" not in case.mapping.by_tensor or bias is None:
        bias = torch.zeros(3 * case.config.n_embd, dtype=torch.float64)
    assert weight is not None
    attention = case.mapping.attentions[i]
    rotation = rotation_of(case.graph, attention, layer.x1, weight, bias)
    learned = "wpe.weight" in case.mapping.by_tensor

    def apply(variant: ModifiedReference) -> None:
        if rotation is not None:
            variant.rotation[i] = rotation
        if not learned:
            variant.drop(["wpe.weight"])

    return apply


def _upcast(case: DiagnosisContext) -> Deviation | None:
    """A wider type on the way to the heads; in float32 a cast shows in the source alone."""
    graph, layer = case.graph, case.anatomy.layers[0]
    operands = [operand.node for core in layer.cores for operand in (core.q, core.k, core.v)]
    ends = [core.out.node for core in layer.cores]
    for node in graph.between([*ends, *operands], layer.qkv):
        place = graph.place(node) if node in graph.live else None
        named = place and re.search(r"\.(float|double)\(\)|torch\.(float32|float64)", place.text)
        if place is not None and named:
            wide = named[2] or {"float": "float32", "double": "float64"}[named[1]]
            return Deviation("attn_upcast", None, place, {"found": wide})
    return None
