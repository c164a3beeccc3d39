"""Assign the checkpoint's tensors to parameters of the model.

Each layer is traced from its norms through the projections to their results. A layer that computes
the same as an earlier layer reuses its assignments. Embeddings, head and norms are assigned by the
shapes of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from operator import eq
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy, AttentionOp, Layer, Operand, UnknownPart
from compat.adaptation.anatomy.norms import Norm, NormPlaces
from compat.adaptation.mapping.embeddings import embedding_of
from compat.adaptation.mapping.linear_maps import (
    LinearMap,
    View,
    find_op,
    function_between,
    head_view,
    linear_map,
    merged,
    sequences_of_groups,
    token_view,
)
from compat.adaptation.tracing.graph import MOVES, Graph, kind, random_values, size, tensor_inputs
from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import EMBEDDING, HEAD
from compat.config import GPT2Config
from compat.errors import AdaptError, NameMapError, listed
from compat.ops import Fused, Op, Rearrange, Rows, Same, Transpose

# Operations that put tensors side by side.
JOINS = frozenset("cat stack getitem".split())
ROUNDING = frozenset("round sign trunc floor ceil".split())
# The parameters that one tensor of the checkpoint is loaded into, and the operation.
Assignment = tuple[tuple[Node, ...], Op]


class BatchFirst(UnknownPart):
    """Attention runs along the first axis of the ids; perhaps the model expects ids (T, B)."""


@dataclass
class Attention:
    """How one layer computes attention, apart from the contents of its parameters.

    Args:
        q, k, v, heads: views (B, H, T, D) of the operands and of the result.
        sequences: to which sequence each group of each operation belongs.
        q_factor, k_factor: what q and k are multiplied by before their product.
        rotated: which of q, k and v depend on the position, as with rotary embeddings.
        shared_kv: one projection computes key and value.
        unmerged: the input of the output projection is not the concatenation of each token's heads.
        indirect: q, k or v of a token is not a projection of this token. The views are then the
            results of the projections, split into heads as in GPT-2.
        inner: if it is indirect, the same attention with the operands of the products as views.
        changed_heads: operations other than a merge run between the heads and their projection.
        raw: which of q, k and v are projected from the residual stream and not from its norm.
        unprojected: which of q, k and v are the tensor that the others are projected from.
        over_heads: attention runs over the heads of each token instead of over the tokens.
        kv_heads: the number of key heads if several query heads share a key head; otherwise 0.
    """

    q: View
    k: View
    v: View
    heads: View
    sequences: list[list[int]]
    q_factor: float = 1.0
    k_factor: float = 1.0
    rotated: str = ""
    shared_kv: bool = False
    unmerged: bool = False
    indirect: bool = False
    inner: Attention | None = None
    changed_heads: bool = False
    raw: str = ""
    unprojected: str = ""
    over_heads: bool = False
    kv_heads: int = 0

    @property
    def prescale(self) -> float:
        return self.q_factor * self.k_factor


@dataclass(frozen=True)
class UnknownProjection:
    """A projection of the model that computes something that compat does not know.

    Args:
        module: `h.0.attn.c_attn` or another projection of GPT-2 in its place.
        node: the node of the projection.
        parameters: its parameters.
        code: the code of the finding that states why they cannot be loaded.
        values: the values for the message of this finding.
        reasons: the nodes that are the reason.
    """

    module: str
    node: Node
    parameters: tuple[Node, ...]
    code: str
    values: dict[str, Any]
    reasons: tuple[Node, ...]


@dataclass
class Assignments:
    """Which parameters hold which tensor.

    Args:
        by_tensor: the parameters by Hugging Face name, with all layers written out.
        attentions: the attention of each layer.
        zeroed: biases that GPT-2 does not have, which are set to zero.
        output_softmax: the softmax that the model applies to the logits.
        head_scale: the factor of the logits.
        unknown: projections that no tensor can be loaded into.
    """

    by_tensor: dict[str, Assignment] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    zeroed: list[Node] = field(default_factory=list)
    output_softmax: Node | None = None
    head_scale: float = 1.0
    unknown: list[UnknownProjection] = field(default_factory=list)


@dataclass
class Unmatched:
    """The tensors of the checkpoint that are not assigned, and why.

    Args:
        names: the names of all such tensors.
        shapes: the found and the expected shape, for tensors whose parameter has another shape.
        shared: the other tensor's name, for tensors whose parameters already hold another one.
        nodes: parameters whose tensors do not fit, or whose layer the checkpoint does not have, and
            those of unknown projections, by the name of the tensor in their place.
        partly: which of q, k and v the model has no parameters for, by the name of a fused tensor
            of which it has the other parts.
    """

    names: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, tuple[Node, ...]] = field(default_factory=dict)
    partly: dict[str, str] = field(default_factory=dict)

    def lacks(self, hf: str) -> bool:
        """Return whether the model has nothing in place of a tensor."""
        return hf in self.names and hf not in self.shapes and hf not in self.shared


def find_assignments(
    anatomy: Anatomy, places: NormPlaces, config: GPT2Config, accepts_others: bool = False
) -> Assignments:
    """Assign a tensor of the checkpoint to every parameter that has a counterpart in GPT-2.

    Args:
        anatomy, places: the parts.
        config: the checkpoint's config.
        accepts_others: accept operations between the projections and attention that GPT-2 does not
            have, keys that several heads share, and projections that cannot be loaded.

    Raises:
        AdaptError: a part is not a projection of each token, or two parts share parameters.
    """
    found = Assignments()
    traced: dict[int, dict[str, Assignment]] = {}
    for i, layer in enumerate(anatomy.layers):
        attention = _attention(anatomy, layer, i)
        paired = ((j, _paired_parameters(anatomy, j, i)) for j in traced)
        equal, pairs = next((pair for pair in paired if pair[1] is not None), (0, None))
        if pairs is None:
            assignment = _LayerAssignment(anatomy, i, attention, accepts_others)
            assignment.run()
            own = assignment.assigned
            found.unknown += assignment.unknown
            traced |= {} if assignment.unknown else {i: own}
        else:
            own = {
                hf: (tuple(pairs[node] for node in nodes), op)
                for hf, (nodes, op) in traced[equal].items()
            }
            if found.attentions[equal].indirect:
                _start_at_projections(anatomy, layer, attention)
            own_views = {n: getattr(attention, n) for n in ("q", "k", "v", "heads", "inner")}
            attention = replace(found.attentions[equal], **own_views)
        found.attentions.append(attention)
        found.by_tensor.update({f"h.{i}.{hf}": assignment for hf, assignment in own.items()})
    for hf, norm in places.named.items():
        found.by_tensor.update(_assign_norm(anatomy.graph, hf, norm))
    _assign_embeddings_and_head(anatomy, found, config)
    return found


def _attention(anatomy: Anatomy, layer: Layer, i: int) -> Attention:
    graph = anatomy.graph
    attention_ops = [_with_tokens_as_time(op, *graph.shape) for op in layer.attention_ops]
    sequences = [sequences_of_groups(graph, layer.x1, op) for op in attention_ops]
    q, k, v, heads = (
        head_view(
            attention_ops, [getattr(op, name) for op in attention_ops], graph.shape, sequences
        )
        for name in ("q", "k", "v", "out")
    )
    B, T = graph.shape
    where = graph.at(attention_ops[0].product)
    joined = _joined_tokens(anatomy, layer)
    if joined is not None:
        raise UnknownPart(
            f"other vectors are joined with the tokens{graph.at(joined)}",
            [joined],
            "extra_tokens",
            {"found": size(joined)[1], "expected": T},
        )
    if size(attention_ops[0].q.node)[attention_ops[0].q.time] == B != T:
        raise BatchFirst(
            f"layer {i}: attention{where} runs over the sequences of the batch, not over the "
            "tokens. Pass batch_first=True to nn.MultiheadAttention for tensors (B, T, C).",
            [attention_ops[0].product],
            "batch_first",
        )
    if q is None or k is None or v is None or heads is None:
        raise UnknownPart(
            f"layer {i}: q, k and v of the attention{where} do not have the same heads and "
            "lengths, as with keys that several heads share or with a cache. GPT-2 has as many "
            "keys and values as queries",
            [attention_ops[0].product],
        )
    over_heads = attention_ops != layer.attention_ops
    return Attention(q, k, v, heads, sequences, over_heads=over_heads)


def _joined_tokens(anatomy: Anatomy, layer: Layer) -> Node | None:
    """Return where other vectors are concatenated with the tokens before a layer, or None."""
    graph = anatomy.graph
    B, T = graph.shape
    for node in graph.between([layer.x1], [graph.input]):
        shape = size(node)
        if kind(node) == "cat" and node in graph.live and len(shape) == 3 and shape[0] == B:
            if shape[1] > T and any(size(a)[1:2] == (T,) for a in tensor_inputs(node)):
                return node
    return None


def _with_tokens_as_time(op: AttentionOp, B: int, T: int) -> AttentionOp:
    """Exchange the operation's axes of heads and tokens, if attention runs over the heads."""

    def exchanged(operand: Operand) -> Operand:
        batch, *others = operand.groups
        if len(others) != 1 or size(operand.node)[batch] != B or size(operand.node)[others[0]] != T:
            return operand
        return replace(operand, groups=(batch, operand.time), time=others[0])

    operands = op.q, op.k, op.v, op.out
    q, k, v, out = (exchanged(operand) for operand in operands)
    if size(op.q.node)[op.q.time] == T or any(map(eq, operands, (q, k, v, out))):
        return op
    return replace(op, q=q, k=k, v=v, out=out)


