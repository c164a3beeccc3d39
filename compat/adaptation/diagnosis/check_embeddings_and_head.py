"""Deviations of the embeddings, the head, and dropout."""

from __future__ import annotations

from collections.abc import Iterator

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.check_attention import torch_built
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext, sizes_of
from compat.adaptation.diagnosis.modified_reference import ModifiedReference
from compat.adaptation.mapping.embedding import embedding_of
from compat.adaptation.tracing.graph import MOVES, kind
from compat.adaptation.tracing.output_head import CUTS
from compat.ops import Rows

# Operations that draw random numbers, but for those of dropout.
DRAWS = frozenset("uniform normal normal_functional randn rand randint".split())


def of_embedding(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, anatomy, homes = case.graph, case.anatomy, case.mapping.by_tensor
    if "wte.weight" not in homes:
        return  # a table of another width, which is reported as such
    (table,), _ = homes["wte.weight"]
    positions = homes["wpe.weight"][0][0] if "wpe.weight" in homes else None
    found = embedding_of(graph, anatomy.embed, table, positions)
    path = graph.between([anatomy.embed], [graph.input])
    sums = [node for node in path if kind(node) == "add" and node in graph.live]
    here = source.running(graph, sums or [anatomy.token_embedding])
    if found is None:
        yield Deviation("unexplained", "embed", here, {"found": "the embedding is no sum of a "
                        "token's and a position's row"})  # fmt: skip
        return
    for what, scale in (("token", found.token_scale), ("position", found.position_scale)):
        if abs(scale - 1) > 1e-9:
            scaling = source.running(graph, path, "mul", "div") or here

            def apply(variant: ModifiedReference, what: str = what, scale: float = scale) -> None:
                setattr(variant, f"{what}_scale", scale)

            yield Deviation(
                "scaled_embedding", "embed", scaling, {"what": what, "found": scale}, apply
            )
    rotated = any(attention.rotated for attention in case.mapping.attentions)
    if found.added is not None:

        def add(variant: ModifiedReference) -> None:
            variant.added = found.added
            if positions is None:
                variant.drop(["wpe.weight"])

        yield Deviation("sinusoidal_pos", "embed", here, sizes_of(case.config), add)
    elif found.offset is None and not rotated:
        line = source.running(graph, [anatomy.token_embedding])
        yield Deviation("no_pos", "embed", line, {}, lambda v: v.drop(["wpe.weight"]))
    elif found.offset is not None and (offset := found.offset - _start(case)):

        def shift(variant: ModifiedReference) -> None:
            variant.offset = offset

        dead = [node for node in path if node not in graph.live]
        line = source.running(graph, dead, "arange", "slice", "add", "embedding") or here
        yield Deviation("pos_offset", "embed", line, {"found": offset}, shift)


def _start(case: DiagnosisContext) -> int:
    """The row of the position table that holds the checkpoint's first position."""
    _, op = case.mapping.by_tensor["wpe.weight"]
    return op.start if isinstance(op, Rows) else 0


def of_head(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, mapping = case.graph, case.mapping
    if "lm_head.weight" in mapping.by_tensor and case.config.tie_word_embeddings:
        (node,), _ = mapping.by_tensor["lm_head.weight"]
        place = source.building(case.model, graph.names[node])
        yield Deviation("untied_head", None, place, {"found": graph.values[node].numel()})
    for node in mapping.zeroed:
        yield Deviation("head_bias", None, source.building(case.model, graph.names[node]))
    if abs(mapping.head_scale - 1) > 1e-9:
        after = graph.between([graph.output], [case.anatomy.head])
        scale = mapping.head_scale

        def scaled(variant: ModifiedReference) -> None:
            variant.head_scale = scale

        place = source.running(graph, after, "mul", "div")
        yield Deviation("scaled_logits", "logits", place, {"found": scale}, scaled)
    if mapping.output_softmax is not None:
        node = mapping.output_softmax
        place = torch_built(case, [node], source.running(graph, [node]))
        found = "the logarithm of the softmax" if "log" in kind(node) else "the softmax"
        yield Deviation("softmax_output", "logits", place, {"found": found}, lambda v: None)
    if case.last_only is not None:
        yield Deviation("last_position_only", None, source.running(graph, [case.last_only]))
    elif case.with_targets:
        place = source.saying(case.model, r"\[:, *\[? *-1|\[:, *-1 *:")
        yield Deviation("last_position_only", None, place)


def of_output(case: DiagnosisContext) -> Iterator[Deviation]:
    """Operations on the logits that are neither a bias nor a factor, such as a clamp."""
    graph = case.graph
    usual = MOVES | CUTS | {"add", "mul", "div", "getitem"}
    for node in graph.between([graph.output], [case.anatomy.head]):
        if node in graph.live and kind(node) not in usual:
            words = {"found": kind(node), "evidence": "seen in the graph, at work or not"}
            yield Deviation("changed_logits", "logits", source.running(graph, [node]), words)
            return


def of_tracing(case: DiagnosisContext) -> Iterator[Deviation]:
    """What torch.export could not follow, though make_fx could."""
    for stopped in case.graph.stopped:
        yield Deviation("export_stopped", None, source.named(stopped), {"found": stopped})


def of_random(case: DiagnosisContext) -> Iterator[Deviation]:
    """Weights that are drawn anew in every run."""
    graph = case.graph
    drawn = [n for n in graph.between([graph.output], [graph.input])
             if n not in graph.live and n not in graph.dropouts and kind(n) in DRAWS]  # fmt: skip
    if drawn:
        users = [
            n for n in graph.nodes if n in graph.live and graph.order[n] > graph.order[drawn[0]]
        ]
        tap = case.tap_after(users[0]) if users else "logits"
        yield Deviation("random_in_forward", tap, source.running(graph, drawn))


def of_dropout(case: DiagnosisContext) -> Iterator[Deviation]:
    """Dropout in eval mode, confirmed by two runs that do not agree."""
    dropouts = case.graph.dropouts
    if not dropouts:
        return
    place = source.running(case.graph, dropouts)
    here = [node for node in dropouts if node in case.graph.order]
    tap = case.tap_after(here[0]) if here else "embed"
    yield Deviation("dropout_always_on", tap, place, {"evidence": case.noise})
