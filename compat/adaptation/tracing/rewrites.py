"""Rewrites of a traced graph into a form in which the parts of a GPT-2 are recognised.

The slices of parameters that hold several layers, and weights that are computed from parameters,
become inputs. A bias is added to its projection before the residual stream is, and attention is
added to the stream before the MLP. Columns of an embedding become rows. Repetitions by 1, a softmax
on the logits and a slice of the last position are removed. Products that are stacked head by head
become one product, and terms that are zero are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.tracing.contractions import SDPA, contraction
from compat.adaptation.tracing.graph import (
    MOVES,
    Derived,
    Graph,
    aten,
    insert,
    kind,
    live_inputs,
    size,
    tensor_inputs,
)
from compat.adaptation.tracing.record import drop_dead_code
from compat.ops import Affine, WeightNorm

CUTS = frozenset("slice select index".split())
# Operations that compute one vector from those of all positions, and what they compute.
POOLS = {"mean": "mean", "sum": "sum", "amax": "maximum", "max": "maximum"}
SOFTMAXES = frozenset("softmax _softmax log_softmax _log_softmax".split())
ATTENTION = frozenset({*SDPA, "softmax", "_softmax"})
WEIGHT_NORMS = frozenset({"_weight_norm", "_weight_norm_interface"})  # the second returns ‖v‖ too
ARITHMETIC = frozenset("add sub rsub mul div neg".split())


def normalize(graph: Graph) -> tuple[Node | None, Node | None]:
    """Bring a graph into the form in which the parts of a GPT-2 are recognised.

    Returns:
        The nodes that `keep_every_position` and `remove_output_softmax` removed.
    """
    split_stacked_parameters(graph)
    add_biases_to_projections(graph)
    add_attention_first(graph)
    drop_repetitions_by_one(graph)
    look_up_rows(graph)
    lift_derived_weights(graph)
    return keep_every_position(graph), remove_output_softmax(graph)


def _prune(graph: Graph) -> None:
    """Erase what nothing reads any longer, after a change to the graph."""
    drop_dead_code(graph.output.graph, graph.output)
    graph.invalidate()


def _at_every_node(rewrite: Callable[[Graph, Node], bool]) -> Callable[[Graph], bool]:
    """Apply a rewrite of single nodes to all nodes of a graph, and return whether one changed."""

    @wraps(rewrite)
    def rewritten(graph: Graph) -> bool:
        changed = [node for node in graph.nodes if rewrite(graph, node)]
        if changed:
            _prune(graph)
        return bool(changed)

    return rewritten


def _replace(graph: Graph, node: Node, other: Node) -> None:
    """Let everything that reads a node read another one."""
    node.replace_all_uses_with(other)
    graph.output = other if graph.output is node else graph.output


def _input(graph: Graph, nodes: Sequence[Node], label: str, name: str, value: Tensor) -> Node:
    """Let everything that reads these nodes read a new parameter instead, and return it."""
    first = nodes[0]
    with first.graph.inserting_before(first):
        parameter = first.graph.placeholder(label)
    parameter.meta = dict(first.meta)
    graph.names[parameter], graph.values[parameter] = name, value
    for node in nodes:
        node.replace_all_uses_with(parameter)
    return parameter


def remove_output_softmax(graph: Graph) -> Node | None:
    """Make the logits the output if it is their softmax, perhaps rounded.

    Returns:
        The node of the softmax.
    """
    node = graph.output
    while kind(node) in MOVES | {"round"} and tensor_inputs(node)[0] in graph.live:
        node = tensor_inputs(node)[0]
    if kind(node) not in SOFTMAXES:
        return None
    graph.output = tensor_inputs(node)[0]
    return node


def keep_every_position(graph: Graph) -> Node | None:
    """Remove a slice before or after the head that drops all positions but the last, or a mean.

    Returns:
        The first node that dropped them, or that computes the mean.
    """
    if graph.shape[1] in size(graph.output)[:-1]:
        return None
    for node in _path_from_attention(graph):
        above = tensor_inputs(node)[0]
        drops = kind(node) in CUTS or (kind(node) in POOLS and graph.shape[1] not in size(node))
        if drops and graph.shape[1] in size(above):
            results = [node] if size(node) else list(node.users)  # `max` returns indices too
            for result in results:
                result.replace_all_uses_with(above)
            while kind(graph.output) in MOVES | CUTS:  # they expect the shape of one position
                graph.output = tensor_inputs(graph.output)[0]
            graph.invalidate()
            if len(size(node)) < len(size(above)):
                _add_positions_to_einsums(graph, above)
            _update_shapes(graph, above)
            return node
    return None


def _add_positions_to_einsums(graph: Graph, start: Node) -> None:
    """Give the einsums after `start` an axis of positions: `b c, v c -> b v` to `bzc,vc->bzv`."""
    nodes = graph.live_between([graph.output], [start])
    for node in nodes:
        if kind(node) == "einsum" and "..." not in str(node.args[0]):
            terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
            operands = list(zip(terms.split(","), tensor_inputs(node), strict=True))
            added = next(letter for letter in "zyxwZYXW" if letter not in terms)
            batch = next(term[0] for term, operand in operands if operand in {start, *nodes})
            widened = [
                term.replace(batch, batch + added) if operand in {start, *nodes} else term
                for term, operand in operands
            ]
            equation = f"{','.join(widened)}->{result.replace(batch, batch + added)}"
            node.args = (equation, *node.args[1:])


def _path_from_attention(graph: Graph) -> list[Node]:
    """Return the nodes on all paths from attention to the output, the output first."""
    path, nodes = [], {graph.output}
    while nodes:
        node = max(nodes, key=graph.order.__getitem__)
        above = live_inputs(graph, node)
        if kind(node) in SDPA or (contraction(node) is not None and len(above) > 1):
            break
        path += [node] if len(nodes) == 1 else []
        nodes = nodes - {node} | {*above}
    return path


def _update_shapes(graph: Graph, start: Node) -> None:
    """Recompute the shapes of the nodes after `start`."""
    nodes = graph.live_between([graph.output], [start])
    values = graph.run(nodes, {start: torch.zeros(size(start), dtype=torch.float64)})
    for node, value in zip(nodes, values, strict=True):
        node.meta["shape"] = tuple(value.shape)


def drop_neutral_operands(graph: Graph) -> bool:
    """Remove terms of sums that are zero for all ids, and factors that are one.

    Examples are LoRA's term while B = 0, and a mask of the heads with the largest results that
    contains all heads. This depends on the current values of the parameters. Attention is kept,
    which is zero in a new model if its values are those of a constant, and only because their
    biases are.

    Returns:
        Whether there was such an operand, and the graph can be run with other ids.
    """
    binary = [
        node for node in graph.nodes
        if node in graph.live and kind(node) in ("add", "sub", "mul")
        and len(node.all_input_nodes) == 2
    ]  # fmt: skip
    neutral = {(a, kind(node) == "mul") for node in binary for a in live_inputs(graph, node)}
    for ids in (graph.example, graph.example.roll(1)):
        nodes = [*{node for node, _ in neutral}]
        try:
            values = graph.run(nodes, {graph.input: ids}, double=False)
        except RuntimeError:  # the graph runs on the example only, as where ids choose experts
            return False
        found = dict(zip(nodes, values, strict=True))
        neutral = {(node, one) for node, one in neutral if (found[node] == int(one)).all()}
    dropped = False
    for node in binary:
        for kept, operand in _orders(node)[: 1 if kind(node) == "sub" else 2]:
            if (operand, kind(node) == "mul") not in neutral or size(kept) != size(node):
                continue
            if kept not in graph.ancestors[operand] or not _attends(graph, operand, kept):
                _replace(graph, node, kept)
                dropped = True
                break
    if dropped:
        _prune(graph)
    return dropped


def _attends(graph: Graph, branch: Node, x: Node) -> bool:
    """Return whether a branch that begins at x is attention, or a block with it."""
    return any(kind(node) in ATTENTION for node in graph.between([branch], [x]))


@_at_every_node
def drop_low_rank_terms(graph: Graph, node: Node) -> bool:
    """Remove low-rank terms such as LoRA's: a projection to a few channels, followed by another.

    They are listed in `graph.low_rank`, with their parameters.
    """
    if node in graph.live and kind(node) == "add" and len(node.all_input_nodes) == 2:
        for kept, term in _orders(node):
            start = _low_rank_input(graph, term)
            if start is None or size(kept) != size(node):
                continue
            if _low_rank_input(graph, kept) is None:
                graph.low_rank[term] = {*graph.parameters_between([term], [start])}
                _replace(graph, node, kept)
                return True
    return False


def _low_rank_input(graph: Graph, term: Node) -> Node | None:
    """Return the input of the two projections of a low-rank term; None for other terms."""
    widths: list[int] = []
    node = term
    for _ in range(12):
        product = contraction(node)
        if product is not None and (product.a in graph.live) != (product.b in graph.live):
            node = product.a if product.a in graph.live else product.b
            widths.append(size(node)[-1])
        elif kind(node) in MOVES | {"mul", "div", "getitem"}:
            live = live_inputs(graph, node)
            if len(live) != 1:
                return None
            node = live[0]
        else:
            break
        if len(widths) == 2:
            narrow, wide = widths
            return node if 2 * narrow <= min(wide, size(term)[-1]) else None
    return None


@_at_every_node
def merge_stacked_products(graph: Graph, node: Node) -> bool:
    """Replace `stack([a[:, i] @ b[:, i] for i in range(n)], 1)`, a loop over heads, by `a @ b`."""
    if kind(node) != "stack":
        return False
    items = tensor_inputs(node)
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    factors = {_selected_factors(item, dim, i) for i, item in enumerate(items)}
    found = factors.pop() if len(factors) == 1 else None
    if found is None or size(found[0])[dim] != len(items):
        return False
    node.replace_all_uses_with(insert(node, aten.matmul.default, found))
    return True


def _selected_factors(item: Node, dim: int, i: int) -> tuple[Node, Node] | None:
    """Return a and b if the item is `a.select(dim, i) @ b.select(dim, i)`."""
    if kind(item) not in ("matmul", "bmm"):
        return None
    factors = []
    for factor in tensor_inputs(item):
        if kind(factor) != "select" or factor.args[1:] != (dim, i):
            return None
        whole = tensor_inputs(factor)[0]
        while kind(whole) == "slice" and size(whole) == size(tensor_inputs(whole)[0]):
            whole = tensor_inputs(whole)[0]
        factors.append(whole)
    a, b = factors
    return (a, b) if 0 <= dim < len(size(a)) - 2 else None


@_at_every_node
def split_projections(graph: Graph, node: Node) -> bool:
    """Change parts such as `linear(x, w, b)[..., 5:9]` to projections `linear(x, w[5:9], b[5:9])`.

    One projection may compute q, k, v and what the MLP reads.
    """
    users = node.users if kind(node) == "linear" else ()
    parts = [part for user in users for part in _parts_of_channels(node, user)]
    for part, start in parts:
        x, *parameters = tensor_inputs(node)
        count = size(part)[-1]
        rows = [
            insert(part, aten.slice.Tensor, (p, 0, start, start + count), p, (count, *size(p)[1:]))
            for p in parameters
        ]
        part.replace_all_uses_with(insert(part, aten.linear.default, (x, *rows)))
    return bool(parts)


def _parts_of_channels(node: Node, user: Node) -> list[tuple[Node, int]]:
    """Return the nodes of parts of a node's last axis that a user cuts, and where each begins."""
    args: Any = (*user.args, *user.kwargs.values())
    last = (-1, len(size(node)) - 1)
    if kind(user) == "slice" and args[1] in last and len(args) < 5:
        return [(user, (args[2] or 0) % size(node)[-1])]
    if kind(user) in ("split", "split_with_sizes") and args[-1] in last and len(args) == 3:
        sizes = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(user.users)
        items: Any = [(part.args[1], part) for part in user.users if kind(part) == "getitem"]
        return [(part, sum(sizes[:i])) for i, part in items]
    return []


