"""LoRA adapters of PEFT, between Hugging Face's GPT-2 and models with a name map.

An adapter adds B·A to a weight [out, in], with A (r, in) and B (out, r) (Hu et al. 2021, §4.1). The
operations of a name map move the elements of a weight. If they move whole rows and columns, the
rows of B and the columns of A move in the same way, and the adapter keeps its low rank. With any
other operation the adapter can only be merged into the weight.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint.checks import not_finite
from compat.checkpoint.files import read_json
from compat.checkpoint.layout import PREFIX, PROJECTIONS, Shape
from compat.checkpoint.safetensors_file import SafetensorsFile
from compat.errors import (
    CheckpointError,
    NameMapError,
    collapse_faults,
    collapse_layers,
    lines,
    listed,
    short_repr,
)
from compat.export_view import hf_tensors, map_of
from compat.name_map import NameMap, Row
from compat.saving.atomic import replacing_folder
from compat.saving.shards import write_tensors
from compat.validation import as_module, check_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_MODEL = "base_model.model."  # PEFT's prefix of all names
# Fields with which PEFT computes something other than B·A, or also trains other weights.
UNSUPPORTED = (
    *("use_dora", "lora_bias", "modules_to_save", "layer_replication", "use_qalora", "use_bdlora"),
    *("alora_invocation_tokens", "arrow_config", "target_parameters", "trainable_token_indices"),
    *("velora_config", "monteclora_config", "kasa_config"),
)
# Other kinds of initialisation change the base weights, which an adapter does not hold.
INITIAL_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight [out, in]: B·A.

    Args:
        A: (r, in).
        B: (out, r), with PEFT's scale multiplied in.
    """

    A: Tensor
    B: Tensor


@dataclass(frozen=True)
class Place:
    """The position of a module's weight in Hugging Face's weight.

    Args:
        outputs: the index in Hugging Face's weight of each of its outputs.
        inputs: the same for each of its inputs.
        in_out: whether it is stored as [in, out], as in Conv1D.
    """

    outputs: Tensor
    inputs: Tensor
    in_out: bool


Parts = dict[str, LowRank]  # by the name of the module, without PEFT's prefix


def merge_lora(model: nn.Module, adapter: str | Path, *, name_map: NameMap | None = None) -> None:
    """Add an adapter of Hugging Face's GPT-2 to the weights of a model, in place.

    Args:
        model: a dialect's model, or any module with a name map.
        adapter: the folder that PEFT saved.
        name_map: required for a module that is not a dialect's.

    Raises:
        CheckpointError: The adapter cannot be read, is not only B·A, or does not fit. The model is
            left unchanged.
        NameMapError: The model needs a map and has none, the map lacks parameters, or the model has
            LoRA layers.
    """
    tensors = hf_tensors(model, name_map)
    parameters, rows = _projections(model, name_map)
    _, parts = _read_of_hf(adapter)
    _check(adapter, parts, {module: tensors[row.hf].like.shape for module, row in rows.items()})
    merged: dict[str, Tensor] = {}
    for module, part in parts.items():
        row = rows[module]
        weight = tensors[row.hf].view()  # [in, out]
        sums = row.op.load(weight + (part.B @ part.A).t().to(weight))
        merged.update(zip(row.ours, sums, strict=True))
    with torch.no_grad():
        for name, value in merged.items():
            parameters[name].copy_(value)


def lora_from_hf(
    model: nn.Module, adapter: str | Path, folder: str | Path, *, name_map: NameMap | None = None
) -> list[Path]:
    """Save an adapter of Hugging Face's GPT-2 as one of this model, and return the paths.

    `peft.PeftModel.from_pretrained(model, folder)` loads it.

    Args:
        model: a dialect's model, or any module with a name map. Only its shapes are read.
        adapter: the folder that PEFT saved.
        folder: where to save.
        name_map: required for a module that is not a dialect's.

    Raises:
        CheckpointError: The adapter cannot be read, is not only B·A, or does not fit; or the folder
            cannot be written.
        NameMapError: The model needs a map and has none, the map lacks parameters, or the low rank
            would be lost.
    """
    parameters, rows = _projections(model, name_map)
    base, parts = _read_of_hf(adapter)
    _check(adapter, parts, {module: row.hf_shape(parameters) for module, row in rows.items()})
    places = _places({module: rows[module] for module in parts}, parameters)
    found: Parts = {}
    in_out = False
    for hf, part in parts.items():
        for module, place in places[hf].items():
            found[module] = LowRank(part.A[:, place.inputs], part.B[place.outputs])
            in_out |= place.in_out
    return _write(folder, found, {"base_model_name_or_path": base, "fan_in_fan_out": in_out})


