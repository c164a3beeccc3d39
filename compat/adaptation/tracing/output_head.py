"""What stands between the head and the output, taken away so that all logits can be compared."""

from __future__ import annotations

import torch
from torch.fx import Node

from compat.adaptation.tracing.contractions import contraction
from compat.adaptation.tracing.graph import MOVES, Graph, kind, size, tensor_inputs

CUTS = frozenset("slice select index".split())

SOFTMAXES = frozenset("softmax _softmax log_softmax _log_softmax".split())


def before_softmax(graph: Graph) -> Node | None:
    """If the output is a softmax of the logits, make the logits the output; the softmax's node."""
    node = graph.output
    while kind(node) in MOVES and tensor_inputs(node)[0] in graph.live:
        node = tensor_inputs(node)[0]
    if kind(node) not in SOFTMAXES:
        return None
    graph.output = tensor_inputs(node)[0]
    return node


def every_position(graph: Graph) -> Node | None:
    """If all positions but the last are dropped before or after the head, keep them.

    Returns the first node that dropped them.
    """
    if graph.shape[1] in size(graph.output)[:-1]:
        return None
    dropped = None
    for node in _chain(graph):
        above = tensor_inputs(node)[0]
        if kind(node) in CUTS and graph.shape[1] in size(above):
            dropped = node
            for user in list(node.users):
                user.replace_input_with(node, above)
            while kind(graph.output) in MOVES | CUTS:  # with shapes of one position
                graph.output = tensor_inputs(graph.output)[0]
            graph.forget()
            _measure_again(graph, above)
            break
    return dropped


def _measure_again(graph: Graph, start: Node) -> None:
    """The shapes of what is computed from a node, as they are now."""
    nodes = [n for n in graph.between([graph.output], [start]) if n in graph.live]
    values = graph.run(nodes, {start: torch.zeros(size(start), dtype=torch.float64)})
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value.to("meta")


def _chain(graph: Graph) -> list[Node]:
    """From the output up to the norm before the head, while one live tensor leads on."""
    chain, node = [], graph.output
    for _ in range(12):
        chain.append(node)
        product = contraction(node)
        if product is not None:
            node = product.a if product.a in graph.live else product.b
            continue
        above = [a for a in tensor_inputs(node) if a in graph.live]
        if len(above) != 1 or kind(node) not in MOVES | CUTS | SOFTMAXES | {"add", "getitem"}:
            break
        node = above[0]
    return chain
