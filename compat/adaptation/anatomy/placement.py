"""Where the norms sit: before each branch as in GPT-2, after the sum, or on the branch's result."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from compat.adaptation.anatomy.norms import Norm, norms_between
from compat.adaptation.anatomy.parts import Anatomy, Layer, Sum
from compat.adaptation.tracing.graph import Graph


@dataclass
class NormPlaces:
    """Every norm under its Hugging Face name, and what is unusual about where it stands.

    Args:
        named: such as `h.0.ln_1`.
        post: names of norms on the stream, after a sum: post-LN.
        on_output: names of norms on a branch's result, before the sum.
        extra: norms that GPT-2 does not have, by where they are: "embed", "h.0.attn", "h.0.mlp".
        from_norm: names of norms behind which the shortcut starts.
        missing: names of norms that are nowhere.
    """

    named: dict[str, Norm] = field(default_factory=dict)
    post: list[str] = field(default_factory=list)
    on_output: list[str] = field(default_factory=list)
    extra: dict[str, Norm] = field(default_factory=dict)
    from_norm: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass
class _Found:
    """The norms around one branch: on the stream before it, in front of it, on its result."""

    stream: list[Norm]
    before: list[Norm]
    after: list[Norm]


def place_norms(anatomy: Anatomy) -> NormPlaces:
    """Find all norms and give each its name by its place in the data flow."""
    graph = anatomy.graph
    branches: list[_Found] = []
    stream = anatomy.embed
    for layer in anatomy.layers:
        branches.append(_around(graph, stream, layer.x1, layer.attn, layer.attn_sum))
        second = stream if layer.parallel else layer.mid
        branches.append(_around(graph, second, layer.x2, layer.mlp, layer.mlp_sum))
        if layer.parallel:
            branches[-1].stream = []  # found already, in front of attention
        stream = layer.out
    final = norms_between(graph, stream, anatomy.xf)
    places = NormPlaces()
    for number in _behind_norms(anatomy, branches):
        branches[number].before.append(branches[number].stream.pop())
        places.from_norm.append(_names(number)[0])
    for number, branch in enumerate(branches):
        following = branches[number + 1].stream if number + 1 < len(branches) else final
        if following is final and len(final) == 1 and not places.post:
            following = []  # the model's last norm, before the head
        _name(places, number, branch, following)
    for norm in branches[0].stream:
        places.extra["embed"] = norm
    if final:
        places.named["ln_f"] = final.pop()
    else:
        places.missing.append("ln_f")
    for norm in final:
        places.extra["final"] = norm
    return places


def _names(number: int) -> tuple[str, str]:
    """The norm and the branch, counted through all layers."""
    layer, second = divmod(number, 2)
    return f"h.{layer}.ln_{second + 1}", f"h.{layer}.{'mlp' if second else 'attn'}"


def _behind_norms(anatomy: Anatomy, branches: list[_Found]) -> list[int]:
    """Branches of the form x = norm(x); x = x + f(x).

    For attention it is the same graph as post-LN behind a norm of the embeddings. Here names
    decide: whether the first norm lives in the first block, as its projections do.
    """
    attention, mlp = branches[0::2], branches[1::2]
    found: list[int] = []
    if all(b.stream and not b.before for b in attention) and _lives_in_block(anatomy, attention[0]):
        found += range(0, len(branches), 2)
    settled = found or all(b.before for b in attention)
    if settled and all(b.stream and not b.before for b in mlp):
        found += range(1, len(branches), 2)
    return found


def _lives_in_block(anatomy: Anatomy, branch: _Found) -> bool:
    graph, scale, layer = anatomy.graph, branch.stream[0].scale, anatomy.layers[0]
    fc = graph.parameters_between([layer.fc_end], [layer.x2])
    if scale is None or not fc:
        return False
    norm, projection = (graph.names[node].partition(".0.") for node in (scale, fc[0]))
    return norm[0] == projection[0] and bool(norm[1])


def _name(places: NormPlaces, number: int, branch: _Found, following: list[Norm]) -> None:
    """The norm of one branch: in front of it, else on its result, else on the stream after it."""
    name, end = _names(number)
    if branch.before:
        places.named[name] = branch.before.pop()
        for norm in branch.before:
            places.extra[f"{name}.before"] = norm
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


def _around(graph: Graph, stream: Node, x: Node, branch: Node, total: Sum) -> _Found:
    found = norms_between(graph, stream, x)
    shortcut = total.shortcut
    upon = [
        norm for norm in found
        if shortcut is not None and (norm.end is shortcut or norm.end in graph.ancestors[shortcut])
    ]  # fmt: skip
    before = [norm for norm in found if norm not in upon]
    after = norms_between(graph, branch, total.branch) if total.branch is not branch else []
    return _Found(upon, before, after)


def deviating_layers(anatomy: Anatomy) -> dict[str, list[int]]:
    """Layers whose branches are not wired as GPT-2's: without a shortcut, or side by side."""
    layers: list[tuple[int, Layer]] = list(enumerate(anatomy.layers))
    return {
        "no_attn_residual": [i for i, layer in layers if layer.attn_sum.shortcut is None],
        "no_mlp_residual": [i for i, layer in layers if layer.mlp_sum.shortcut is None],
        "past_attention": [i for i, layer in layers if _past_attention(anatomy, layer)],
        "parallel": [i for i, layer in layers if layer.parallel],
    }


def _past_attention(anatomy: Anatomy, layer: Layer) -> bool:
    """The MLP's shortcut starts before attention's sum, which is lost but for what the MLP sees."""
    shortcut = layer.mlp_sum.shortcut
    if shortcut is None or layer.parallel:
        return False
    return layer.mid not in anatomy.graph.ancestors[shortcut] | {shortcut}
