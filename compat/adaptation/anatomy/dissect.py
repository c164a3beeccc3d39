"""Recognise the parts of a GPT-2 in a graph by data flow, without looking at names.

Attention is identified by products of two values that depend on the ids. All other parts are found
by their connection to it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch
from torch.fx import Node

from compat.adaptation.tracing.contractions import SDPA, Contraction, contraction
from compat.adaptation.tracing.graph import (
    MOVES,
    REDUCTIONS,
    SHIFTS,
    Graph,
    Place,
    adds_two,
    aten,
    below,
    insert,
    kind,
    live_inputs,
    live_users,
    meetings,
    random_values,
    reached,
    reads_parameter,
    size,
    tensor_inputs,
)
from compat.errors import AdaptError

ACTIVATIONS = frozenset("gelu relu silu leaky_relu elu selu tanh sigmoid softplus mish".split())


# Operations between the token embedding and the residual stream, such as positions that are added
# to every other channel.
EMBEDDINGS = SHIFTS | frozenset(
    "add mul div sub rsub where masked_fill stack unbind split chunk split_with_sizes index".split()
)


NO_ATTENTION = "no_attention"


class UnknownPart(AdaptError):
    """A part whose structure compat does not know.

    Args:
        message: describes the unknown part, with its line.
        nodes: the part's nodes.
        code: the code of its deviation, if that is known.
        values: the values for the message of this deviation.
    """

    def __init__(
        self,
        message: str,
        nodes: Sequence[Node],
        code: str = "unknown_part",
        values: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.nodes, self.code = list(nodes), code
        self.values = {"found": message, **(values or {})}


class NoHead(AdaptError):
    """A model that returns hidden states.

    Args:
        message: the error message.
        table: the name of the token embedding's parameter.
        lines: the lines that compute the hidden states, the outermost first.
    """

    def __init__(self, message: str, table: str, lines: list[Place]) -> None:
        super().__init__(message)
        self.table, self.lines = table, lines


class UnknownHead(UnknownPart):
    """A head whose structure compat does not know.

    Args:
        message: the error message.
        nodes: the products of the head, in order, or all its operations if it has none.
        table: the name of the token embedding's parameter.
        hidden: the node of the last hidden states (B, T, C), from which the head computes.
    """

    def __init__(self, message: str, nodes: Sequence[Node], table: str, hidden: Node) -> None:
        super().__init__(message, nodes)
        self.table, self.hidden = table, hidden


@dataclass(frozen=True)
class Operand:
    """A tensor that enters or leaves attention, and the meaning of its axes.

    Args:
        node: the node that computes the tensor.
        groups: the axes of batch and heads, merged or not; with one head, only the batch.
        time: the axis of the positions.
        d: the axis of the head size.
    """

    node: Node
    groups: tuple[int, ...]
    time: int
    d: int


@dataclass(frozen=True)
class AttentionOp:
    """softmax(q·kᵀ)·v, for all heads or for one.

    Args:
        q, k, v, out: operands and result.
        product: the node of the product with v, or of the fused kernel.
        scores: the node of q·kᵀ; None in a fused kernel.
        probs: the operand that is multiplied with v. Its `time` is the query's axis, its `d` the
            key's.
        others: further products of queries and keys from which the probabilities are computed, as
            in differential attention.
    """

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    product: Node
    scores: Node | None
    probs: Operand | None
    others: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Sum:
    """Where a branch is added to the residual stream.

    Args:
        node: the sum; without a shortcut, the end of the branch.
        branch: the end of the branch.
        shortcut: what the branch is added to; None without a shortcut.
        own_input: an earlier sum, of the branch with its own input.
    """

    node: Node
    branch: Node
    shortcut: Node | None
    own_input: Node | None = None


@dataclass
class Layer:
    """The nodes of one block; taps of `compat.tap` are named in the comments.

    Without an MLP, its nodes are those of `resid_mid`. With a single projection, `act` and `mlp`
    are the result of its activation. Of projections in a structure that compat does not know, only
    their input and the result of the branch are set.
    """

    attention_ops: list[AttentionOp]
    qkv: list[Node]  # the projections that compute q, k and v
    qkv_ends: list[Node]  # their results, with biases that are added in operations of their own
    x1: Node  # ln_1: their input
    raw: Node | None  # where some of them have another input, from which x1 is computed
    out_proj: Node | None
    heads: Node  # the input of the output projection; without one, the result of attention
    projected: Node  # the result of the output projection
    attn: Node  # the same, unless GPT-2 has no counterpart of what follows
    attn_sum: Sum  # resid_mid
    fc: Node | None  # None without an MLP
    x2: Node  # ln_2
    act: Node
    fc_end: Node  # fc, with a bias that is added in an operation of its own
    mlp_proj: Node | None  # None without an MLP, or if it has a single projection
    mlp: Node
    mlp_sum: Sum  # out
    parallel: bool  # the MLP does not depend on the result of attention
    gate: Node | None  # of a gated MLP, the second projection of the MLP's input
    extra: list[Node]  # projections that GPT-2 does not have, after those of the MLP
    extra_ends: dict[Node, Node]  # their results, with biases
    unknown: list[Node]  # projections in place of the MLP, in a structure that is not known
    cross: list[AttentionOp]  # attention to another sequence, between attention and the MLP
    cross_sum: Sum | None  # where its result is added to the residual stream

    @property
    def is_gated(self) -> bool:
        """Whether two projections, or the halves of one, are multiplied."""
        return self.gate is not None or size(self.fc_end)[-1] == 2 * size(self.act)[-1]

    @property
    def has_mlp(self) -> bool:
        return self.fc is not None or bool(self.unknown)

    def activation_spans(self, graph: Graph) -> list[tuple[Node, Node]]:
        """Return the nodes before and after each place of an activation, the first one first.

        There is one, between `fc_end` and `act`, unless the MLP has more than two projections.
        """
        between = {*graph.between([self.act], [self.fc_end])}
        inside = [node for node in self.extra if node in between]
        starts = [self.fc_end, *(self.extra_ends[node] for node in inside)]
        ends = [a for node in inside for a in live_inputs(graph, node)]
        return list(zip(starts, [*ends, self.act], strict=False))

    @property
    def mid(self) -> Node:
        return self.attn_sum.node

    @property
    def out(self) -> Node:
        return self.mlp_sum.node


@dataclass
class Anatomy:
    """The parts of a GPT-2 in a graph.

    Args:
        graph: the model's graph.
        token_embedding: the node that looks up the token table.
        looked_up: the same with factors; without positions behind a norm or a projection, `embed`.
        embed: the sum of token and position embeddings, before any norm of the sum.
        own_input: the operand of this sum that is computed from the tokens, behind a norm or a
            projection; otherwise None.
        layers: the blocks, in their order.
        xf: the input of the head, tap `ln_f`.
        head: the projection to the vocabulary.
        width: C, that of the residual stream.
        table_width: that of the token table.
        vocabulary: rows of the token table.
        leading: projections between the embeddings and the first attention that have an effect.
            GPT-2 has none.
    """

    graph: Graph
    token_embedding: Node
    looked_up: Node
    embed: Node
    own_input: Node | None
    layers: list[Layer]
    xf: Node
    head: Node
    width: int
    table_width: int
    vocabulary: int
    leading: list[Node]

    @property
    def position_width(self) -> int:
        """The width of vectors that are added to the tokens, which may be projected before."""
        return self.table_width if self.own_input is None else size(self.embed)[-1]


@dataclass(frozen=True)
class _Inputs:
    """The projections that compute q, k and v, and the tensors that they project.

    Args:
        qkv: the projections.
        x1: their input.
        raw: the input of some of them, from which x1 is computed, as without the norm; or None.
    """

    qkv: list[Node]
    x1: Node
    raw: Node | None = None


@dataclass(frozen=True)
class _Mlp:
    """The projections of an MLP. Without any, the branch has an unknown structure or is missing.

    Args:
        fc, gate, proj: the first projection, one beside it that multiplies its result, the last.
        others: projections that GPT-2 does not have.
    """

    fc: Node | None = None
    gate: Node | None = None
    proj: Node | None = None
    others: Sequence[Node] = ()


class GraphIndex:
    """The projections, products and embeddings of a graph, and how they are connected.

    Attributes:
        live: the nodes that depend on the ids, in execution order.
        products: every contraction among them.
        projections: products of a live tensor with parameters.
        mixers: products of two live tensors, and fused attention kernels.
        ends: all of these, and embeddings.
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
                elif size(node).count(graph.shape[1]) > 1:
                    continue  # the scores or the probabilities of the heads are mixed
                elif graph.parameters_of[found.b if live[0] else found.a]:
                    self.projections.add(node)
        self.ends = {*self.projections, *self.mixers, *filter(self.embeds, self.live)}

    def before_moves(self, node: Node) -> Node:
        """Return the node whose elements this node has moved; itself if it moves none."""
        while kind(node) in MOVES or kind(node) == "getitem":
            above = tensor_inputs(node)[0]
            if above not in self.graph.live:
                break
            if kind(node) == "getitem" and kind(above) != "native_dropout":
                break  # one of several results, such as q, k and v
            node = above
        return node

    def frontier(self, node: Node) -> set[Node]:
        """Return the nearest projections, mixers and embeddings that a node is computed from."""
        above = reached([node], lambda n: [] if n in self.ends else live_inputs(self.graph, n))
        return above & self.ends

    def sources(self, node: Node) -> set[Node]:
        """Return the frontier of a product's live operands."""
        return set().union(*(self.frontier(a) for a in self.operands(node)))

    def operands(self, node: Node) -> list[Node]:
        """Return the live operands of a product."""
        if kind(node) in SDPA:
            operands = tensor_inputs(node)[:3]
        else:
            operands = [self.products[node].a, self.products[node].b]
        return [a for a in operands if a in self.graph.live]

    def input_of(self, projection: Node) -> Node:
        """Return the tensor that a projection projects."""
        return self.before_moves(self.operands(projection)[0])

    def embeds(self, node: Node) -> bool:
        """Return whether a node looks up a table of parameters by the ids."""
        if node not in self.graph.live or kind(node) not in ("embedding", "index", "index_select"):
            return False
        table = tensor_inputs(node)[0]
        return table not in self.graph.live and bool(self.graph.parameters_of[table])