def _paired_parameters(anatomy: Anatomy, j: int, i: int) -> dict[Node, Node] | None:
    """Pair the parameters of layers j and i, if both compute the same node by node."""
    graph = anatomy.graph

    def nodes_of(i: int) -> tuple[list[Node], Node]:
        layer = anatomy.layers[i]
        start = anatomy.layers[i - 1].out if i else anatomy.embed
        nodes = graph.between([layer.out], [start])
        # A mask that all layers share is computed within the first layer.
        return sorted(nodes, key=graph.live.__contains__), start

    (ours, start), (theirs, other) = nodes_of(j), nodes_of(i)
    if len(ours) != len(theirs):
        return None
    pairs = {start: other}
    for one, two in zip(ours, theirs, strict=True):
        if (one.op, size(one), one in graph.names) != (two.op, size(two), two in graph.names):
            return None
        if one.op == "call_function" and one.target != two.target:
            return None
        pairs[one] = two
        translated = torch.fx.map_arg((one.args, one.kwargs), lambda node: pairs.get(node, node))
        if one not in graph.names and str(translated) != str((two.args, two.kwargs)):
            return None
        if one in graph.values and one not in graph.names and one is not two:
            if not torch.equal(graph.values[one], graph.values[two]):
                return None
    return {one: two for one, two in pairs.items() if one in graph.names}


