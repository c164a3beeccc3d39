"""Deviations of the norms: their formulas, their number and their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.norms import Norm, NormFormula, own_formula
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import Changes, Function
from compat.adaptation.diagnosis.registry import Deviation, detects, deviation
from compat.adaptation.mapping.linear_maps import function_between, token_view
from compat.adaptation.tracing.graph import (
    NORM_KERNELS,
    OTHER_NORMS,
    REDUCTIONS,
    Graph,
    Place,
    kind,
    random_values,
    size,
    tensor_inputs,
)
from compat.errors import collapse_layers, listed

PRE_NORM = "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"

Differs = Callable[[NormFormula | None, Norm], dict[str, Any] | None]


def norms_where(
    context: DiagnosisContext,
    differs: Differs,
    *kinds: str,
    fields: tuple[str, ...] = (),
    number: bool = False,
) -> Iterator[Deviation]:
    """Yield one deviation per set of values, at the lines of all norms that show it.

    Args:
        context: the model.
        differs: returns the values for the texts if a formula deviates, and None otherwise.
        kinds: the kinds of operations whose line is reported.
        fields: the fields of the formula that deviate.
        number: count a sum among them only if it adds a number, such as eps.
    """
    seen: dict[str, Deviation] = {}
    for name, norm in context.places.named.items():
        formula = context.norm_formulas[name]
        values = differs(formula, norm)
        if values is None:
            continue
        live = context.graph.live_between([norm.end], [norm.start])
        if number:
            sums = [n for n in live if kind(n) in ("add", "sub") and len(n.all_input_nodes) > 1]
            live = [n for n in live if n not in sums] or live
        place = _line(context, live, kinds)
        found = seen.setdefault(str(values), Deviation(name, (), values, Changes()))
        found.lines = [*found.lines, place, *source.calls(context.graph, live, place)]
        assert found.changes is not None
        if formula is None:
            found.changes.norm_formula |= _own_formula(context.graph, name, norm)
        else:
            found.changes.norm_fields |= {(name, f): getattr(formula, f) for f in fields}
    yield from seen.values()


def _own_formula(graph: Graph, name: str, norm: Norm) -> dict[str, Function]:
    """Return a norm's name and its formula without parameters, (B, T, C) → (B, T, C)."""
    start, end = token_view(graph, norm.start), token_view(graph, norm.end)
    if start is None or end is None:
        return {}
    run = own_formula(graph, norm)
    return {name: lambda x: end.read([run(*start.write(x))])}


def _line(context: DiagnosisContext, nodes: list[Node], kinds: tuple[str, ...]) -> Place | None:
    """Return the line that builds a torch module among the nodes, or else that of an operation."""
    built = source.torch_built(context.model, nodes)
    return built or source.running(context.graph, nodes, *kinds)


@deviation(
    "the norm is an RMSNorm, which does not subtract the mean{no_bias}, but GPT-2 uses LayerNorm",
    "nn.LayerNorm({n_embd}, eps={expected:g})",
)
def rmsnorm(context: DiagnosisContext) -> Iterator[Deviation]:
    config = context.config

    def differs(formula: NormFormula | None, norm: Norm) -> dict[str, Any] | None:
        if formula is None and not _axes(context.graph, norm):
            return None
        if _is_centred(context.graph, norm) if formula is None else formula.centred:
            return None
        no_bias = "" if norm.shift else " and has no bias"
        values = {"n_embd": config.n_embd, "no_bias": no_bias}
        return {**values, "expected": config.layer_norm_epsilon}

    for found in norms_where(context, differs, fields=("centred",)):
        if found.values["no_bias"] and found.changes is not None:
            names = [*found.changes.norm_formula, *(name for name, _ in found.changes.norm_fields)]
            found.changes.weights |= dict.fromkeys(f"{name}.bias" for name in names)
        yield found


@deviation(
    "the variance is divided by C − 1, but GPT-2 divides it by C",
    "x.var(-1, keepdim=True, unbiased=False)",
)
def unbiased_var(context: DiagnosisContext) -> Iterator[Deviation]:
    kinds = ("var", "std", "var_mean", "std_mean", "div")
    fields = ("unbiased",)
    return norms_where(
        context, lambda f, _: {} if f and f.unbiased else None, *kinds, fields=fields
    )


