"""A traced graph without what changes no value: regions of one mode, and dead code."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

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