class _LayerAssignment:
    """The assignments of one layer, projection by projection.

    Args:
        anatomy: the parts of the model's graph.
        i: the layer's number.
        attention: how the layer computes attention; properties that its projections show are set.
        accepts_others: list projections that cannot be loaded instead of raising an error.
    """

    def __init__(
        self, anatomy: Anatomy, i: int, attention: Attention, accepts_others: bool
    ) -> None:
        self.anatomy, self.graph, self.layer = anatomy, anatomy.graph, anatomy.layers[i]
        self.i, self.attention, self.accepts_others = i, attention, accepts_others
        self.n_head, self.d_head = attention.q.index.shape[1], attention.q.index.shape[3]
        self.assigned: dict[str, Assignment] = {}
        self.unknown: list[UnknownProjection] = []

    def run(self) -> None:
        layer = self.layer
        self._add("attn.c_attn", layer.x1, layer.qkv_ends, self._qkv)
        if layer.out_proj is not None:
            ends = [layer.projected, layer.attn_sum.branch]
            self._add("attn.c_proj", layer.heads, ends, partial(self._out_proj, layer.out_proj))
        for hf, projection, start, end, branch in (
            ("mlp.c_fc", layer.fc, layer.x2, layer.fc_end, layer.fc_end),
            ("mlp.c_proj", layer.mlp_proj, layer.act, layer.mlp, layer.mlp_sum.branch),
        ):
            if projection is not None:
                self._add(hf, start, [end, branch], partial(self._mlp, hf, start, end))

    def _add(
        self,
        hf: str,
        start: Node,
        ends: Sequence[Node],
        assign: Callable[[], dict[str, Assignment]],
    ) -> None:
        """Add the assignments of one projection, or list it as unknown."""
        try:
            self.assigned.update(assign())
        except UnknownPart as error:
            if not self.accepts_others:
                raise
            parameters = tuple(self.graph.parameters_between(ends, [start]))
            code, reasons = error.code, error.nodes
            # Of several products of queries and keys, each reads a part of the projections.
            if hf == "attn.c_attn" and any(op.others for op in self.layer.attention_ops):
                code = "other_attention"
            if self._is_parallel_part(parameters):
                code = "parallel_block"
            if rounding := [n for n in self.graph.between(ends, [start]) if kind(n) in ROUNDING]:
                of_weights = [n for n in rounding if n not in self.graph.live]
                code, reasons = "rounded_weights", of_weights or rounding
            module = f"h.{self.i}.{hf}"
            self.unknown.append(
                UnknownProjection(module, ends[0], parameters, code, error.values, tuple(reasons))
            )

    def _is_parallel_part(self, parameters: Sequence[Node]) -> bool:
        """Return whether one projection computes q, k, v and what the MLP reads."""
        layer, graph = self.layer, self.graph
        if not layer.parallel:
            return False
        of_attention = {*graph.parameters_between(layer.qkv_ends, [layer.x1])}
        shared = of_attention & {*graph.parameters_between([layer.fc_end], [layer.x2])}
        return not shared.isdisjoint(parameters)

    def _view(self, node: Node, what: str) -> View:
        found = token_view(self.graph, node)
        if found is None:
            raise UnknownPart(
                f"layer {self.i}: {what}{self.graph.at(node)} has shape {list(size(node))}, "
                "but one vector per token was expected",
                [node],
            )
        return found

    def _qkv(self) -> dict[str, Assignment]:
        graph, layer, attention = self.graph, self.layer, self.attention
        x1 = self._view(layer.x1, "the input of q, k and v")
        operands = (attention.q, attention.k, attention.v)
        raw = None if layer.raw is None else self._view(layer.raw, "the input of q, k or v")
        maps = _qkv_maps(graph, x1, raw, attention)
        if (
            maps is None
            and self.accepts_others
            and _start_at_projections(self.anatomy, layer, attention)
        ):
            maps = _qkv_maps(graph, x1, raw, attention)
        if maps is None and all(_is_same_for_heads(graph, x1, o) for o in operands):
            raise _shared(graph, "the heads of q, k and v", layer.qkv)
        if maps is None:
            raise _other_projection(graph, layer, x1, attention) or _not_linear(
                graph, self.i, "q, k or v", layer.qkv[0]
            )
        q, k, v = maps
        order = _order_within_heads(q, k, self.n_head)
        if order is not None:
            attention.q, attention.k = (
                replace(view, index=view.index[..., order]) for view in (attention.q, attention.k)
            )
            q, k = (_with_heads_in_order(one, self.n_head, order) for one in (q, k))
        attention.q_factor, attention.k_factor = q.factor, k.factor
        attention.shared_kv = _same(k, v) and not _same(q, k)
        attention.kv_heads = (
            _kv_heads(k, self.n_head) if self.accepts_others and k.parameters else 0
        )
        return {} if attention.kv_heads else _assign_qkv(graph, [q, k, v], self.n_head, layer.qkv)

    def _out_proj(self, node: Node) -> dict[str, Assignment]:
        graph, layer, attention = self.graph, self.layer, self.attention
        end = self._view(layer.projected, "the result of attention")
        ends = {op.out.node for op in layer.attention_ops}
        between = graph.live_between([layer.heads], ends)
        joins = [n for n in graph.live_between([node], ends) if kind(n) in JOINS]
        for join in joins:
            if len({*tensor_inputs(join)}) == 1 < len(tensor_inputs(join)):
                raise _shared(graph, "the heads of q, k and v", [join])
        gated = any(not ends & graph.ancestors[n] for n in between)
        found = None if gated else linear_map(graph, merged(attention.heads), end, self.d_head)
        if found is None:
            start = token_view(graph, layer.heads)
            found = None if start is None else linear_map(graph, start, end)
            if found is not None and all(kind(n) in MOVES | JOINS for n in between):
                attention.unmerged = True
            elif found is not None:
                attention.changed_heads = True
        if found is None:
            raise self._per_head(node) or _not_linear(
                graph, self.i, "attention's output projection", node
            )
        return _assign_projection(graph, "attn.c_proj", found, self.n_head, self.i, node)

    def _per_head(self, node: Node) -> UnknownPart | None:
        """Return the error of an output projection of each head, or of groups of heads."""
        narrow, C = size(node)[-1], self.anatomy.width
        if narrow < C:
            found = f"each head is projected on its own, to {narrow} of the {C} channels"
        elif size(self.layer.projected)[-1] > C:
            groups = size(self.layer.projected)[-1] // C
            found = f"the heads are projected in {groups} groups, and the results are joined"
        else:
            return None
        message = f"layer {self.i}: {found}{self.graph.at(node)}"
        return UnknownPart(message, [node], "per_head_projection", {"found": found})

    def _mlp(self, hf: str, start: Node, end: Node) -> dict[str, Assignment]:
        views = self._view(start, f"the input of {hf}"), self._view(end, f"the result of {hf}")
        found = linear_map(self.graph, *views)
        if found is None:
            raise _not_linear(self.graph, self.i, hf, end)
        return _assign_projection(self.graph, hf, found, self.n_head, self.i, end)


