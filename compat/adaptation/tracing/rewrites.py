"""Rewrites of a traced graph into a form in which the parts of a GPT-2 are recognised.

The slices of parameters that hold several layers, and weights that are computed from parameters,
become inputs. A bias is added to its projection before the residual stream is, and attention is
added to the stream before the MLP. Columns of an embedding become rows. Repetitions by 1, a softmax
on the logits and a slice of the last position are removed. Products that are stacked head by head
become one product, and terms that are zero are dropped.
"""

from __future__ import annotations

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


def _prune(graph: Graph) -> None:
    """Erase what nothing reads any longer, after a change to the graph."""
    drop_dead_code(graph.output.graph, graph.output)
    graph.invalidate()


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
                for user in list(result.users):
                    user.replace_input_with(result, above)
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


def drop_zero_terms(graph: Graph) -> bool:
    """Remove terms of sums that are zero for all ids, such as LoRA's term while B = 0.

    This depends on the current values of the parameters. Attention is kept, which is zero in a new
    model if its values are those of a constant, and only because their biases are.

    Returns:
        Whether there was such a term, and the graph can be run with other ids.
    """
    sums = [
        node for node in graph.nodes
        if node in graph.live and kind(node) in ("add", "sub") and len(node.all_input_nodes) == 2
    ]  # fmt: skip
    zero = {a for node in sums for a in live_inputs(graph, node)}
    for ids in (graph.example, graph.example.roll(1)):
        try:
            values = graph.run(zero, {graph.input: ids}, double=False)
        except RuntimeError:  # the graph runs on the example only, as where ids choose experts
            return False
        zero = {node for node, value in zip(zero, values, strict=True) if not value.any()}
    attention = {node for node in graph.nodes if kind(node) in ATTENTION}

    def attends(term: Node, stream: Node) -> bool:
        """Return whether a term is attention, or a block with it, that reads the other term."""
        within = graph.between([term], [stream]) if stream in graph.ancestors[term] else ()
        return not attention.isdisjoint(within)

    dropped = False
    for node in sums:
        for kept, term in _orders(node)[: 2 if kind(node) == "add" else 1]:
            if term in zero and size(kept) == size(node) and not attends(term, kept):
                node.replace_all_uses_with(kept)
                graph.output = kept if graph.output is node else graph.output
                dropped = True
                break
    if dropped:
        _prune(graph)
    return dropped


def drop_low_rank_terms(graph: Graph) -> bool:
    """Remove low-rank terms such as LoRA's: a projection to a few channels, followed by another.

    They are listed in `graph.low_rank`.

    Returns:
        Whether there was such a term.
    """
    for node in graph.nodes:
        if node not in graph.live or kind(node) != "add" or len(node.all_input_nodes) != 2:
            continue
        for kept, term in _orders(node):
            rank = _rank(graph, term)
            if rank and not _rank(graph, kept) and size(kept) == size(node):
                graph.low_rank.append(term)
                node.replace_all_uses_with(kept)
                graph.output = kept if graph.output is node else graph.output
                break
    if graph.low_rank:
        _prune(graph)
    return bool(graph.low_rank)


def _rank(graph: Graph, term: Node) -> int:
    """Return the number of channels between a low-rank term's projections; 0 for other terms."""
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
                return 0
            node = live[0]
        else:
            break
        if len(widths) == 2:
            narrow, wide = widths
            return narrow if 2 * narrow <= min(wide, size(term)[-1]) else 0
    return 0


def merge_stacked_products(graph: Graph) -> bool:
    """Replace `stack([a[:, i] @ b[:, i] for i in range(n)], 1)`, a loop over heads, by `a @ b`.

    Returns:
        Whether there was such a loop.
    """
    merged = False
    for node in [node for node in graph.nodes if kind(node) == "stack"]:
        items = tensor_inputs(node)
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        factors = {_selected_factors(item, dim, i) for i, item in enumerate(items)}
        found = factors.pop() if len(factors) == 1 else None
        if found is None or size(found[0])[dim] != len(items):
            continue
        with node.graph.inserting_before(node):
            product = node.graph.call_function(aten.matmul.default, found)
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        merged = True
    if merged:
        _prune(graph)
    return merged


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


def split_projections(graph: Graph) -> bool:
    """Change parts such as `linear(x, w, b)[..., 5:9]` to projections `linear(x, w[5:9], b[5:9])`.

    One projection may compute q, k, v and what the MLP reads.

    Returns:
        Whether there was such a part.
    """
    parts = [(node, part) for node in graph.nodes if kind(node) == "linear"
             for user in node.users for part in _parts_of_channels(node, user)]  # fmt: skip
    for node, (part, start) in parts:
        x, *parameters = tensor_inputs(node)
        with node.graph.inserting_before(part):
            own = [_rows(parameter, start, size(part)[-1]) for parameter in parameters]
            projection = node.graph.call_function(aten.linear.default, (x, *own))
        projection.meta = dict(part.meta)
        part.replace_all_uses_with(projection)
    if parts:
        _prune(graph)
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


def _rows(parameter: Node, start: int, count: int) -> Node:
    """Insert a slice of the first axis of a parameter."""
    rows = parameter.graph.call_function(aten.slice.Tensor, (parameter, 0, start, start + count))
    rows.meta = {**parameter.meta, "shape": (count, *size(parameter)[1:])}
    return rows