def _eps(context: DiagnosisContext, formula: NormFormula) -> dict[str, float]:
    return {"found": float(f"{formula.eps:.3g}"), "expected": context.config.layer_norm_epsilon}


@deviation(
    "eps = {found:g} is added to the standard deviation, but GPT-2 adds {expected:g} to the "
    "variance",
    "(x - mean) / torch.sqrt(var + {expected:g})",
)
def eps_outside_sqrt(context: DiagnosisContext) -> Iterator[Deviation]:
    def differs(formula: NormFormula | None, _: Norm) -> dict[str, float] | None:
        outside = formula is not None and formula.eps_outside and formula.eps
        return _eps(context, formula) if formula and outside else None

    return norms_where(context, differs, "add", "sub", fields=("eps", "eps_outside"), number=True)


@deviation("the norm's eps is {found:g}, but the checkpoint's is {expected:g}", "eps={expected:g}")
def eps_value(context: DiagnosisContext) -> Iterator[Deviation]:
    expected = context.config.layer_norm_epsilon

    def differs(formula: NormFormula | None, _: Norm) -> dict[str, float] | None:
        if formula is None or (formula.eps_outside and formula.eps):
            return None
        return _eps(context, formula) if abs(formula.eps - expected) > 1e-3 * expected else None

    return norms_where(context, differs, *NORM_KERNELS, "add", fields=("eps",), number=True)


@deviation(
    "the norm adds its bias before it multiplies by its weight, but GPT-2 adds it afterwards",
    "weight * normed + bias",
)
def bias_before_scale(context: DiagnosisContext) -> Iterator[Deviation]:
    graph, weights = context.graph, context.weights
    lines: list[Place | None] = []
    scaled: dict[str, Tensor | None] = {}
    for name, norm in context.places.named.items():
        if _scales_its_bias(graph, norm):
            live = graph.live_between([norm.end], [norm.start])
            sums = [node for node in live if norm.shift in node.all_input_nodes]
            place = source.running(graph, sums or live)
            lines += [place, *source.calls(graph, live, place)]
            scaled[f"{name}.bias"] = weights[f"{name}.weight"] * weights[f"{name}.bias"]
    if scaled:
        tap = next(iter(scaled)).removesuffix(".bias")
        yield Deviation(tap, lines, {}, Changes(weights=scaled))


def _scales_its_bias(graph: Graph, norm: Norm) -> bool:
    """Return whether a change of the bias changes the result by the weight times as much."""
    if norm.scale is None or norm.shift is None:
        return False
    x = random_values(size(norm.start))
    shifted, plain = (own_formula(graph, norm, scale=2, shift=shift)(x) for shift in (1, 0))
    return torch.allclose(shifted - plain, torch.tensor(2.0).double())


@deviation(
    "the norm is computed over {found}, but GPT-2 computes it over the channels of each token",
    "x.mean(dim=-1, keepdim=True)",
)
def norm_axis(context: DiagnosisContext) -> Iterator[Deviation]:
    def differs(formula: NormFormula | None, norm: Norm) -> dict[str, Any] | None:
        axes = _axes(context.graph, norm) if formula is None else []
        noun = "axes" if len(axes) > 1 else "axis"
        found = f"{noun} {' and '.join(axes)} of {len(size(norm.start))}"
        return {"found": found} if axes else None

    return norms_where(context, differs, *REDUCTIONS)


def _is_centred(graph: Graph, norm: Norm) -> bool:
    """Return whether a norm subtracts the mean, over whichever axes."""
    run, x = own_formula(graph, norm), random_values(size(norm.start))
    return torch.allclose(run(x), run(x + 1), rtol=1e-6, atol=1e-6)


def _axes(graph: Graph, norm: Norm) -> list[str]:
    """Return the axes that a norm reduces; none if it is only the last."""
    found, last = list[str](), ""
    for node in graph.live_between([norm.end], [norm.start]):
        if kind(node) in REDUCTIONS - NORM_KERNELS:
            place = 2 if "norm" in kind(node) else 1  # after the order of the norm
            dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
            n = len(size(tensor_inputs(node)[0]))
            axes = list(dim) if isinstance(dim, (list, tuple)) else [dim]
            if dim is None or isinstance(dim, bool):  # var(unbiased=False)
                axes = list(range(n))
            found += [str(a % n) for a in axes if isinstance(a, int)]
            last = str(n - 1)
    return [] if {*found} <= {last} else sorted({*found})


