"""Tensors without a home, and parameters without a source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from math import prod

import torch

from compat.adaptation.diagnosis import source
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.diagnosis.modified_reference import ModifiedReference
from compat.adaptation.mapping.fit import Unmatched
from compat.adaptation.tracing.graph import Place
from compat.checkpoint.layout import HEAD
from compat.errors import collapse_layers, listed
from compat.ops import Rows
from compat.user_models.synonyms import role_of
from compat.user_models.usage import reads

# Unmatched tensors by the end of their names, and the code that they make.
LOST = {
    "attn.c_attn.bias": "no_qkv_bias",
    "attn.c_proj.bias": "no_proj_bias",
    "attn.c_proj.weight": "no_out_proj",
    "mlp.c_fc.bias": "no_mlp_bias",
    "mlp.c_proj.bias": "no_mlp_bias",
    "ln_1.bias": "no_ln_bias",
    "ln_2.bias": "no_ln_bias",
    "ln_f.bias": "no_ln_bias",
    "ln_1.weight": "no_ln_weight",
    "ln_2.weight": "no_ln_weight",
    "ln_f.weight": "no_ln_weight",
}


def of_sizes(case: DiagnosisContext, lost: Unmatched) -> Iterator[Deviation]:
    """Sizes that are not the checkpoint's; where the width differs, what follows from it is not
    reported again."""
    same_width = case.anatomy.width == case.config.n_embd
    if not same_width:
        yield _width(case)
    yield from _of_tables(case, lost)
    if len(case.anatomy.layers) != case.config.n_layer:
        yield _depth(case)
    inner = _of_inner(case, lost)
    if inner is not None:
        yield inner
    others = [hf for hf in lost.shapes if inner is None or ".mlp." not in hf]
    if others and same_width:
        found_shape, expected_shape = lost.shapes[others[0]]
        texts = {"found": f"{listed(others)}: the parameter has shape {found_shape}, the "
                 f"checkpoint's tensor makes {expected_shape}"}  # fmt: skip
        yield Deviation("unexplained", None, None, texts)


def _width(case: DiagnosisContext) -> Deviation:
    """The embedding width, by the name of the constructor's argument, or of its config's key."""
    cls = type(case.model)
    arguments = list(inspect.signature(cls).parameters)
    arguments += [key for name in arguments for key in reads(cls, name).names]  # of a config
    named = [name for name in arguments if role_of(name) == "n_embd"]
    words = {
        "name": named[0] if len(named) == 1 else "the embedding width",
        "found": case.anatomy.width,
        "expected": case.config.n_embd,
    }
    tables = case.graph.parameters_between([case.anatomy.token_embedding], [])
    place = source.built(case.model, case.graph.names[tables[0]]) if tables else None
    return Deviation("n_embd_mismatch", "embed", place, words)


def _of_tables(case: DiagnosisContext, lost: Unmatched) -> Iterator[Deviation]:
    """The vocabulary and the context, also of tables that differ in their width as well."""
    config, C = case.config, case.anatomy.width
    for hf, code, expected in (
        ("wte.weight", "vocab_mismatch", config.vocab_size),
        ("wpe.weight", "context_too_short", config.n_positions),
    ):
        if hf in lost.shapes:
            found = prod(lost.shapes[hf][0]) // C
        elif hf in case.mapping.by_tensor and isinstance(op := case.mapping.by_tensor[hf][1], Rows):
            found = op.wanted
        else:
            continue
        if found == expected or (code == "context_too_short" and found > expected):
            continue  # room for more positions changes nothing
        words = {"found": found, "expected": expected}
        tap = None if hf == "wpe.weight" else "logits"
        yield Deviation(code, tap, owner_of(case, hf), words)


def _depth(case: DiagnosisContext) -> Deviation:
    homes, names, config = case.mapping.by_tensor, case.graph.names, case.config
    found = len(case.anatomy.layers)
    stack = next((names[n[0]] for hf, (n, _) in homes.items() if hf.startswith("h.0.")), "")
    place = source.building(case.model, _stack(stack))
    if place is None and "wte.weight" in homes:
        place = source.building(case.model, names[homes["wte.weight"][0][0]].split(".")[0])
    words = {"found": found, "expected": config.n_layer}

    def cut(variant: ModifiedReference) -> None:
        variant.n_layer = found

    apply = cut if found < config.n_layer else None
    return Deviation("n_layer_mismatch", f"h.{min(found, config.n_layer) - 1}.out", place, words,
                     apply)  # fmt: skip


def _of_inner(case: DiagnosisContext, lost: Unmatched) -> Deviation | None:
    """The inner width of the MLP; None where it is the checkpoint's, or the same multiple of C."""
    config, C = case.config, case.anatomy.width
    weight = next((hf for hf in lost.shapes if hf.endswith(".mlp.c_fc.weight")), None)
    if weight is None:
        return None
    found = prod(lost.shapes[weight][0]) // C
    if found == config.d_inner or (
        C != config.n_embd and found * config.n_embd == config.d_inner * C
    ):
        return None
    layer = case.anatomy.layers[0]
    words = {"found": found, "expected": config.d_inner}
    fc = case.graph.parameters_between([layer.fc_end], [layer.x2])
    module = case.graph.names[fc[0]].rpartition(".")[0] if fc else ""
    found_shape, made = lost.shapes[weight]
    evidence = f"{weight} makes {made}, the parameter has shape {found_shape}"
    place = source.building(case.model, module)
    return Deviation("inner_dim", "h.0.fc", place, {**words, "evidence": evidence})