def lora_to_hf(
    model: nn.Module, adapter: str | Path, folder: str | Path, *, name_map: NameMap | None = None
) -> list[Path]:
    """Save an adapter that PEFT trained on this model as one of Hugging Face's GPT-2.

    The adapters of q, k and v become one of `c_attn`. Its rank is the sum of their ranks, or their
    own rank if they have the same A.

    Args:
        model, adapter, folder, name_map: as in `lora_from_hf`. The model may have its LoRA layers.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError, NameMapError: as in `lora_from_hf`.
    """
    parameters, rows = _projections(model, name_map)
    base, parts = _read(adapter)
    adapted = {
        hf: row for hf, row in rows.items() if any(_module(name) in parts for name in row.ours)
    }
    places = _places(adapted, parameters)
    known = {module: place for own in places.values() for module, place in own.items()}
    _check(adapter, parts, {m: (len(p.inputs), len(p.outputs)) for m, p in known.items()})
    found = {
        PREFIX + hf: _joined(places[hf], parts, row.hf_shape(parameters))
        for hf, row in adapted.items()
    }
    fields = {"base_model_name_or_path": base, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return _write(folder, found, fields)


def _joined(places: Mapping[str, Place], parts: Parts, shape: Shape) -> LowRank:
    """Return the adapter of Hugging Face's weight that is equivalent to those of the modules."""
    joined: list[LowRank] = []
    for module, place in places.items():
        if part := parts.get(module):
            r = len(part.A)
            A, B = part.A.new_zeros(r, shape[0]), part.B.new_zeros(shape[1], r)
            A[:, place.inputs], B[place.outputs] = part.A, part.B
            same = [i for i, other in enumerate(joined) if torch.equal(other.A, A)]
            if same:
                joined[same[0]] = LowRank(A, joined[same[0]].B + B)
            else:
                joined.append(LowRank(A, B))
    return LowRank(torch.cat([p.A for p in joined]), torch.cat([p.B for p in joined], dim=1))


def _projections(model: Any, name_map: NameMap | None) -> tuple[dict[str, Tensor], dict[str, Row]]:
    """Return the parameters of a model, and the rows of the projections of all layers.

    Parameters have the names that they have without PEFT's wrappers; rows are found by Hugging
    Face's names of the modules.
    """
    base = as_module(model.get_base_model() if hasattr(model, "get_base_model") else model)
    parameters: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in base.named_parameters(remove_duplicate=False)
        if ".lora_" not in name
    }
    name_map = map_of(base, name_map)
    n_layer = name_map.count_layers(parameters)
    rows = name_map.expand(n_layer)
    check_names(model, rows, parameters, name_map.expand_zeros(n_layer))
    return parameters, {_module(row.hf): row for row in rows if row.hf.endswith(PROJECTIONS)}


def _module(name: str) -> str:
    """Return the module to which a weight belongs."""
    return name.removesuffix(".weight")


def _places(
    rows: Mapping[str, Row], parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Place]]:
    """Return the positions of each row's weights by module. They are found once for all layers.

    Raises:
        NameMapError: An operation does not move whole rows and columns, or a parameter is not the
            weight of a module, to which PEFT could add an adapter.
    """
    found: dict[tuple[int, Shape], list[Place | None]] = {}
    places: dict[str, dict[str, Place]] = {hf: {} for hf in rows}
    for hf, row in rows.items():
        shape = row.hf_shape(parameters)
        key = id(row.op), shape
        if key not in found:
            found[key] = _find_places(row, shape)
        for name, place in zip(row.ours, found[key], strict=True):
            if place is None or not name.endswith(".weight"):
                why = (
                    f"{row.op} does not move whole rows and columns"
                    if place is None
                    else "PEFT adapts only parameters that are the `weight` of a module"
                )
                raise NameMapError(
                    f"an adapter of {row.hf} cannot be converted to or from {name}: {why}. Merge "
                    "an adapter of Hugging Face's GPT-2 with merge_lora, and one of this model "
                    "with PEFT's merge_and_unload."
                )
            places[hf][_module(name)] = place
    return places


def _find_places(row: Row, shape: Shape) -> list[Place | None]:
    """Return the position of each parameter, or None if it is not whole rows and columns.

    Every element of Hugging Face's weight is labelled with its position, and the operation moves
    the labels as it moves weights.
    """
    labels = row.op.load(torch.arange(shape[0] * shape[1]).view(*shape))
    found: list[Place | None] = []
    for label in labels:
        place = None
        if label.ndim == 2 and label.dtype == torch.int64:
            inputs, outputs = label // shape[1], label % shape[1]
            if (inputs == inputs[0]).all() and (outputs == outputs[:, :1]).all():
                place = Place(outputs[:, 0], inputs[0], in_out=False)
            elif (inputs == inputs[:, :1]).all() and (outputs == outputs[0]).all():
                place = Place(outputs[0], inputs[:, 0], in_out=True)
        found.append(place)
    return found


# PEFT's files.


def _read_of_hf(folder: str | Path) -> tuple[str | None, Parts]:
    """Read an adapter of GPT2LMHeadModel or GPT2Model as `_read` does, without their prefix."""
    base, parts = _read(folder)
    return base, {name.removeprefix(PREFIX): part for name, part in parts.items()}


