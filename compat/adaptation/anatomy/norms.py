"""The norms of a model, fused or written out: where they are, and which formula they compute.

GPT-2 applies a norm before each branch. Other models apply it after the residual sum (post-LN) or
to the branch's result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy, Layer, Sum
from compat.adaptation.tracing.contractions import contraction
from compat.adaptation.tracing.graph import (
    MOVES,
    NORM_KERNELS,
    REDUCTIONS,
    SHAPE_ONLY,
    Graph,
    kind,
    live_inputs,
    random_values,
    reached,
    size,
    tensor_inputs,
)

# The path of the first block: `h.0.` or `blocks.block_0.`.
_FIRST_BLOCK = re.compile(r"(?:\w+\.)*?\w*?(?<!\d)0\.")

# What a norm does with the result of a reduction. A mean that is only added is not a norm.
NORMALIZING = frozenset("sub rsub div mul".split())
CONVOLUTIONS = frozenset("conv1d convolution conv2d".split())


@dataclass(frozen=True)
class Norm:
    """One norm: its input and its result, and its scale and its shift if it has them."""

    start: Node
    end: Node
    scale: Node | None
    shift: Node | None


@dataclass(frozen=True)
class NormFormula:
    """What a norm computes before scale and shift.

    Args:
        centred: the mean is subtracted, as in LayerNorm but not in RMSNorm.
        unbiased: the variance is divided by C − 1 instead of C.
        summed: the sum of the squares takes the place of the variance, so that each token is
            divided by its L2 norm.
        eps: added to the variance.
        eps_outside: eps is added to the root of the variance instead.
    """

    centred: bool = True
    unbiased: bool = False
    summed: bool = False
    eps: float = 1e-5
    eps_outside: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C)."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        C = x.shape[-1]
        number = 1 if self.summed else C - 1 if self.unbiased else C
        var = x.square().sum(-1, keepdim=True) / number
        root = var.sqrt() + self.eps if self.eps_outside else (var + self.eps).sqrt()
        return x / root


def norms_between(graph: Graph, start: Node, end: Node) -> list[Norm]:
    """Return the norms between two nodes, in execution order."""
    found: list[tuple[Node, Node]] = []
    consumed = False  # the current norm has its parameters, so that a reduction begins the next
    divided = False  # it was divided by its root mean square, so that a reduction begins the next
    for first, last in pairwise(_waypoints(graph, start, end)):
        piece = _piece(graph, first, last)
        own = {n for n in piece if n in graph.live and first in graph.ancestors[n]}
        kinds = {kind(node) for node in own}
        reduces = bool(kinds & REDUCTIONS) and bool(kinds & (NORMALIZING | NORM_KERNELS))
        reduces = reduces and prod(size(last)) >= prod(size(first))  # not a mean of several tensors
        projects = any(kind(n) in CONVOLUTIONS or contraction(n) is not None for n in piece)
        lengths = [prod(size(node)) for node in piece if node in graph.names]
        parameters = bool(lengths) and not projects
        own_lengths = all(n == 1 or n % size(last)[-1] == 0 for n in lengths)
        joins = any(len({*n.all_input_nodes} & {first, *own}) > 1 for n in own)
        several = any(n > size(last)[-1] for n in lengths) and not projects
        if not reduces and (joins or not (projects or own_lengths)):
            consumed = True  # a norm contains neither a sum of branches nor a factor of each layer
        elif not reduces and several and not _treats_tokens_alike(graph, first, last):
            consumed = True  # nor positions
        elif reduces and (not found or consumed or divided):
            found.append((first, last))
            consumed = parameters or any(kind(node) in NORM_KERNELS for node in piece)
            divided = any(map(_is_root, piece))
        elif found and (reduces or parameters or not consumed) and not projects:
            found[-1] = found[-1][0], last
            consumed = consumed or parameters
            divided = divided or any(map(_is_root, piece))
    return [_with_parameters(graph, first, last) for first, last in found]


def _treats_tokens_alike(graph: Graph, first: Node, last: Node) -> bool:
    """Return whether a piece of a graph computes the same for equal tokens at all positions."""
    axis = _channel_axis(graph, first)
    token = random_values(size(first)).movedim(axis, -1).reshape(-1, size(first)[axis])[0]
    x = token.expand(*(n for i, n in enumerate(size(first)) if i != axis), -1).movedim(-1, axis)
    [y] = graph.run([last], {first: x})
    tokens = y.movedim(axis, -1).flatten(end_dim=-2) if y.shape == x.shape else y
    return torch.allclose(tokens, tokens[:1].expand_as(tokens), atol=1e-9)


def _is_root(node: Node) -> bool:
    """Return whether a node computes a root, as of the variance."""
    if kind(node) == "pow":
        return node.args[1] in (0.5, -0.5)
    return kind(node) in {"sqrt", "rsqrt", "std", "std_mean", "norm", "linalg_vector_norm"}


def _piece(graph: Graph, first: Node, last: Node) -> set[Node]:
    """Return the nodes whose values, not only shapes, are needed to compute `last` from `first`."""

    def inputs(node: Node) -> list[Node]:
        above = [] if kind(node) in SHAPE_ONLY else node.all_input_nodes
        return [a for a in above if a not in graph.live or first in graph.ancestors[a]]

    return reached([last], inputs)


def _waypoints(graph: Graph, start: Node, end: Node) -> list[Node]:
    """Return the nodes on all paths from start to end, both included."""
    path = [start, *graph.on_paths([start], [end])]
    place = {node: i for i, node in enumerate(path)}
    waypoints, reach = [], 0
    for i, node in enumerate(path):
        if i >= reach and size(node):  # a kernel's tuple has no size; its first item follows
            waypoints.append(node)
        reach = max([reach, *(place[user] for user in node.users if user in place)])
    return waypoints


def _with_parameters(graph: Graph, start: Node, end: Node) -> Norm:
    """Find the parameters: the scale is the one without which the result does not depend on x.

    In `x + norm(x)`, it is the one whose contribution depends on x.
    """
    scale, shifts = None, list[Node]()
    x = random_values(size(start))

    def without(node: Node) -> Tensor:
        return _filled(graph, start, end, {node: 0.0})(x).reshape(-1)

    def is_constant(values: Tensor) -> bool:
        return torch.allclose(values, values[0].expand_as(values), atol=1e-9)

    for node in graph.parameters_between([end], [start]):
        if is_constant(without(node)):
            scale = node
        else:
            shifts.append(node)
    if scale is None and len(shifts) > 1:
        whole = _filled(graph, start, end, {})(x).reshape(-1)
        scale = next((node for node in shifts if not is_constant(whole - without(node))), None)
    shift = next((node for node in reversed(shifts) if node is not scale), None)
    return Norm(start, end, scale, shift)


def own_formula(
    graph: Graph, norm: Norm, scale: float = 1.0, shift: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """Return the model's own norm as a function of its input, with this scale and shift."""
    return _filled(graph, norm.start, norm.end, {norm.scale: scale, norm.shift: shift})


