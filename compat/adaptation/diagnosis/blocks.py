"""Deviations of the blocks: the activation of the MLP, and how the branches are connected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Layer, Operand
from compat.adaptation.anatomy.norms import deviating_layers
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.activations import (
    ACTIVATIONS,
    Activation,
    activation_code,
    activation_of,
    called_activation,
    canonical_activation,
)
from compat.adaptation.diagnosis.attention import operands_of
from compat.adaptation.diagnosis.context import Branch, DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import Changes, combine
from compat.adaptation.diagnosis.norms import PRE_NORM, branch_line
from compat.adaptation.diagnosis.registry import Deviation, detects, deviation, operations
from compat.adaptation.diagnosis.shifts import shifted_tokens
from compat.adaptation.mapping.linear_maps import function_between, token_view
from compat.adaptation.result import Severity
from compat.adaptation.tracing.contractions import SDPA, contraction
from compat.adaptation.tracing.graph import (
    DRAWS,
    MOVES,
    SHIFTS,
    Graph,
    Place,
    kind,
    live_inputs,
    live_users,
    random_values,
    size,
    tensor_inputs,
)
from compat.errors import listed

# The reader of the final norm, as in "between ln_f and the head".
HEAD = "the head"

# Gated MLPs by the activation of one factor, for messages.
GATED = {
    "silu": ", one of them after SiLU, as in SwiGLU",
    "gelu": ", one of them after the exact (erf) GELU, as in GEGLU",
    "gelu_new": ", one of them after the tanh approximation of GELU, as in GEGLU",
    "relu": ", one of them after ReLU, as in ReGLU",
    "sigmoid": ", one of them after a sigmoid, as in GLU",
}
CLASS_OF = {"gelu": "GELU", "relu": "ReLU", "silu": "SiLU"}


def _other_activations(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect functions in place of the checkpoint's, each with the lines of all its layers."""
    expected = canonical_activation(context.config)
    found: dict[str, dict[int, Activation]] = {}
    for i, activation in enumerate(context.activations):
        layer = context.anatomy.layers[i]
        if layer.is_gated or not layer.has_mlp or _gated_product(context, layer):
            continue
        if layer.unknown and activation.name is None:
            continue
        if i in context.late_activations and activation.name == "identity":
            continue
        name = activation.name or "a function that compat does not know"
        if name != expected:
            found.setdefault(name, {})[i] = activation
    for name, layers in found.items():
        first = next(iter(layers))
        lines = [_activation_line(context, i) for i in layers]
        nodes = _activation_nodes(context, first)
        lines += [
            source.function_built(context.model, nodes),
            _module_call(context, lines[0], nodes),
        ]
        if lines[0] and name in CLASS_OF and name not in lines[0].text.lower():
            lines += source.selected(context.model, name, CLASS_OF[name])
        fix = f"Use {expected} as the activation."
        if expected == "gelu_new":
            fix = tanh_gelu(lines[0])
        values = {"found": name, "expected": expected, "fix": fix}
        functions = {i: a.function for i, a in layers.items() if a.function is not None}
        changes = Changes(activation=functions) if len(functions) == len(layers) else None
        code = activation_code(name, expected)
        yield Deviation(f"h.{first}.act", lines, values, changes, layers=list(layers), code=code)


def _activation_line(context: DiagnosisContext, i: int) -> Place | None:
    """Return the line that builds or computes the activation, or else that calls the MLP."""
    graph, layer = context.graph, context.anatomy.layers[i]
    nodes = _activation_nodes(context, i)
    line = source.torch_built(context.model, nodes) or source.running(graph, nodes)
    projections = layer.mlp_proj or layer.act, layer.fc or layer.act
    return line or source.calling(graph, context.model, *projections)


def _module_call(
    context: DiagnosisContext, built: Place | None, nodes: Sequence[Node]
) -> Place | None:
    """Return the line that calls an activation by the attribute that it is stored in."""
    stored = re.match(r"self\.(\w+)\s*(:.*)?=", built.text.strip()) if built else None
    line = source.running(context.graph, nodes)
    return line if stored and line and f"self.{stored[1]}(" in line.text else None


def _activation_nodes(context: DiagnosisContext, i: int) -> list[Node]:
    """Return the operations that compute the activation of a layer."""
    graph, layer = context.graph, context.anatomy.layers[i]
    if layer.unknown:
        return called_activation(graph, graph.between([layer.mlp], [layer.x2]))[1]
    spans = layer.activation_spans(graph)
    inside = (n for start, end in spans for n in graph.live_between([end], [start]))
    return [n for n in inside if kind(n) not in MOVES]