@deviation(
    "the norm {found}, but GPT-2 uses LayerNorm, which normalizes the channels of each token",
    "nn.LayerNorm({n_embd}, eps={expected:g})",
)
def other_norm(context: DiagnosisContext) -> Iterator[Deviation]:
    config = context.config

    def differs(formula: NormFormula | None, norm: Norm) -> dict[str, Any] | None:
        if formula is not None or _axes(context.graph, norm):
            return None
        kinds = map(kind, context.graph.between([norm.end], [norm.start]))
        name = next((OTHER_NORMS[each] for each in kinds if each in OTHER_NORMS), "")
        found = f"is {name}" if name else "has a formula that is unknown to compat"
        if _divides_by_root_of_std(context.graph, norm):
            found = "divides by the square root of the standard deviation, not of the variance"
        return {"found": found, "n_embd": config.n_embd, "expected": config.layer_norm_epsilon}

    return norms_where(context, differs, "std", "std_mean")


@detects("other_norm")
def divides_by_l2_norm(context: DiagnosisContext) -> Iterator[Deviation]:
    config = context.config
    values = {
        "found": "divides by the L2 norm of the channels, √C times their root mean square",
        "n_embd": config.n_embd, "expected": config.layer_norm_epsilon,
    }  # fmt: skip
    kinds = ("norm", "linalg_vector_norm", "sum", "div")
    return norms_where(
        context, lambda f, _: values if f and f.summed else None, *kinds, fields=("summed",)
    )


def _divides_by_root_of_std(graph: Graph, norm: Norm) -> bool:
    """Return whether the divisor is √std, as where `var` holds a standard deviation."""
    x = random_values(size(norm.start))
    y = own_formula(graph, norm)(x)
    if y.shape != x.shape:
        return False
    centred = x - x.mean(-1, keepdim=True)
    divisor = centred.norm(dim=-1) / y.norm(dim=-1)
    stds = (centred.square().mean(-1).sqrt(), x.std(-1))
    return any(torch.allclose(divisor, std.sqrt(), rtol=1e-4) for std in stds)


@deviation("a norm is applied here, but GPT-2 has no norm here", "Remove the norm.")
def extra_ln(context: DiagnosisContext) -> Iterator[Deviation]:
    extra = context.places.extra
    if extra:
        graph, model = context.graph, context.model
        first, norm = next(iter(extra.items()))
        lines = [source.norm_call(graph, model, each) for each in extra.values()]
        lines += [source.torch_built(model, [each.end]) for each in extra.values()]
        functions = _functions(graph, extra)
        tap = context.tap_after(norm.end)
        if first.endswith((".attn", ".mlp", ".before")):
            tap = first.removesuffix(".before")
        elif first.endswith(".after"):
            readers = {"ln_1": "q", "ln_2": "fc", "ln_f": "logits"}
            block, _, name = first.removesuffix(".after").rpartition(".")
            tap = f"{block}.{readers[name]}".removeprefix(".")
        yield Deviation(tap, lines, {}, Changes(functions=functions))


def _functions(graph: Graph, norms: Mapping[str, Norm]) -> dict[str, list[Function]]:
    """Return functions that compute norms with their own parameters: (B, T, C) → (B, T, C)."""
    views = {at: (token_view(graph, n.start), token_view(graph, n.end)) for at, n in norms.items()}
    return {
        at: [function_between(graph, start, end)] for at, (start, end) in views.items()
        if start is not None and end is not None
    }  # fmt: skip


@deviation("there is no norm where GPT-2 has {tensors}", PRE_NORM)
def missing_ln(context: DiagnosisContext) -> Iterator[Deviation]:
    missing = [name for name in context.places.missing if name != "ln_f"]
    if missing:
        branches = (name.split(".")[1:] for name in missing)
        lines = [branch_line(context, int(i), is_mlp=norm == "ln_2") for i, norm in branches]
        values = {"tensors": listed(collapse_layers(missing))}
        yield Deviation(missing[0], lines, values, _without(missing))


