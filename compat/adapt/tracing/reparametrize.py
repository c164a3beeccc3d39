"""Weights that a model computes from its parameters, found in a graph and made inputs of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from compat.adapt.tracing.graph import MOVES, Derived, Graph, kind, size
from compat.rearrange import Affine, WeightNorm

WEIGHT_NORMS = frozenset({"_weight_norm", "_weight_norm_interface"})  # the second gives ‖v‖ too
ARITHMETIC = frozenset("add sub rsub mul div neg".split())


def find_derived(graph: Graph, scaled: bool = False) -> bool:
    """Make an input of every weight of the form g · v / ‖v‖ or a · parameter + b, b not zero.

    Args:
        graph: changed in place.
        scaled: b may be zero. Not at first, because a factor may be a deviation of the model.

    Returns:
        Whether there was such a weight.
    """
    found = False
    for node in list(graph.nodes):
        if kind(node) in WEIGHT_NORMS:
            v, g, *dim = node.args
            first = (user for user in node.users if kind(user) == "getitem" and user.args[1] == 0)
            end = node if kind(node) == "_weight_norm" else next(first, None)
            if isinstance(g, Node) and isinstance(v, Node) and {g, v} <= graph.names.keys() and end:
                op = WeightNorm(dim[0] if dim and isinstance(dim[0], int) else 0)
                _make_input(graph, end, (g, v), op)
                found = True
    for parameter in list(graph.names):
        end = _end_of_arithmetic(graph, parameter)
        affine = None if end is None else _affine(graph, parameter, end)
        if end is not None and affine is not None and (affine.offset or scaled):
            _make_input(graph, end, (parameter,), affine)
            found = True
    if found:
        graph.take_over()
    return found


def _end_of_arithmetic(graph: Graph, parameter: Node) -> Node | None:
    """The last sum or product on a way from the parameter that nothing else joins."""
    node, end = parameter, None
    while len(node.users) == 1:
        [node] = node.users
        if node in graph.live or kind(node) not in ARITHMETIC | MOVES:
            break
        if graph.parameters_of[node] != {parameter}:
            break
        end = node if kind(node) in ARITHMETIC else end
    return end if end is not None and size(end) == size(parameter) else None


def _affine(graph: Graph, parameter: Node, end: Node) -> Affine | None:
    """Factor and offset, if these are the same for all elements, and do anything."""
    shape = graph.values[parameter].shape

    def run(value: Tensor) -> Tensor:
        return graph.run([end], {parameter: value})[0]

    zero, one = (torch.full(shape, value, dtype=torch.float64) for value in (0.0, 1.0))
    random = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    offset = run(zero).reshape(-1)[0].item()
    factor = run(one).reshape(-1)[0].item() - offset
    if factor == 0 or (factor, offset) == (1.0, 0.0):
        return None
    same = torch.allclose(run(random), random * factor + offset, rtol=1e-9, atol=1e-12)
    return Affine(factor, offset) if same else None


def _make_input(
    graph: Graph, end: Node, sources: tuple[Node, ...], op: Affine | WeightNorm
) -> None:
    """Let a placeholder take the place of what computes a weight; named as its last parameter."""
    with end.graph.inserting_before(end):
        made = end.graph.placeholder(f"derived_{end.name}")
    made.meta = dict(end.meta)
    end.replace_all_uses_with(made)
    names = tuple(graph.names[node] for node in sources)
    graph.derived[made] = Derived(names, tuple(graph.values[node] for node in sources), op)
    graph.values[made] = op.save(graph.derived[made].values)
    graph.names[made] = names[-1]
    for node in sources:
        del graph.names[node]
