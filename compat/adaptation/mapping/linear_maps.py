"""Find which element of which parameter connects two channels, by running a graph on numbers.

A `View` is a value of the graph in the reference's shape. `linear_map` measures a projection
between two views: every element of every parameter is replaced by a unique number. For an input
that is 1 in one channel and 0 in all others, each output is the number of the element that connects
the two channels. Neither layouts nor names need to be known. `find_op` expresses the result as an
operation of the name map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import AttentionOp, Operand
from compat.adaptation.tracing.graph import Graph, random_values, size
from compat.errors import NameMapError
from compat.ops import Fused, Op, Part, Rearrange, Same, Split, Transpose


@dataclass(frozen=True)
class View:
    """A value of the reference's shape, held by one or several nodes in any order of elements.

    Args:
        nodes: the nodes that hold the value.
        index: in the reference's shape, the position of each element in the flattened and
            concatenated values of the nodes.
        factor: the factor of the value in the nodes, for example if q is scaled before q·kᵀ.
    """

    nodes: tuple[Node, ...]
    index: Tensor
    factor: float = 1.0

    def read(self, values: Sequence[Tensor]) -> Tensor:
        """The nodes' values → the reference's shape."""
        flat = torch.cat([value.reshape(-1) for value in values])[self.index]
        return flat if self.factor == 1 else flat / self.factor

    def write(self, value: Tensor) -> list[Tensor]:
        """The reference's shape → the nodes' values."""
        flat = value.new_zeros(sum(prod(size(node)) for node in self.nodes))
        flat[self.index.reshape(-1)] = value.reshape(-1) * self.factor
        pieces = torch.split(flat, [prod(size(node)) for node in self.nodes])
        return [piece.reshape(size(n)) for piece, n in zip(pieces, self.nodes, strict=True)]

    def node_values(self, value: Tensor) -> dict[Node, Tensor]:
        """The reference's shape → the value of each node, for `Graph.run`."""
        return dict(zip(self.nodes, self.write(value), strict=True))