@_at_every_node
def split_stacked_parameters(graph: Graph, parameter: Node) -> bool:
    """Make `parameter[0]`, `parameter[1]`, … inputs of the graph, as if each were a parameter.

    This is done for parameters that hold the weights of several layers, or of several parts of one
    layer: they are read as slices only, one after the other. Slices that are read side by side are
    those of a fused projection of q, k and v.
    """
    slices = _slices(parameter) if parameter in graph.names else {}
    readers = [graph.first_reader(nodes) for nodes in slices.values()]
    in_turn = all(before in graph.ancestors[after] for before, after in pairwise(readers))
    if not slices or not in_turn:
        return False
    name, values = graph.names.pop(parameter), graph.values[parameter]
    for i, nodes in slices.items():
        _input(graph, nodes, f"{parameter.name}_{i}", f"{name}[{i}]", values[i])
    return True


def _slices(parameter: Node) -> dict[int, list[Node]]:
    """Return the nodes of `parameter[i]` in the order of i; none if anything else reads it."""
    found: dict[int, list[Node]] = {}
    if len(size(parameter)) < 2 or size(parameter)[0] == 1:
        return found
    for user in parameter.users:
        args: Any = user.args
        if kind(user) == "select" and args[1] == 0:
            found.setdefault(args[2] % size(parameter)[0], []).append(user)
        elif kind(user) == "unbind" and not any(args[1:]):
            parts: Any = [(part.args[1], part) for part in user.users]
            for i, part in parts:
                found.setdefault(i, []).append(part)
        else:
            return {}
    return dict(sorted(found.items()))


