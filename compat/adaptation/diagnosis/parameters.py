"""Deviations of sizes and parameters: what differs in shape, is missing, is shared or is unused."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.attention import attention_in
from compat.adaptation.diagnosis.context import DiagnosisContext
from compat.adaptation.diagnosis.embeddings_and_head import joined_positions, later_tables
from compat.adaptation.diagnosis.modified_reference import Changes
from compat.adaptation.diagnosis.registry import Deviation, detects, deviation
from compat.adaptation.mapping.assignments import UnknownProjection
from compat.adaptation.result import Severity
from compat.adaptation.tracing.contractions import product_behind
from compat.adaptation.tracing.graph import Place, random_values, size, tensor_inputs
from compat.checkpoint.layout import HEAD
from compat.errors import collapse_layers, listed
from compat.name_map import all_parameters, sliced, whole_of
from compat.ops import Rows
from compat.user_models.synonyms import role_of
from compat.user_models.usage import reads

# Sizes


@deviation("{name} is {found}, but the checkpoint has {expected}", "{fix}")
def n_embd_mismatch(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect another width, named as the constructor's argument or its config's key."""
    found, expected = context.anatomy.width, context.config.n_embd
    if found == expected:
        return
    cls = type(context.model)
    arguments = list(inspect.signature(cls).parameters)
    arguments += [key for name in arguments for key in reads(cls, name).names]
    named = [name for name in arguments if role_of(name) == "n_embd"]
    name, fix = "the embedding width", f"Set the embedding width to {expected}."
    if len(named) == 1:
        name, fix = named[0], f"{named[0]}={expected}"
    place = context.built_between([context.anatomy.token_embedding], [])
    values = {"name": name, "found": found, "expected": expected, "fix": fix}
    yield Deviation("embed", [place], values)


@deviation(
    "the model has a vocabulary of {found}, but the checkpoint's is {expected}",
    "vocab_size={expected}",
)
def vocab_mismatch(context: DiagnosisContext) -> Iterator[Deviation]:
    found, expected = context.anatomy.vocabulary, context.config.vocab_size
    logits, place = size(context.graph.output)[-1], context.owner_of("wte.weight")
    if found != expected:
        yield Deviation("logits", [place], {"found": found, "expected": expected})
    elif logits != expected:
        head = context.graph.parameters_between([context.anatomy.head], [context.anatomy.xf])
        if head:
            place = source.built(context.model, context.graph.names[head[0]])
        values = {"found": logits, "expected": expected}
        message = (
            "the model returns {found} logits for each token, but the checkpoint's vocabulary has "
            "{expected} tokens"
        )
        yield Deviation("logits", [place], values, message=message)


@deviation(
    "the model has {found} positions, but the checkpoint has {expected}, so compat loaded the "
    "first {found}",
    "n_positions={expected}",
    severity="info",
)
def context_too_short(context: DiagnosisContext) -> Iterator[Deviation]:
    found, expected = _positions(context), context.config.n_positions
    if found is not None and found < expected:
        values = {"found": found, "expected": expected}
        yield Deviation(None, [context.owner_of("wpe.weight")], values)


def _positions(context: DiagnosisContext) -> int | None:
    """Return the rows of the table of positions if they differ from the checkpoint's."""
    if "wpe.weight" in context.unmatched.shapes:
        shape = context.unmatched.shapes["wpe.weight"][0]
        return prod(shape) // context.anatomy.position_width
    assigned = context.mapping.by_tensor.get("wpe.weight")
    return assigned[1].wanted if assigned and isinstance(assigned[1], Rows) else None