def split_stacked_parameters(graph: Graph) -> None:
    """Make `parameter[0]`, `parameter[1]`, … inputs of the graph, as if each were a parameter.

    This is done for parameters that hold the weights of several layers, or of several parts of one
    layer: they are read as slices only, one after the other. Slices that are read side by side are
    those of a fused projection of q, k and v.
    """
    stacked = []
    for parameter in list(graph.names):
        slices = _slices(parameter)
        readers = [graph.first_reader(nodes) for nodes in slices.values()]
        in_turn = all(before in graph.ancestors[after] for before, after in pairwise(readers))
        if not slices or not in_turn:
            continue
        name, values = graph.names.pop(parameter), graph.values[parameter]
        for i, nodes in slices.items():
            with nodes[0].graph.inserting_before(nodes[0]):
                layer = nodes[0].graph.placeholder(f"{parameter.name}_{i}")
            layer.meta = dict(nodes[0].meta)
            graph.names[layer], graph.values[layer] = f"{name}[{i}]", values[i]
            for node in nodes:
                node.replace_all_uses_with(layer)
        stacked.append(parameter)
    if stacked:
        _prune(graph)


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


def add_biases_to_projections(graph: Graph) -> None:
    """Change `(x + h @ w) + b`, which is how Python reads `x + h @ w + b`, to `x + (h @ w + b)`."""
    changed = False
    for node in [node for node in graph.nodes if node in graph.live and _is_sum(node)]:
        total, bias = sorted(tensor_inputs(node), key=graph.live.__contains__, reverse=True)
        if bias in graph.live or not _is_sum(total) or len(total.users) > 1:
            continue
        if size(total) != size(node) or not graph.parameters_of[bias]:
            continue
        if prod(size(bias)) != size(node)[-1]:  # not one vector for all tokens
            continue
        branches = [a for a in tensor_inputs(total) if _is_bare_projection(graph, a)]
        streams = [a for a in live_inputs(graph, total) if a not in branches]
        if len(branches) != 1 or len(streams) != 1 or size(branches[0]) != size(node):
            continue
        with node.graph.inserting_before(node):
            with_bias = node.graph.call_function(aten.add.Tensor, (branches[0], bias))
        with_bias.meta = dict(node.meta)
        node.args = (streams[0], with_bias)
        changed = True
    if changed:
        _prune(graph)


def add_attention_first(graph: Graph) -> None:
    """Change `x + mlp(x) + attn(x)`, a block with parallel branches, to `x + attn(x) + mlp(x)`."""
    attention = {node for node in graph.nodes if kind(node) in ATTENTION}
    changed = False

    def attends(branch: Node, x: Node) -> bool:
        return not attention.isdisjoint(graph.between([branch], [x]))

    for total in [node for node in graph.nodes if node in graph.live and _is_sum(node)]:
        for first, attn in _orders(total):
            if not {first, attn} <= graph.live or not _is_sum(first) or len(first.users) > 1:
                continue
            above = graph.ancestors[attn]
            for x, mlp in _orders(first):
                if mlp not in graph.live or x not in above & graph.ancestors[mlp]:
                    continue
                if {first, mlp} & above:  # attention reads the MLP, as in the next block
                    continue
                if attends(attn, x) and not attends(mlp, x) and size(x) == size(attn):
                    total.prepend(first)
                    first.args, total.args = (x, attn), (first, mlp)
                    changed = True
                    break
    if changed:
        _prune(graph)


def _orders(node: Node) -> list[tuple[Node, Node]]:
    """Return the two operands of a sum or a difference in both orders."""
    one, other = tensor_inputs(node)
    return [(one, other), (other, one)]


def drop_repetitions_by_one(graph: Graph) -> None:
    """Remove `repeat_interleave(1, dim)`, as where heads of keys are repeated for no other head."""
    changed = False
    for node in [node for node in graph.nodes if kind(node) == "repeat_interleave"]:
        repeated = tensor_inputs(node)[0]
        if node.args[1:2] == (1,) and size(node) == size(repeated):
            node.replace_all_uses_with(repeated)
            changed = True
    if changed:
        _prune(graph)


def look_up_rows(graph: Graph) -> None:
    """Change `table[:, ids]`, of a table (C, V), to a look-up in the rows of its transpose."""
    changed = False
    for node in [node for node in graph.nodes if kind(node) == "index" and node in graph.live]:
        table, indices = node.args[:2]
        if not isinstance(table, Node) or not isinstance(indices, (list, tuple)):
            continue
        if table in graph.live or len(size(table)) != 2 or len(indices) != 2 or indices[0]:
            continue
        last = len(size(node)) - 1
        with node.graph.inserting_before(node):
            rows = node.graph.call_function(aten.permute.default, (table, [1, 0]))
            found = node.graph.call_function(aten.index.Tensor, (rows, [indices[1]]))
            moved = node.graph.call_function(aten.permute.default, (found, [last, *range(last)]))
        shapes = size(table)[::-1], (*size(node)[1:], size(node)[0]), size(node)
        for new, shape in zip((rows, found, moved), shapes, strict=True):
            new.meta = {**node.meta, "shape": shape}
        node.replace_all_uses_with(moved)
        if graph.output is node:
            graph.output = moved
        changed = True
    if changed:
        _prune(graph)


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
    with end.graph.inserting_before(end):
        weight = end.graph.placeholder(f"derived_{end.name}")
    weight.meta = dict(end.meta)
    end.replace_all_uses_with(weight)
    names = tuple(graph.names[node] for node in sources)
    derived = Derived(names, tuple(graph.values[node] for node in sources), op)
    graph.derived[weight] = derived
    graph.values[weight] = op.save(derived.values)
    graph.names[weight] = names[-1]
    for node in sources:
        del graph.names[node]
