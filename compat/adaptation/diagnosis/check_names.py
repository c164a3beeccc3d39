"""Names that say something else than the use: harmless here, a trap for loaders by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import Node

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.check_assignments import owner_of
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.mapping.by_calls import ROLES
from compat.adaptation.tracing.graph import Place
from compat.ops import Fused


def of_names(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, layer = case.graph, case.anatomy.layers[0]
    home = case.mapping.by_tensor.get("h.0.attn.c_attn.weight")
    if home is not None:
        _, op = home
        owner = owner_of(case, "h.0.attn.c_attn.weight")
        if isinstance(op, Fused):
            if any("q" in p.axes and p.axes.index("h") < p.axes.index("q") for p in op.parts
                   if "h" in p.axes):  # fmt: skip
                line = source.running(graph, _splitting(case), "view", "reshape", "_unsafe_view",
                                      "unflatten", "split", "chunk")  # fmt: skip
                yield Deviation("head_interleaved_qkv", None, line or owner)
            order = [part.qkv for part in op.parts if len(part.qkv) > 1]
            shared = case.mapping.attentions[0].shared_kv
            for code, orders in (
                () if shared else (("qk_swapped", ("kqv", "kq")), ("kv_swapped", ("qvk", "vk")))
            ):
                if any(o in orders for o in order):
                    line = source.running(graph, _splitting(case), "split", "chunk", "unbind",
                                          "split_with_sizes", "slice", "select")  # fmt: skip
                    yield Deviation(code, None, line or owner)
        roles = _roles(case)
        if roles.get("q") == "k" or roles.get("k") == "q":
            yield Deviation("qk_swapped", None, _projecting(case, layer.cores[0].q.node))
        if roles.get("k") == "v" or roles.get("v") == "k":
            yield Deviation("kv_swapped", None, _projecting(case, layer.cores[0].k.node))
    yield from _norm_names(case)


def _projecting(case: DiagnosisContext, operand: Node) -> Place | None:
    """The line that projects q, or k."""
    layer = case.anatomy.layers[0]
    path = case.graph.between([operand], [layer.x1])
    return source.running(case.graph, [n for n in layer.qkv if n in path])


def _splitting(case: DiagnosisContext) -> list[Node]:
    """The nodes between the projections and q, k and v."""
    layer = case.anatomy.layers[0]
    ends = [o.node for c in layer.cores for o in (c.q, c.k, c.v)]
    return [n for n in case.graph.between(ends, layer.qkv) if n in case.graph.live]


def _roles(case: DiagnosisContext) -> dict[str, str]:
    """For q, k and v: the one that the name of its own parameter speaks of."""
    graph, layer = case.graph, case.anatomy.layers[0]
    found: dict[str, str] = {}
    held: dict[str, set[Node]] = {}
    for role, operands in (
        ("q", [c.q for c in layer.cores]),
        ("k", [c.k for c in layer.cores]),
        ("v", [c.v for c in layer.cores]),
    ):
        held[role] = set(graph.parameters_between([o.node for o in operands], [layer.x1]))
    for role, nodes in held.items():
        others = set().union(*(held[x] for x in held if x != role))
        names = [graph.names[n] for n in nodes - others]
        said = {x for name in names for x, pattern in ROLES.items() if pattern.search(name)}
        if len(said) == 1:
            found[role] = said.pop()
    return found


def _norm_names(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, named = case.graph, case.places.named
    if "h.0.ln_1" not in named or "h.0.ln_2" not in named or case.places.post:
        return
    first, second = named["h.0.ln_1"].scale, named["h.0.ln_2"].scale
    if first is None or second is None:
        return
    one, two = graph.names[first].lower(), graph.names[second].lower()
    digits = [re.sub(r"(^|(?<=\.))\d+\.", "", name) for name in (one, two)]
    numbers = [re.findall(r"\d", name) for name in digits]
    by_number = bool(numbers[0] and numbers[1] and numbers[0] > numbers[1])
    for_mlp, for_attn = re.compile(r"mlp|ffn|ff|feed"), re.compile(r"att")
    by_word = bool(for_mlp.search(_last(one)) and for_attn.search(_last(two)))
    if by_number or by_word:
        yield Deviation("swapped_ln", None, source.norm_call(graph, case.model, named["h.0.ln_1"]))


def _last(name: str) -> str:
    """The name of the norm's module without the path to it."""
    return ".".join(name.split(".")[-2:-1])
