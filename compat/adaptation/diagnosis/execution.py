"""Deviations of how a model runs and of what could be traced and compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.registry import CODES, Code, Deviation, deviation
from compat.adaptation.tracing.graph import kind

# Operations that draw random numbers, other than those of dropout.
DRAWS = frozenset("uniform normal normal_functional randn rand randint".split())


@deviation(
    "dropout is applied in eval mode too, but GPT-2 applies it in training only",
    "F.dropout(x, p, training=self.training)",
)
def dropout_always_on(context: DiagnosisContext) -> Iterator[Deviation]:
    if dropouts := context.graph.dropouts:
        place = source.running(context.graph, dropouts)
        first = next((node for node in dropouts if node in context.graph.order), None)
        tap = "embed" if first is None else context.tap_after(first)
        yield Deviation(tap, place, evidence=context.noise)


@deviation(
    "the forward pass draws random numbers, for example for a module that it creates, so no two "
    "runs agree",
    "Create the module in __init__.",
)
def random_in_forward(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    drawn = [
        n for n in graph.between([graph.output], [graph.input])
        if n not in graph.live and n not in graph.dropouts and kind(n) in DRAWS
    ]  # fmt: skip
    if drawn:
        later = graph.nodes[graph.order[drawn[0]] + 1 :]
        user = next((n for n in later if n in graph.live), None)
        tap = "logits" if user is None else context.tap_after(user)
        yield Deviation(tap, source.running(graph, drawn))


@deviation(
    "this is computed in {found}, but the parameters of the model are in {expected}",
    "Remove the cast, or convert the whole model with model.to(torch.{found}).",
)
def low_precision(context: DiagnosisContext) -> Iterator[Deviation]:
    graph, half = context.graph, (torch.bfloat16, torch.float16)
    casts = [
        node for node in graph.nodes
        if node in graph.live and any(argument in half for argument in node.args)
    ]  # fmt: skip
    if casts:
        named = next(a for a in casts[0].args if a in half)
        values = {"found": _name(named), "expected": _name(next(context.model.parameters()).dtype)}
        yield Deviation(context.tap_after(casts[0]), source.running(graph, casts), values)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# Entries without a detector, which `findings` reports after the model has run.
CODES.update(
    plain_list=Code(
        "breaks",
        "{found} is a Python {kind} of modules, so their parameters do not belong to the model: no "
        "optimizer trains them, and no checkpoint has them",
        "self.{name} = nn.ModuleList(self.{name})",
    ),
    train_mode=Code(
        "info",
        "the constructor leaves the model in training mode, in which dropout is applied",
        "model.eval()",
    ),
    fast_path=Code(
        "breaks",
        "in eval mode without gradients, nn.TransformerEncoderLayer runs a fused kernel that "
        "differs from the layer's own code, for example by the exact GELU",
        "torch.backends.mha.set_fastpath_enabled(False)",
    ),
    untraced=Code(
        "info",
        "{found}, so compat mapped the model by the order of its module calls and compared its "
        "logits only",
        "Use torch operations only between the ids and the logits.",
    ),
    unexamined=Code(
        "info",
        "compat failed to check the model for {codes} ({found}), which does not affect the "
        "comparison",
        "Report this to the authors of compat, and attach the model.",
    ),
    not_compared=Code(
        "limit",
        "{found}, so the proof does not cover every case",
        "check_parity(model, source, input_ids=…)  # ids that cover the case",
    ),
    unexplained=Code("breaks", "{found}", "Compare the code before this tap with GPT-2's."),
)
