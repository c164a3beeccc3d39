"""The homes of all tensors: every layer traced, or taken over from a layer that does the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from compat.adaptation.anatomy.parts import Anatomy, Layer
from compat.adaptation.anatomy.placement import NormPlaces
from compat.adaptation.mapping.assignments import Assignments, Attention, BatchFirst, Home
from compat.adaptation.mapping.embeddings_and_norms import end_homes, fit_sizes, norm_homes
from compat.adaptation.mapping.layers import layer_homes
from compat.adaptation.mapping.views import head_view
from compat.adaptation.tracing.graph import size
from compat.config import GPT2Config
from compat.errors import AdaptError


def find_mapping(anatomy: Anatomy, places: NormPlaces, config: GPT2Config) -> Assignments:
    """Trace every layer; a layer that is computed just as an earlier one is not traced again.

    Raises:
        AdaptError: a piece that is no projection per token, or parameters that two pieces share.
    """
    mapping = Assignments()
    traced: dict[int, dict[str, Home]] = {}
    for i, layer in enumerate(anatomy.layers):
        twin = next(
            ((j, pairs) for j in traced if (pairs := _twins(anatomy, j, i)) is not None), None
        )
        mapping.attentions.append(_views(anatomy, layer, i))
        if twin is None:
            homes = traced[i] = layer_homes(anatomy, layer, i, mapping.attentions[-1])
        else:
            j, pairs = twin
            homes = {
                hf: (tuple(pairs[node] for node in nodes), op)
                for hf, (nodes, op) in traced[j].items()
            }
            before = mapping.attentions[j]
            mapping.attentions[-1] = replace(
                mapping.attentions[-1],
                q_factor=before.q_factor,
                k_factor=before.k_factor,
                rotated=before.rotated,
                shared_kv=before.shared_kv,
                unmerged=before.unmerged,
            )
        mapping.by_tensor.update({f"h.{i}.{hf}": home for hf, home in homes.items()})
    for hf, norm in places.named.items():
        mapping.by_tensor.update(norm_homes(anatomy.graph, hf, norm))
    end_homes(anatomy, mapping)
    fit_sizes(anatomy, mapping, config)
    return mapping


def _views(anatomy: Anatomy, layer: Layer, i: int) -> Attention:
    graph, cores = anatomy.graph, layer.cores
    found = [
        head_view(cores, [getattr(core, name) for core in cores], graph.shape)
        for name in ("q", "k", "v", "out")
    ]
    B, T = graph.shape
    if size(cores[0].q.node)[cores[0].q.time] == B != T:
        place = graph.place(cores[0].product)
        where = f" at {place.file}:{place.line}" if place else ""
        raise BatchFirst(
            f"layer {i}: attention runs over the sequences of the batch, not over the tokens"
            f"{where}; nn.MultiheadAttention needs batch_first=True for tensors (B, T, C)"
        )
    if any(view is None for view in found):
        raise AdaptError(
            f"layer {i}: q, k and v do not have the same heads and times (as with keys shared by "
            "several heads, or with a cache); GPT-2 has as many keys and values as queries"
        )
    q, k, v, heads = (view for view in found if view is not None)
    return Attention(q, k, v, heads)


def _twins(anatomy: Anatomy, j: int, i: int) -> dict[Node, Node] | None:
    """If layer i does what layer j does, node by node: the parameters of j and those of i."""
    graph = anatomy.graph

    def nodes_of(i: int) -> tuple[list[Node], Node]:
        layer = anatomy.layers[i]
        start = anatomy.layers[i - 1].out if i else anatomy.embed
        nodes = graph.between([layer.out], [start])
        # A mask that all layers share is computed amid the first, and before the others.
        return sorted(nodes, key=graph.live.__contains__), start

    (ours, start), (theirs, other) = nodes_of(j), nodes_of(i)
    if len(ours) != len(theirs):
        return None
    pairs = {start: other}
    for one, two in zip(ours, theirs, strict=True):
        if one.op != two.op or size(one) != size(two):
            return None
        if one.op == "call_function" and one.target != two.target:
            return None
        if (one in graph.names) != (two in graph.names):
            return None
        pairs[one] = two
        translated = torch.fx.map_arg((one.args, one.kwargs), lambda node: pairs.get(node, node))
        if one not in graph.names and str(translated) != str((two.args, two.kwargs)):
            return None
        if one in graph.values and one not in graph.names and one is not two:
            if not torch.equal(graph.values[one], graph.values[two]):
                return None
    return {one: two for one, two in pairs.items() if one in graph.names}