def tanh_gelu(place: Place | None) -> str:
    """Write GELU's tanh approximation as a module or a function, like the replaced line."""
    if place is not None and re.search(r"\b(nn\.\w+|GELU|ReLU|SiLU)\(", place.text):
        return 'nn.GELU(approximate="tanh")'
    return 'F.gelu(x, approximate="tanh")'


for _code, _message in (
    (
        "erf_gelu",
        "the MLP uses the exact (erf) GELU, but GPT-2 uses its tanh approximation",
    ),
    ("relu", "the MLP uses ReLU, but GPT-2 uses the tanh approximation of GELU"),
    ("silu", "the MLP uses SiLU, but GPT-2 uses the tanh approximation of GELU"),
    (
        "other_activation",
        "the activation of the MLP is {found}, but the checkpoint's is {expected}",
    ),
):
    deviation(_message, "{fix}", code=_code)(_other_activations)


@detects("other_activation")
def activation_after_mlp(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect activations of MLPs' results, instead of or besides those between projections."""
    expected = canonical_activation(context.config)
    found: dict[tuple[str, bool], dict[int, Activation]] = {}
    for i, late in context.late_activations.items():
        moved = context.activations[i].name == "identity"
        found.setdefault((str(late.name), moved), {})[i] = late
    for (name, moved), layers in found.items():
        lines = [line for i in layers for line in _late_lines(context, i)]
        message = (
            "the activation ({found}) is applied after the second projection of the MLP, but GPT-2 "
            "applies {expected} between the two projections"
        )
        fix = "Apply the activation between the projections: c_proj(act(c_fc(x)))."
        functions = {i: late.function for i, late in layers.items() if late.function is not None}
        changes = Changes(functions={f"h.{i}.mlp.c_proj": [f] for i, f in functions.items()})
        if moved:
            changes.activation = {i: ACTIVATIONS["identity"] for i in layers}
        else:
            message = (
                "an activation ({found}) is applied to the result of the MLP's second projection, "
                "but GPT-2 adds this result to the residual stream as it is"
            )
            fix = "Remove this activation. GPT-2 has only the one between the two projections."
        values = {"found": name, "expected": expected, "fix": fix, "after": True, "moved": moved}
        tap = f"h.{next(iter(layers))}.{'act' if moved else 'out'}"
        yield Deviation(tap, lines, values, changes, layers=list(layers), message=message)


def _late_lines(context: DiagnosisContext, i: int) -> list[Place | None]:
    """Return the lines of the activation after the MLP, and of the projection before it."""
    graph, model, layer = context.graph, context.model, context.anatomy.layers[i]
    inside = graph.live_between([layer.mlp_sum.branch], [layer.mlp])
    node = next(n for n in inside if kind(n) not in MOVES)
    last = layer.mlp_proj or layer.mlp
    built = source.torch_built(model, [node]) if source.in_sequence(model, node) else None
    lines = [built or source.beside(graph, node, last)]
    return [*lines, source.beside(graph, last, node), source.projecting(graph, model, last)]


ADDS = (
    "the MLP adds the results of two projections, but GPT-2's MLP has one projection before the "
    "activation"
)


@deviation(
    "the MLP is gated (it multiplies the results of two projections{like}), but GPT-2's MLP has "
    "one projection before the activation",
    'c_proj(F.gelu(c_fc(x), approximate="tanh"))',
)
def gated_mlp(context: DiagnosisContext) -> Iterator[Deviation]:
    for i, layer in context.layers:
        if layer.is_gated:
            product = _product_before(context, layer)
            graph, model = context.graph, context.model
            lines = [source.projecting(graph, model, layer.gate or product)]
            starts = [node for node in (layer.fc_end, layer.gate) if node is not None]
            inside = graph.live_between([layer.act], starts)
            activations = [node for node in inside if kind(node) in GATED]
            lines += [source.torch_built(model, [n]) or graph.place(n) for n in activations]
            lines.append(graph.place(product))
            values = {"like": _gated_like(context, layer, product)}
            message = ADDS if kind(product) == "add" else ""
            yield Deviation(f"h.{i}.act", lines, values, message=message)
            return


@detects("missing_ln")
def unnormed_gate(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect a gated MLP of which only one projection reads the norm before it."""
    for i, layer in context.layers:
        norm, projections = context.places.named.get(f"h.{i}.ln_2"), (layer.fc, layer.gate)
        raw = [n for n in projections if n and norm and norm.end not in context.graph.ancestors[n]]
        if layer.gate is not None and len(raw) == 1:
            message = (
                "one projection of the gated MLP reads the residual stream itself, but GPT-2's MLP "
                "reads its norm, ln_2"
            )
            place = source.projecting(context.graph, context.model, raw[0])
            yield Deviation(f"h.{i}.fc", [place], {"tensors": f"h.{i}.ln_2"}, message=message)
            return


@detects("gated_mlp")
def gated_experts(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect products of two projections in MLPs of an unknown form, such as those of experts."""
    for i, layer in context.layers:
        if product := _gated_product(context, layer):
            is_glu = kind(product) == "glu"
            like = GATED.get("sigmoid" if is_glu else context.activations[i].name or "", "")
            yield Deviation(f"h.{i}.act", [context.graph.place(product)], {"like": like})
            return


def _gated_product(context: DiagnosisContext, layer: Layer) -> Node | None:
    """Return the first product of two projections' results in an MLP of an unknown form."""
    graph, above = context.graph, context.graph.ancestors
    nodes = graph.live_between([layer.mlp], [layer.x2]) if layer.unknown else []
    for node in nodes:
        factors = live_inputs(graph, node)
        if kind(node) == "glu":
            return node
        if kind(node) != "mul" or len(factors) != 2 or size(factors[0]) != size(factors[1]):
            continue
        one, other = ({*layer.unknown} & {*above[factor], factor} for factor in factors)
        if len(one - other) == len(other - one) == 1:  # a router may be above both
            return node
    return None


def _gated_like(context: DiagnosisContext, layer: Layer, product: Node) -> str:
    """Return the activation of one factor and the name of such an MLP; "" without an activation."""
    graph = context.graph
    projections = [layer.fc_end, *([layer.gate] if layer.gate else [])]
    for factor in live_inputs(graph, product):
        before = graph.on_paths(projections, [factor])  # such as a bias, or a half
        for start in [*projections, *before]:
            name = None if start is factor else activation_of(graph, start, factor).name
            if name in GATED:
                return GATED[name]
    is_glu = any(kind(n) == "glu" for n in graph.between([layer.act], [layer.fc_end]))
    return GATED["sigmoid"] if is_glu else ""


def _product_before(context: DiagnosisContext, layer: Layer) -> Node:
    """Return the product of a projection's two halves; without one, the next projection's input."""
    graph = context.graph
    between = graph.between([layer.act], [layer.fc_end])
    products = [n for n in between if kind(n) == "mul" and len(live_inputs(graph, n)) == 2]
    return products[-1] if products else layer.act


@deviation(
    "{found}, but GPT-2 has no projection here",
    "Remove it. GPT-2 adds the result of {branch} to the residual stream and continues with "
    "{next}.",
)
def extra_projection(context: DiagnosisContext) -> Iterator[Deviation]:
    order = context.graph.order
    for i, layer in context.layers:
        mlp = layer.unknown or [n for n in (layer.fc, layer.mlp_proj) if n is not None]
        if layer.extra and len(mlp) > 1:
            n = len(layer.extra)
            place = source.running(context.graph, layer.extra[:1])
            where, after = "here", {"branch": "the MLP", "next": "the next block, or with ln_f"}
            if order[layer.extra[0]] < order[mlp[0]]:
                tap, after = f"h.{i}.attn", {"branch": "attention", "next": "the MLP"}
            elif order[layer.extra[-1]] < order[mlp[-1]]:
                where = "between the first and the last projection of the MLP"
                tap = f"h.{i}.act"
            else:
                tap = "ln_f" if i == len(context.layers) - 1 else f"h.{i + 1}.ln_1"
                place = None
            place = place or source.calling(context.graph, context.model, layer.extra[0], mlp[-1])
            found = f"{n} projection{'s' * (n > 1)} run{'s' * (n == 1)} {where}"
            yield Deviation(tap, [place], {"found": found} | after)
            return


@detects("extra_projection")
def projected_embedding(context: DiagnosisContext) -> Iterator[Deviation]:
    own = [node for node in context.on_tokens_alone if contraction(node) is not None]
    leading = own or context.anatomy.leading
    if leading and not _mlp_first(context):
        message = (
            "a projection is applied to the embeddings before the first block, but GPT-2's first "
            "block reads the sum of wte and wpe"
        )
        values = {
            "found": "a projection runs here",
            "branch": "the embeddings",
            "next": "the first block",
        }
        place = source.running(context.graph, leading)
        yield Deviation("embed", [place], values, message=message)


@deviation(
    "each block runs its MLP before attention, but GPT-2's blocks run attention first", PRE_NORM
)
def mlp_before_attention(context: DiagnosisContext) -> Iterator[Deviation]:
    if _mlp_first(context):
        place = next(iter(context.graph.places(context.anatomy.leading[0])), None)
        yield Deviation("h.0.ln_1", [place])


def _mlp_first(context: DiagnosisContext) -> bool:
    """Return whether each block begins with its MLP, so that none follows the last attention."""
    leading, layers = context.anatomy.leading, context.anatomy.layers
    return len(leading) > 1 and not layers[-1].has_mlp


@deviation(
    "the block attends to another sequence as well (cross-attention), but GPT-2 has no encoder and "
    "no cross-attention",
    "x = x + attn(ln_1(x))\nx = x + mlp(ln_2(x))",
)
def cross_attention(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    found = {i: layer.cross[0] for i, layer in context.layers if layer.cross}
    if found:
        products = [op.product for op in found.values()]
        lines = [source.torch_built(context.model, [node]) for node in products]
        lines += [graph.place(node) for node in products]
        lines = [lines[0] or lines[-1], *lines]
        yield Deviation(f"h.{next(iter(found))}.ln_2", lines, layers=list(found))


@deviation(
    "the block has no MLP, but each of GPT-2's blocks adds the result of an MLP to the residual "
    "stream",
    "x = x + mlp(ln_2(x))",
)
def no_mlp(context: DiagnosisContext) -> Iterator[Deviation]:
    layers = [i for i, layer in context.layers if not layer.has_mlp]
    if layers and not _mlp_first(context):
        layer = context.anatomy.layers[layers[0]]
        place = context.graph.place(layer.mid)
        if layer.attn_sum.shortcut is None:
            place = source.module_call(context.graph, context.model, layer.attention_ops[0].product)
        changes = Changes(no_mlp=set(layers))
        yield Deviation(f"h.{layers[0]}.out", [place], {}, changes, layers=layers)


@deviation(
    "{n} here{like}, but the MLP of GPT-2 has two, c_fc and c_proj",
    "x = x + mlp(ln_2(x))",
)
def unknown_mlp(context: DiagnosisContext) -> Iterator[Deviation]:
    if layers := [i for i, layer in context.layers if layer.unknown]:
        layer = context.anatomy.layers[layers[0]]
        place = source.running(context.graph, layer.unknown)
        inside, n = context.graph.between([layer.mlp], [layer.x2]), len(layer.unknown)
        chosen = any(kind(node) == "topk" for node in inside)
        values = {
            "n": "1 projection runs" if n == 1 else f"{n} projections run",
            "like": ", as in a mixture of experts" if chosen else "",
        }
        yield Deviation(f"h.{layers[0]}.mlp", [place], values, layers=layers)


@deviation(
    "the MLP has one projection, but GPT-2's has two with the activation between them",
    'c_proj(F.gelu(c_fc(x), approximate="tanh"))',
)
def one_mlp_projection(context: DiagnosisContext) -> Iterator[Deviation]:
    layers = [i for i, layer in context.layers if layer.fc is not None and layer.mlp_proj is None]
    if layers:
        layer = context.anatomy.layers[layers[0]]
        place = context.graph.place(layer.fc_end)
        yield Deviation(f"h.{layers[0]}.mlp", [place])


@deviation(
    "attention and the MLP read the same tensor, but in GPT-2 the MLP reads the residual stream "
    "after attention was added",
    PRE_NORM,
)
def parallel_block(context: DiagnosisContext) -> Iterator[Deviation]:
    graph, layers = context.graph, deviating_layers(context.anatomy)["parallel"]
    if not layers:
        return
    layer = context.anatomy.layers[layers[0]]
    fused = [each for each in context.mapping.unknown if each.code == "parallel_block"]
    if fused:  # one projection for both branches, so neither is loaded
        lines = [graph.place(layer.mlp)]
        lines += [source.built(context.model, graph.names[fused[0].parameters[0]])]
        yield Deviation(f"h.{layers[0]}.q", lines)
    else:
        place = graph.place(layer.mlp_sum.node)
        yield Deviation(f"h.{layers[0]}.fc", [place], {}, Changes(parallel=set(layers)))


@deviation(
    "the output of the branch is not added to its input, but GPT-2 has a residual connection here",
    "x = x + branch(norm(x))",
)
def missing_residual(context: DiagnosisContext) -> Iterator[Deviation]:
    if context.sums_of_copies:
        return  # hyper_connections
    wiring = deviating_layers(context.anatomy)
    no_attn, no_mlp = wiring["no_attn_residual"], wiring["no_mlp_residual"]
    past = wiring["past_attention"]
    around = {*no_attn} & {*past}  # x + mlp(attn(x)): one connection around both branches
    past = [i for i in past if i not in around]
    layers = context.anatomy.layers
    to_attention = [i for i in past if _adds_to_attention(context.graph, layers[i])]
    if to_attention:
        lines = [context.graph.place(layers[i].mlp_sum.node) for i in to_attention]
        message = (
            "the result of the MLP is added to that of attention, but GPT-2 adds it to the "
            "residual stream, which includes both the block's input and attention"
        )
        changes = Changes(mlp_residual_from_attention={*to_attention})
        at = f"h.{to_attention[0]}.out"
        yield Deviation(at, lines, {}, changes, message=message, layers=to_attention)
    past = [i for i in past if i not in to_attention]
    for tap, numbers, changes in (
        ("resid_mid", no_attn,
         Changes(no_residual={f"h.{i}.resid_mid" for i in no_attn},
                 mlp_residual_from_input=around)),
        ("out", no_mlp, Changes(no_residual={f"h.{i}.out" for i in no_mlp})),
        ("out", past, Changes(mlp_residual_from_input={*past})),
    ):  # fmt: skip
        if numbers:
            lines = [branch_line(context, i, is_mlp=tap == "out") for i in numbers]
            at = f"h.{numbers[0]}.{tap}"
            yield Deviation(at, lines, {}, changes, layers=numbers)


def _adds_to_attention(graph: Graph, layer: Layer) -> bool:
    """Return whether the MLP is added to the result of attention, before attention's own sum."""
    shortcut = layer.mlp_sum.shortcut
    return shortcut is not None and layer.attn in graph.ancestors[shortcut] | {shortcut}


@deviation(
    "the branches read and change {n} copies of the hidden states, (B, T, {n}, C), as in "
    "hyper-connections, but GPT-2 has one residual stream (B, T, C)",
    PRE_NORM,
)
def hyper_connections(context: DiagnosisContext) -> Iterator[Deviation]:
    if sums := context.sums_of_copies:
        n = prod(size(sums[0])) // (prod(context.graph.shape) * context.anatomy.width)
        lines = [context.graph.place(node) for node in sums]
        yield Deviation("h.0.ln_1", lines, {"n": n})


@deviation(
    "{found}, but GPT-2 adds each branch to the residual stream once", "x = x + branch(norm(x))"
)
def doubled_residual(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    sums = {branch.tap: branch.total for branch in context.branches}
    spans = ((operands_of(layer), [layer.x1]) for _, layer in context.layers)
    inside = {node for ends, starts in spans for node in graph.live_between(ends, starts)}
    doubled = [
        node for node in graph.nodes
        if node in graph.live - inside and kind(node) == "add" and len(tensor_inputs(node)) == 2
        and len(set(tensor_inputs(node))) == 1 and size(node)[-1:] == (context.anatomy.width,)
    ]  # fmt: skip
    if doubled:
        lines = [graph.place(node) for node in doubled]
        terms = {tensor_inputs(node)[0] for node in doubled}
        twice = {tap: 2.0 for tap, total in sums.items() if total.node in terms}
        sums_of_terms = (line.text for node in terms for line in graph.places(node))
        in_place = any(re.search(r"\+=|\badd_\(", text) for text in sums_of_terms)
        cause = ", because an earlier in-place operation added the branch to the shortcut"
        values = {"found": f"a tensor is added to itself{cause if in_place else ''}"}
        tap = context.tap_after(doubled[0])
        yield Deviation(tap, lines, values, _multiplied(twice) if twice else None)
    own = {tap: total.own_input for tap, total in sums.items() if total.own_input is not None}
    if own:
        lines = [graph.place(node) for node in own.values()]
        values = {"found": "the branch adds its own input to its result, and the block adds the "
                  "residual stream as well"}  # fmt: skip
        yield Deviation(next(iter(own)), lines, values, Changes(own_input={*own}))
    if again := _second_shortcuts(context):
        lines = [graph.place(node) for node in again.values()]
        values = {"found": "the input of the block is added to its result a second time"}
        tap = f"h.{min(again) + 1}.ln_1" if min(again) + 1 < len(context.anatomy.layers) else "ln_f"
        yield Deviation(tap, lines, values, Changes(input_again={*again}))


def _second_shortcuts(context: DiagnosisContext) -> dict[int, Node]:
    """Return the sum of the result and the input of a block, by layer."""
    found = {}
    for i, layer in context.layers:
        ends = {layer.mlp_sum.node, layer.attn_sum.shortcut}
        for node in live_users(context.graph, layer.mlp_sum.node):
            if kind(node) == "add" and {*tensor_inputs(node)} == ends:
                found[i] = node
    return found


@deviation(
    "the residual connection starts after the norm, but in GPT-2 it starts before the norm",
    "x = x + branch(norm(x))",
)
def residual_from_norm(context: DiagnosisContext) -> Iterator[Deviation]:
    if (names := context.places.from_norm) and not context.sums_of_copies:
        sums = {branch.norm: branch.total.node for branch in context.branches}
        lines = [context.graph.place(sums[name]) for name in names]
        changes = Changes(residual_from_norm=set(names))
        yield Deviation("h.0.resid_mid", lines, {}, changes)


@deviation(
    "the residual sum is {found} · x + {branch} · branch(x), but GPT-2 computes x + branch(x)",
    "x = x + branch(norm(x))",
)
def residual_weights(context: DiagnosisContext) -> Iterator[Deviation]:
    found: dict[str, tuple[str, float, float, list[Node]]] = {}
    stream = context.anatomy.embed
    for branch in context.branches:
        total, norm = branch.total, context.places.named.get(branch.norm)
        factor, kept = _factor(context, branch.end, total.branch) or 1.0, 1.0
        if total.shortcut is not None:
            if norm is not None and norm.start is not total.shortcut:
                kept = _factor(context, stream, total.shortcut) or 1.0
            if kind(total.node) == "sub" and tensor_inputs(total.node)[1] is total.branch:
                factor = -factor
            elif kind(total.node) == "sub":
                kept = -kept
        if factor != 1.0 or kept != 1.0:
            starts = [(branch.end, total.branch), (stream, total.shortcut or total.node)]
            between = [n for start, to in starts for n in context.graph.between([to], [start])]
            factors = [n for n in between if kind(n) in ("mul", "div")]
            found[branch.tap] = branch.name, kept, factor, factors or [total.node]
        stream = total.node
        if norm is not None and norm.start is stream:  # a post-norm
            stream = norm.end
    if found:
        first = next(iter(found))
        _, kept, factor, _ = found[first]
        changes = _multiplied({name: factor for name, _, factor, _ in found.values()})
        changes.shortcut_factor = {tap: kept for tap, (_, kept, _, _) in found.items()}
        lines = [source.running(context.graph, nodes) for *_, nodes in found.values()]
        values = {"found": f"{kept:.6g}", "branch": f"{factor:.6g}"}
        yield Deviation(first, lines, values, changes)


@detects("residual_weights")
def scaled_sums(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect sums that are multiplied by a number, as in `x = (x + branch(x)) / 2`."""
    graph, found = context.graph, dict[str, tuple[float, Node]]()
    shortcuts = {branch.norm: branch.total.shortcut for branch in context.branches}
    for start, end, after, _, before in _connections(context):
        shortcut = shortcuts.get(before, end)
        if after != "embed" and shortcut is not None and before in ("ln_f", *shortcuts):
            factor = _factor(context, start, end)
            scaled = [n for n in graph.between([end], [start]) if kind(n) in ("mul", "div")]
            if factor and scaled and end in graph.ancestors[shortcut] | {shortcut}:
                found[after] = factor, scaled[0]
    if found:
        factor, _ = next(iter(found.values()))
        changes = _multiplied({tap: factor for tap, (factor, _) in found.items()})
        lines = [graph.place(node) for _, node in found.values()]
        values = {"found": f"{factor:.6g}", "branch": f"{factor:.6g}"}
        yield Deviation(next(iter(found)), lines, values, changes)


@detects("random_parameters")
def learned_weights(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect parameters by which branches are multiplied, as with LayerScale."""
    graph = context.graph
    if found := context.learned_factors:
        factors = {a for nodes, _ in found.values() for n in nodes for a in n.all_input_nodes}
        parameters = {p for a in factors - graph.live for p in graph.parameters_of[a]}
        names = sorted({name for node in parameters for name in graph.parameter_names(node)})
        lines = [source.built(context.model, names[0])]
        lines += [source.running(graph, products) for products, _ in found.values()]
        factors_of = {branch: value for branch, (_, value) in found.items()}
        without_effect = all(bool((value == 1).all()) for value in factors_of.values())
        changes = None if without_effect else _multiplied(factors_of)
        first, value = next(iter(factors_of.items()))
        values = {
            "found": listed(names, 4),
            "factor": f" (here {value[0].item():.4g})" if (value == value[0]).all() else "",
        }
        message = (
            "the result of the branch is multiplied by learned factors{factor}, {found}, "
            "which have no counterpart in GPT-2 and keep their initial values"
        )
        severity: Severity | None = "info" if without_effect else None
        yield Deviation(first, lines, values, changes, message=message, severity=severity)


def _multiplied(factors: Mapping[str, float | Tensor]) -> Changes:
    """Return the change by which what follows these taps is multiplied by numbers or by (C,)."""
    return Changes(functions={tap: [partial(torch.mul, f)] for tap, f in factors.items()})


def _factor(context: DiagnosisContext, start: Node, end: Node) -> float | None:
    """Return the factor between two nodes; None if it is not a constant."""
    graph = context.graph
    every = graph.between([end], [start])
    between = [n for n in every if n in graph.live]
    if not {*graph.dropouts}.isdisjoint(every):  # a part of dropout, which has its own finding
        return None
    if (
        start is end
        or start not in graph.ancestors[end]
        or graph.parameters_between([end], [start])
    ):
        return None
    if any(len(live_inputs(graph, n)) > 1 for n in between):
        return None
    x = random_values(size(start))
    [y] = graph.run([end], {start: x})
    if y.numel() != x.numel():
        return None
    factor = ((x.flatten() @ y.flatten()) / x.square().sum()).item()
    same = torch.allclose(y.flatten(), factor * x.flatten(), rtol=1e-9, atol=1e-9)
    return factor if same and abs(factor - 1) > 1e-9 else None


@deviation(
    "the code computes {found} between {after} and {before}, but GPT-2 computes nothing there",
    "Remove this operation.",
    code="extra_operation",
)
def changed_stream(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect operations between two parts of GPT-2, except norms, in all layers at once."""
    found: dict[str, list[Deviation]] = {}
    for start, end, after, tap, before in _connections(context):
        if (each := _operations(context, start, end, after, before)) is not None:
            each.tap = tap
            kind_of_place = before if before == HEAD or "projection" in before else "stream"
            found.setdefault(f"{each.values['found']} {kind_of_place}", []).append(each)
    for same in found.values():
        changes = combine(each.changes for each in same if each.changes is not None)
        lines = [line for each in same for line in each.lines]
        yield replace(same[0], changes=changes, lines=lines)


def _connections(context: DiagnosisContext) -> Iterator[tuple[Node, Node, str, str, str]]:
    """Yield nodes with the same value in GPT-2, the taps from and at which it is read, and by what.

    They are connections of the residual stream with norms, and of norms with projections.
    """
    places = context.places
    stream, tap = context.anatomy.embed, "embed"
    extra = {name for name in places.extra if not name.endswith((".fc", ".act"))} - {tap}
    moved = bool(places.post or places.from_norm or places.on_output or extra)
    if tap in places.extra:
        stream = places.extra[tap].end
    for i, layer in context.layers:
        for branch, at, reader in _readers(context, i):
            name, total = branch.norm, branch.total
            norm = places.named.get(name)
            if norm is not None and not moved and total.shortcut is not None and not layer.parallel:
                if tap != "embed" or not context.anatomy.leading:
                    yield stream, norm.start, tap, name, name
                if layer.raw is None and norm.end is not norm.start:
                    yield norm.end, branch.x, name, at, reader
            stream, tap = total.node, branch.tap
        for branch in context.branches_of(i):
            is_added = branch.total.shortcut is not None and not layer.parallel
            is_added = is_added and branch.end in context.graph.ancestors[branch.total.branch]
            if is_added and not _is_explained(context, i, branch):
                yield branch.end, branch.total.branch, branch.name, branch.tap, "the residual sum"
    yield from _connections_after_norms(context)
    last = f"h.{len(context.layers) - 1}.ln_2"
    ends_known = not places.post or last in places.post
    if "ln_f" in places.named and ends_known and not (extra or context.sums_of_copies):
        stream = places.named[last].end if places.post else stream
        yield stream, places.named["ln_f"].start, tap, "ln_f", "ln_f"
    if "ln_f" in places.named and "ln_f.after" not in places.extra:
        yield places.named["ln_f"].end, context.anatomy.xf, "ln_f", "logits", HEAD


def _readers(context: DiagnosisContext, i: int) -> Iterator[tuple[Branch, str, str]]:
    """Yield the branches of a layer, each with the tap and the name of its first projection."""
    names = ("the projection of q, k and v", "the projection of the MLP")
    yield from zip(context.branches_of(i), (f"h.{i}.q", f"h.{i}.fc"), names, strict=True)


def _connections_after_norms(
    context: DiagnosisContext,
) -> Iterator[tuple[Node, Node, str, str, str]]:
    """Yield the connections of a norm after a residual sum with the branch that reads it next.

    Before the first of these norms, it is that of the embeddings.
    """
    graph, places = context.graph, context.places
    layers = [i for i, layer in context.layers if not layer.parallel]
    start, before = None, "embed"
    if layers[:1] == [0] and "h.0.ln_1" in places.post and not context.anatomy.leading:
        start = None if "embed" in places.extra else context.anatomy.embed
    for branch, tap, reader in (each for i in layers for each in _readers(context, i)):
        if start is not None and branch.total.shortcut is not None:
            paths = [
                [n for n in graph.on_paths([start], [end]) if kind(n) not in MOVES]
                for end in (branch.x, branch.total.shortcut)
            ]
            if paths[0] == paths[1]:
                yield start, branch.x, before, tap, reader
        norm = places.named.get(branch.norm) if branch.norm in places.post else None
        start, before = None if norm is None else norm.end, branch.tap


def _is_explained(context: DiagnosisContext, i: int, branch: Branch) -> bool:
    """Return whether what follows the result of a branch has a finding of its own."""
    layer, places = context.anatomy.layers[i], context.places
    if branch.name in {*places.extra, *context.learned_factors} or branch.norm in places.on_output:
        return True
    changed_mlp = i in context.late_activations or layer.unknown or layer.extra or layer.is_gated
    return branch.end is layer.mlp and bool(changed_mlp)


def _operations(
    context: DiagnosisContext, start: Node, end: Node, after: str, before: str
) -> Deviation | None:
    """Return the deviation that is all that runs between two nodes; None if nothing does."""
    graph = context.graph
    if start not in graph.ancestors[end]:
        return None
    nodes = [n for n in graph.on_paths([start], [end]) if kind(n) not in MOVES | {"getitem"}]
    if not nodes or (before != HEAD and _factor(context, start, end) is not None):
        return None  # nothing, residual_weights, or doubled_residual
    if {*nodes} <= {*_second_shortcuts(context).values()}:
        return None  # doubled_residual
    if any(kind(n) in SDPA or contraction(n) is not None for n in nodes):
        return None  # extra_projection, or cross_attention
    if any(kind(n) in DRAWS for n in graph.between([end], [start])):
        return None  # dropout_always_on, or random_in_forward
    if before != HEAD and any(kind(n) in SHIFTS for n in nodes):
        if shifted_tokens(graph, start, Operand(end, (), 1, 2)):
            return None  # time_shift
    source_view, view = token_view(graph, start), token_view(graph, end)
    if source_view is None or view is None:
        return None
    function, x = function_between(graph, source_view, view), random_values(source_view.index.shape)
    try:
        if view.index.shape == x.shape and torch.allclose(function(x), x, rtol=1e-12):
            return None  # such as a factor of 1
    except RuntimeError:
        return None  # other values change which experts run
    lines = [graph.place(node) for node in nodes]
    lines += [line for each in lines if each for line in source.callers(graph, each)][:4]
    changes = Changes(functions={after: [function]})
    return Deviation(None, lines, operations(nodes, after, before), changes)
