"""Attention's two products, or the one kernel: which operand is q, which axis is time."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from compat.adaptation.anatomy.parts import Core, Operand
from compat.adaptation.tracing.contractions import Contraction
from compat.adaptation.tracing.graph import kind, size, tensor_inputs


def fused_core(node: Node) -> Core:
    q, k, v = tensor_inputs(node)[:3]

    def operand(x: Node) -> Operand:
        n = len(size(x))
        return Operand(x, tuple(range(n - 2)), n - 2, n - 1)

    out = node
    if kind(node) != "scaled_dot_product_attention":  # the kernels return more than the result
        out = next(user for user in node.users if user.args[1] == 0)
    n = len(size(q))
    return Core(
        operand(q), operand(k), operand(v), Operand(out, tuple(range(n - 2)), n - 2, n - 1),
        node, None, None,
    )  # fmt: skip


def split_core(first: Contraction, second: Contraction, probs: Node, v: Node) -> Core | None:
    """q, k and v told apart: v's time, which the second product sums over, is also k's."""
    p_axes, v_axes, out = second.axes(probs), second.axes(v), second.out_axes
    summed = second.summed
    if len(summed) != 1 or len(first.summed) < 1:
        return None
    d_v = [x for x in v_axes if x not in p_axes]
    t_q = [x for x in p_axes if x not in v_axes]
    if len(d_v) != 1 or len(t_q) != 1:
        return None
    # The axes of the probabilities are, from the right, those of the scores.
    back = p_axes.index(summed) - len(p_axes)
    key_time = first.out_axes[back]
    query_time = first.out_axes[p_axes.index(t_q[0]) - len(p_axes)]
    k, q = (first.a, first.b) if key_time in first.a_axes else (first.b, first.a)
    if key_time not in first.axes(k) or query_time not in first.axes(q):
        return None
    groups = [x for x in p_axes if x in v_axes and x != summed]
    first_groups = [x for x in first.out_axes if x not in (key_time, query_time)]

    def of(node: Node, axes: str, groups: Iterable[str], time: str, d: str) -> Operand:
        return Operand(node, tuple(axes.index(x) for x in groups if x in axes), axes.index(time),
                       axes.index(d))  # fmt: skip

    return Core(
        q=of(q, first.axes(q), first_groups, query_time, first.summed[0]),
        k=of(k, first.axes(k), first_groups, key_time, first.summed[0]),
        v=of(v, v_axes, groups, summed, d_v[0]),
        out=of(second.node, out, groups, t_q[0], d_v[0]),
        product=second.node,
        scores=first.node,
        probs=of(probs, p_axes, groups, t_q[0], summed),
    )
