"""Deviations of the MLP and of how a block's branches are wired."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch import Tensor

from compat.adaptation.anatomy.norms import deviating_layers
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.diagnosis.formulas import Activation, activation_of
from compat.adaptation.diagnosis.modified_reference import ALIASES, ModifiedReference
from compat.adaptation.tracing.graph import MOVES, Place, kind


def of_mlp(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, config = case.graph, case.config
    wanted = ALIASES.get(config.activation_function, config.activation_function)
    found: dict[str, dict[int, Activation]] = {}
    for i, layer in case.layers:
        activation = activation_of(graph, layer.fc_end, layer.act)
        found.setdefault(activation.name or "a function not known here", {})[i] = activation
    for name, layers in found.items():
        if name == wanted:
            continue
        first = next(iter(layers))
        layer = case.anatomy.layers[first]
        nodes = [n for n in graph.between([layer.act], [layer.fc_end]) if n in graph.live]
        nodes = [n for n in nodes if kind(n) not in MOVES]
        place = next((p for n in nodes if (p := source.torch_module(case.model, n))), None)
        code = {"gelu": "erf_gelu", "relu": "relu", "silu": "silu"}.get(name, "other_activation")
        code = code if wanted == "gelu_new" else "other_activation"
        place = place or source.running(graph, nodes)
        place = place or source.calling(graph, layer.mlp_proj, layer.fc)
        own = {i: a.function for i, a in layers.items() if a.function is not None}

        def apply(
            variant: ModifiedReference, own: dict[int, Callable[[Tensor], Tensor]] = own
        ) -> None:
            variant.activation.update(own)

        words = {"found": name, "expected": wanted, "paste": _tanh_gelu(place)}
        yield Deviation(code, f"h.{first}.act", place, words, apply)


def _tanh_gelu(place: Place | None) -> str:
    """The tanh GELU in the spelling of the author's line."""
    text = place.text if place else ""
    if "nn.GELU" in text or re.search(r"\bGELU\(", text):
        return 'nn.GELU(approximate="tanh")'
    if "gelu(" in text:
        return 'F.gelu(x, approximate="tanh")'
    return 'F.gelu(x, approximate="tanh"), or nn.GELU(approximate="tanh")'


def of_wiring(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, places = case.graph, case.places
    wiring = deviating_layers(case.anatomy)
    for code, names, attribute in (
        ("post_ln", places.post, "post"),
        ("norm_on_output", places.on_output, "on_output"),
    ):
        if names:
            norm = places.named[names[0]]
            place = source.norm_call(graph, case.model, norm)

            def move(
                variant: ModifiedReference, kept: str = attribute, names: list[str] = names
            ) -> None:
                getattr(variant, kept).update(names)

            tap = "h.0.ln_1" if code == "norm_on_output" else names[0].replace("ln_1", "q")
            yield Deviation(code, tap, place, {}, move)
    for code, layers, attribute, tap in (
        ("parallel_block", wiring["parallel"], "parallel", "fc"),
        ("missing_residual", wiring["no_attn_residual"], "no_attn_residual", "resid_mid"),
        ("missing_residual", wiring["no_mlp_residual"], "no_mlp_residual", "out"),
        ("missing_residual", wiring["past_attention"], "past_attention", "out"),
    ):
        if not layers:
            continue
        layer = case.anatomy.layers[layers[0]]
        inner, other = (layer.mlp, layer.attn) if tap in ("out", "fc") else (layer.attn, layer.mlp)
        place = source.calling(graph, inner, other)
        if code == "parallel_block":
            place = source.running(graph, [layer.mlp_sum.node])

        def mark(
            variant: ModifiedReference, attribute: str = attribute, layers: list[int] = layers
        ) -> None:
            getattr(variant, attribute).update(layers)

        yield Deviation(code, f"h.{layers[0]}.{tap}", place, {}, mark)
    if places.from_norm:
        layer = case.anatomy.layers[0]
        total = layer.attn_sum if places.from_norm[0].endswith("ln_1") else layer.mlp_sum
        place = source.running(graph, [total.node])

        def behind(variant: ModifiedReference) -> None:
            variant.from_norm.update(places.from_norm)

        yield Deviation("residual_from_norm", "h.0.resid_mid", place, {}, behind)
