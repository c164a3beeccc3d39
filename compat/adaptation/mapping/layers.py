"""The homes of one layer's tensors, traced from norm to projections and on to their results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.parts import Anatomy, Layer
from compat.adaptation.mapping.arrange import fused_op, single_op, split_op
from compat.adaptation.mapping.assignments import Attention, Home
from compat.adaptation.mapping.linear_maps import LinearMap, linear_map
from compat.adaptation.mapping.views import View, merged, token_view
from compat.adaptation.tracing.graph import Graph, size
from compat.errors import AdaptError


def layer_homes(anatomy: Anatomy, layer: Layer, i: int, attention: Attention) -> dict[str, Home]:
    graph = anatomy.graph
    x1 = _view(graph, layer.x1, f"layer {i}: what q, k and v are projected from")
    n_head, d_head = attention.q.index.shape[1], attention.q.index.shape[3]
    maps = [_qkv_map(graph, x1, view, attention) for view in
            (attention.q, attention.k, attention.v)]  # fmt: skip
    if any(found is None for found in maps):
        raise AdaptError(f"layer {i}: q, k or v is no projection of its token")
    q, k, v = (found for found in maps if found is not None)
    attention.q_factor, attention.k_factor = q.factor, k.factor
    attention.shared_kv = _same(k, v)
    homes = _fused_homes(graph, [q, k, v], n_head)
    if layer.out_proj is not None:
        out = _out_map(anatomy, layer, attention, d_head, i)
        homes.update(_homes(graph, "attn.c_proj", out, n_head, f"layer {i}"))
    for hf, start, end in (
        ("mlp.c_fc", layer.x2, layer.fc_end),
        ("mlp.c_proj", layer.act, layer.mlp),
    ):
        found = linear_map(graph, _view(graph, start, hf), _view(graph, end, hf))
        if found is None:
            raise AdaptError(f"layer {i}: {hf} is no projection of its token")
        homes.update(_homes(graph, hf, found, n_head, f"layer {i}"))
    return homes


def _view(graph: Graph, node: Node, what: str) -> View:
    view = token_view(graph, node)
    if view is None:
        raise AdaptError(f"{what} has shape {list(size(node))}, which is not one vector per token")
    return view


def _qkv_map(graph: Graph, x1: View, operand: View, attention: Attention) -> LinearMap | None:
    """From the norm to q, k or v; where the position enters, from the first token alone."""
    target = merged(operand)
    found = linear_map(graph, x1, target)
    if found is None:
        attention.rotated = True
        first = View(x1.nodes, x1.index[:, :1]), View(target.nodes, target.index[:, :1])
        found = linear_map(graph, *first)
    return found


def _out_map(
    anatomy: Anatomy, layer: Layer, attention: Attention, d_head: int, i: int
) -> LinearMap:
    """From the heads to attention's result; from the projection's own input where heads mix."""
    graph = anatomy.graph
    end = _view(graph, layer.attn, "attention's result")
    found = linear_map(graph, merged(attention.heads), end, d_head)
    if found is None:
        attention.unmerged = True
        start = token_view(graph, layer.heads)
        found = None if start is None else linear_map(graph, start, end)
    if found is None:
        raise AdaptError(f"layer {i}: attention's output projection is no projection per token")
    return found


def _contents(
    graph: Graph, maps: Sequence[LinearMap], numbers: Sequence[Tensor]
) -> dict[Node, Tensor]:
    """For every parameter met, which element of the fused tensor each of its elements is.

    `numbers` has, for each map, the numbers of the elements that make the map's columns; the fused
    tensor has all of them side by side along the last axis.
    """
    found: dict[Node, Tensor] = {}
    width = sum(n.shape[-1] for n in numbers)
    offset = 0
    for linear, number in zip(maps, numbers, strict=True):
        rows = number.reshape(-1, number.shape[-1])
        place = torch.arange(rows.shape[0])[:, None] * width + offset
        place = place + torch.arange(rows.shape[1])
        first = 1
        for node in linear.parameters:
            count = graph.values[node].numel()
            mine = (rows >= first) & (rows < first + count)
            if mine.any():
                content = found.setdefault(node, torch.full((count,), -1))
                content[rows[mine] - first] = place[mine]
            first += count
        offset += number.shape[-1]
    return {node: found[node].view(graph.values[node].shape) for node in found}


def _fused_homes(graph: Graph, maps: Sequence[LinearMap], n_head: int) -> dict[str, Home]:
    homes: dict[str, Home] = {}
    C, N = maps[0].weight.shape
    if _same(maps[1], maps[2]):
        spare = _unused(graph, maps)
        nowhere = LinearMap([], 0 * maps[1].weight, 0 * maps[1].bias, 1.0)
        maps = [maps[0], spare or nowhere, maps[2]]
    for hf, numbers, shape in (
        ("attn.c_attn.weight", [m.weight for m in maps], (C, 3 * N)),
        ("attn.c_attn.bias", [m.bias for m in maps], (3 * N,)),
    ):
        contents = _contents(graph, maps, numbers)
        if not contents:
            continue
        wanted = sum(int((n > 0).sum()) for n in numbers)
        held = sum(content.numel() for content in contents.values())
        partly = any((c < 0).any() for c in contents.values())
        op = None if partly else fused_op(list(contents.values()), shape, n_head)
        if op is None or held != wanted:
            names = ", ".join(graph.names[node] for node in contents)
            raise AdaptError(
                f"{names}: q, k and v share parameters, or use only parts of them, as where one "
                "parameter holds several layers; compat needs parameters of their own"
            )
        homes[hf] = tuple(contents), op
    return homes


def _same(one: LinearMap, other: LinearMap) -> bool:
    return one.parameters == other.parameters and torch.equal(one.weight, other.weight)


def _unused(graph: Graph, maps: Sequence[LinearMap]) -> LinearMap | None:
    """Where one projection serves as key and value: the part of the parameters that serves nobody.

    It gets the checkpoint's keys, which change nothing; without such a part they are left out.
    """
    q, k, _ = maps
    taken = torch.cat([q.weight, k.weight], dim=1)
    count = sum(graph.values[node].numel() for node in q.parameters)
    numbers = torch.arange(1, count + 1)
    spare = numbers[~torch.isin(numbers, torch.cat([taken.reshape(-1), q.bias, k.bias]))]
    bias_count = q.bias.numel() if q.bias.any() else 0
    if len(spare) != q.weight.numel() + bias_count:
        return None
    by_row = spare[: q.weight.numel()].view(q.weight.shape[1], -1).T
    step = q.weight[0, 1] - q.weight[0, 0] if q.weight.shape[1] > 1 else 1
    plain = by_row if step != 1 else spare[: q.weight.numel()].view(q.weight.shape)
    bias = spare[q.weight.numel() :] if bias_count else torch.zeros_like(q.bias)
    return LinearMap(q.parameters, plain, bias, 1.0)


def _homes(graph: Graph, hf: str, found: LinearMap, n_head: int, where: str) -> dict[str, Home]:
    homes: dict[str, Home] = {}
    for kind_of, numbers in (("weight", found.weight), ("bias", found.bias)):
        contents = _contents(graph, [found], [numbers])
        if not contents:
            continue
        nodes = sorted(contents, key=lambda node: int(contents[node].min()))
        if len(nodes) == 1:
            op = single_op(contents[nodes[0]], numbers.shape, n_head)
        else:
            op = split_op([contents[node] for node in nodes], numbers.shape)
        if op is None:
            names = ", ".join(graph.names[node] for node in contents)
            raise AdaptError(f"{where}: {hf}.{kind_of} would be made of {names} in no plain order")
        homes[f"{hf}.{kind_of}"] = tuple(nodes), op
    return homes