def _qkv_maps(
    graph: Graph, x1: View, raw: View | None, attention: Attention
) -> list[LinearMap] | None:
    """Return the maps from the projections' input to q, k and v; None if one is not linear.

    Some of them may be projected from `raw` instead.
    """
    maps = _maps_of_one_input(graph, x1, attention)
    if maps is None and raw is not None:
        maps = _maps_of_two_inputs(graph, x1, raw, attention)
    return maps


def _maps_of_one_input(graph: Graph, x1: View, attention: Attention) -> list[LinearMap] | None:
    maps, unprojected, rotated = list[LinearMap](), "", ""
    for letter, operand in zip("qkv", (attention.q, attention.k, attention.v), strict=True):
        target = merged(operand)
        if _is_same_tensor(graph, x1, target):
            unprojected += letter
            nowhere = torch.zeros(x1.index.shape[2], target.index.shape[2], dtype=torch.long)
            maps.append(LinearMap([], nowhere, nowhere[0], 1.0))
            continue
        found = linear_map(graph, x1, target)
        if found is None and _is_per_token(graph, x1, target):
            # The first token alone, where the position enters.
            rotated += letter
            first = View(x1.nodes, x1.index[:, :1]), View(target.nodes, target.index[:, :1])
            found = linear_map(graph, *first)
        if found is None:
            return None
        maps.append(found)
    attention.unprojected, attention.rotated = unprojected, rotated
    return maps


def _is_same_tensor(graph: Graph, source: View, target: View) -> bool:
    """Return whether a view has the elements of another one, which it only moves."""
    if source.index.shape != target.index.shape or graph.parameters_between(
        target.nodes, source.nodes
    ):
        return False
    x = random_values(source.index.shape)
    return torch.equal(function_between(graph, source, target)(x), x)