@_at_every_node
def add_biases_to_projections(graph: Graph, node: Node) -> bool:
    """Change `(x + h @ w) + b`, which is how Python reads `x + h @ w + b`, to `x + (h @ w + b)`."""
    if node not in graph.live or not _is_sum(node):
        return False
    total, bias = sorted(tensor_inputs(node), key=graph.live.__contains__, reverse=True)
    if bias in graph.live or not _is_sum(total) or len(total.users) > 1:
        return False
    if size(total) != size(node) or not graph.parameters_of[bias]:
        return False
    if prod(size(bias)) != size(node)[-1]:  # not one vector for all tokens
        return False
    branches = [a for a in tensor_inputs(total) if _is_bare_projection(graph, a)]
    streams = [a for a in live_inputs(graph, total) if a not in branches]
    if len(branches) != 1 or len(streams) != 1 or size(branches[0]) != size(node):
        return False
    node.args = (streams[0], insert(node, aten.add.Tensor, (branches[0], bias)))
    return True


@_at_every_node
def add_attention_first(graph: Graph, total: Node) -> bool:
    """Change `x + mlp(x) + attn(x)`, a block with parallel branches, to `x + attn(x) + mlp(x)`."""
    for first, attn in _orders(total) if total in graph.live and _is_sum(total) else ():
        if not {first, attn} <= graph.live or not _is_sum(first) or len(first.users) > 1:
            continue
        above = graph.ancestors[attn]
        for x, mlp in _orders(first):
            if mlp not in graph.live or x not in above & graph.ancestors[mlp]:
                continue
            if {first, mlp} & above:  # attention reads the MLP, as in the next block
                continue
            if _attends(graph, attn, x) and not _attends(graph, mlp, x) and size(x) == size(attn):
                total.prepend(first)
                first.args, total.args = (x, attn), (first, mlp)
                return True
    return False


