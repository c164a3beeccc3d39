"""Deviations of the norms: their formulas, and norms too many or too few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.norms import Norm, NormFormula, formula_of, own_formula
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import ModifiedReference
from compat.adaptation.tracing.graph import Graph, Place, kind
from compat.errors import collapse_layers


def of_norms(case: DiagnosisContext) -> Iterator[Deviation]:
    """One deviation per kind, with the first norm that shows it."""
    seen: dict[tuple[str, Any], Deviation] = {}
    for name, norm in case.places.named.items():
        formula = formula_of(case.graph, norm)
        for code, words in _norm_codes(formula, case.config.layer_norm_epsilon):
            deviation = seen.get((code, str(words)))
            if deviation is None:
                nodes = case.graph.between([norm.end], [norm.start])
                place = _norm_place(case, nodes, code)
                deviation = Deviation(code, name, place, words, _FormulaFor())
                seen[code, str(words)] = deviation
            if isinstance(deviation.apply, _FormulaFor):
                deviation.apply.formulas[name] = formula or own_formula(case.graph, norm)
    yield from seen.values()
    yield from _extra_norms(case)
    yield from _missing_norms(case)


def _extra_norms(case: DiagnosisContext) -> Iterator[Deviation]:
    graph, extra = case.graph, case.places.extra
    if not extra:
        return
    first = next(iter(extra))
    made = {where: _computed(graph, norm) for where, norm in extra.items()}

    def apply(variant: ModifiedReference) -> None:
        variant.extra.update(made)

    tap = "h.0.ln_1" if first == "embed" else "ln_f" if first == "final" else first
    place = source.norm_call(graph, case.model, extra[first])
    yield Deviation("extra_ln", tap.removesuffix(".before"), place, {}, apply)


def _computed(graph: Graph, norm: Norm) -> Callable[[Tensor], Tensor]:
    """What a norm computes with the parameters it has: (…, C) → (…, C)."""
    formula = formula_of(graph, norm)

    def run(x: Tensor) -> Tensor:
        x = x if formula is None else formula(x)
        for node, join in ((norm.scale, torch.mul), (norm.shift, torch.add)):
            x = x if node is None else join(x, graph.values[node].double().reshape(-1))
        return x

    return run


def _missing_norms(case: DiagnosisContext) -> Iterator[Deviation]:
    missing = case.places.missing
    if "ln_f" in missing:
        place = source.calling(case.graph, case.anatomy.head, case.anatomy.layers[-1].out)
        yield Deviation("no_final_ln", "ln_f", place, {}, lambda v: v.drop(_tensors(["ln_f"])))
    if lost := [name for name in missing if name != "ln_f"]:
        layer = case.anatomy.layers[int(lost[0].split(".")[1])]
        inner, other = layer.attn, layer.mlp
        if lost[0].endswith("ln_2"):
            inner, other = other, inner
        place = source.calling(case.graph, inner, other)
        words = {"tensors": ", ".join(collapse_layers(lost))}
        yield Deviation("missing_ln", lost[0], place, words, lambda v: v.drop(_tensors(lost)))


def _tensors(norms: Iterable[str]) -> list[str]:
    return [f"{norm}.{kind_of}" for norm in norms for kind_of in ("weight", "bias")]


class _FormulaFor:
    """Gives norms of the reference the formulas that were measured."""

    def __init__(self) -> None:
        self.formulas: dict[str, Callable[[Tensor], Tensor]] = {}

    def __call__(self, variant: ModifiedReference) -> None:
        variant.formulas.update(self.formulas)


def _norm_codes(formula: NormFormula | None, eps: float) -> list[tuple[str, dict[str, Any]]]:
    if formula is None:
        return [("unexplained", {"found": "a norm of no known formula"})]
    codes: list[tuple[str, dict[str, Any]]] = []
    if not formula.centred:
        codes.append(("rmsnorm", {}))
    if formula.unbiased:
        codes.append(("unbiased_var", {}))
    words = {"found": formula.eps, "expected": eps}
    if formula.eps_outside and formula.eps:
        codes.append(("eps_outside_sqrt", words))
    elif formula.centred and abs(formula.eps - eps) > 1e-3 * eps:
        codes.append(("eps_value", words))
    return codes


def _norm_place(case: DiagnosisContext, nodes: list[Node], code: str) -> Place | None:
    live = [node for node in nodes if node in case.graph.live]
    kinds = {
        "unbiased_var": ("var", "std", "var_mean", "std_mean", "div"),
        "eps_outside_sqrt": ("add",),
        "eps_value": ("layer_norm", "native_layer_norm", "add"),
    }.get(code, ())
    if code.startswith("eps"):  # the sum with a number, not with the shift
        live = [n for n in live if kind(n) != "add" or not _adds_tensor(n)] or live
    place = source.running(case.graph, live, *kinds)
    built = next((p for n in live if (p := source.torch_module(case.model, n))), None)
    return built or place


def _adds_tensor(node: Node) -> bool:
    return len(node.all_input_nodes) > 1