def _filled(
    graph: Graph, start: Node, end: Node, numbers: Mapping[Node | None, float]
) -> Callable[[Tensor], Tensor]:
    """Return a piece of a graph as a function, with parameters filled with these numbers or 1."""

    def value(node: Node) -> Tensor:
        return torch.full_like(graph.values[node].double(), numbers.get(node, 1.0))

    return lambda x: graph.run([end], {start: x}, value)[0]


def formula_of(graph: Graph, norm: Norm) -> NormFormula | None:
    """Measure the formula on inputs of several magnitudes; None if no such formula fits."""
    axis = _channel_axis(graph, norm.start)
    run = own_formula(graph, norm)
    x = random_values(size(norm.start)) + 0.7
    if run(x).shape != x.shape:
        return None
    C = x.shape[axis]
    for centred in (True, False):
        y = x - x.mean(axis, keepdim=True) if centred else x
        var = y.square().mean(axis, keepdim=True)

        def root(factor: float, y: Tensor = y) -> Tensor:
            """Return the divisor of y for each token when the input is scaled by `factor`."""
            divided: Tensor = (y * factor).norm(dim=axis) / run(x * factor).norm(dim=axis)
            return divided

        r = root(1e7)  # even an eps of a vocabulary's size is small beside it
        if not torch.allclose(run(x * 1e7) * r.unsqueeze(axis), y * 1e7, rtol=1e-6, atol=1):
            continue
        ratio = (r.square() / (var.squeeze(axis) * 1e14)).mean().item()
        unbiased = abs(ratio - C / (C - 1)) < abs(ratio - 1) and ratio < 2
        summed = abs(ratio - C) < abs(ratio - 1)
        expected_ratio = C if summed else C / (C - 1) if unbiased else 1
        if abs(ratio / expected_ratio - 1) > 1e-6:
            return None
        found = _fit_eps(root, var.squeeze(axis) * ratio)
        if found is None:
            return None
        formula = NormFormula(centred, unbiased, summed, *found)
        expected = formula(x.movedim(axis, -1)).movedim(-1, axis)
        return formula if torch.allclose(run(x), expected, rtol=1e-7, atol=1e-9) else None
    return None