def _order_within_heads(q: LinearMap, k: LinearMap, n_head: int) -> Tensor | None:
    """Return the order of a head's channels in the parameters, if all heads of q and k share it.

    Rotary embeddings may turn neighbouring channels and return them in two halves. q·kᵀ is the
    same in any order. Return None if the order is that of the result.
    """
    heads = torch.cat([one.weight[0].view(n_head, -1) for one in (q, k)])
    order = heads[0].argsort()
    ascending = heads[:, order].diff(dim=1) > 0
    return order if ascending.all() and not (order.diff() > 0).all() else None


def _with_heads_in_order(found: LinearMap, n_head: int, order: Tensor) -> LinearMap:
    """Return a projection whose channels are in this order within each head."""
    weight, bias = (
        numbers.view(*numbers.shape[:-1], n_head, -1)[..., order].flatten(-2)
        for numbers in (found.weight, found.bias)
    )
    return replace(found, weight=weight, bias=bias)


def _maps_of_two_inputs(
    graph: Graph, x1: View, raw: View, attention: Attention
) -> list[LinearMap] | None:
    """Return the maps to q, k and v, some of them projected from x1 and the others from `raw`."""
    maps, letters = [], ""
    for letter, operand in zip("qkv", (attention.q, attention.k, attention.v), strict=True):
        found = linear_map(graph, x1, merged(operand))
        if found is None:
            letters += letter
            found = linear_map(graph, raw, merged(operand))
        if found is None:
            return None
        maps.append(found)
    attention.raw = letters
    return maps


def _is_same_for_heads(graph: Graph, x1: View, operand: View) -> bool:
    """Return whether one matrix projects the channels of each head, as if the heads were tokens."""
    B, H, T, D = operand.index.shape
    if x1.index.numel() != operand.index.numel():
        return False
    source = View(x1.nodes, x1.index.reshape(B, T * H, D))
    target = View(operand.nodes, operand.index.transpose(1, 2).reshape(B, T * H, D))
    return linear_map(graph, source, target) is not None


def _is_per_token(graph: Graph, source: View, target: View) -> bool:
    """Return whether a change of the first token changes no other token of the target."""
    one = random_values(source.index.shape)
    two = one.clone()
    two[:, 0] += 1
    before, after = map(function_between(graph, source, target), (one, two))
    return torch.allclose(before[:, 1:], after[:, 1:], rtol=1e-9, atol=1e-12)


def _start_at_projections(anatomy: Anatomy, layer: Layer, attention: Attention) -> bool:
    """Let attention begin at the results of the projections, if q, k and v each have their own.

    The operations between these results and the products are then treated as a part of attention.
    """
    graph = anatomy.graph
    views = []
    for name in ("q", "k", "v"):
        operand = getattr(attention, name)
        above = set(operand.nodes).union(*(graph.ancestors[node] for node in operand.nodes))
        ends = [end for end in layer.qkv_ends if end in above]
        before = set().union(*(graph.ancestors[end] for end in ends))
        ends = [end for end in ends if end not in before]  # the last ones of latent attention
        sources = [source for end in ends if (source := token_view(graph, end)) is not None]
        whole = [  # a narrower projection may compute a gate
            View(source.nodes, source.index[..., used].transpose(1, 2))
            for source in sources
            if (used := _channels_of_heads(graph, source, operand)) is not None
        ]
        if not ends:  # it is not projected
            whole = [operand]
        views += whole if len(whole) == 1 else _heads_of_projections(graph, sources, operand)
    if len(views) != 3:
        return False
    attention.inner = replace(attention)
    attention.q, attention.k, attention.v = views
    attention.indirect = True
    return True


def _heads_of_projections(graph: Graph, sources: list[View], operand: View) -> list[View]:
    """Return the results of projections of single heads as one view (B, H, T, D), if there is one.

    Args:
        graph: the graph.
        sources: the results (B, T, N) of the projections, each of which computes one head.
        operand: q, k or v (B, H, T, D).
    """
    _, H, _, D = operand.index.shape
    own = [source for source in sources if source.index.shape[2] == D]
    of_heads: list[View] = []
    for h in range(H):
        head = View(operand.nodes, operand.index[:, h])
        found = [source for source in own if len(_used_channels(graph, source, head)) == D]
        if len(found) != 1:
            return []
        of_heads += found
    nodes = tuple(dict.fromkeys(node for source in of_heads for node in source.nodes))
    starts = dict(zip(nodes, accumulate((prod(size(n)) for n in nodes), initial=0), strict=False))
    heads = [source.index + starts[source.nodes[0]] for source in of_heads]
    return [View(nodes, torch.stack(heads, dim=1))]


