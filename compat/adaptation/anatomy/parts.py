"""What a GPT-2 is made of: the nodes of a graph under the names of their parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from compat.adaptation.tracing.graph import Graph


@dataclass(frozen=True)
class Operand:
    """A tensor that enters or leaves attention, and which of its axes is what."""

    node: Node
    groups: tuple[int, ...]  # batch and heads, merged or not; for one head the batch alone
    time: int
    d: int


@dataclass(frozen=True)
class Core:
    """softmax(q·kᵀ)·v, of all heads or of one."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    product: Node  # the product with v, or the kernel that does it all
    scores: Node | None  # q·kᵀ; None in a kernel
    probs: Operand | None  # what is multiplied with v; time: of the query; d: of the key


@dataclass(frozen=True)
class Sum:
    """Where a branch joins the residual stream: the sum, the branch's end, what it is added to.

    Without a shortcut, the sum is the branch itself.
    """

    node: Node
    branch: Node
    shortcut: Node | None


@dataclass
class Layer:
    """The nodes of one block; taps of `compat.taps` are named in the comments."""

    cores: list[Core]
    qkv: list[Node]  # the projections that q, k and v come from
    x1: Node  # ln_1: what they project
    out_proj: Node | None
    heads: Node  # what the output projection reads, or attention's own output
    attn: Node
    attn_sum: Sum  # mid
    fc: Node
    x2: Node  # ln_2
    act: Node
    fc_end: Node
    mlp_proj: Node
    mlp: Node
    mlp_sum: Sum  # out
    parallel: bool  # the MLP does not see the attention's result

    @property
    def mid(self) -> Node:
        return self.attn_sum.node

    @property
    def out(self) -> Node:
        return self.mlp_sum.node


@dataclass
class Anatomy:
    """A GPT-2 in a graph."""

    graph: Graph
    token_embedding: Node
    embed: Node
    layers: list[Layer]
    xf: Node  # ln_f: what the head projects
    head: Node
    logits: Node
    width: int
    vocabulary: int  # rows of the token embedding