def _read(folder: str | Path) -> tuple[str | None, Parts]:
    """Return the name of the adapter's base model, and what the adapter adds to each module.

    Raises:
        CheckpointError: A file is missing or damaged, or the adapter is not only B·A.
    """
    path = Path(folder)
    config, file = read_json(path / CONFIG), SafetensorsFile(path / WEIGHTS)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path / CONFIG} has peft_type {short_repr(config.get('peft_type'))}, but must "
            "have 'LORA'. Merge it with PEFT's merge_and_unload."
        )
    beyond = {name: config[name] for name in UNSUPPORTED if config.get(name)}
    if config.get("bias", "none") != "none":
        beyond["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in INITIAL_VALUES:
        beyond["init_lora_weights"] = config["init_lora_weights"]
    if beyond:
        fields = listed([f"{name} = {short_repr(value)}" for name, value in beyond.items()])
        raise CheckpointError(
            f"{path / CONFIG} has {fields}, so the adapter is not only B·A. Merge it with PEFT's "
            "merge_and_unload."
        )
    factors: dict[str, dict[str, Tensor]] = {}
    faults = []
    for name in file.infos:
        found = re.fullmatch(rf"(?:{re.escape(BASE_MODEL)})(.+)\.lora_([AB])\.weight", name)
        tensor = file.read(name)
        if not found or tensor.ndim != 2:
            faults.append((name, "is not the A or B of a module"))
        elif fault := not_finite(tensor):
            faults.append((name, f"has {fault}"))
        else:
            factors.setdefault(found[1], {})[found[2]] = tensor
    ranks = {module: len(pair["A"]) for module, pair in factors.items() if "A" in pair}
    for module, pair in factors.items():
        if pair.keys() != {"A", "B"} or pair["B"].shape[1] != ranks[module]:
            faults.append((module, "its A and B do not have the same rank"))
    if faults or not factors:
        what = collapse_faults(faults) or ["no lora_A and lora_B"]
        raise CheckpointError(lines(f"{path / WEIGHTS} is not a LoRA adapter:", what))
    parts = {
        module: LowRank(pair["A"], pair["B"] * _scale(config, module, ranks[module]))
        for module, pair in factors.items()
    }
    return config.get("base_model_name_or_path"), parts


def _scale(config: Mapping[str, Any], module: str, r: int) -> float:
    """Return PEFT's factor on B·A: alpha / r, or alpha / √r (use_rslora, Kalajdzievski 2023).

    Raises:
        CheckpointError: alpha is not a number, or its pattern not a regular expression.
    """
    alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    try:
        matching = [patterns[p] for p in patterns if re.fullmatch(rf"(.*\.)?({p})", module)]
        alpha = float([*matching, alpha][0])
    except (re.error, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{CONFIG} has lora_alpha {short_repr(alpha)} and alpha_pattern "
            f"{short_repr(patterns)}, which are not valid: {error}. Save the adapter again."
        ) from error
    return alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r


def _check(adapter: str | Path, parts: Parts, sizes: Mapping[str, Shape]) -> None:
    """Check that every part belongs to a known module with the sizes (in, out)."""
    if unknown := [name for name in parts if name not in sizes]:
        raise CheckpointError(
            f"{adapter} adapts {listed(collapse_layers(unknown))}, but may adapt only the "
            "projections that are c_attn, c_proj and c_fc in GPT-2's blocks. Train it with other "
            "target_modules, or merge it with PEFT's merge_and_unload."
        )
    faults = []
    for name, part in parts.items():
        found = part.A.shape[1], len(part.B)
        if found != tuple(sizes[name]):
            faults.append((name, f"found {found} inputs and outputs, expected {(*sizes[name],)}"))
    if faults:
        raise CheckpointError(
            lines(f"{adapter} does not fit the model:", collapse_faults(faults))
            + "\nUse the adapter of a model of this size."
        )


def _write(folder: str | Path, parts: Parts, fields: Mapping[str, Any]) -> list[Path]:
    """Save an adapter as PEFT does, with scale 1, and return the paths of the files."""
    ranks = {module: len(part.A) for module, part in parts.items()}
    r, _ = Counter(ranks.values()).most_common(1)[0]
    others = {module: rank for module, rank in ranks.items() if rank != r}
    config = {
        "peft_type": "LORA",
        **fields,
        "r": r,
        "lora_alpha": r,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": list(parts),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    tensors = {
        f"{BASE_MODEL}{module}.lora_{letter}.weight": tensor.contiguous()
        for module, part in parts.items()
        for letter, tensor in (("A", part.A), ("B", part.B))
    }
    with replacing_folder(folder, lambda name: name == "adapter_model.bin") as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(temporary / WEIGHTS, tensors)
    return [Path(folder) / CONFIG, Path(folder) / WEIGHTS]