def _channel_axis(graph: Graph, node: Node) -> int:
    """Return the axis of the channels: the last one, or that before the time in (B, C, T)."""
    shape, (B, T) = size(node), graph.shape
    return len(shape) - 1 if shape[-1] != T or shape[:1] != (B,) else len(shape) - 2


def _fit_eps(root: Callable[[float], Tensor], var: Tensor) -> tuple[float, bool] | None:
    """Fit eps, and whether it is added to the root, to be the same for all magnitudes."""
    small = (1e-2, 3e-3, 1e-3)
    inside = torch.stack([root(f).square() - var * f**2 for f in small])
    outside = torch.stack([root(f) - (var * f**2).sqrt() for f in small])
    for values, is_outside in ((inside, False), (outside, True)):
        eps = values.median().item()
        if (values - eps).abs().max() <= 1e-4 * abs(eps) + 1e-13:
            return (float(f"{eps:.6g}") if abs(eps) > 1e-14 else 0.0), is_outside
    return None


@dataclass
class NormPlaces:
    """Every norm by its Hugging Face name, and which of them are placed differently than in GPT-2.

    Args:
        named: norms by names such as `h.0.ln_1`.
        post: names of norms on the residual stream after a sum (post-LN).
        on_output: names of norms on a branch's result before the sum.
        extra: norms that GPT-2 does not have, by position: "wte" for the token embedding alone,
            "embed", "h.0.resid_mid" and "h.0.out" for the residual stream, "h.0.attn" and
            "h.0.mlp" for the result of a branch, "h.0.fc" and "h.0.act" before and after the
            activation, "h.0.ln_1.before" and "h.0.ln_1.after" beside a norm.
        from_norm: names of norms from whose result the shortcut starts.
        cross: norms of cross-attention.
        missing: names of norms that were not found.
    """

    named: dict[str, Norm] = field(default_factory=dict)
    post: list[str] = field(default_factory=list)
    on_output: list[str] = field(default_factory=list)
    extra: dict[str, Norm] = field(default_factory=dict)
    from_norm: list[str] = field(default_factory=list)
    cross: list[Norm] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass
class _BranchNorms:
    """The norms of one branch: on the stream before it, on its input, and on its result."""

    stream: list[Norm]
    before: list[Norm]
    after: list[Norm]