@deviation("the number of layers is {found}, but the checkpoint's is {expected}", "{fix}")
def n_layer_mismatch(context: DiagnosisContext) -> Iterator[Deviation]:
    graph, model = context.graph, context.model
    layers, head = context.anatomy.layers, context.anatomy.head
    found, expected = len(layers), context.config.n_layer
    if found == expected:
        return
    if repeated := _first_repeated(context):
        place = source.calling(graph, model, layers[repeated].attn, head)
        message = "the {expected} blocks are run {found} times in all, but GPT-2 runs each once"
        again = {"found": found, "expected": expected, "fix": "for block in blocks: x = block(x)"}
        yield Deviation(f"h.{repeated - 1}.out", [place], again, message=message)
        return
    own = [tuple(graph.parameters_between(n.qkv_ends, [n.x1])) for n in layers]
    if len({*own}) == expected and context.unmatched.shared:  # attention alone is called again
        return
    assigned, names = context.mapping.by_tensor, graph.names
    first = names[own[0][0]] if own and own[0] else ""
    blocks, *numbered = re.split(r"\.\d+\.", first)
    # The list of blocks; without one, the first module of the only block.
    place = source.building(model, blocks if numbered else first.split(".")[0])
    values: dict[str, Any] = {"found": found, "expected": expected, "fix": f"n_layer={expected}"}
    message = ""
    inside = {name[len(blocks) :].split(".")[1] for name in map(names.get, own[0] if own else ())
              if name and name.startswith(f"{blocks}.")}  # fmt: skip
    is_list = bool(numbered) and len(inside) == 1  # and not one of the heads of the only block
    if is_list and _count_of_blocks(context, blocks) == expected > found:
        place = source.calling(graph, model, layers[0].attn, head)
        values["fix"] = "x = block(x)"
        message = (
            "the logits depend on {found} of the {expected} layers only, because the results of "
            "the others are not used"
        )
        if _all_contribute(context, blocks, expected):
            values["fix"] = "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"
            message = "{found} of the {expected} blocks compute attention, but in GPT-2 all do"
    if place is None and "wte.weight" in assigned:
        table = names[assigned["wte.weight"][0][0]]
        place = source.building(model, table.split(".")[0])
    if not found:
        place = graph.place(head)
    changes = Changes(n_layer=found) if found < expected else None
    tap = f"h.{min(found, expected) - 1}.out" if found else "ln_f"
    yield Deviation(tap, [place], values, changes, message=message)


def _first_repeated(context: DiagnosisContext) -> int:
    """Return the number of the first layer that runs an earlier block again.

    It may run other modules before. It is 0 unless there are as many blocks as in the checkpoint.
    """
    graph, outs = context.graph, [layer.out for layer in context.anatomy.layers]
    starts = [context.anatomy.embed, *outs]
    spans = zip(starts, outs, strict=False)
    own = [frozenset(graph.parameters_between([out], [start])) for start, out in spans]
    repeated = [i for i, parameters in enumerate(own) if any(p <= parameters for p in own[:i])]
    return repeated[0] if len(own) - len(repeated) == context.config.n_layer < len(own) else 0


def _count_of_blocks(context: DiagnosisContext, blocks: str) -> int:
    """Return how many modules of the list are blocks, and not a norm at its end."""
    modules = [*context.model.get_submodule(blocks).children()]
    kinds = {type(module) for module in modules[: len(context.anatomy.layers)]}
    return sum(type(module) in kinds for module in modules)


def _all_contribute(context: DiagnosisContext, blocks: str, n_layer: int) -> bool:
    """Return whether the logits depend on a parameter of each block."""
    graph = context.graph
    used = graph.parameters_between([graph.output], [])
    names = [name for node in used for name in graph.parameter_names(node)]
    return all(any(n.startswith(f"{blocks}.{i}.") for n in names) for i in range(n_layer))


@deviation(
    "the MLP is {found} wide, but the checkpoint's is {expected}",
    "nn.Linear({n_embd}, {expected})",
)
def inner_dim(context: DiagnosisContext) -> Iterator[Deviation]:
    if (found := _inner_width(context)) is None:
        return
    graph, shapes = context.graph, context.unmatched.shapes
    weight = next(hf for hf in shapes if hf.endswith(".mlp.c_fc.weight"))
    layer = context.anatomy.layers[int(weight.split(".")[1])]
    fc = graph.parameters_between([layer.fc_end], [layer.x2])
    module = graph.names[fc[0]].rpartition(".")[0] if fc else ""
    own, expected = shapes[weight]
    evidence = f"{weight} is loaded as {expected}, but the parameter has shape {own}"
    config = context.config
    values = {"found": found, "expected": config.d_inner, "n_embd": config.n_embd}
    model = context.model
    place = source.torch_layer(model, module) or source.building(model, module)
    yield Deviation(weight.replace("mlp.c_fc.weight", "fc"), [place], values, evidence=evidence)


def _inner_width(context: DiagnosisContext) -> int | None:
    """Return the MLP's inner width; None if it is the checkpoint's, or the same multiple of C."""
    config, C, shapes = context.config, context.anatomy.width, context.unmatched.shapes
    weight = next((hf for hf in shapes if hf.endswith(".mlp.c_fc.weight")), None)
    if weight is None:
        return None
    found = prod(shapes[weight][0]) // C
    if _computes_gate(context, weight):
        found //= 2
    follows = C != config.n_embd and found * config.n_embd == config.d_inner * C
    return None if found == config.d_inner or follows else found


