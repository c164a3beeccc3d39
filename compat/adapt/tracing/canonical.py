"""A traced graph without what changes no value: regions of one mode, dead code, zero terms."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from compat.adapt.tracing.graph import Graph, kind, size

# Regions as torch.export writes them: a call with a subgraph among its arguments.
REGIONS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})


def inline_regions(module: GraphModule) -> None:
    """Put the operations of `torch.no_grad()` and `autocast(enabled=False)` into the graph itself.

    Autocast at work is left as it is, because it computes in another data type.
    """
    for node in list(module.graph.nodes):
        if getattr(node.target, "__name__", str(node.target)) in REGIONS:
            _inline(module, node)


def _inline(module: GraphModule, region: Node) -> None:
    place = next(i for i, a in enumerate(region.args) if isinstance(a, Node) and a.op == "get_attr")
    submodule: Any = region.args[place]
    inner = getattr(module, str(submodule.target))
    if str(region.target) == "wrap_with_autocast" and region.args[2]:
        return
    inline_regions(inner)
    if any(node.op == "get_attr" for node in inner.graph.nodes):
        return
    given = iter(region.args[place + 1 :])
    made: dict[Node, Any] = {}
    with region.graph.inserting_before(region):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op != "output":
                made[node] = region.graph.node_copy(node, made.__getitem__)
    [output] = (node for node in inner.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    for user in list(region.users):  # each takes one of the results
        user.replace_all_uses_with(made[results[user.args[1]]])
        region.graph.erase_node(user)
    region.graph.erase_node(region)
    if not submodule.users:
        submodule.graph.erase_node(submodule)


def drop_dead_code(graph: Any, output: Node) -> None:
    """Erase the operations that the output is not computed by; the graph's inputs stay."""
    needed, stack = set[Node](), [output]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    [end] = (node for node in graph.nodes if node.op == "output")
    end.args = (output,)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in needed:
            graph.erase_node(node)


def drop_zero_terms(graph: Graph) -> bool:
    """Leave out of sums what is zero whatever the ids are, such as LoRA's share while B = 0.

    It goes by the values that the parameters have. Returns whether there was such a term.
    """
    sums = [
        node for node in graph.nodes
        if node in graph.live and kind(node) in ("add", "sub") and len(node.all_input_nodes) == 2
    ]  # fmt: skip
    terms = {a for node in sums for a in node.all_input_nodes if a in graph.live}
    zero = set(terms)
    for ids in (graph.example, graph.example.roll(1)):
        values = graph.run(zero, {graph.input: ids}, double=False)
        zero = {node for node, value in zip(zero, values, strict=True) if not value.any()}
    for node in sums:
        first, second = node.args[:2]
        if second in zero:
            kept = first
        elif first in zero and kind(node) == "add":
            kept = second
        else:
            continue
        if isinstance(kept, Node) and size(kept) == size(node):
            node.replace_all_uses_with(kept)
            graph.output = kept if graph.output is node else graph.output
    if zero:
        drop_dead_code(graph.output.graph, graph.output)
        graph.take_over()
    return bool(zero)
