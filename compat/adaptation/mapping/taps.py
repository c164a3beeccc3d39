"""Hidden states at the nodes of a graph, by tap and in the reference's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy
from compat.adaptation.anatomy.norms import NormPlaces
from compat.adaptation.mapping.assignments import Assignments
from compat.adaptation.mapping.linear_maps import View, head_view, merged, token_view
from compat.adaptation.tracing.graph import Graph, call
from compat.parity.trace import Trace
from compat.tap import tap_names

Taps = dict[str, View]


def find_taps(anatomy: Anatomy, assignments: Assignments, places: NormPlaces) -> Taps:
    """Return every tap that some node of the model holds, in execution order."""
    graph = anatomy.graph
    found: dict[str, View | None] = {"embed": token_view(graph, anatomy.embed)}
    for i, (layer, attention) in enumerate(
        zip(anatomy.layers, assignments.attentions, strict=True)
    ):
        # Where q and k are scaled before their product, each is compared without its factor.
        found[f"h.{i}.q"] = replace(merged(attention.q), factor=attention.q_factor)
        found[f"h.{i}.k"] = replace(merged(attention.k), factor=attention.k_factor)
        found[f"h.{i}.v"] = merged(attention.v)
        probs = [op.probs for op in layer.attention_ops if op.probs is not None]
        if len(probs) == len(layer.attention_ops):
            found[f"h.{i}.probs"] = head_view(
                layer.attention_ops, probs, graph.shape, attention.sequences
            )
        heads = token_view(graph, layer.heads) if attention.unmerged else None
        by_head = merged(attention.heads)
        complete = heads is not None and heads.index.shape == by_head.index.shape
        found[f"h.{i}.heads"] = heads if complete else by_head
        nodes = {
            "attn": layer.attn, "resid_mid": layer.mid, "fc": layer.fc_end, "act": layer.act,
            "mlp": layer.mlp, "out": layer.out,
        }  # fmt: skip
        for name, node in nodes.items():
            found[f"h.{i}.{name}"] = token_view(graph, node)
    for name, norm in places.named.items():
        if name not in places.post and name not in places.on_output:
            found[name] = token_view(graph, norm.end)
    found["logits"] = token_view(graph, graph.output)
    taps: Taps = {}
    for name in tap_names(len(anatomy.layers)):
        view = found.get(name)
        # A whole node is at most one tap, but parts of a node can be several taps.
        if view is not None and all(view.nodes != other.nodes for other in taps.values()):
            taps[name] = view
    return taps


@torch.no_grad()
def trace_graph(
    graph: Graph, taps: Taps, input_ids: Tensor, forced: Mapping[str, Tensor] | None = None
) -> Trace:
    """Run the graph once and keep the hidden state at every tap.

    With `forced`, each tap is recorded and then replaced by the forced value, as in
    `compat.parity.trace`.

    Args:
        graph: the graph, which runs in the data type of its values.
        taps: the views to record, by name.
        input_ids: (B, T), of the shape that the graph was traced with.
        forced: values for some or all taps, by name.
    """
    forced_at: dict[Node, tuple[Tensor, Tensor]] = {}  # which elements are forced, to which values
    for name, view in taps.items():
        if forced is not None and name in forced:
            marks = view.write(torch.ones_like(forced[name]))
            for node, value, mark in zip(view.nodes, view.write(forced[name]), marks, strict=True):
                forced_at[node] = mark != 0, value
    env: dict[Node, Tensor] = {graph.input: input_ids}
    computed: dict[Node, Tensor] = {}
    tapped = {node for view in taps.values() for node in view.nodes}
    for node in graph.between([graph.output], [graph.input]):
        if node in graph.values:
            env[node] = graph.values[node]
        elif node.op == "call_function":
            env[node] = call(node, env, double=False)
        if node in tapped:
            computed[node] = env[node]
        if node in forced_at:
            mark, value = forced_at[node]
            env[node] = torch.where(mark, value.to(env[node].dtype), env[node])
    return {name: view.read([computed[n] for n in view.nodes]) for name, view in taps.items()}
