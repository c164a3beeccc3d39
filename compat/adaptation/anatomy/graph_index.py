"""Projections, products and embeddings in a graph, and the ways between them."""

from __future__ import annotations

from torch.fx import Node

from compat.adaptation.tracing.contractions import SDPA, Contraction, contraction
from compat.adaptation.tracing.graph import MOVES, Graph, kind, tensor_inputs


class GraphIndex:
    """The nodes of a graph that its anatomy is found by, and ways from one to the next.

    Args:
        graph: of a model.

    Attributes:
        live: the nodes that depend on the ids, in execution order.
        products: every contraction among them, in one spelling.
        projections: products of a live tensor with parameters.
        mixers: products of two live tensors.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live = [node for node in graph.nodes if node in graph.live]
        self.products: dict[Node, Contraction] = {}
        self.projections: set[Node] = set()
        self.mixers: set[Node] = set()
        for node in self.live:
            if kind(node) in SDPA:
                self.mixers.add(node)
            elif (found := contraction(node)) is not None:
                self.products[node] = found
                live = [x in graph.live for x in (found.a, found.b)]
                if all(live):
                    self.mixers.add(node)
                elif graph.parameters_of[found.b if live[0] else found.a]:
                    self.projections.add(node)

    def up(self, node: Node) -> Node:
        """Past operations that only move elements."""
        while kind(node) in MOVES or kind(node) == "getitem":
            above = tensor_inputs(node)[0]
            if above not in self.graph.live:
                break
            if kind(node) == "getitem" and kind(above) != "native_dropout":
                break  # of a kernel's several results, or of q, k and v
            node = above
        return node

    def frontier(self, node: Node) -> set[Node]:
        """The projections, attention products and embeddings that a node is directly made of."""
        stack, seen, found = [node], set(), set()
        while stack:
            node = stack.pop()
            if node in self.projections or node in self.mixers or self.embeds(node):
                found.add(node)
            elif node not in seen:
                seen.add(node)
                stack += [a for a in node.all_input_nodes if a in self.graph.live]
        return found

    def sources(self, node: Node) -> set[Node]:
        """The frontier of a product's operand, whichever is live."""
        return set().union(*(self.frontier(a) for a in self.data(node)))

    def data(self, node: Node) -> list[Node]:
        """The live operands of a product."""
        if kind(node) in SDPA:
            return [a for a in tensor_inputs(node)[:3] if a in self.graph.live]
        found = self.products[node]
        return [a for a in (found.a, found.b) if a in self.graph.live]

    def embeds(self, node: Node) -> bool:
        """A table of parameters looked up by the ids."""
        if kind(node) not in ("embedding", "index", "index_select"):
            return False
        table = tensor_inputs(node)[0]
        return (
            node in self.graph.live
            and table not in self.graph.live
            and bool(self.graph.parameters_of[table])
        )

    def refresh(self) -> None:
        """The graph got a node more."""
        self.live = [node for node in self.graph.nodes if node in self.graph.live]