def _channels_of_heads(graph: Graph, source: View, operand: View) -> Tensor | None:
    """Return the channels (H, D) of a projection from which each head of an operand is computed.

    Return None where a head is not computed from D channels. Heads of a group may have the same
    channels.
    """
    _, H, _, D = operand.index.shape
    used = _used_channels(graph, source, operand)
    if len(used) == H * D:
        return used.view(H, D)
    if len(used) == 0 or (H * D) % len(used):
        return None
    heads = [View(operand.nodes, operand.index[:, h]) for h in range(H)]
    found = [_used_channels(graph, source, head) for head in heads]
    return torch.stack(found) if {len(each) for each in found} == {D} else None


def _used_channels(graph: Graph, source: View, target: View) -> Tensor:
    """Return the channels of a view (B, T, N) on which another view depends, in ascending order."""
    used = torch.zeros(source.index.shape[-1], dtype=torch.bool)
    for scale in (1.0, 1e-3):  # a clamp has no gradient for large numbers
        x = scale * random_values(source.index.shape)
        inputs = [part.requires_grad_() for part in source.write(x)]
        with torch.enable_grad():
            found = graph.run(target.nodes, dict(zip(source.nodes, inputs, strict=True)))
            total = target.read(found).square().sum()
            gradients = source.read(torch.autograd.grad(total, inputs))
        used |= gradients.flatten(0, 1).any(0)
    return used.nonzero().flatten()


def _shared(graph: Graph, shared: str, nodes: Sequence[Node]) -> UnknownPart:
    message = (
        f"{shared} are projected by the same parameters{graph.at(*nodes)}, but GPT-2 has separate "
        "parameters for each of them"
    )
    values = {"tensors": shared, "part": "projection"}
    return UnknownPart(message, nodes, "shared_parameters", values)


def _other_projection(
    graph: Graph, layer: Layer, x1: View, attention: Attention
) -> UnknownPart | None:
    """Return what computes q, k and v in place of one projection of all channels, if known."""
    chain = [n for n in layer.qkv if any(n in graph.ancestors[other] for other in layer.qkv)]
    if chain:
        message = f"q, k and v are projected twice{graph.at(*chain)}"
        narrow = max(size(n)[-1] for n in chain) < x1.index.shape[2]
        values = {"like": ", as in multi-head latent attention" if narrow else ""}
        return UnknownPart(message, chain, "latent_attention", values)
    q, (_, H, _, D) = attention.q, attention.q.index.shape
    used = [len(_used_channels(graph, x1, View(q.nodes, q.index[:, h]))) for h in range(H)]
    if max(used) == D < x1.index.shape[2]:
        message = f"each head projects {D} channels{graph.at(*layer.qkv)}"
        return UnknownPart(message, layer.qkv, "sliced_heads", {"found": D})
    return None


def _not_linear(graph: Graph, i: int, what: str, node: Node) -> AdaptError:
    message = f"layer {i}: {what}{graph.at(node)} is not a linear projection of each token"
    return UnknownPart(message, [node])


def _kv_heads(k: LinearMap, n_head: int) -> int:
    """Return the number of different heads in the projection of k, if there are fewer than of q."""
    heads = k.weight.view(k.weight.shape[0], n_head, -1)
    different = len({tuple(heads[:, h].flatten().tolist()) for h in range(n_head)})
    return different if different < n_head else 0


def _same(one: LinearMap, other: LinearMap) -> bool:
    return one.parameters == other.parameters and torch.equal(one.weight, other.weight)


def _contents(
    graph: Graph, maps: Sequence[LinearMap], numbers: Sequence[Tensor]
) -> dict[Node, Tensor]:
    """Return which element of the fused tensor each element of every parameter is, or −1.

    Args:
        graph: the graph of the parameters.
        maps: one or several.
        numbers: the numbers of the elements in each map's columns. The fused tensor has all of
            them side by side along the last axis.
    """
    found: dict[Node, Tensor] = {}
    width = sum(number.shape[-1] for number in numbers)
    offset = 0
    for linear, number in zip(maps, numbers, strict=True):
        rows = number.reshape(-1, number.shape[-1])
        place = torch.arange(len(rows))[:, None] * width + offset + torch.arange(rows.shape[1])
        first = 1
        for node in linear.parameters:
            count = graph.values[node].numel()
            own = (rows >= first) & (rows < first + count)
            if own.any():
                content = found.setdefault(node, torch.full((count,), -1))
                content[rows[own] - first] = place[own]
            first += count
        offset += rows.shape[1]
    return {node: found[node].view(graph.values[node].shape) for node in found}