def place_norms(anatomy: Anatomy) -> NormPlaces:
    """Find all norms and name each by its position in the data flow."""
    graph = anatomy.graph
    branches: dict[int, _BranchNorms] = {}  # by number; without those of missing MLPs
    stream = anatomy.leading[-1] if anatomy.leading else anatomy.embed
    for i, layer in enumerate(anatomy.layers):
        branches[2 * i] = _branch_norms(graph, stream, layer.x1, layer.attn, layer.attn_sum)
        if layer.has_mlp:
            start, total = layer.mid, layer.mlp_sum
            if layer.parallel:  # the stream before both, in x + attn(ln(x)) + mlp(ln(x))
                start, total = stream, replace(total, shortcut=layer.attn_sum.shortcut)
            second = _branch_norms(graph, start, layer.x2, layer.mlp, total, layer.cross_sum)
            branches[2 * i + 1] = second
            if layer.parallel:
                second.stream = []  # the norm before attention, found already
        stream = layer.out
    final = norms_between(graph, stream, anatomy.xf)
    places = NormPlaces(extra=_inside_mlps(anatomy))
    if anatomy.own_input is not None:
        for norm in norms_between(graph, anatomy.looked_up, anatomy.own_input):
            places.extra["wte"] = norm
    for projection in anatomy.leading[:1]:
        for norm in norms_between(graph, anatomy.embed, live_inputs(graph, projection)[0]):
            if anatomy.embed not in graph.between([anatomy.layers[0].x1], [norm.end]):
                places.extra["embed"] = norm  # and not the norm of a branch
    for number in _start_from_norm(anatomy, branches):
        branches[number].before.append(branches[number].stream.pop())
        places.from_norm.append(_names(number)[0])
    numbers = [*branches, None]
    for (number, branch), after in zip(branches.items(), numbers[1:], strict=True):
        following = final if after is None else branches[after].stream
        if following is final and len(final) == 1 and not _is_post(places, number):
            following = []  # the model's last norm, before the head
        _name(places, number, branch, following)
        if number % 2 and anatomy.layers[number // 2].cross:
            places.cross += branch.stream
    for number, branch in branches.items():
        if number % 2 == 0 or not anatomy.layers[number // 2].cross:
            for norm in branch.stream:
                places.extra[_stream_before(number)] = norm
    if final:
        _name_among(places, "ln_f", final)
    else:
        places.missing.append("ln_f")
    return places


def _inside_mlps(anatomy: Anatomy) -> dict[str, Norm]:
    """Return the norms beside the activations of MLPs with two projections."""
    graph, found = anatomy.graph, dict[str, Norm]()
    for i, layer in enumerate(anatomy.layers):
        further = {*layer.extra} & {*graph.between([layer.act], [layer.fc_end])}
        if layer.mlp_proj is None or layer.is_gated or further:
            continue
        for norm in norms_between(graph, layer.fc_end, layer.act):
            after = graph.on_paths([norm.end], [layer.act])
            is_last = all(kind(node) in MOVES for node in after)
            found[f"h.{i}.act" if is_last else f"h.{i}.fc"] = norm
    return found


def _names(number: int) -> tuple[str, str]:
    """Return the names of a branch's norm and of the branch, by its number over all layers."""
    layer, second = divmod(number, 2)
    return f"h.{layer}.ln_{second + 1}", f"h.{layer}.{'mlp' if second else 'attn'}"


def _stream_before(number: int) -> str:
    """Return the tap of the residual stream that a branch starts from."""
    layer, second = divmod(number, 2)
    if second:
        return f"h.{layer}.resid_mid"
    return f"h.{layer - 1}.out" if layer else "embed"


def _is_post(places: NormPlaces, number: int) -> bool:
    """Return whether the norm of a branch is expected after its sum, as in the layer before it."""
    return _names(number - 2)[0] in places.post if number > 1 else bool(places.post)


def _start_from_norm(anatomy: Anatomy, branches: dict[int, _BranchNorms]) -> list[int]:
    """Return the numbers of branches of the form x = norm(x); x = x + f(x).

    Post-LN after a norm of the embeddings has the same graph as this form of attention. This is the
    only decision by name: the first norm belongs to the first block if its name says so.
    """
    attention = [branch for number, branch in branches.items() if number % 2 == 0]
    mlp = [branch for number, branch in branches.items() if number % 2]
    found: list[int] = []
    if (
        attention
        and all(b.stream and not b.before for b in attention)
        and _belongs_to_first_block(anatomy, attention[0])
    ):
        found += [number for number in branches if number % 2 == 0]
    settled = found or all(b.before for b in attention)
    if settled and all(b.stream and not b.before for b in mlp):
        found += [number for number in branches if number % 2]
    return found


def _belongs_to_first_block(anatomy: Anatomy, branch: _BranchNorms) -> bool:
    graph, norm, layer = anatomy.graph, branch.stream[-1], anatomy.layers[0]

    def first_block(node: Node, parameters: Sequence[Node]) -> str:
        """Return the path of the first block if a node is in it, by its parameters or modules."""
        own = [graph.names[each] for each in parameters]
        own += [f"{module}." for module in reversed(node.meta.get("modules", ()))]
        found = _FIRST_BLOCK.match(own[0]) if own else None
        return found[0] if found else ""

    block = first_block(layer.qkv[0], graph.parameters_between(layer.qkv_ends, [layer.x1]))
    return bool(block) and block == first_block(norm.end, [norm.scale] if norm.scale else [])


def _name(places: NormPlaces, number: int, branch: _BranchNorms, following: list[Norm]) -> None:
    """Name a branch's norm: on its input, else on its result, else on the stream after it."""
    name, end = _names(number)
    if branch.before:
        _name_among(places, name, branch.before)
    elif branch.after:
        places.named[name] = branch.after.pop()
        places.on_output.append(name)
    elif following:
        places.named[name] = following.pop(0)
        places.post.append(name)
    else:
        places.missing.append(name)
    for norm in branch.after:
        places.extra[end] = norm


def _name_among(places: NormPlaces, name: str, norms: list[Norm]) -> None:
    """Name the last norm that has parameters, if any has. Those before and after it are extra."""
    learned = [i for i, norm in enumerate(norms) if norm.scale or norm.shift]
    own = learned[-1] if learned else len(norms) - 1
    places.named[name] = norms[own]
    for i, norm in enumerate(norms):
        if i != own:
            places.extra[f"{name}.before" if i < own else f"{name}.after"] = norm


def _branch_norms(
    graph: Graph, stream: Node, x: Node, branch: Node, total: Sum, cross: Sum | None = None
) -> _BranchNorms:
    """Return the norms of a branch; of cross-attention before it, only those on the stream."""
    found = []
    if cross is not None:
        found = [] if cross.shortcut is None else norms_between(graph, stream, cross.shortcut)
        stream = cross.node
    found += norms_between(graph, stream, x)
    shortcut = total.shortcut
    shared = set() if shortcut is None else graph.ancestors[shortcut] | {shortcut}
    before = [norm for norm in found if norm.end not in shared]
    after = norms_between(graph, branch, total.branch) if total.branch is not branch else []
    return _BranchNorms([norm for norm in found if norm not in before], before, after)


def deviating_layers(anatomy: Anatomy) -> dict[str, list[int]]:
    """Return the layers whose shortcuts differ from GPT-2's, by the kind of difference."""
    layers: list[tuple[int, Layer]] = list(enumerate(anatomy.layers))
    return {
        "no_attn_residual": [i for i, layer in layers if layer.attn_sum.shortcut is None],
        "no_mlp_residual": [i for i, layer in layers if layer.mlp_sum.shortcut is None],
        "past_attention": [i for i, layer in layers if _past_attention(anatomy, layer)],
        "parallel": [i for i, layer in layers if layer.parallel],
    }


def _past_attention(anatomy: Anatomy, layer: Layer) -> bool:
    """Return whether the MLP's shortcut starts before attention's sum, read by the MLP only."""
    shortcut = layer.mlp_sum.shortcut
    if shortcut is None or layer.parallel:
        return False
    mid = layer.mid
    while kind(mid) in MOVES:  # without a sum, the heads may still be merged here
        mid = tensor_inputs(mid)[0]
    return mid not in anatomy.graph.ancestors[shortcut] | {shortcut}