@deviation(
    "a head has {found} channels, but GPT-2 divides {n_embd} channels among {n_head} heads, "
    "{expected} for each",
    "head_dim = {n_embd} // {n_head}",
)
def head_width(context: DiagnosisContext) -> Iterator[Deviation]:
    if (found := _head_width(context)) is None:
        return
    width, n_head = context.anatomy.width, context.config.n_head
    values = {"found": found, "n_embd": width, "n_head": n_head, "expected": width // n_head}
    attention, message = context.mapping.attentions[0], ""
    place = context.owner_of("h.0.attn.c_attn.weight") or _built_qkv(context)
    q, v = attention.q.index.shape[3], attention.v.index.shape[3]
    if q != v:
        message = (
            f"a head has {q} channels of q and k and {v} of v, but GPT-2 divides {{n_embd}} "
            "channels among {n_head} heads, {expected} for each of q, k and v"
        )
    evidence = "found in the shapes of the parameters"
    yield Deviation("h.0.q", [place], values, evidence=evidence, message=message)


def _head_width(context: DiagnosisContext) -> int | None:
    """Return the size of q's or v's heads; None if they are GPT-2's or together as wide as C."""
    if context.n_head is None or any(op.others for op in context.anatomy.layers[0].attention_ops):
        return None  # several products of queries and keys read parts of the heads
    width, attention = context.anatomy.width, context.mapping.attentions[0]
    usual = (width / context.n_head, width / context.config.n_head)
    sizes = (view.index.shape[3] for view in (attention.q, attention.v))
    return next((size for size in sizes if size not in usual), None)


def _computes_gate(context: DiagnosisContext, hf: str) -> bool:
    """Return whether the projection in the place of c_fc computes the gate of the MLP as well."""
    parts = hf.split(".")
    if parts[2:4] != ["mlp", "c_fc"]:
        return False
    layer = context.anatomy.layers[int(parts[1])]
    return layer.is_gated and layer.gate is None


@deviation(
    "{tensors} cannot be loaded, because the parameter has shape {found} and not {expected}",
    "Create the parameter with shape {expected}.",
)
def other_shape(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect shapes that differ although width, inner width and number of heads agree."""
    inner, shapes = _inner_width(context), context.unmatched.shapes
    others = [hf for hf in shapes if inner is None or ".mlp." not in hf]
    others = [hf for hf in others if not _computes_gate(context, hf)]  # gated_mlp
    if context.n_head not in (None, context.config.n_head) or _head_width(context):
        others = [hf for hf in others if ".attn." not in hf]
    if joined_positions(context):
        others = [hf for hf in others if hf not in ("wte.weight", "wpe.weight")]
    if others and context.anatomy.width == context.config.n_embd:
        own, expected = shapes[others[0]]
        tensors = listed(collapse_layers(others))
        lines = []
        for hf in others:
            norm = context.places.named.get(hf.rpartition(".")[0])
            if norm is None:
                lines.append(context.owner_of(hf))
            else:
                node = norm.scale if hf.endswith(".weight") else norm.shift
                name = context.graph.names.get(node) if node is not None else None
                lines += [source.built(context.model, name)] if name else []
        values = {"tensors": tensors, "found": own, "expected": expected}
        yield Deviation(None, lines, values)


@detects("shared_parameters")
def _unknown(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect projections that cannot be loaded, with the code of the reason."""
    graph = context.graph
    kinds = {each.module.split(".", 2)[2]: each for each in reversed(context.mapping.unknown)}
    for each in kinds.values():  # of the first layer that has them
        hf = f"{each.module}.weight"
        lines = [graph.place(each.node)]
        if each.code == "shared_parameters" and each.module.endswith("attn.c_attn"):
            lines = [_repeated_call(context, each) or context.owner_of(hf)]
        elif each.code == "shared_parameters":  # heads that are computed several times
            lines = [graph.place(each.reasons[0])]
        elif each.code == "per_head_projection":
            lines += [graph.place(graph.first_reader([node])) for node in each.parameters]
        elif each.code == "latent_attention":
            lines += [source.built(context.model, graph.names[node]) for node in each.parameters]
        values = {"n_embd": context.config.n_embd, **each.values}
        yield Deviation(_first_tap(hf), lines, values, code=each.code)


QKV = "self.c_attn = nn.Linear({n_embd}, 3 * {n_embd})"
for _code, _message, _fix in (
    (
        "unknown_part",
        "compat does not know this part: {found}",
        "Rewrite this part as GPT-2 computes it.",
    ),
    (
        "latent_attention",
        "q, k or v is projected twice{like}, but GPT-2 projects each of them once",
        QKV,
    ),
    (
        "sliced_heads",
        "each head projects only {found} of the {n_embd} channels of its input, but GPT-2's heads "
        "project all of them",
        QKV,
    ),
    (
        "per_head_projection",
        "{found}, but GPT-2 projects all heads together, to all channels",
        "self.c_proj = nn.Linear({n_embd}, {n_embd})",
    ),
):
    deviation(_message, _fix, code=_code)(_unknown)


@deviation(
    "the {found} of {modules} are rounded, as in a quantized network, but GPT-2 computes with them "
    "as they are",
    "F.linear(x, self.weight, self.bias)",
)
def rounded_weights(context: DiagnosisContext) -> Iterator[Deviation]:
    graph = context.graph
    rounded = [each for each in context.mapping.unknown if each.code == "rounded_weights"]
    if rounded:
        modules = listed(collapse_layers([each.module for each in rounded]))
        found = "weights" if rounded[0].reasons[0] not in graph.live else "inputs"
        lines = [graph.place(node) for each in rounded for node in each.reasons]
        values = {"modules": modules, "found": found}
        yield Deviation(_first_tap(f"{rounded[0].module}.weight"), lines, values)


def _repeated_call(context: DiagnosisContext, unknown: UnknownProjection) -> Place | None:
    """Return where a projection of q, k or v is called once more, as in `v = self.query(x)`."""
    layer = context.anatomy.layers[int(unknown.module.split(".")[1])]
    lines = [context.graph.repeated(node) for node in layer.qkv if unknown.node in layer.qkv_ends]
    return next((line for line in lines if line), None)


# Missing parameters


def _missing(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect tensors that the model has no parameter for, with the codes in `MISSING`."""
    by_code: dict[str | None, list[str]] = {}
    for hf in context.unmatched.names:
        by_code.setdefault(_code_of(context, hf), []).append(hf)
    by_code.setdefault("no_qkv_bias", []).extend(_partly_missing_biases(context))
    per_head = {u.module for u in context.mapping.unknown if u.code == "per_head_projection"}
    for code in MISSING:
        if not (tensors := by_code.get(code)):
            continue
        module = tensors[0].rpartition(".")[0]
        norm = context.places.named.get(module)
        place = None if code == "no_ln_weight" else context.owner_of(f"{module}.weight")
        if code == "no_proj_bias" and module in per_head:
            place = source.built(context.model, context.graph.names[_of_heads(context, module)[0]])
        if place is None and norm is not None:
            place = source.torch_built(context.model, [norm.end])
        if place is None and code == "no_qkv_bias":
            place = _built_qkv(context)
        if place is None:
            end = context.anatomy.layers[0].attn if norm is None else norm.end
            place = context.graph.place(end)
        changes = Changes(weights={hf: _substitute(context, hf) for hf in tensors})
        values = {"tensors": listed(collapse_layers(tensors)), "n_embd": context.config.n_embd}
        modules = dict.fromkeys(hf.rpartition(".")[0] for hf in tensors)
        lines = [place, *(line for m in modules for line in context.owners_of(f"{m}.weight"))]
        lines += _gate_without_bias(context) if code == "no_mlp_bias" else []
        message = ""
        if code == "no_out_proj" and place:
            names = {path.rpartition(".")[2] for path, _ in context.model.named_modules()}
            if unused := source.unused_result(place, names):
                lines = [unused, place]
                message = (
                    "the result of this module is not used, so attention has no output "
                    "projection, but the checkpoint has {tensors}"
                )
        tap = _first_tap(tensors[0])
        yield Deviation(tap, lines, values, changes, message=message, code=code)


def _gate_without_bias(context: DiagnosisContext) -> list[Place | None]:
    """Return the line that builds the second projection of a gated MLP, if it has no bias."""
    layer = context.anatomy.layers[0]
    if layer.gate is None:
        return []
    weights = context.graph.parameters_between([layer.gate], [layer.x2])
    if _include_bias(context, weights):
        return []
    names = [name for node in weights for name in context.graph.parameter_names(node)]
    return [source.built(context.model, name) for name in names]


def _built_qkv(context: DiagnosisContext) -> Place | None:
    """Return the line that builds the first projection of q, k and v.

    It is known also where these are not mapped, as where several heads share a key.
    """
    layer = context.anatomy.layers[0]
    return context.built_between(layer.qkv_ends, [layer.x1])


def _partly_missing_biases(context: DiagnosisContext) -> list[str]:
    """Return the fused biases of which q, k or v lacks its part, although it is projected."""
    attentions = {f"h.{i}.attn.c_attn.bias": a for i, a in enumerate(context.mapping.attentions)}
    partly = context.unmatched.partly
    return [
        hf for hf, attention in attentions.items()
        if {*partly.get(hf, "")} - {*attention.unprojected} and not attention.shared_kv
    ]  # fmt: skip


def _code_of(context: DiagnosisContext, hf: str) -> str | None:
    """Return the code of an unmatched tensor; None if another finding covers it."""
    unmatched, (module, _, kind) = context.unmatched, hf.rpartition(".")
    if hf in unmatched.shapes or hf in unmatched.shared or module in context.places.missing:
        return None
    unknown = next((each for each in context.mapping.unknown if each.module == module), None)
    if unknown is not None:
        return _code_of_unknown(context, unknown, kind)
    if not module.startswith("h."):
        return _code_of_norm(context, module, kind) if module == "ln_f" else None
    number, name = int(module.split(".")[1]), module.split(".", 2)[2]
    if number >= len(context.anatomy.layers):
        return None
    layer = context.anatomy.layers[number]
    if name == "attn.c_attn":
        return _code_of_qkv(context, number) if kind == "bias" else None
    if name == "attn.c_proj":
        return "no_out_proj" if unmatched.lacks(f"{module}.weight") else "no_proj_bias"
    if name == "ln_1" or (name == "ln_2" and layer.fc is not None):
        return _code_of_norm(context, module, kind)
    projection = {"mlp.c_fc": layer.fc, "mlp.c_proj": layer.mlp_proj}.get(name)
    return "no_mlp_bias" if projection is not None and kind == "bias" else None


def _code_of_unknown(
    context: DiagnosisContext, unknown: UnknownProjection, kind: str
) -> str | None:
    """Return the code of a tensor of projections whose structure is not known."""
    parameters: Sequence[Node] = context.unmatched.nodes[f"{unknown.module}.weight"]
    if unknown.code == "per_head_projection":
        parameters = _of_heads(context, unknown.module)
    if kind != "bias" or _include_bias(context, parameters):
        return None
    if unknown.module.endswith("c_attn"):
        return "no_qkv_bias"
    if unknown.code not in ("rounded_weights", "per_head_projection"):
        return None
    return "no_proj_bias" if ".attn." in unknown.module else "no_mlp_bias"


def _of_heads(context: DiagnosisContext, module: str) -> list[Node]:
    """Return the parameters that project the heads of a layer's attention."""
    layer = context.anatomy.layers[int(module.split(".")[1])]
    products = [op.product for op in layer.attention_ops]
    return context.graph.parameters_between([layer.projected], products)


def _code_of_qkv(context: DiagnosisContext, number: int) -> str | None:
    """Return the code of a missing bias of q, k and v."""
    layer, attention = context.anatomy.layers[number], context.mapping.attentions[number]
    if not attention.kv_heads and not attention.shared_kv:
        return "no_qkv_bias"
    projecting = context.graph.parameters_between(layer.qkv_ends, [layer.x1])
    return None if _include_bias(context, projecting) else "no_qkv_bias"


def _code_of_norm(context: DiagnosisContext, module: str, kind: str) -> str | None:
    """Return the code of a missing tensor of a norm."""
    norm, placed = context.norm_formulas.get(module), context.places.named.get(module)
    if placed is not None and norm is None:
        if (placed.scale if kind == "weight" else placed.shift) is not None:
            return None  # a norm over several axes, with weights for each token
    if kind == "weight":
        return "no_ln_weight"
    return "no_ln_bias" if norm is None or norm.centred else None  # an RMSNorm has another code


def _include_bias(context: DiagnosisContext, parameters: Sequence[Node]) -> bool:
    """Return whether one of these parameters is added to a product, unlike those of a norm."""
    graph = context.graph
    vectors = [node for node in parameters if graph.values[node].ndim == 1]
    readers = (graph.first_reader([vector]) for vector in vectors)
    return any(product_behind(graph, node) is not None for node in readers)


def _substitute(context: DiagnosisContext, hf: str) -> Tensor | None:
    """Return what the model computes with in place of a tensor that it does not have."""
    if hf in context.unmatched.partly:
        parts = list(context.weights[hf].chunk(3))
        for letter in context.unmatched.partly[hf]:
            parts["qkv".index(letter)] = torch.zeros_like(parts[0])
        return torch.cat(parts)
    is_norm = hf.endswith(".weight") and "ln_" in hf
    return torch.ones_like(context.weights[hf]) if is_norm else None


def _first_tap(hf: str) -> str:
    """Return the tap that a tensor changes first."""
    module = hf.rpartition(".")[0]
    block, _, name = module.rpartition(".")
    if name == "c_attn":
        return f"{block.removesuffix('.attn')}.q"
    if name == "c_fc":
        return f"{block.removesuffix('.mlp')}.fc"
    if name == "c_proj":
        return block
    return "logits" if hf == HEAD else module


NORM = "(x - mean) / torch.sqrt(var + eps) * self.weight + self.bias"
# For each code: the tensors that are missing, the start of the message, and the fix.
MISSING = {
    "no_qkv_bias": ("the projections of q, k and v have no bias", "bias=True"),
    "no_proj_bias": ("the output projection of attention has no bias", "bias=True"),
    "no_out_proj": (
        "attention has no output projection",
        "self.c_proj = nn.Linear({n_embd}, {n_embd})",
    ),
    "no_mlp_bias": ("the projections of the MLP have no bias", "bias=True"),
    "no_ln_bias": ("the norm has no bias", NORM),
    "no_ln_weight": ("the norm has no weight", NORM),
}
for _code, (_lacks, _fix) in MISSING.items():
    deviation(f"{_lacks}, but the checkpoint has {{tensors}}", _fix, code=_code)(_missing)


@detects("no_mlp_bias")
def experts_without_bias(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect MLPs of an unknown form, such as a mixture of experts, without any bias."""
    layers = [i for i, layer in context.layers if layer.unknown]
    if not layers:
        return
    graph, layer = context.graph, context.anatomy.layers[layers[0]]
    parameters = graph.parameters_between([layer.mlp], [layer.x2])
    if not parameters or _include_bias(context, parameters):
        return
    widest = max(layer.unknown, key=lambda node: size(node)[-1])  # not the router
    names = [
        name for operand in tensor_inputs(widest) if operand not in graph.live
        for node in graph.parameters_of[operand] for name in graph.parameter_names(node)
    ]  # fmt: skip
    lines = [source.built(context.model, name) for name in names[:1]]
    missing = [f"h.{i}.mlp.{part}.bias" for i in layers for part in ("c_fc", "c_proj")]
    yield Deviation(f"h.{layers[0]}.fc", lines, {"tensors": listed(collapse_layers(missing))})


# Shared and unused parameters


@deviation(
    "{tensors} share one set of parameters, but GPT-2 has separate parameters for each of them",
    "Create a separate module for each of them.",
)
def shared_parameters(context: DiagnosisContext) -> Iterator[Deviation]:
    shared = context.unmatched.shared
    if not shared or _first_repeated(context):  # n_layer_mismatch
        return
    hf, other = next(iter(shared.items()))
    module, place = hf.rpartition(".")[0], context.owner_of(other)
    part = "projection"
    if "ln_" in hf and module in context.places.named:
        part, norm = "norm", context.places.named[module]
        place = source.norm_call(context.graph, context.model, norm) or place
        first = context.places.named.get(other.rpartition(".")[0])
        if first is not None:  # one norm called twice: the second call
            place = source.calling(context.graph, context.model, norm.end, first.end) or place
    elif hf.split(".")[1:2] != other.split(".")[1:2]:  # two layers: the line that calls them
        part = "layer"
        graph, anatomy = context.graph, context.anatomy
        end, first_end = (anatomy.layers[int(n.split(".")[1])].attn for n in (hf, other))
        if graph.places(end) == graph.places(first_end):  # one line that is run again
            first_end = anatomy.head
        place = source.calling(graph, context.model, end, first_end) or place
        parameters, _ = context.mapping.by_tensor.get(other, ((), None))  # or it does not fit
        if parameters and whole_of(graph.names[parameters[0]]):  # a wrong slice
            place = graph.place(graph.first_reader(parameters[:1])) or place
    blocks = {name.split(".")[1]: None for name in shared if name.startswith("h.")}
    first_block = f"h.{other.split('.')[1]}"
    parts = [name for name in context.mapping.by_tensor if name.startswith(f"{first_block}.")]
    suffixes = [name.removeprefix(first_block) for name in parts]
    whole = [i for i in blocks if all(f"h.{i}{suffix}" in shared for suffix in suffixes)]
    lines = [place]
    if parts and whole and list(blocks) == whole:
        values = {"tensors": f"the blocks {listed([first_block, *(f'h.{i}' for i in whole)])}"}
        nodes = (n for name in parts for n in context.mapping.by_tensor[name][0])
        own_path = _common_module([context.graph.names[node] for node in nodes])
        lines.append(source.building(context.model, own_path))
    elif within := _within_blocks(shared):
        values = {"tensors": within}
    else:
        values = {"tensors": listed([other, *collapse_layers(list(shared))])}
    values["part"] = part
    weights: dict[str, Tensor | None] = {n: context.weights[held] for n, held in shared.items()}
    same = all(
        context.weights[n].shape == context.weights[held].shape for n, held in shared.items()
    )
    # The reference has no further layers, as of attention that is called again.
    reproducible = same and len(context.anatomy.layers) <= context.config.n_layer
    changes = Changes(weights=weights) if reproducible else None
    yield Deviation(_first_tap(hf), lines, values, changes)


def _within_blocks(shared: Mapping[str, str]) -> str:
    """Return `in h.{0…3}, ln_1 and ln_2` if blocks share no tensors with others, otherwise ""."""
    pairs = [[re.fullmatch(r"h\.(\d+)\.(.+)\.\w+", n) for n in pair] for pair in shared.items()]
    if not all(n and held and n[1] == held[1] for n, held in pairs):
        return ""
    parts = dict.fromkeys(n[2] for pair in pairs for n in reversed(pair) if n)
    blocks = dict.fromkeys(f"h.{n[1]}.part" for n, _ in pairs if n)
    [layers] = collapse_layers(list(blocks))
    return f"in {layers.removesuffix('.part')}, {listed(list(parts))}"


def _common_module(names: Sequence[str]) -> str:
    """Return the path of the innermost module that holds all of these parameters."""
    split = [name.split(".") for name in names]
    shared = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*split, strict=False))
    return ".".join(parts[0] for parts in shared)


def _is_mask(parameter: Tensor) -> bool:
    """Return whether a parameter is a causal mask: one value up to the diagonal, another above."""
    square = parameter.detach().squeeze()
    if square.ndim != 2 or len(set(square.shape)) != 1 or len(square) < 2:
        return False
    above = torch.ones_like(square, dtype=torch.bool).triu(1)
    seen, hidden = square[~above], square[above]
    return bool((seen == seen[0]).all() and (hidden == hidden[0]).all() and seen[0] != hidden[0])


def _unknown_mlps(context: DiagnosisContext) -> tuple[str, ...]:
    """Return the prefixes of the parameters of unknown MLPs.

    The names include those of experts that no token was routed to.
    """
    graph, prefixes = context.graph, []
    for _, layer in context.layers:
        nodes = graph.parameters_between([layer.mlp], [layer.x2]) if layer.unknown else []
        names = [name for node in nodes for name in graph.parameter_names(node)]
        module = _common_module(names)
        if len(names) > 1 and re.search(r"\b\d+\b", module):  # a module of this layer
            prefixes.append(f"{module}.")
    return tuple(prefixes)


def _is_identity(context: DiagnosisContext) -> bool:
    """Return whether h.0.ln_1 reads the sum of the embeddings, or the norm of it, unchanged."""
    norm, end = context.places.extra.get("embed"), context.places.named["h.0.ln_1"].start
    start = context.anatomy.embed if norm is None else norm.end
    x = random_values(size(start))
    [y] = context.graph.run([end], {start: x})
    return y.numel() == x.numel() and torch.allclose(y.flatten(), x.flatten(), rtol=1e-9, atol=1e-9)


def _parts_with_findings(context: DiagnosisContext) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield results and inputs of parts whose parameters have a finding by another code."""
    graph, anatomy = context.graph, context.anatomy
    for i, layer in context.layers:
        if context.mapping.attentions[i].kv_heads:  # grouped_query_attention
            yield layer.qkv_ends, [layer.x1]
        if layer.cross_sum is not None:
            yield [layer.cross_sum.node], [layer.mid]
        ln_1 = context.places.named.get(f"h.{i}.ln_1")
        if ln_1 is not None and ln_1.end in graph.ancestors[layer.x1]:  # changed_stream
            yield [layer.x1], [ln_1.end]
        attention = attention_in(context, i)
        biased = attention.measured is not None and attention.measured.bias is not None
        if biased or attention.adds_relative_scores or attention.op.others:
            for op in layer.attention_ops:
                yield [op.product], [op.q.node, op.k.node, op.v.node, layer.x1]
        if context.mapping.attentions[i].changed_heads:
            projected = [end for _, each in context.layers[: i + 1] for end in each.qkv_ends]
            yield [layer.heads], [layer.x1, *projected]
        if layer.unknown:  # unknown_mlp
            yield [layer.mlp, layer.mlp_sum.branch], [layer.x2]
        if layer.gate and layer.gate not in graph.ancestors[layer.act]:  # nothing projects it
            yield [layer.mlp_sum.branch], [layer.x2]
        elif layer.gate:  # without further projections, with a bias that is added to the gate
            yield [layer.gate if layer.extra else layer.act], [layer.x2]
    if anatomy.own_input is not None:  # extra_projection, extra_ln, or unexplained
        yield [anatomy.embed], [anatomy.looked_up]
    if anatomy.leading:  # extra_projection, or an MLP before attention
        yield [anatomy.layers[0].x1], [anatomy.embed]


@deviation(
    "{found} do not contribute to the logits and keep their initial values",
    "Remove these parameters.",
    severity="info",
    code="unused_parameters",
)
@deviation(
    "{found} have no counterpart in GPT-2 and keep their initial values",
    "Remove these parameters.",
    code="random_parameters",
)
def without_source(context: DiagnosisContext) -> Iterator[Deviation]:
    """Detect parameters that no tensor fills, without those of parts that have other findings."""
    graph, model = context.graph, context.model
    known = {node for nodes, _ in context.mapping.by_tensor.values() for node in nodes}
    known = known.union(context.mapping.zeroed, *context.unmatched.nodes.values())
    for norm in (*context.places.extra.values(), *context.places.cross):
        known |= {node for node in (norm.scale, norm.shift) if node is not None}
    for factors, _ in context.learned_factors.values():
        known |= {a for node in factors for a in node.all_input_nodes if a in graph.names}
    for ends, starts in _parts_with_findings(context):
        known |= {*graph.parameters_between(ends, starts)}
    known = known.union(later_tables(context), *graph.low_rank.values())
    neutral: set[str] = set()  # by the names of parameters without effect
    if not context.anatomy.leading and "h.0.ln_1" in context.places.named:
        norm = context.places.named["h.0.ln_1"]
        before = {*graph.parameters_between([norm.start], [context.anatomy.embed])}
        if _is_identity(context):
            neutral |= {name for node in before for name in graph.parameter_names(node)}
        else:  # extra_operation
            known |= before
    by_name = sliced(all_parameters(model), graph.names.values())
    filled = {id(by_name[name]) for node in known for name in graph.parameter_names(node)}
    inputs = graph.parameters_between([graph.output], [])
    in_use = {name for node in inputs for name in graph.parameter_names(node)}
    once = {id(p): name for name, p in reversed(by_name.items())}
    rest = [n for n, p in by_name.items() if once[id(p)] == n and id(p) not in filled]
    used = [name for name in rest if name in in_use]
    masks = [name for name in used if _is_mask(by_name[name])]  # which need no weights
    without_effect = [name for name in used if name in neutral and name not in masks]
    others = [name for name in used if name not in {*masks, *without_effect}]
    unknown_mlps = _unknown_mlps(context)
    unused = [name for name in rest if name not in in_use and not name.startswith(unknown_mlps)]
    groups: tuple[tuple[list[str], Severity | None], ...]
    groups = (others, None), (masks, "info"), (without_effect, "info"), (unused, None)
    for found, severity in groups:
        if not found:
            continue
        own = {node for node in inputs if not set(found).isdisjoint(graph.parameter_names(node))}
        first = graph.first_reader(own) if own else None
        tap = None if first is None else context.tap_after(first)
        lines = [source.built(model, found[0]), None if first is None else graph.place(first)]
        code = "unused_parameters" if found is unused else "random_parameters"
        one = "has no counterpart in GPT-2"
        if found is unused:
            one = "does not contribute to the logits"
        message = "" if len(found) > 1 else f"{{found}} {one} and keeps its initial value"
        if found is without_effect:
            message = "{found} has no counterpart in GPT-2, but its initial value has"
            if len(found) > 1:
                message = "{found} have no counterpart in GPT-2, but their initial values have"
            message += " no effect on the logits"
        values = {"found": listed(found, 4)}
        yield Deviation(tap, lines, values, severity=severity, message=message, code=code)