def _assign_qkv(
    graph: Graph, maps: Sequence[LinearMap], n_head: int, nodes: Sequence[Node]
) -> dict[str, Assignment]:
    assigned: dict[str, Assignment] = {}
    C, N = maps[0].weight.shape
    widths = [one.weight.shape[1] for one in maps]
    if len({*widths}) > 1:
        found = f"q, k and v have {listed([str(width) for width in widths])} channels"
        raise UnknownPart(f"{found}, but GPT-2 has {C} of each", nodes, "head_width")
    shared = [x for x, one in zip("qkv", maps, strict=True)
              if one.parameters and sum(_same(one, other) for other in maps) > 1]  # fmt: skip
    if "q" in shared:
        used = dict.fromkeys(node for one in maps for node in one.parameters)
        raise _shared(graph, f"{', '.join(shared[:-1])} and {shared[-1]}", [*used])
    if shared:
        nowhere = LinearMap([], 0 * maps[1].weight, 0 * maps[1].bias, 1.0)
        maps = [maps[0], _unused(graph, maps) or nowhere, maps[2]]
    for hf, numbers, shape in (
        ("attn.c_attn.weight", [m.weight for m in maps], (C, 3 * N)),
        ("attn.c_attn.bias", [m.bias for m in maps], (3 * N,)),
    ):
        contents = _contents(graph, maps, numbers)
        if not contents:
            continue
        complete = all(bool((content >= 0).all()) for content in contents.values())
        op = find_op(list(contents.values()), shape, n_head, qkv=True) if complete else None
        held = sum(content.numel() for content in contents.values())
        if op is None or held != sum(int((n > 0).sum()) for n in numbers):
            names = listed([graph.names[node] for node in contents])
            message = f"the parameters {names} hold q, k and v in a form that compat does not know"
            if not complete:
                message = (
                    f"q, k and v use only parts of the parameters {names}, as where one parameter "
                    "holds several layers, but GPT-2's layers have parameters of their own"
                )
            raise UnknownPart(message, nodes)
        assigned[hf] = tuple(contents), op
    return assigned


def _unused(graph: Graph, maps: Sequence[LinearMap]) -> LinearMap | None:
    """Return the unused part of the parameters if one projection computes both key and value.

    The checkpoint's keys are loaded into it without effect. Without such a part they are left out.
    """
    q, k, _ = maps
    used = torch.cat([q.weight.reshape(-1), k.weight.reshape(-1), q.bias, k.bias])
    numbers = torch.arange(1, sum(graph.values[node].numel() for node in q.parameters) + 1)
    spare = numbers[~torch.isin(numbers, used)]
    bias_count = q.bias.numel() if q.bias.any() else 0
    if len(spare) != q.weight.numel() + bias_count:
        return None
    weight, bias = spare[: q.weight.numel()], spare[q.weight.numel() :]
    by_row = q.weight.shape[1] > 1 and q.weight[0, 1] - q.weight[0, 0] != 1
    weight = weight.view(q.weight.mT.shape).mT if by_row else weight.view(q.weight.shape)
    return LinearMap(q.parameters, weight, bias if bias_count else torch.zeros_like(q.bias), 1.0)


def _assign_projection(
    graph: Graph, hf: str, found: LinearMap, n_head: int, i: int, end: Node
) -> dict[str, Assignment]:
    assigned: dict[str, Assignment] = {}
    for part, numbers in (("weight", found.weight), ("bias", found.bias)):
        contents = _contents(graph, [found], [numbers])
        if not contents:
            continue
        nodes = sorted(contents, key=lambda node: int(contents[node].min()))
        op = find_op([contents[node] for node in nodes], numbers.shape, n_head)
        if op is None:
            names = listed([graph.names[node] for node in contents])
            why = "the order of its elements there is not known to compat"
            if any(bool((content < 0).any()) for content in contents.values()):
                why = "this parameter has other numbers as well"
            message = f"layer {i}: {hf}.{part} cannot be loaded into {names}, because {why}"
            raise UnknownPart(message, [end])
        assigned[f"{hf}.{part}"] = tuple(nodes), op
    return assigned


def _assign_norm(graph: Graph, hf: str, norm: Norm) -> dict[str, Assignment]:
    assigned: dict[str, Assignment] = {}
    for part, node in (("weight", norm.scale), ("bias", norm.shift)):
        if node is not None:
            content = torch.arange(graph.values[node].numel()).view(graph.values[node].shape)
            op = find_op([content], (content.numel(),), 1)
            if op is not None:
                assigned[f"{hf}.{part}"] = (node,), op
    return assigned