def _orders(node: Node) -> list[tuple[Node, Node]]:
    """Return the two operands of a sum or a difference in both orders."""
    one, other = tensor_inputs(node)
    return [(one, other), (other, one)]


@_at_every_node
def drop_repetitions_by_one(graph: Graph, node: Node) -> bool:
    """Remove `repeat_interleave(1, dim)`, as where heads of keys are repeated for no other head."""
    if kind(node) != "repeat_interleave" or node.args[1:2] != (1,):
        return False
    repeated = tensor_inputs(node)[0]
    if size(node) != size(repeated):
        return False
    node.replace_all_uses_with(repeated)
    return True


@_at_every_node
def look_up_rows(graph: Graph, node: Node) -> bool:
    """Change `table[:, ids]`, of a table (C, V), to a look-up in the rows of its transpose."""
    if kind(node) != "index" or node not in graph.live:
        return False
    table, indices = node.args[:2]
    if not isinstance(table, Node) or not isinstance(indices, (list, tuple)):
        return False
    if table in graph.live or len(size(table)) != 2 or len(indices) != 2 or indices[0]:
        return False
    shape = size(node)
    last = len(shape) - 1
    rows = insert(node, aten.permute.default, (table, [1, 0]), shape=size(table)[::-1])
    found = insert(node, aten.index.Tensor, (rows, [indices[1]]), shape=(*shape[1:], shape[0]))
    moved = insert(node, aten.permute.default, (found, [last, *range(last)]))
    _replace(graph, node, moved)
    return True