def function_between(
    graph: Graph, start: View, end: View, parameters: Callable[[Node], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return what the graph computes from the values of one view to those of another."""
    return lambda x: end.read(graph.run(end.nodes, start.node_values(x), parameters))


def token_view(graph: Graph, node: Node) -> View | None:
    """View a node with one vector per token as (B, T, N). Axes are found by their lengths."""
    B, T = graph.shape
    shape, place = size(node), torch.arange(prod(size(node)))
    if not shape or prod(shape) % (B * T):
        return None
    if shape[0] == B * T:
        if node in graph.time_first:
            return View((node,), place.view(T, B, -1).transpose(0, 1))
        return View((node,), place.view(B, T, -1))
    if shape[0] == T and B in shape[1:]:
        time, batch = 0, shape.index(B, 1)
    elif shape[0] == B and T in shape[1:]:
        batch, time = 0, shape.index(T, 1)
    else:
        return None
    rest = [axis for axis in range(len(shape)) if axis not in (batch, time)]
    return View((node,), place.view(shape).permute(batch, time, *rest).reshape(B, T, -1))


def sequences_of_groups(graph: Graph, start: Node, op: AttentionOp) -> list[int]:
    """Return to which sequence of the batch each group of an attention operation belongs.

    The groups are its batch and head axes, merged or not. In (B·H, T, D) the heads of a sequence
    follow each other, in (H·B, T, D) the sequences of a head; this is measured from the values of
    the node `start` (B, T, C), of which one sequence after the other is changed.
    """
    B = graph.shape[0]
    sizes = [size(op.out.node)[axis] for axis in op.out.groups]
    groups, view = prod(sizes), token_view(graph, start)
    usual = [group * B // groups for group in range(groups)]
    if sizes.count(B) == 1 and len(sizes) < 3:
        return usual if sizes[0] == B else [group % B for group in range(groups)]
    if groups % B or view is None:
        return usual

    def values(x: Tensor) -> Tensor:
        [found] = graph.run([op.out.node], view.node_values(x), finite=True)
        return found.permute(*op.out.groups, op.out.time, op.out.d).reshape(groups, -1)

    x = random_values(view.index.shape)
    before, found = values(x), [0] * groups
    for b in range(1, B):
        other = x.clone()
        other[b] = random_values(x.shape[1:], seed=b)
        changed = (values(other) != before).any(1)
        found = [b if now else was for now, was in zip(changed.tolist(), found, strict=True)]
    return found if {found.count(b) for b in range(B)} == {groups // B} else usual


def head_view(
    attention_ops: Sequence[AttentionOp],
    operands: Sequence[Operand],
    shape: tuple[int, int],
    sequences: Sequence[Sequence[int]],
) -> View | None:
    """Return one operand of all attention operations as (B, H, T, D).

    The groups of an operation are its batch and head axes, merged or not, or the batch alone, as in
    (B, T, D). For each operation, `sequences` are those of its groups; see `sequences_of_groups`.
    """
    B, T = shape
    pieces: list[tuple[int, Tensor]] = []  # of each head of each sequence: which sequence, (T, D)
    starts: dict[Node, int] = {}  # several operations may share a key and a value
    offset = 0
    for op, operand, own in zip(attention_ops, operands, sequences, strict=True):
        groups = prod(size(op.out.node)[axis] for axis in op.out.groups)
        if groups % B:
            return None
        sizes = size(operand.node)
        if operand.node not in starts:
            starts[operand.node], offset = offset, offset + prod(sizes)
        index = starts[operand.node] + torch.arange(prod(sizes)).view(sizes)
        index = index.permute(*operand.groups, operand.time, operand.d)
        index = index.reshape(-1, sizes[operand.time], sizes[operand.d])
        if groups > len(index):  # several heads share a key and a value
            if len(index) % B or groups % len(index):
                return None
            index = index.repeat_interleave(groups // len(index), dim=0)
        pieces += zip(own, index, strict=False)  # an operand may have more groups
    ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
    if len({piece.shape for piece in ordered}) != 1 or ordered[0].shape[0] != T:
        return None
    stacked = torch.stack(ordered).view(B, -1, *ordered[0].shape)
    return View(tuple(starts), stacked)


def merged(view: View) -> View:
    """(B, H, T, D) → (B, T, H·D)."""
    B, H, T, D = view.index.shape
    return View(view.nodes, view.index.transpose(1, 2).reshape(B, T, H * D), view.factor)


@dataclass
class LinearMap:
    """out[n] = factor · (Σ_k weight[k, n]·in[k] + bias[n]), with numbers of elements.

    Args:
        parameters: the parameters whose elements are numbered from 1, one parameter after another.
        weight: (K, N) numbers.
        bias: (N,) numbers; 0 for no bias.
        factor: the factor of weight and bias.
    """

    parameters: list[Node]
    weight: Tensor
    bias: Tensor
    factor: float


class Probe:
    """The piece of a graph from `source` to `target`, as a function of its input."""

    def __init__(self, graph: Graph, source: View, target: View) -> None:
        self.graph, self.source, self.target = graph, source, target
        self.parameters = graph.parameters_between(target.nodes, source.nodes)
        counts = [graph.values[node].numel() for node in self.parameters]
        self.first = dict(zip(self.parameters, accumulate(counts, initial=1), strict=False))
        self.last = sum(counts)
        self.ones = torch.ones((), dtype=torch.float64).expand(self.last + 1)
        self.numbers = torch.arange(self.last + 1, dtype=torch.float64)

    def __call__(self, x: Tensor, values: Tensor) -> Tensor:
        """Return the output for x, if the element of number n of the parameters is `values[n]`."""

        def value(node: Node) -> Tensor:
            shape, first = self.graph.values[node].shape, self.first[node]
            return values[first : first + shape.numel()].view(shape)

        return function_between(self.graph, self.source, self.target, value)(x)


def linear_map(graph: Graph, source: View, target: View, d_head: int = 0) -> LinearMap | None:
    """Measure the map from (B, T, K) to (B, T, N); None if it is not linear for each token.

    If the numbers increase evenly along the channels, or within heads of `d_head` channels, a few
    channels are measured and the others interpolated. Otherwise every channel is measured.
    """
    probe = Probe(graph, source, target)
    B, T, K = source.index.shape
    zero = torch.zeros(B, T, K, dtype=torch.float64)
    off = probe(zero, probe.ones)
    one = zero.clone()
    one[..., 0] = 1
    on = probe(one, probe.ones) - off
    factor = on.reshape(-1)[0].item()
    if factor == 0 or not torch.allclose(on, torch.full_like(on, factor), rtol=1e-9):
        return None
    each = torch.arange(1, B * T + 1, dtype=torch.float64).view(B, T, 1)
    if not torch.allclose(probe(one * each, probe.ones) - off, on * each, rtol=1e-9):
        return None  # some token depends on the input of another
    bias = probe(zero, probe.numbers) / factor
    numbers = _integers(bias[0, 0])
    if numbers is None or not torch.equal(bias.round(), numbers.expand_as(bias)):
        return None
    if not torch.allclose(off, (numbers != 0).double() * factor, rtol=1e-9):
        return None  # the sum of several biases
    weight = _weight(probe, bias, factor, K, d_head or K)
    if weight is None or max(weight.max().item(), numbers.max().item()) > probe.last:
        return None  # the product of several parameters
    found = LinearMap(probe.parameters, weight, numbers.long(), factor)
    return found if _agrees(probe, found) else None


def _agrees(probe: Probe, found: LinearMap) -> bool:
    """Return whether a map holds for other numbers, which a clamp or an activation would change."""
    B, T, K = probe.source.index.shape
    x = random_values((B, T, K))
    values = random_values((probe.last + 1,), 1)
    values[0] = 0  # stands for no bias
    expected = found.factor * (x @ values[found.weight] + values[found.bias])
    return torch.allclose(probe(x, values), expected, rtol=1e-6, atol=1e-6 * (K**0.5))


def _weight(probe: Probe, bias: Tensor, factor: float, K: int, d_head: int) -> Tensor | None:
    """Return the numbers (K, N). A few channels are measured and interpolated, or all measured."""
    B, T, _ = bias.shape
    channels = [0, 1 % K, d_head % K, K - 1]
    generator = torch.Generator().manual_seed(0)
    channels += torch.randint(K, (B * T,), generator=generator).tolist()
    channels = channels[: max(4, B * T)]
    seen = _numbers(probe, bias, factor, channels, K)
    if seen is None:
        return None
    k = torch.arange(K)[:, None]
    along, across = seen[1] - seen[0], seen[2] - seen[0] if d_head < K else 0
    weight = seen[0] + (k % d_head) * along + (k // d_head) * across
    if K > 1 and torch.equal(weight[channels], seen):
        return weight.long()
    return _numbers(probe, bias, factor, list(range(K)), K)


def _numbers(
    probe: Probe, bias: Tensor, factor: float, channels: list[int], K: int
) -> Tensor | None:
    """Return the numbers (len(channels), N), as many channels at once as there are tokens."""
    B, T, _ = bias.shape
    rows = []
    for start in range(0, len(channels), B * T):
        part = channels[start : start + B * T]
        x = torch.zeros(B * T, K, dtype=torch.float64)
        x[torch.arange(len(part)), part] = 1
        out = probe(x.view(B, T, K), probe.numbers) / factor - bias
        found = _integers(out.reshape(B * T, -1)[: len(part)])
        if found is None:
            return None
        rows.append(found.long())
    return torch.cat(rows)


def _integers(x: Tensor) -> Tensor | None:
    """Round x to integers; None if it is not close to integers."""
    rounded = x.round()
    return rounded if torch.allclose(x, rounded, rtol=1e-9, atol=1e-3) else None


def find_op(
    contents: Sequence[Tensor], shape: Sequence[int], n_head: int, qkv: bool = False
) -> Op | None:
    """Return the operation that turns one Hugging Face tensor into parameters.

    Args:
        contents: for each parameter, in its shape, which element of the Hugging Face tensor,
            counted from 0, each of its elements is.
        shape: the shape of the Hugging Face tensor.
        n_head: the length of axes of heads.
        qkv: the tensor is the fused q, k and v, `"c (q h d)"`.
    """
    count = torch.arange(prod(shape)).view(*shape)
    tried = _ops(contents, count, n_head, qkv)
    return next((op for op in tried if _makes(op, count, contents)), None)


def _ops(contents: Sequence[Tensor], count: Tensor, n_head: int, qkv: bool) -> Iterator[Op]:
    """Yield the operations to try, the simplest first."""
    if len(contents) == 1:
        yield Same()
        if count.ndim == 2:
            yield Transpose()
    elif count.ndim == 1:
        yield Split(len(contents))
    elif not qkv or len(contents) == 3:
        yield from (Split(len(contents), flip, dim) for dim in (0, -1) for flip in (True, False))
    if qkv:
        parts = [_part(content, count, n_head) for content in contents]
        if all(parts):
            yield Fused(n_head, tuple(part for part in parts if part is not None))
    elif len(contents) == 1:
        letters = "io" if count.ndim == 2 else "c"
        if right := _layout(contents[0], count, letters):
            yield Rearrange(f"{' '.join(letters)} -> {right}")
        if count.ndim == 2 and count.shape[0] % n_head == 0:
            by_head = count.view(n_head, -1, count.shape[1])
            if right := _layout(contents[0], by_head, "hdc"):
                yield Rearrange(f"(h d) c -> {right}", (("h", n_head),))


def _part(content: Tensor, count: Tensor, n_head: int) -> Part | None:
    """Find which of q, k and v and which heads a parameter holds, and in which order of axes."""
    fused = count.view(count.shape[0] if count.ndim == 2 else 1, 3, n_head, -1)
    D = fused.shape[-1]
    flat = content.reshape(-1)
    # The different values in the order in which they occur.
    which = list(dict.fromkeys(torch.unique_consecutive(flat // (n_head * D) % 3).tolist()))
    heads = list(dict.fromkeys(torch.unique_consecutive(flat // D % n_head).tolist()))
    held = fused[:, which][:, :, heads]
    letters = "".join(x for x, n in zip("cqhd", held.shape, strict=True) if n > 1)
    axes = _layout(content, held.squeeze(), letters)
    every = heads == list(range(n_head))
    if axes is None:
        return None
    return Part("".join("qkv"[w] for w in which), axes, None if every else tuple(heads))


def _layout(content: Tensor, tensor: Tensor, letters: str) -> str | None:
    """Return the order and grouping of a tensor's axes in a parameter, such as "(q h d) c"."""
    for order in permutations(range(tensor.ndim)):
        sizes = [tensor.shape[i] for i in order]
        axes = _grouped([letters[i] for i in order], sizes, content.shape)
        if axes and torch.equal(tensor.permute(order).reshape(-1), content.reshape(-1)):
            return axes
    return None


def _grouped(letters: Sequence[str], sizes: Sequence[int], shape: Sequence[int]) -> str | None:
    """Merge axes to those of a shape, in brackets: "(q h d) c"; None if they do not fit."""
    groups, place = [], 0
    for length in shape:
        group: list[str] = []
        elements = 1
        while elements < length and place < len(letters):
            group.append(letters[place])
            elements *= sizes[place]
            place += 1
        if elements != length:
            return None
        groups.append(group)
    if place != len(letters):
        return None
    return " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] if g else "1" for g in groups)


def _makes(op: Op, count: Tensor, contents: Sequence[Tensor]) -> bool:
    try:
        result = op.load(count)
    except (RuntimeError, ValueError, NameMapError):
        return False
    return len(result) == len(contents) and all(map(torch.equal, result, contents))