def _assign_embeddings_and_head(anatomy: Anatomy, found: Assignments, config: GPT2Config) -> None:
    """Assign the embeddings and the head, by the shapes of their parameters."""
    graph = anatomy.graph
    tables = graph.parameters_between([anatomy.token_embedding], [])
    if len(tables) != 1:
        names = listed([graph.names[node] for node in tables])
        raise UnknownPart(
            f"the token embedding is computed from {len(tables)} parameters ({names}), but GPT-2 "
            "looks it up in one table",
            [anatomy.token_embedding],
        )
    table = tables[0]

    def is_table(node: Node, C: int) -> bool:
        shape = graph.values[node].shape
        return node is not table and C in shape and shape.numel() > C

    def assign(hf: str, node: Node, C: int, rows: int, start: int = 0) -> None:
        """Assign a tensor of width C, or the rows that both have if their number differs."""
        pattern = _pattern(graph, node, C)
        wanted = graph.values[node].numel() // C
        plain: dict[str, Op] = {"r c -> r c": Same(), "r c -> c r": Transpose()}
        op = plain.get(pattern) or Rearrange(pattern)
        found.by_tensor[hf] = (node,), op if wanted == rows else Rows(rows, wanted, pattern, start)

    assign(EMBEDDING, table, anatomy.table_width, config.vocab_size)
    tokens = [] if anatomy.own_input is None else [anatomy.own_input]
    positions = [
        node for node in graph.parameters_between([anatomy.embed], tokens)
        if is_table(node, anatomy.position_width)
    ]  # fmt: skip
    for node in positions[:1]:
        spare = graph.values[node].numel() // config.n_embd - config.n_positions
        formula = embedding_of(anatomy, table, node) if spare > 0 else None
        first = formula.offset if formula is not None else None
        start = first if first is not None and 0 <= first <= spare else 0
        assign("wpe.weight", node, anatomy.position_width, config.n_positions, start)
    # Other tensors that depend on the ids may be added to the logits.
    others = [
        node for node in graph.between([graph.output], [anatomy.xf])
        if node in graph.live and anatomy.xf not in graph.ancestors[node] | {node}
    ]  # fmt: skip
    width = prod(size(anatomy.xf)) // prod(graph.shape)  # C, unless the last block ends otherwise
    for node in graph.parameters_between([graph.output], [anatomy.xf, *others]):
        if is_table(node, width):
            assign(HEAD, node, width, config.vocab_size)
        elif node is not table and graph.values[node].numel() > 1:
            found.zeroed.append(node)  # a bias; a single number is a factor
    found.head_scale = _head_scale(anatomy)


def _pattern(graph: Graph, node: Node, C: int) -> str:
    """Return which axes of a table are the rows and the channels, by its shape."""
    shape = tuple(graph.values[node].shape)
    rows = graph.values[node].numel() // C
    patterns = {  # where two have the same shape, the last one
        (rows, C, 1): "r c -> r c 1",
        (rows, 1, C): "r c -> r 1 c",
        (1, rows, C): "r c -> 1 r c",
        (C, rows): "r c -> c r",
        (rows, C): "r c -> r c",
    }
    if shape not in patterns:
        raise UnknownPart(
            f"{graph.names[node]} has shape {list(shape)}, but a table [rows, {C}] was expected",
            [node],
        )
    return patterns[shape]


def _head_scale(anatomy: Anatomy) -> float:
    """Return the factor by which the logits are multiplied after the head."""
    graph = anatomy.graph
    between = graph.between([graph.output], [anatomy.head])
    if not any(kind(node) in ("mul", "div") for node in between):
        return 1.0
    x = random_values(size(anatomy.xf))
    nodes = [anatomy.head, graph.output]
    (head, logits), (base, other) = (graph.run(nodes, {anatomy.xf: v}) for v in (x, 0 * x))
    before, after = (head - base).flatten(), (logits - other).flatten()  # of ids (B, T) or (B·T)
    scale = float(after.norm() / before.norm())
    alike = before.shape == after.shape
    return scale if alike and torch.allclose(after, scale * before, rtol=1e-6, atol=1e-9) else 1.0


def drop_misfits(graph: Graph, found: Assignments, checkpoint: Checkpoint) -> Unmatched:
    """Remove assignments that the checkpoint's tensors do not fit into.

    Returns:
        All tensors of the checkpoint that are not assigned.
    """
    unmatched, holder = Unmatched(), dict[Node, str]()
    unmatched.nodes |= {f"{each.module}.weight": each.parameters for each in found.unknown}
    for hf, (nodes, op) in list(found.by_tensor.items()):
        if hf not in checkpoint.infos:
            unmatched.nodes[hf] = nodes
            del found.by_tensor[hf]
            continue
        wanted = [list(graph.values[node].shape) for node in nodes]
        shape = checkpoint.infos[hf].shape
        try:
            loaded = [list(t.shape) for t in op.load(torch.empty(shape, device="meta"))]
        except (NameMapError, RuntimeError):
            loaded = [list(shape)]
        holders = [holder[node] for node in nodes if node in holder]
        holder |= {node: hf for node in nodes if node not in holder}
        if holders:
            unmatched.shared[hf] = holders[0]
        elif loaded != wanted:
            unmatched.shapes[hf] = wanted[0], loaded[0]
            unmatched.nodes[hf] = nodes
        else:
            if isinstance(op, Fused):
                held = "".join(part.qkv for part in op.parts)
                if absent := "".join(x for x in "qkv" if x not in held):
                    unmatched.partly[hf] = absent
            continue
        del found.by_tensor[hf]
    unmatched.names = [
        hf for hf in names_without_tied_head(checkpoint) if hf not in found.by_tensor
    ]
    if HEAD in unmatched.names and HEAD not in unmatched.shapes:
        unmatched.shared[HEAD] = EMBEDDING  # the model ties its head
    return unmatched


def names_without_tied_head(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the checkpoint's tensors, without that of a tied head."""
    tied = checkpoint.config.tie_word_embeddings
    return [name for name in checkpoint.infos if not (tied and name == HEAD)]