def _stack(name: str) -> str:
    """The container of the blocks: what stands before the layer's number."""
    return re.split(r"\.\d+\.", name)[0]


def of_lost(case: DiagnosisContext, lost: Unmatched) -> Iterator[Deviation]:
    by_code: dict[str, list[str]] = {}
    excused = {*lost.shapes, *lost.shared}
    for hf in lost.names:
        parts = hf.split(".")
        if hf in excused or (parts[0] == "h" and int(parts[1]) >= len(case.anatomy.layers)):
            continue
        if parts[-2] in ("ln_1", "ln_2", "ln_f") and hf.rpartition(".")[0] in case.places.missing:
            continue
        end = ".".join(parts[2:]) if parts[0] == "h" else hf
        if hf.removesuffix("bias") + "weight" in lost.names and end == "attn.c_proj.bias":
            end = "attn.c_proj.weight"  # the whole projection
        if end in LOST:
            by_code.setdefault(LOST[end], []).append(hf)
    for hf, absent in lost.partly.items():
        if absent:
            by_code.setdefault("no_qkv_bias", []).append(hf)
    for code, tensors in by_code.items():
        weight = tensors[0].rpartition(".")[0] + ".weight"
        if code == "no_ln_weight":
            norm = case.places.named[tensors[0].rpartition(".")[0]]
            place = source.running(case.graph, [norm.end])
        else:
            at_attention = source.running(case.graph, [case.anatomy.layers[0].attn])
            place = owner_of(case, weight) or at_attention
        names = listed(collapse_layers(tensors))
        yield Deviation(code, _first_tap(tensors[0]), place, {"tensors": names},
                        _dropping(tensors, lost.partly))  # fmt: skip


def _dropping(tensors: Sequence[str], partly: dict[str, str]):  # type: ignore[no-untyped-def]
    def apply(variant: ModifiedReference) -> None:
        weights = dict(variant.weights)
        for hf in tensors:
            if hf in partly:
                parts = list(weights[hf].chunk(3))
                for letter in partly[hf]:
                    parts["qkv".index(letter)] = torch.zeros_like(parts[0])
                weights[hf] = torch.cat(parts)
            elif hf.endswith(".weight") and "ln_" in hf:
                weights[hf] = torch.ones_like(weights[hf])
            else:
                weights.pop(hf, None)
        variant.weights = weights

    return apply


def _first_tap(hf: str) -> str:
    layer, _, rest = hf.partition(".attn.") if ".attn." in hf else hf.partition(".mlp.")
    taps = {"c_attn.bias": "q", "c_proj.bias": "attn", "c_proj.weight": "attn"}
    if ".attn." in hf:
        return f"{layer}.{taps[rest]}"
    if ".mlp." in hf:
        return f"{layer}.{'fc' if rest.startswith('c_fc') else 'mlp'}"
    return hf.rpartition(".")[0]


def of_shared(case: DiagnosisContext, lost: Unmatched) -> Iterator[Deviation]:
    if not lost.shared:
        return
    hf, other = next(iter(lost.shared.items()))

    def apply(variant: ModifiedReference) -> None:
        weights = dict(variant.weights)
        for name, holder in lost.shared.items():
            weights[name] = weights[holder]
        variant.weights = weights

    tensors = f"{other} and {listed(collapse_layers(list(lost.shared)))}"
    words = {"tensors": tensors}
    place = owner_of(case, other)
    if "ln_" in hf and (norm := case.places.named.get(hf.rpartition(".")[0])):
        place = source.norm_call(case.graph, case.model, norm) or place
    elif hf.split(".")[1:2] != other.split(".")[1:2]:  # whole layers: where they are stacked
        again = case.anatomy.layers[int(hf.split(".")[1])]
        place = source.calling(case.graph, again.attn, case.anatomy.head) or place
    yield Deviation("shared_parameters", _tap_of(hf), place, words, apply)


def _tap_of(hf: str) -> str:
    if hf == HEAD:
        return "logits"
    return hf.rpartition(".")[0] if "ln_" in hf else _first_tap(hf.rpartition(".")[0] + ".bias")


def of_sourceless(case: DiagnosisContext, lost: Unmatched) -> Iterator[Deviation]:
    """Parameters that no tensor fills; those of norms that GPT-2 lacks are told with the norm."""
    graph = case.graph
    homes = [node for nodes, _ in case.mapping.by_tensor.values() for node in nodes]
    known = {*homes, *case.mapping.zeroed, *lost.nodes}
    for norm in case.places.extra.values():
        known |= {node for node in (norm.scale, norm.shift) if node is not None}
    parameters = dict(case.model.named_parameters())
    by_name = dict(case.model.named_parameters(remove_duplicate=False))
    filled = {id(by_name[name]) for node in known for name in graph.parameter_names(node)}
    inputs = graph.parameters_between([graph.output], [])
    used = {name for node in inputs for name in graph.parameter_names(node)}
    rest = [name for name, p in parameters.items() if id(p) not in filled]
    if active := [name for name in rest if name in used]:
        place = source.built(case.model, active[0])
        yield Deviation("random_parameters", None, place, {"found": listed(active, 4)})
    if idle := [name for name in rest if name not in used]:
        place = source.built(case.model, idle[0])
        yield Deviation("unused_parameters", None, place, {"found": listed(idle, 4)})


def owner_of(case: DiagnosisContext, hf: str) -> Place | None:
    """The line that builds the module whose weight this tensor is."""
    home = case.mapping.by_tensor.get(hf)
    return home and source.built(case.model, case.graph.names[home[0][0]])