def fused_attention(node: Node) -> AttentionOp:
    """Return the operands of a fused attention kernel."""
    q, k, v = tensor_inputs(node)[:3]
    out = node
    if kind(node) != "scaled_dot_product_attention":  # the other kernels return a tuple
        out = next(user for user in node.users if user.args[1] == 0)

    def operand(x: Node) -> Operand:
        n = len(size(q if x is out else x))
        return Operand(x, tuple(range(n - 2)), n - 2, n - 1)

    return AttentionOp(operand(q), operand(k), operand(v), operand(out), node, None, None)


def split_attention(
    first: Contraction, second: Contraction, probs: Node, v: Node
) -> AttentionOp | None:
    """Return the operands of attention that is written as two products.

    The second product sums over the time of v, which is also the time of k. This distinguishes k
    from q in the first product.
    """
    p_axes, v_axes, out = second.axes(probs), second.axes(v), second.out_axes
    summed = second.summed
    if len(summed) != 1 or len(first.summed) < 1:
        return None
    d_v = [x for x in v_axes if x not in p_axes]
    t_q = [x for x in p_axes if x not in v_axes]
    if len(t_q) > 1:  # the heads share a key and a value, as in "bhqk,bkd->bhqd"
        lengths = dict(zip(p_axes, size(probs), strict=True))
        t_q = [x for x in t_q if lengths[x] == lengths[summed]]
    if len(d_v) != 1 or len(t_q) != 1:
        return None
    # The axes of the probabilities are, from the right, those of the scores.
    key_time = first.out_axes[p_axes.index(summed) - len(p_axes)]
    query_time = first.out_axes[p_axes.index(t_q[0]) - len(p_axes)]
    k, q = (first.a, first.b) if key_time in first.a_axes else (first.b, first.a)
    if key_time not in first.axes(k) or query_time not in first.axes(q):
        return None
    groups = [x for x in p_axes if x not in (t_q[0], summed)]
    first_groups = [x for x in first.out_axes if x not in (key_time, query_time)]

    def operand(node: Node, axes: str, groups: Iterable[str], time: str, d: str) -> Operand:
        places = tuple(axes.index(x) for x in groups if x in axes)
        return Operand(node, places, axes.index(time), axes.index(d))

    return AttentionOp(
        q=operand(q, first.axes(q), first_groups, query_time, first.summed[0]),
        k=operand(k, first.axes(k), first_groups, key_time, first.summed[0]),
        v=operand(v, v_axes, groups, summed, d_v[0]),
        out=operand(second.node, out, groups, t_q[0], d_v[0]),
        product=second.node,
        scores=first.node,
        probs=operand(probs, p_axes, groups, t_q[0], summed),
    )