def _is_sum(node: Node) -> bool:
    """Return whether a node adds two tensors without a factor."""
    return kind(node) == "add" and len(tensor_inputs(node)) == 2 and "alpha" not in node.kwargs


def _is_bare_projection(graph: Graph, node: Node) -> bool:
    """Return whether a node is the product of a live tensor and a weight, without a bias."""
    while kind(node) in MOVES and tensor_inputs(node)[0] in graph.live:
        node = tensor_inputs(node)[0]
    product = contraction(node)
    if product is None or len(tensor_inputs(node)) > 2:
        return False
    return (product.a in graph.live) != (product.b in graph.live)


def lift_derived_weights(graph: Graph, scaled: bool = False) -> bool:
    """Make every weight of the form g · v / ‖v‖ or a · parameter + b an input of the graph.

    Args:
        graph: changed in place.
        scaled: also accept b = 0. This is not tried first, because a factor may be a deviation.

    Returns:
        Whether there was such a weight.
    """
    before = len(graph.derived)
    for node in list(graph.nodes):
        if kind(node) in WEIGHT_NORMS:
            v, g, *dim = node.args
            first = (user for user in node.users if kind(user) == "getitem" and user.args[1] == 0)
            end = node if kind(node) == "_weight_norm" else next(first, None)
            if isinstance(g, Node) and isinstance(v, Node) and {g, v} <= graph.names.keys() and end:
                op = WeightNorm(dim[0] if dim and isinstance(dim[0], int) else 0)
                _make_input(graph, end, (g, v), op)
    for parameter in list(graph.names):
        end = _end_of_arithmetic(graph, parameter)
        affine = None if end is None else _affine(graph, parameter, end)
        if end is not None and affine is not None and (affine.offset or scaled):
            _make_input(graph, end, (parameter,), affine)
    if len(graph.derived) > before:
        graph.invalidate()
    return len(graph.derived) > before


def _end_of_arithmetic(graph: Graph, parameter: Node) -> Node | None:
    """Return the last operation in a chain of arithmetic that reads only the parameter."""
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
    """Return factor and offset if they are the same for all elements and not 1 and 0."""
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
    """Replace the computation of a weight by a placeholder named after its last parameter."""
    names = tuple(graph.names.pop(node) for node in sources)
    derived = Derived(names, tuple(graph.values[node] for node in sources), op)
    value = op.save(derived.values)
    weight = _input(graph, [end], f"derived_{end.name}", names[-1], value)
    graph.derived[weight] = derived