def branch_line(context: DiagnosisContext, i: int, is_mlp: bool) -> Place | None:
    """Return the line that calls attention or the MLP of a block."""
    layer = context.anatomy.layers[i]
    if layer.fc is None:
        return source.module_call(context.graph, context.model, layer.attention_ops[0].product)
    branch, other = (layer.mlp, layer.attn) if is_mlp else (layer.attn, layer.mlp)
    return source.calling(context.graph, context.model, branch, other)


@deviation(
    "there is no norm between the last block and the head, but GPT-2 applies ln_f there",
    "logits = head(ln_f(x))",
)
def no_final_ln(context: DiagnosisContext) -> Iterator[Deviation]:
    if "ln_f" in context.places.missing:
        anatomy = context.anatomy
        last = anatomy.layers[-1].out if anatomy.layers else anatomy.embed
        place = source.calling(context.graph, context.model, anatomy.head, last)
        lines = [place, source.module_call(context.graph, context.model, anatomy.head)]
        lines += [source.stack_built(context.model, last)]  # takes a final norm as an argument
        if not any(lines):  # the model returns hidden states
            lines = [*context.graph.places(last)[:1]]
        yield Deviation("ln_f", lines, {}, _without(["ln_f"]))


def _without(norms: list[str]) -> Changes:
    return Changes(
        weights={f"{norm}.{part}": None for norm in norms for part in ("weight", "bias")}
    )


@deviation(
    "the norm is applied after the residual sum (post-norm), but GPT-2 applies it to the input of "
    "the branch (pre-norm)",
    PRE_NORM,
)
def post_ln(context: DiagnosisContext) -> Iterator[Deviation]:
    if names := context.places.post:
        lines = _calls(context, names)
        changes = Changes(post_norm=set(names))
        yield Deviation(names[0].replace("ln_1", "q"), lines, {}, changes)


@deviation(
    "the norm is applied to the output of the branch, but GPT-2 applies it to the branch's input",
    PRE_NORM,
)
def norm_on_output(context: DiagnosisContext) -> Iterator[Deviation]:
    if names := context.places.on_output:
        lines = _calls(context, names)
        changes = Changes(norm_on_output=set(names))
        yield Deviation("h.0.ln_1", lines, {}, changes)


def _calls(context: DiagnosisContext, names: list[str]) -> list[Place | None]:
    """Return the lines that call these norms, or that build the layer of torch that does.

    A line that several norms have in common is in a module that adds and normalizes: the lines that
    call it follow.
    """
    graph, model = context.graph, context.model
    norms = [context.places.named[name] for name in names]
    lines = [
        source.torch_layer_of(model, n.end) or source.norm_call(graph, model, n) for n in norms
    ]
    further = [source.callers(graph, line) for line in dict.fromkeys(lines) if line is not None]
    return [*lines, *(line for each in further if len(each) > 1 for line in each)]


@deviation(
    "the names of the two norms suggest the opposite order, so compat mapped them by their use",
    "Swap the names of the norms, or load the weights with this name map.",
    severity="info",
)
def swapped_ln(context: DiagnosisContext) -> Iterator[Deviation]:
    graph, named = context.graph, context.places.named
    if "h.0.ln_1" not in named or "h.0.ln_2" not in named or context.places.post:
        return
    first, second = named["h.0.ln_1"].scale, named["h.0.ln_2"].scale
    if first is None or second is None:
        return
    names = [graph.names[first].lower(), graph.names[second].lower()]
    without_layer = [re.sub(r"(^|(?<=\.))\d+\.", "", name) for name in names]
    numbers = [re.findall(r"\d", name) for name in without_layer]
    by_number = bool(numbers[0] and numbers[1] and numbers[0] > numbers[1])
    modules = [".".join(name.split(".")[-2:-1]) for name in names]
    by_word = re.search(r"mlp|ffn|ff|feed", modules[0]) and re.search(r"att", modules[1])
    if by_number or by_word:
        yield Deviation(None, [source.norm_call(graph, context.model, named["h.0.ln_1"])])