def is_table_of_positions(graph: Graph, node: Node) -> bool:
    """Return whether a node holds a vector of parameters for each position."""
    if node in graph.live or not graph.parameters_of.get(node) or not size(node):
        return False
    B, T = graph.shape
    return T in size(node)[:-1] and prod(size(node)) in (T * size(node)[-1] * n for n in (1, B))


def dissect(graph: Graph, accepts_others: bool = False) -> Anatomy:
    """Recognise all parts of a GPT-2.

    Args:
        graph: the model's graph.
        accepts_others: accept blocks without an MLP, a model of embeddings and a head without
            blocks, and projections that GPT-2 does not have: those of cross-attention, the gate of
            a gated MLP, and others after the MLP.

    Raises:
        AdaptError: a part is missing or ambiguous. The message names it and its line.
    """
    return _Dissection(graph, accepts_others).run()


class _Dissection:
    """One search for the parts, from attention outwards."""

    def __init__(self, graph: Graph, accepts_others: bool) -> None:
        self.graph, self.accepts_others = graph, accepts_others
        self.index = GraphIndex(graph)
        self.cross: list[AttentionOp] = []

    def run(self) -> Anatomy:
        graph = self.graph
        levels = self._levels(self._attention_ops())
        tokens, looked_up = self._embedding(levels[0] if levels else [])
        embed, own_input = self._later_sum(looked_up) or (looked_up, None)
        self.width = size(tokens)[-1]
        head = self._head(tokens)
        between = graph.parameters_between([self.index.input_of(head)], [embed])
        if not levels and any(graph.values[node].ndim > 1 for node in between):
            raise self._no_attention()
        self.levels, self.head = levels, head
        self.inputs = [self._inputs(i, attention_ops) for i, attention_ops in enumerate(levels)]
        if levels and self.width not in size(self.inputs[0].x1):  # a narrow table is projected
            self.width = prod(size(self.inputs[0].x1)) // prod(graph.shape)
        layers = [self._layer(i) for i in range(len(levels))]
        found = size(tokens)[-1]
        table_width = found if found % self.width else self.width  # it may join the tokens
        rows = prod(size(self._table(tokens))) // table_width
        xf = self.index.input_of(head)
        first = set() if not layers else {*graph.between([layers[0].x1], [embed])}
        leading = [n for n in self.index.live if n in first & self.index.projections]
        leading = [n for n in leading if self._changes(n, embed, layers[0].x1)]
        return Anatomy(
            graph, tokens, looked_up, embed, own_input, layers, xf, head, self.width, table_width,
            rows, leading,
        )  # fmt: skip

    def _changes(self, node: Node, start: Node, end: Node) -> bool:
        """Return whether a node between two others has an effect; a gate of 0 has none."""
        x = random_values(size(start))
        one, other = (
            self.graph.run([end], {start: x, node: random_values(size(node), seed)})[0]
            for seed in (1, 2)
        )
        return not torch.equal(one, other)

    def _attention_ops(self) -> list[AttentionOp]:
        found: list[AttentionOp] = []
        for node in self.index.live:
            if kind(node) in SDPA:
                found.append(self._with_own_operands(fused_attention(node)))
            elif node in self.index.mixers:
                op = self._attention_op(self.index.products[node])
                found += [self._with_own_operands(op)] if op is not None else []
        if not found and not self.accepts_others:
            raise self._no_attention()
        if self.accepts_others:
            own = [op for op in found if not self._is_cross(op)]
            self._check_own_keys(found)
            self.cross = [op for op in found if op not in own] if own else []
            found = own or found
        return found

    def _check_own_keys(self, attention_ops: list[AttentionOp]) -> None:
        """Refuse keys and values that a layer takes over from an earlier one."""
        # What computes keys and values, down to the nearest projections.
        read = [[self.index.frontier(o.node) for o in (op.k, op.v)] for op in attention_ops]
        for (i, first), (j, op) in combinations(enumerate(attention_ops), 2):
            is_later = first.product in self.graph.ancestors[op.product]
            if read[j][0] and is_later and read[i] == read[j]:
                raise UnknownPart(
                    f"attention {j + 1}{self.graph.at(op.product)} reads the keys and values of "
                    f"attention {i + 1}, but in GPT-2 each layer projects its own",
                    [op.product],
                )

    def _is_cross(self, op: AttentionOp) -> bool:
        """Return whether keys and values are projected from another tensor than the queries."""
        if op.k.node not in self.graph.live:
            return True
        own = self._projected([op.q.node, op.k.node, op.v.node])
        q, k, v = (
            {self.index.input_of(n) for n in self.index.frontier(operand.node)
             if n in self.index.projections and operand.node in own}
            for operand in (op.q, op.k, op.v)
        )  # fmt: skip
        return bool(q) and bool(k) and q.isdisjoint(k | v)

    def _no_attention(self) -> UnknownPart:
        index = self.index
        for node in index.live:
            operands = index.operands(node) if node in index.mixers & index.products.keys() else []
            scores = sorted(len(index.frontier(operand) & index.mixers) for operand in operands)
            if scores[:1] == [0] and scores[-1] > 1:
                return UnknownPart(
                    f"the weights with which v is multiplied{self.graph.at(node)} are computed "
                    f"from {scores[-1]} products of queries and keys, as in differential "
                    "attention, but GPT-2 computes them from one",
                    [node],
                )
        projections = sorted(index.projections, key=self.graph.order.__getitem__)
        return UnknownPart(
            "the model multiplies no softmax(q·kᵀ) with v, so it has no attention and is not a "
            f"GPT-2. It has {len(projections)} projections",
            projections or [node for node in self.graph.nodes if node in self.graph.live][-1:],
            NO_ATTENTION,
        )

    def _with_own_operands(self, op: AttentionOp) -> AttentionOp:
        """Copy a node that is several of q, k and v, so that each of them can be set."""
        op = self._with_copy(op, "k") if op.k.node is op.q.node else op
        return self._with_copy(op, "v") if op.v.node in (op.q.node, op.k.node) else op

    def _with_copy(self, op: AttentionOp, name: str) -> AttentionOp:
        """Return the operation with a copy of one operand, which only its product reads."""
        operand: Operand = getattr(op, name)
        product = op.product
        if op.scores is not None and name == "k":
            return op  # the product of q with itself
        copy = insert(product, aten.clone.default, (operand.node,), operand.node)
        if op.scores is None:
            product.update_arg("qkv".index(name), copy)
        else:
            product.replace_input_with(operand.node, copy)
        self.graph.invalidate()
        self.index = GraphIndex(self.graph)
        changed: dict[str, Any] = {name: replace(operand, node=copy)}
        return replace(op, **changed)

    def _attention_op(self, product: Contraction) -> AttentionOp | None:
        """Return the attention whose second product this is: probabilities times v."""
        index = self.index
        for probs, v in ((product.a, product.b), (product.b, product.a)):
            firsts = index.frontier(probs) & index.mixers
            if not firsts or index.frontier(v) & index.mixers:
                continue
            last = max(firsts, key=self.graph.order.__getitem__)
            others = firsts - {last} - self.graph.ancestors[last]  # without those of earlier layers
            if others and not self.accepts_others:
                continue
            first = index.products.get(last)
            if first is not None:
                found = split_attention(first, product, probs, v)
                return found and replace(found, others=tuple(others))
        return None

    def _levels(self, attention_ops: list[AttentionOp]) -> list[list[AttentionOp]]:
        """Return the operations by layer; the heads of a layer do not depend on each other."""
        above, levels = self.graph.ancestors, list[list[AttentionOp]]()
        for op in attention_ops:
            before = [
                i for i, level in enumerate(levels)
                if any(other.product in above[op.product] for other in level)
            ]  # fmt: skip
            own = max(before, default=-1) + 1
            levels += [[]] if own == len(levels) else []
            levels[own].append(op)
        return levels

    def _embedding(self, first: list[AttentionOp]) -> tuple[Node, Node]:
        """Return the token embedding, and the same with positions and factors, before any norm.

        Args:
            first: the attention of the first layer. A table that only its values depend on is
                not the token embedding.
        """
        index = self.index
        tables = [  # a table looked up by the ids, or multiplied with one-hot vectors of them
            node for node in index.live
            if index.embeds(node) or (node in index.projections and not index.sources(node))
        ]  # fmt: skip
        if not tables:
            raise AdaptError(
                "the model has no token embedding. No table of parameters is looked up by the ids"
            )
        queries = set[Node]().union(*(self.graph.ancestors[op.q.node] for op in first))
        tokens = embed = next((node for node in tables if node in queries), tables[0])
        for node, is_meeting in below(self.graph, embed):
            moves = kind(node) in MOVES or kind(node) == "getitem"
            inputs = live_inputs(self.graph, node) if kind(node) in EMBEDDINGS else ()
            if not moves and not (inputs and all(index.frontier(a) <= {*tables} for a in inputs)):
                break
            if is_meeting and prod(size(node)) == prod(size(embed)):
                embed = node
        return tokens, embed

    def _later_sum(self, looked_up: Node) -> tuple[Node, Node] | None:
        """Return the sum with positions behind a norm or a projection, and its own operand."""
        graph = self.graph
        before = graph.between([looked_up], [graph.input])
        if any(is_table_of_positions(graph, node) for node in before):
            return None
        for node, is_meeting in below(graph, looked_up):
            if node in self.index.mixers:
                return None
            if is_meeting and kind(node) in ("add", "cat"):
                inputs = [a for a in tensor_inputs(node) if a in graph.live]
                positions = (is_table_of_positions(graph, a) for a in tensor_inputs(node))
                if len(inputs) == 1 and any(positions):
                    return node, inputs[0]
        return None

    def _table(self, node: Node) -> Node:
        """Return the table of an embedding, or of a product with one-hot vectors."""
        found = self.index.products.get(node)
        if found is None:
            return tensor_inputs(node)[0]
        return found.b if found.a in self.graph.live else found.a

    def _head(self, tokens: Node) -> Node:
        """Return the projection that computes the output, or raise the error of its structure."""
        found = sorted(self.index.frontier(self.graph.output), key=self.graph.order.__getitem__)
        with_attention = [n for n in found if n in self.index.projections
                          and self.graph.ancestors[n] & self.index.mixers]  # fmt: skip
        if self.accepts_others and len(with_attention) == 1:
            return with_attention[0]  # other terms may be added to the logits
        if len(found) == 1 and found[0] in self.index.projections:
            return found[0]
        message = (
            "the model has no language-model head. One projection to the vocabulary was "
            f"expected, but {len(found)} operations compute the output{self.graph.at(*found)}"
        )
        table, width = self._table(tokens), size(self.graph.output)[-1]
        name = self.graph.names.get(table)
        if name is not None and width == self.width:
            raise NoHead(message, name, self.graph.places(self.graph.output))
        hidden = self._last_hidden(tokens)
        if name is not None and width == size(table)[0] and hidden is not None:
            head = self.graph.live_between([self.graph.output], [hidden])
            products = [node for node in head if node in self.index.products] or head
            message = (
                "the logits are not one projection of the last hidden state, but are computed"
                f"{self.graph.at(*products)}"
            )
            raise UnknownHead(message, products, name, hidden)
        raise AdaptError(message)

    def _last_hidden(self, tokens: Node) -> Node | None:
        """Return the last node of hidden states (B, T, C) from which alone the output follows."""
        shape = (*self.graph.shape, size(tokens)[-1])
        found = [n for n in meetings(self.graph, tokens) if size(n) == shape]
        after_attention = [n for n in found if self.graph.ancestors[n] & self.index.mixers]
        return after_attention[-1] if after_attention else None

    def _layer(self, i: int) -> Layer:
        """Build a layer, which ends before the next layer's attention or the head."""
        index, above = self.index, self.graph.ancestors
        attention_ops, inputs = self.levels[i], self.inputs[i]
        products = {op.product for op in attention_ops}
        until, after, following = self._following(i)
        cross = [c for c in self.cross if c.product in following and products & above[c.product]]
        out_projs, second, rest = self._projections_of(i, products, until, following, after)
        found = self._mlp(i, rest, until)
        fc, mlp_proj = found.fc, found.proj
        extra = [*found.others, *second]  # `second` project what attention computes
        unknown = [n for n in rest if n not in extra] if fc is None else []
        if out_projs:  # the single one, or where those of several heads are joined
            joined = self._joined(out_projs)
            if joined is None:
                raise UnknownPart(
                    f"layer {i}: the results of the {len(out_projs)} projections of attention"
                    f"{self.graph.at(*out_projs)} are not combined",
                    out_projs,
                )
            projected = self._with_bias(self._summed(joined))
        else:
            projected = self._joined_heads(attention_ops)
        attn = self._with_bias(second[-1]) if second else projected
        attn_sum = self._with_own_input(self._sum(attn, products, until), inputs.x1)
        x2 = act = fc_end = end = attn_sum.node
        mlp_sum = Sum(end, end, end)
        if fc is not None:
            x2, fc_end = index.input_of(fc), self._with_bias(fc)
            last = mlp_proj or fc
            act = index.input_of(last) if mlp_proj else self._activated(fc_end)
            end = self._with_bias(last) if mlp_proj else act
            mlp_sum = self._with_own_input(self._sum(end, {last}, until), x2)
            if mlp_sum.shortcut is None and mlp_proj:  # no residual connection ends the branch
                activated = self._weighted(self._activated(end))
                mlp_sum = Sum(activated, activated, None)
        elif unknown:
            x2 = act = fc_end = index.input_of(unknown[0])
            mlp_sum = self._sum(unknown[0], set(unknown), until)
            joined = self._joined(unknown) if len(unknown) > 1 else None
            end = mlp_sum.branch
            if joined is not None and mlp_sum.shortcut is None:
                end, mlp_sum = joined, Sum(joined, joined, None)
            elif joined in above[end]:
                end = joined
        mlp = [n for n in (fc, mlp_proj) if n is not None] or unknown
        if mlp and attn_sum.node is mlp_sum.node:
            if products & above[mlp[0]]:
                attn_sum = Sum(attn, attn, None)  # x + mlp(attn(x))
            else:  # both are summed before they join the stream
                attn_sum = mlp_sum = self._sum(mlp_sum.node, {*products, *mlp}, until)
        cross_products = {op.product for op in cross}
        return Layer(
            attention_ops=attention_ops,
            cross=cross,
            cross_sum=self._sum(cross[-1].product, cross_products, until) if cross else None,
            qkv=inputs.qkv,
            qkv_ends=[self._with_bias(node) for node in inputs.qkv],
            x1=inputs.x1,
            raw=inputs.raw,
            out_proj=out_projs[-1] if out_projs else None,
            heads=index.operands(out_projs[-1])[0] if out_projs else attn,
            projected=projected,
            attn=attn,
            attn_sum=attn_sum,
            fc=fc,
            x2=x2,
            act=act,
            fc_end=fc_end,
            mlp_proj=mlp_proj,
            mlp=end,
            mlp_sum=mlp_sum,
            parallel=bool(mlp) and not products & above[mlp[0]],
            gate=found.gate,
            extra=extra,
            extra_ends={node: self._with_bias(node) for node in extra},
            unknown=unknown,
        )

    def _following(self, i: int) -> tuple[list[Node], set[Node], set[Node]]:
        """Return where a layer ends, the projections there, and the nodes between attention and it.

        A layer ends before the next layer's attention or the head. Products of q with other tensors
        than k, such as a vector for each distance, belong to attention and are left out.
        """
        above, qkv = self.graph.ancestors, {*self.inputs[i].qkv}
        until, following_qkv = [self.head], set[Node]()
        if i + 1 < len(self.levels):
            until = [op.product for op in self.levels[i + 1]]
            following_qkv = {*self.inputs[i + 1].qkv}
        found = set().union(*(above[n] for n in until)) - above[self.inputs[i].qkv[0]]
        found -= {n for n in found - following_qkv - {self.head} if above[n] & following_qkv}
        products = {op.product for op in self.levels[i]}
        found -= set().union(*(above[n] for n in products if above[n] >= qkv))
        return until, {self.head} | following_qkv, found

    def _projections_of(
        self,
        i: int,
        products: set[Node],
        until: list[Node],
        following: set[Node],
        after: set[Node],
    ) -> tuple[list[Node], list[Node], list[Node]]:
        """Return the output projections of a layer, those that follow them, and the MLP's."""
        graph, index = self.graph, self.index
        qkv = {*self.inputs[i].qkv}
        gates = self._gates(products, qkv, self.inputs[i].x1) if self.accepts_others else set()
        out_projs = [
            n for n in index.live
            if n in index.projections - after and index.sources(n) <= products | gates
            and index.sources(n) & products
        ]  # fmt: skip
        projections = index.projections - self._of_cross_attention()
        if self.accepts_others and not out_projs:  # another tensor may be added to the heads
            others = following & projections - after - qkv - gates
            reading = [n for n in others if index.sources(n) & products]
            reading = [n for n in reading if others.isdisjoint(graph.ancestors[n])]
            out_projs = reading if len(reading) == 1 and len(others) > 2 else []
        mlp = (following & projections) - {*out_projs} - qkv - after - gates
        if not mlp and not self.accepts_others:
            raise UnknownPart(
                f"layer {i}: no projection follows attention, but GPT-2 has an MLP there",
                [self._with_bias(node) for node in out_projs or products],
            )
        is_mlp = len(out_projs) > 1 and len({*map(index.input_of, out_projs)}) == 1
        if (
            self.accepts_others
            and out_projs
            and (is_mlp or self._reads_heads(out_projs[-1], len(mlp)))
        ):
            mlp, out_projs = {*mlp, *out_projs}, []  # an MLP that reads the heads
        ordered = sorted(mlp, key=graph.order.__getitem__)
        second = self._second_out_projs(out_projs, ordered) if self.accepts_others else []
        if self.accepts_others and out_projs and not second:
            second = self._in_attention_branch(out_projs[-1], products, ordered, until)
        rest = [n for n in ordered if n not in second]
        if len(rest) == 1 and index.sources(rest[0]) and index.sources(rest[0]) <= qkv:
            raise UnknownPart(
                f"layer {i}: the MLP{graph.at(*rest)} reads a part of the projection of q, k and "
                "v, but GPT-2's MLP has its own projection of the stream that includes attention",
                rest,
                "parallel_block",
            )
        return out_projs, second, rest

    def _gates(self, products: set[Node], qkv: set[Node], x1: Node) -> set[Node]:
        """Return other projections of attention's input that multiply the results of heads."""
        index, above = self.index, self.graph.ancestors
        others = {n for n in index.projections - qkv if index.input_of(n) is x1}
        multiplied = [
            index.frontier(n) for n in index.live
            if kind(n) == "mul" and products & above[n] and not index.projections & above[n] - qkv
            - others - above[x1]
        ]  # fmt: skip
        return others & set().union(*multiplied) if products else set()

    def _of_cross_attention(self) -> set[Node]:
        """Return the projections of cross-attention."""
        index = self.index
        products = {op.product for op in self.cross}
        operands = [o.node for op in self.cross for o in (op.q, op.k, op.v)]
        found = set().union(*(index.frontier(n) for n in operands if n in self.graph.live))
        own = {n for n in index.projections if index.sources(n) and index.sources(n) <= products}
        return (found & index.projections) | own

    def _reads_heads(self, projection: Node, following: int) -> bool:
        """Return whether a projection of the heads is the MLP's first, and not attention's own."""
        if following == 0:
            end = self._with_bias(projection)
            return self._activated(end) is not end
        found = size(projection)[-1]
        return found > self.width or (following == 1 and found != self.width)

    def _inputs(self, i: int, attention_ops: list[AttentionOp]) -> _Inputs:
        """Return the projections that compute q, k and v, and the one tensor that they project."""
        index = self.index
        operands = [o.node for c in attention_ops for o in (c.q, c.k, c.v)]
        if self.accepts_others:
            operands = self._projected(operands)
        qkv = set().union(*(index.frontier(node) for node in operands))
        further = [n for c in attention_ops for other in c.others for n in index.operands(other)]
        qkv = qkv.union(*(index.frontier(node) for node in further))
        ordered = sorted(qkv, key=self.graph.order.__getitem__)
        others = [n for n in ordered if n not in index.projections]
        # Terms that are added to the projections, as by an embedding.
        if others and self.accepts_others:
            qkv -= {*others}
            ordered = [n for n in ordered if n in qkv]
            others = [] if all(self.graph.ancestors[o] & qkv for o in operands) else others
        if others:
            raise UnknownPart(
                f"layer {i}: q, k or v is computed by {kind(others[0]) or others[0]}"
                f"{self.graph.at(others[0])}, which is not a projection with the model's "
                "parameters",
                operands,
            )
        inputs = {index.input_of(n) for n in qkv}
        if len(inputs) == 2 and self.accepts_others:
            raw, x1 = sorted(inputs, key=self.graph.order.__getitem__)
            inner = self.graph.between([x1], [raw])
            is_norm = any(kind(n) in REDUCTIONS for n in inner)
            is_norm = is_norm and not {*inner} & (index.projections | index.mixers)
            if raw in self.graph.ancestors[x1] and is_norm:
                return _Inputs(ordered, x1, raw)
        if self.accepts_others and len(inputs) > 1:  # values of earlier layers may be added
            x1 = max(inputs, key=self.graph.order.__getitem__)
            own = [n for n in ordered if index.input_of(n) is x1]
            above = self.graph.ancestors
            if all(above[o] & {*own} for o in operands) and inputs - {x1} <= above[x1]:
                return _Inputs(own, x1)
        if len(inputs) > 1 and self.accepts_others and (start := self._meeting(inputs)) is not None:
            between = self.graph.between(operands, [start])
            inputs = {index.before_moves(start)}
            ordered = sorted(index.projections & {*between}, key=self.graph.order.__getitem__)
        if len(inputs) != 1:
            raise UnknownPart(
                f"layer {i}: q, k and v are projected from {len(inputs)} different tensors"
                f"{self.graph.at(*ordered)}, as in cross-attention, but one was expected",
                ordered,
            )
        x1 = inputs.pop()
        first = index.frontier(x1)
        if (
            self.accepts_others
            and first <= index.projections
            and (size(x1)[-1] == 3 * self.width or self._is_latent(x1, first, attention_ops))
        ):  # a fused projection computes q, k and v, or a latent, which are then projected again
            x1 = index.input_of(next(iter(first)))
            between = self.graph.between(operands, [x1])
            ordered = sorted(index.projections & {*between}, key=self.graph.order.__getitem__)
        return _Inputs(ordered, x1)

    def _is_latent(self, x1: Node, first: set[Node], attention_ops: list[AttentionOp]) -> bool:
        """Return whether `first` project to the input of q, k and v, and no later sum is as wide.

        If the stream is wider than the token embedding, the residual sums are too.
        """
        graph, products = self.graph, {op.product for op in attention_ops}
        later = [n for n in self.index.live if products & graph.ancestors[n]]
        sums = {size(n)[-1] for n in later if adds_two(graph, n, size(n))}
        projected = size(x1)[-1:] in {size(node)[-1:] for node in first}
        return projected and self.width in sums and size(x1)[-1] not in sums

    def _projected(self, operands: list[Node]) -> list[Node]:
        """Return the operands without those that are the tensor which the others project."""
        index = self.index
        projections = set().union(*map(index.frontier, operands)) & index.projections
        inputs = set(map(index.input_of, projections))
        return [node for node in operands if index.before_moves(node) not in inputs] or operands

    def _meeting(self, nodes: set[Node]) -> Node | None:
        """Return the last node that these all depend on; None if that is before attention."""
        while len(nodes) > 1 or not all(map(size, nodes)):  # several results have no size
            node = max(nodes, key=self.graph.order.__getitem__)
            if node in self.index.mixers or self.index.embeds(node):
                return None
            nodes = nodes - {node} | {*live_inputs(self.graph, node)}
        return next(iter(nodes))

    def _second_out_projs(self, out_projs: list[Node], following: list[Node]) -> list[Node]:
        """Return projections of what attention computes, before those of the MLP."""
        found: list[Node] = []
        for node, after in pairwise(following):
            only_attention = self.index.sources(node) <= {*out_projs, *found}
            is_narrow = size(node)[-1] <= self.width  # the MLP's first projection is wide
            if len(following) - len(found) <= 2 or not (only_attention and is_narrow):
                break
            if node not in self.graph.ancestors[after]:
                break
            found.append(node)
        return found

    def _in_attention_branch(
        self, out_proj: Node, products: set[Node], following: list[Node], until: list[Node]
    ) -> list[Node]:
        """Return projections before the sum that ends attention's branch, if an MLP follows it."""
        total, above = self._sum(out_proj, products, until), self.graph.ancestors
        if total.shortcut is None:
            return []
        inside = [n for n in following if n in above[total.branch] | {total.branch}]
        after = [n for n in following if total.node in above[n]]
        only_attention = all(self.index.sources(n) <= {out_proj, *inside} for n in inside)
        is_all = len(inside) + len(after) == len(following)
        return inside if only_attention and is_all and len(after) > 1 else []

    def _mlp(self, i: int, found: list[Node], until: list[Node]) -> _Mlp:
        """Return the MLP among the projections between a layer's attention and `until`."""
        sources = self.index.sources
        if len(found) == 2 and sources(found[1]) <= {found[0]}:
            return _Mlp(found[0], None, found[1])
        if self.accepts_others and (other := self._other_mlp(found, until)) is not None:
            return other
        why = ""
        if len(found) == 2:
            why = ". The second one has inputs beside the result of the first"
        elif self._begins_gated(found):
            why = ". This is a gated MLP, as in LLaMA"
        elif len(found) > 2:
            why = ". More than an MLP is run between two attentions or before the head"
        raise UnknownPart(
            f"layer {i}: {len(found)} projections follow attention{self.graph.at(*found)}, "
            f"but the two of an MLP were expected{why}",
            found,
        )

    def _begins_gated(self, found: list[Node]) -> bool:
        """Return whether the first two projections are multiplied and then projected."""
        return len(found) > 2 and self.index.sources(found[2]) == {*found[:2]}

    def _other_mlp(self, found: list[Node], until: list[Node]) -> _Mlp | None:
        """Return an MLP that GPT-2 does not have; None if its projections are not known."""
        sources = self.index.sources
        if len(found) == 1 and self._chooses_parameters(found[0], until):
            return _Mlp()
        if len(found) < 2:
            return _Mlp(found[0] if found else None)
        first, is_branch = found[0], self._is_one_branch(found, until)
        if self._are_side_by_side(found):
            return _Mlp()
        last = self._last_mlp(found)
        if last is not None:
            others = [*last.others]  # an MLP is wider than other branches
            following = found[len(others) :]
            if len(others) > 2 and self._is_one_branch(others, following[:1]):
                return _Mlp(others=following)
            if not is_branch and size(found[len(others)])[-1] > size(first)[-1]:
                return last
            if is_branch and len(others) == 1 and size(others[0])[-1] == self.width:
                if self._multiplied(found[-1], others[0]):
                    return last  # the result of the MLP is multiplied by a gate
        if self._begins_gated(found):
            beside = any(not sources(n) & {*found} for n in found[3:])  # as other experts
            return _Mlp() if beside and is_branch else _Mlp(first, found[1], found[2], found[3:])
        if len(found) > 2 and sources(found[1]) == {first}:
            if sources(found[2]) == {first} and self._multiplied(found[1], found[2]):
                return _Mlp(first, found[2], found[1], found[3:])  # nothing projects the product
            chain = [first]  # an MLP with more than two projections
            for node in found[1:]:
                chain += [node] if sources(node) == {chain[-1]} else []
            inner = size(first)[-1]
            wide = [n for n in chain[1:] if size(self.index.input_of(n))[-1] == inner]
            end = wide[-1] if wide else chain[-1]  # before an adapter, which is narrower
            return _Mlp(first, None, end, [n for n in found if n not in (first, end)])
        if is_branch:
            return _Mlp()
        for n in range(len(found) - 1, 2, -1):  # others follow the branch
            if self._is_one_branch(found[:n], found[n : n + 1]):
                return _Mlp(others=found[n:])
        return last

    def _are_side_by_side(self, found: list[Node]) -> bool:
        """Return whether projections are several MLPs of the same input, of two projections each.

        Examples are the parts of an MLP that several devices compute.
        """
        sources = {n: self.index.sources(n) for n in found}
        first = [n for n in found if sources[n].isdisjoint(found)]
        read = [sources[n] & {*found} for n in found if n not in first]
        if len({frozenset(sources[n]) for n in first}) > 1 or not len(first) == len(read) > 1:
            return False
        return all(len(each) == 1 for each in read) and set().union(*read) == {*first}

    def _chooses_parameters(self, router: Node, until: list[Node]) -> bool:
        """Return whether parameters are looked up by a projection's result, as those of experts."""
        above = self.graph.ancestors
        following = set().union(*(above[node] for node in until))
        return any(router in above[node] and self.index.embeds(node) for node in following)

    def _last_mlp(self, found: list[Node]) -> _Mlp | None:
        """Return an MLP that ends a block, and the projections of other branches before it."""
        sources = self.index.sources
        for n in range(1, len(found) - 1):
            others, mlp = found[:n], found[n:]
            if any(not self.graph.ancestors[node].isdisjoint(mlp) for node in others):
                continue
            if len(mlp) == 2 and sources(mlp[1]) == {mlp[0]}:
                return _Mlp(mlp[0], None, mlp[1], others)
            if len(mlp) == 3 and self._begins_gated(mlp):
                return _Mlp(mlp[0], mlp[1], mlp[2], others)
        return None

    def _multiplied(self, one: Node, other: Node) -> bool:
        """Return whether the results of two projections are multiplied."""
        return any(
            kind(n) == "mul"
            and {one, other} <= self.index.frontier(n)
            and not any({one, other} <= self.index.frontier(a) for a in tensor_inputs(n))
            for n in self.index.live
        )

    def _is_one_branch(self, projections: list[Node], until: list[Node]) -> bool:
        """Return whether projections compute one residual branch from nothing but its input."""
        total = self._sum(projections[0], set(projections), until)
        start, end = self.index.before_moves(self.index.input_of(projections[0])), total.branch
        if total.shortcut is None:  # all that follows reads the result of the branch alone
            end = self._joined(projections) or end
            after = {*self.graph.between(until, [end])}
            if not after.isdisjoint(self.graph.ancestors[end] & self.graph.live):
                return False
        inside = self.graph.live_between([end], [start])
        if not set(projections) <= set(inside):
            return False
        return all(start in self.graph.ancestors[node] for node in inside)

    def _joined(self, projections: Iterable[Node]) -> Node | None:
        """Return the first node that depends on all of these projections."""
        above, wanted = self.graph.ancestors, {*projections}
        return next((n for n in self.index.live if wanted - {n} <= above[n]), None)

    def _last_user(self, node: Node, kinds: Container[str], of_parameters: bool = False) -> Node:
        """Return the last of a chain of operations of some kinds, each the only user of the last.

        Args:
            node: where the chain begins; returned if its user is not such an operation.
            kinds: the kinds of operations.
            of_parameters: their only other operand has to be a parameter.
        """
        while len(users := live_users(self.graph, node)) == 1 and kind(users[0]) in kinds:
            if of_parameters and not reads_parameter(self.graph, users[0]):
                break
            [node] = users
        return node

    def _activated(self, node: Node) -> Node:
        """Return the result of the activation after a projection."""
        return self._last_user(node, ACTIVATIONS)

    def _joined_heads(self, attention_ops: list[AttentionOp]) -> Node:
        """Return the concatenated heads, the result of attention without an output projection."""
        node = max((op.out.node for op in attention_ops), key=self.graph.order.__getitem__)
        return self._last_user(node, MOVES | {"cat", "getitem", "stack"})

    def _with_bias(self, node: Node) -> Node:
        """Return the result of a projection, after a bias that is added in its own operation."""
        end = node
        while len(users := live_users(self.graph, node)) == 1:
            [node] = users
            if kind(node) == "add" and reads_parameter(self.graph, node):
                if any(is_table_of_positions(self.graph, a) for a in tensor_inputs(node)):
                    break
                end = node
            elif kind(node) not in MOVES and kind(node) != "getitem":
                break
        return end

    def _summed(self, node: Node) -> Node:
        """Return the sum over the heads of an output projection that keeps them apart."""
        users = live_users(self.graph, self._last_user(node, MOVES))
        elements = prod(self.graph.shape) * self.width
        is_sum = len(users) == 1 and kind(users[0]) == "sum" and prod(size(users[0])) == elements
        return users[0] if is_sum else node

    def _sum(self, branch: Node, roots: set[Node], until: list[Node]) -> Sum:
        """Return the first sum of a branch with a tensor that does not depend on its roots.

        It comes before `until`, the next attention or the head.
        """
        above = self.graph.ancestors
        for node in self.index.live:
            if self.graph.order[node] <= self.graph.order[branch] or not self._adds_streams(node):
                continue
            if not above[node].isdisjoint(until):
                break
            one, other = tensor_inputs(node)[:2]
            for inner, outer in ((one, other), (other, one)):
                from_branch = branch in above[inner] or inner is branch
                if from_branch and not roots & (above[outer] | {outer}):
                    return Sum(node, inner, self.index.before_moves(outer))
        end = self._weighted(branch)
        return Sum(end, end, None)

    def _weighted(self, node: Node) -> Node:
        """Return the product of the result of a branch with parameters, if it is multiplied."""
        return self._last_user(node, {"mul"}, of_parameters=True)

    def _with_own_input(self, total: Sum, x: Node) -> Sum:
        """Return the sum with the residual stream, if the first sum is with the branch's input."""
        if total.shortcut is not x:
            return total
        users = live_users(self.graph, self._last_user(total.node, MOVES))
        if len(users) == 1 and self._adds_streams(users[0]):
            for outer in tensor_inputs(users[0])[:2]:
                if self.index.before_moves(outer) in self.graph.ancestors[x] | {x}:
                    shortcut = self.index.before_moves(outer)
                    return Sum(users[0], total.branch, shortcut, total.node)
        return total

    def _adds_streams(self, node: Node) -> bool:
        """Return whether a node is the sum or the difference of two live tensors (B, T, C)."""
        if kind(node) not in ("add", "sub"):
            return False
        inputs = tensor_inputs(node)[:2]
        B, T = self.graph.shape
        elements = B * T * self.width
        return len(inputs) == 2 and all(
            a in self.graph.live and prod(size(a)) == elements for a in inputs
        )
