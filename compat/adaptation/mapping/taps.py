"""Hidden states at the nodes of a graph, under the taps' names and in the reference's shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.parts import Anatomy
from compat.adaptation.anatomy.placement import NormPlaces
from compat.adaptation.mapping.assignments import Assignments
from compat.adaptation.mapping.views import View, head_view, merged, token_view
from compat.adaptation.tracing.graph import Graph, call
from compat.parity.trace import Trace
from compat.taps import tap_names

Taps = dict[str, View]


def find_taps(anatomy: Anatomy, homes: Assignments, places: NormPlaces) -> Taps:
    """Every tap that a node of the model shows, in execution order."""
    graph = anatomy.graph
    found: dict[str, View | None] = {"embed": token_view(graph, anatomy.embed)}
    for i, (layer, attention) in enumerate(zip(anatomy.layers, homes.attentions, strict=True)):
        # Where q and k are scaled before the product, each is compared without its share.
        found[f"h.{i}.q"] = _scaled(attention.q, attention.q_factor)
        found[f"h.{i}.k"] = _scaled(attention.k, attention.k_factor)
        found[f"h.{i}.v"] = merged(attention.v)
        probs = [core.probs for core in layer.cores]
        if all(operand is not None for operand in probs):
            view = head_view(layer.cores, [p for p in probs if p is not None], graph.shape)
            found[f"h.{i}.probs"] = view
        heads, by_head = token_view(graph, layer.heads), merged(attention.heads)
        whole = heads is not None and heads.index.shape == by_head.index.shape
        found[f"h.{i}.heads"] = heads if whole else by_head
        found[f"h.{i}.attn"] = token_view(graph, layer.attn)
        found[f"h.{i}.resid_mid"] = token_view(graph, layer.mid)
        found[f"h.{i}.fc"] = token_view(graph, layer.fc_end)
        found[f"h.{i}.act"] = token_view(graph, layer.act)
        found[f"h.{i}.mlp"] = token_view(graph, layer.mlp)
        found[f"h.{i}.out"] = token_view(graph, layer.out)
    for name, norm in places.named.items():
        if name not in places.post and name not in places.on_output:
            found[name] = token_view(graph, norm.end)
    found["logits"] = token_view(graph, graph.output)
    names = [name for name in tap_names(len(anatomy.layers)) if found.get(name) is not None]
    return _without_overlaps({name: view for name in names if (view := found[name]) is not None})


def _scaled(view: View, factor: float) -> View:
    whole = merged(view)
    return View(whole.nodes, whole.index, factor)


def _without_overlaps(taps: Taps) -> Taps:
    """A node can show one tap only, or the parts of several: of whole nodes the first tap stays."""
    seen: set[tuple[Node, ...]] = set()
    kept: Taps = {}
    for name, view in taps.items():
        if view.nodes not in seen:
            kept[name] = view
            seen.add(view.nodes)
    return kept


@torch.no_grad()
def trace_graph(
    graph: Graph, taps: Taps, input_ids: Tensor, forced: Mapping[str, Tensor] | None = None
) -> Trace:
    """Run the graph once and keep the hidden state at every tap.

    With `forced`, each tap is recorded and then replaced by the forced value, as in
    `compat.parity.trace`.

    Args:
        graph: run in the data type of its own values.
        taps: by name.
        input_ids: of the shape that the graph was traced with.
        forced: values for some or all taps, by name.
    """
    given: dict[Node, tuple[Tensor, Tensor]] = {}  # which elements to force, and to what
    for name, view in taps.items():
        if forced is not None and name in forced:
            marks = view.write(torch.ones_like(forced[name]))
            for node, value, mark in zip(view.nodes, view.write(forced[name]), marks, strict=True):
                given[node] = mark != 0, value
    env: dict[Node, Tensor] = {graph.input: input_ids}
    computed: dict[Node, Tensor] = {}
    shown = {node for view in taps.values() for node in view.nodes}
    for node in graph.between([graph.output], [graph.input]):
        if node in graph.values:
            env[node] = graph.values[node]
        elif node.op == "call_function":
            env[node] = call(node, env, double=False)
        if node in shown:
            computed[node] = env[node]
        if node in given:
            mark, value = given[node]
            env[node] = torch.where(mark, value.to(env[node].dtype), env[node])
    return {name: view.read([computed[n] for n in view.nodes]) for name, view in taps.items()}
