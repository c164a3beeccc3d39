"""Every form of matrix product as one data class: two operands with a letter for each axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

from torch.fx import Node

from compat.adaptation.tracing.graph import MOVES, Graph, kind, live_inputs, reads_parameter, size

SDPA = frozenset(
    """
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention
    """.split()
)


@dataclass(frozen=True)
class Contraction:
    """out = einsum("a_axes,b_axes->out_axes", a, b), plus the bias if the operation adds one."""

    node: Node
    a: Node
    b: Node
    a_axes: str
    b_axes: str
    out_axes: str

    @property
    def summed(self) -> str:
        """The letters that are summed over."""
        return "".join(x for x in self.a_axes if x in self.b_axes and x not in self.out_axes)

    def axes(self, operand: Node) -> str:
        return self.a_axes if operand is self.a else self.b_axes


def contraction(node: Node) -> Contraction | None:
    """Return the node as a contraction; None for any other operation."""
    name = kind(node)
    args: Any = node.args
    if name == "linear":
        x, w = args[0], args[1]
        batch = ascii_letters[: len(size(x)) - 1]
        return Contraction(node, x, w, batch + "Y", "ZY", batch + "Z")
    if name in ("matmul", "mm", "bmm"):
        return _matmul(node, args[0], args[1])
    if name in ("addmm", "baddbmm"):
        return _matmul(node, args[1], args[2])
    if name in ("conv1d", "convolution") and len(size(args[0])) == 3 and size(args[1])[-1:] == (1,):
        return Contraction(node, args[0], args[1], "aYb", "ZYi", "aZb")
    if name == "tensordot":
        return _tensordot(node, *args)
    if name == "einsum" and len(args[1]) == 2:
        return _einsum(node, str(args[0]), *args[1])
    return None


def _matmul(node: Node, a: Node, b: Node) -> Contraction | None:
    """Batch axes, those before the last two, are matched from the right as in broadcasting."""
    n, m = len(size(a)), len(size(b))
    if n < 1 or m < 2:
        return None
    letters = ascii_letters[: max(n, m) - 2][::-1]  # the last batch axis is always "a"
    batch_a, batch_b = letters[len(letters) - max(n - 2, 0) :], letters[len(letters) - (m - 2) :]
    longer = max(batch_a, batch_b, key=len)
    if n == 1:
        return Contraction(node, a, b, "Y", batch_b + "YZ", batch_b + "Z")
    return Contraction(node, a, b, batch_a + "XY", batch_b + "YZ", longer + "XZ")


def _tensordot(
    node: Node, a: Node, b: Node, a_summed: Sequence[int], b_summed: Sequence[int]
) -> Contraction:
    """Return the axes of a that are not summed over, followed by those of b."""
    n, m = len(size(a)), len(size(b))
    a_axes, b_axes = list(ascii_letters[:n]), list(ascii_letters[n : n + m])
    for i, j in zip(a_summed, b_summed, strict=True):
        b_axes[j] = a_axes[i]
    out = [x for x in a_axes if x not in b_axes] + [x for x in b_axes if x not in a_axes]
    return Contraction(node, a, b, "".join(a_axes), "".join(b_axes), "".join(out))


def _einsum(node: Node, equation: str, a: Node, b: Node) -> Contraction:
    """Return the equation with its ellipsis expanded and, if it has none, an explicit result."""
    left, _, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    spare = "".join(x for x in reversed(ascii_letters) if x not in equation)
    for place, operand in enumerate((a, b)):
        if "..." in parts[place]:
            hidden = len(size(operand)) - len(parts[place]) + 3
            parts[place] = parts[place].replace("...", spare[:hidden][::-1])
    if "..." in out:
        out = out.replace("...", spare[: len(size(node)) - len(out) + 3][::-1])
    elif "->" not in equation:
        both = "".join(parts)
        out = "".join(sorted(x for x in set(both) if both.count(x) == 1))
    return Contraction(node, a, b, parts[0], parts[1], out)


def product_behind(graph: Graph, node: Node) -> Node | None:
    """Return the product whose result a node is, moved or with a bias; None if it is none."""
    while contraction(node) is None:
        is_bias = kind(node) == "add" and reads_parameter(graph, node)
        if kind(node) not in MOVES and not is_bias:
            return None
        [node, *_] = live_inputs(graph, node)
    return node
