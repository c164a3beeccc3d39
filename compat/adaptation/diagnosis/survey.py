"""Findings from the graph alone, for a part that compat does not know and cannot map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.anatomy.dissect import NO_ATTENTION, UnknownPart
from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.activations import (
    CODE_OF,
    activation_code,
    called_activation,
    canonical_activation,
)
from compat.adaptation.diagnosis.attention import VIEWS
from compat.adaptation.diagnosis.attention_formula import mask_code
from compat.adaptation.diagnosis.attention_nodes import Span
from compat.adaptation.diagnosis.blocks import tanh_gelu
from compat.adaptation.diagnosis.findings import finding
from compat.adaptation.diagnosis.registry import Deviation
from compat.adaptation.result import Finding
from compat.adaptation.tracing.contractions import SDPA, contraction, product_behind
from compat.adaptation.tracing.graph import (
    DRAWS,
    RMS_NORMS,
    Graph,
    Place,
    kind,
    size,
)
from compat.adaptation.tracing.rewrites import SOFTMAXES
from compat.config import HALF, GPT2Config, dtype_name
from compat.errors import collapse_layers, listed

LAYER_NORMS = ("layer_norm", "native_layer_norm")
OF_ACTIVATIONS = {*CODE_OF.values(), "other_activation"}
EVIDENCE = "found in the graph, but not confirmed, because the model could not be mapped"
BESIDE = "found in the graph; the rest was examined with GPT-2's {} instead"


def survey(
    graph: Graph,
    model: nn.Module,
    config: GPT2Config,
    unknown: UnknownPart,
    nodes: Sequence[Node],
    replaced_by: str = "",
    attention: Sequence[Place] = (),
) -> list[Finding]:
    """Return the finding for the unknown part, then those for single operations.

    Args:
        graph: the model's graph.
        model: the user's model.
        config: the checkpoint's config.
        unknown: the unknown part.
        nodes: the operations.
        replaced_by: the part of GPT-2 with which the rest of the model was examined, if it was.
        attention: the lines that compute attention, if none of it is in the graph.
    """
    if unknown.code == NO_ATTENTION and not replaced_by:
        softmaxes = softmaxes_of_scores(graph)  # of distances, for example
        unknown = UnknownPart(
            str(unknown), softmaxes or unknown.nodes, unknown.code, unknown.values
        )
    part = graph.same(unknown.nodes)
    place = source.running(graph, part)
    place = (unknown.code == "batch_first" and source.torch_built(model, part)) or place
    values = {"n_embd": config.n_embd, **unknown.values}
    evidence = EVIDENCE
    if replaced_by:
        evidence = BESIDE.format(replaced_by)
    first = Deviation(None, [place], values, evidence=evidence, code=unknown.code)
    if attention:
        observed = "observed while the model ran"
        first = Deviation(None, attention, evidence=observed, code="unused_attention")
    single = _deviations(graph, nodes, model, config)
    if replaced_by == "attention":  # its activations, as of random features, are not the MLP's
        single = [each for each in single if each.code not in OF_ACTIVATIONS]
    return [finding(first), *(finding(replace(each, evidence=evidence)) for each in single)]


def softmaxes_of_scores(graph: Graph) -> list[Node]:
    """Return the softmaxes of values (…, T, T) that depend on the ids, in the order of the code."""
    scores = [node for node in graph.live if size(node)[-2:] == 2 * (graph.shape[1],)]
    return sorted((n for n in scores if kind(n) in SOFTMAXES), key=graph.order.__getitem__)


def wrong_mask(
    graph: Graph, nodes: Sequence[Node], mixing: Sequence[Node], attended: Tensor
) -> Finding | None:
    """Return the finding for attention of unknown structure whose mask is not causal, or None.

    Args:
        graph: the model's graph.
        nodes: those of attention.
        mixing: those among them that first compute with several tokens.
        attended: (T, T), whether its result at a token depends on another token.
    """
    code, values = mask_code(attended | torch.eye(len(attended), dtype=torch.bool))
    if code is None:
        return None
    softmax = [node for node in nodes if kind(node) in ("softmax", "_softmax", *SDPA)]
    evidence = "observed: the results of attention change with these tokens"
    place = source.running(graph, softmax or mixing)
    return finding(Deviation(None, [place], values, evidence=evidence, code=code))


def wrong_merge(graph: Graph, merging: Sequence[Node]) -> Finding:
    """Return the finding for operations that merge heads of unknown structure and mix tokens."""
    place = source.running(graph, merging, *VIEWS)
    evidence = "observed: results of other tokens than those that the heads attend to change"
    code = "no_head_merge_transpose"
    return finding(Deviation(None, [place], evidence=evidence, code=code))


def missing_biases(graph: Graph, model: nn.Module, spans: Sequence[Span]) -> list[Finding]:
    """Return the findings for the projections without biases of attention of unknown structure.

    Args:
        graph: the model's graph.
        model: the user's model.
        spans: the attention of each layer.
    """
    span, width = spans[0], size(spans[0].start)[-1]
    weights = {n: w for n in span.nodes if (w := _weight(graph, n)) and 4 * size(n)[-1] >= width}
    of_input = [node for node in weights if not graph.ancestors[node] & weights.keys()]
    last = product_behind(graph, span.end)
    of_heads = [node for node in weights if node is last and node not in of_input]
    parameters = graph.parameters_between([span.end], [span.start])
    vectors = [node for node in parameters if graph.values[node].ndim == 1]
    biased = {product_behind(graph, graph.first_reader([vector])) for vector in vectors}
    found = []
    for code, tensor, products in (
        ("no_qkv_bias", "c_attn", of_input), ("no_proj_bias", "c_proj", of_heads),
    ):  # fmt: skip
        if products and biased.isdisjoint(products):
            lines = [source.built(model, weights[node]) for node in products]
            names = [f"h.{i}.attn.{tensor}.bias" for i in range(len(spans))]
            values = {"tensors": listed(collapse_layers(names)), "n_embd": width}
            evidence = BESIDE.format("attention")
            found.append(finding(Deviation(None, lines, values, evidence=evidence, code=code)))
    return found


def norms_of_heads(
    graph: Graph, model: nn.Module, spans: Sequence[Span], width: int
) -> list[Finding]:
    """Return the finding for norms of queries and keys of this width, if there are any.

    They are in attention of unknown structure, before its softmax.
    """
    above = set[Node]()
    for span in spans:
        scores = [node for node in span.nodes if kind(node) in ("softmax", "_softmax", *SDPA)]
        above |= set().union(*(graph.ancestors[node] & {*span.nodes} for node in scores))
    kinds = (*RMS_NORMS, *LAYER_NORMS)
    norms = [n for n in graph.nodes if n in above and kind(n) in kinds and size(n)[-1] == width]
    lines = [_line(graph, node, model) for node in norms]
    deviation = Deviation(None, lines, evidence=BESIDE.format("attention"), code="qk_norm")
    return [finding(deviation)] if norms else []


def _weight(graph: Graph, node: Node) -> str:
    """Return the name of the matrix of parameters by which an operation multiplies, or ""."""
    product = contraction(node)
    if product is None:
        return ""
    operands = [each for each in (product.a, product.b) if each not in graph.live]
    found = [each for operand in operands for each in graph.parameters_of[operand]]
    names = [graph.names[each] for each in found if graph.values[each].ndim == 2]
    return names[0] if len(names) == 1 else ""


def _deviations(
    graph: Graph, nodes: Sequence[Node], model: nn.Module, config: GPT2Config
) -> list[Deviation]:
    """Return one deviation for each code, with the lines of all its operations."""
    by_code: dict[str, Deviation] = {}
    for node in nodes:
        if node in graph.live and (named := _deviation(graph, node, model, config)):
            code, values = named
            first = by_code.setdefault(code, Deviation(None, (), values, code=code))
            first.lines = [*first.lines, _line(graph, node, model)]
    if dropouts := [node for node in nodes if node in graph.dropouts]:
        lines = [graph.place(node) for node in dropouts]
        by_code["dropout_always_on"] = Deviation(None, lines, code="dropout_always_on")
    drawn = [n for n in nodes if kind(n) in DRAWS and n not in graph.dropouts]
    if drawn:
        place, values = source.running(graph, drawn), {"found": kind(drawn[0])}
        by_code["random_in_forward"] = Deviation(None, [place], values, code="random_in_forward")
    return [*by_code.values()]


def _line(graph: Graph, node: Node, model: nn.Module) -> Place | None:
    """Return the line that builds the torch module of an operation, or else that runs it."""
    return source.torch_built(model, [node]) or graph.place(node)


def _deviation(
    graph: Graph, node: Node, model: nn.Module, config: GPT2Config
) -> tuple[str, dict[str, object]] | None:
    """Return the code of an operation that GPT-2 does not have, and the values for its message."""
    name = kind(node)
    values: dict[str, object]
    activation = called_activation(graph, [node])[0].name
    expected = canonical_activation(config)
    if activation is not None and expected == "gelu_new":
        fix = tanh_gelu(_line(graph, node, model))
        return activation_code(activation, expected), {"fix": fix}
    if name in RMS_NORMS and size(node)[-1] == config.n_embd:
        values = {"n_embd": config.n_embd, "no_bias": "", "expected": config.layer_norm_epsilon}
        return "rmsnorm", values
    if name in LAYER_NORMS:
        eps = node.args[4] if len(node.args) > 4 else node.kwargs.get("eps", 1e-5)
        usual = config.layer_norm_epsilon
        if isinstance(eps, float) and abs(eps - usual) > 1e-3 * usual:
            values = {"found": eps, "expected": usual}
            return "eps_value", values
    if name in ("softmax", "_softmax") and len(size(node)) > 2:
        axis = node.args[1] if len(node.args) > 1 else -1
        if axis not in (-1, len(size(node)) - 1):
            return "softmax_dim", {"found": f"axis {axis}"}
    for half in HALF:
        if half in node.args:
            return "low_precision", {"found": dtype_name(half), "expected": "float32"}
    return None
