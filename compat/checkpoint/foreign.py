"""Files of nanoGPT, minGPT and makemore, translated to Hugging Face's config and layout.

All three use Hugging Face's tensor names, but their projections are `nn.Linear`, [out, in].
nanoGPT saves its sizes beside the tensors. The others save tensors only, from whose shapes all
sizes but the number of heads follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.checks import config_of
from compat.checkpoint.contents import Contents, Stored
from compat.checkpoint.files import ALL, TensorInfo
from compat.checkpoint.layout import CONFIG, EMBEDDING, POSITIONS, PROJECTIONS, expected_shapes
from compat.config import ALIASES, DROPOUT_RATES, GPT2Config
from compat.errors import CheckpointError, ConfigError, collapse_layers, listed, short_repr

HUGGING_FACE, NANOGPT, MINGPT, PACKED = "Hugging Face", "nanoGPT", "minGPT", "packed"
IN_OUT, OUT_IN = "[in, out]", "[out, in]"

# nanoGPT's model.py has had torch's exact GELU since 2023, minGPT and makemore the tanh form.
ACTIVATION = {NANOGPT: "gelu", MINGPT: "gelu_new"}

# n_layer, n_head and n_embd of the model types in minGPT's model.py.
PRESETS = {
    "openai-gpt": (12, 12, 768),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}

# A config.json with these fields only may belong to a file of any kind.
COMMON = {
    *("n_layer", "n_head", "n_embd", "vocab_size", "bias", "dropout"),
    *("activation_function", "layer_norm_epsilon", "tie_word_embeddings"),
}


def is_hugging_face(raw_config: Mapping[str, Any]) -> bool:
    """Return whether a config.json has fields that only Hugging Face's has."""
    foreign = "block_size" in raw_config or isinstance(raw_config.get("model"), dict)
    return not foreign and not {ALIASES.get(name, name) for name in raw_config} <= COMMON


def kind_of(contents: Contents, raw_config: Mapping[str, Any] | None) -> str:
    """Return the program that wrote a file, by its arguments, its config or else its layout."""
    if contents.packed:
        return PACKED
    if contents.model_args is not None:
        return NANOGPT
    if raw_config is not None and is_hugging_face(raw_config):
        return HUGGING_FACE
    return MINGPT if OUT_IN in layouts(contents.tensors()) else HUGGING_FACE


def layouts(stored: Mapping[str, Stored]) -> dict[str, list[str]]:
    """Return the projections' names in each layout. Square ones do not show their layout."""
    found: dict[str, list[str]] = {}
    embedding = stored[EMBEDDING].info.shape if EMBEDDING in stored else ()
    C = embedding[-1] if embedding else 0
    for name, tensor in stored.items():
        shape = tensor.info.shape
        if not name.endswith(PROJECTIONS) or len(shape) != 2 or C not in shape:
            continue
        if shape[0] != shape[1]:
            narrow_first = (shape[0] == C) != name.endswith("mlp.c_proj.weight")
            found.setdefault(IN_OUT if narrow_first else OUT_IN, []).append(name)
    return found


def translate(
    kind: str,
    contents: Contents,
    raw_config: Mapping[str, Any] | None,
    n_head: int | None,
    notes: list[str],
) -> tuple[GPT2Config, dict[str, Stored]]:
    """Return the config and the tensors of a nanoGPT or minGPT file in Hugging Face's layout.

    Args:
        kind: NANOGPT or MINGPT.
        contents: the open file.
        raw_config: the config.json in the same folder, if there is one.
        n_head: the number of heads, if the user passes it.
        notes: assumptions are added here.

    Raises:
        CheckpointError: The projections have two layouts, or there are biases although the
            arguments say that there are none.
        ConfigError: Two sources of a fact disagree, or a fact is missing.
    """
    weights, stored = contents.weights, contents.tensors()
    _check_layout(kind, weights, stored)
    notes.append(
        f"the file was written by {kind}, so its projections are {OUT_IN} and are transposed to "
        f"{IN_OUT}"
    )
    fields = _collect_fields(weights, contents.model_args, raw_config, n_head, stored)
    has_biases, has_masks = fields.pop("bias", True), "h.0.attn.bias" in stored
    if "n_head" not in fields:
        raise _heads_unknown(weights, fields.get("n_embd"))
    if "activation_function" not in fields:
        fields["activation_function"] = _assume_activation(kind, weights, has_masks, notes)
    if "dropout" in fields:
        fields = {**dict.fromkeys(DROPOUT_RATES, fields.pop("dropout")), **fields}
    if fields.get("vocab_size", 0) <= 50256:  # another vocabulary than GPT-2's
        fields = {"bos_token_id": None, "eos_token_id": None, **fields}
    tied = kind == NANOGPT or not has_masks
    config = config_of({"tie_word_embeddings": tied, **fields, "model_type": "gpt2"}, weights)
    tensors = {
        name: replace(tensor, transposed=name.endswith(PROJECTIONS))
        for name, tensor in stored.items()
    }
    return config, tensors if has_biases else {**tensors, **_zeros(weights, config, stored, notes)}


def _check_layout(kind: str, weights: Path, stored: dict[str, Stored]) -> None:
    found = layouts(stored)
    if IN_OUT not in found:
        return
    wrong, right = (listed(collapse_layers(found.get(layout, []))) for layout in (IN_OUT, OUT_IN))
    raise CheckpointError(
        f"{weights} has projections that are {IN_OUT}: {wrong}"
        + (f", and others that are {OUT_IN}: {right}" if right else "")
        + f". {kind} has all projections {OUT_IN}. Save all of them in that layout."
    )


# Facts about the model, and the sources that state them.


def _collect_fields(
    weights: Path,
    model_args: object,
    raw_config: Mapping[str, Any] | None,
    n_head: int | None,
    stored: dict[str, Stored],
) -> dict[str, Any]:
    """Merge the facts of all sources, under Hugging Face's names; two sources must not disagree."""
    stated: dict[str, Mapping[str, Any]] = {}
    if model_args is not None:
        stated["its model_args"] = _renamed(weights, _checked_args(weights, model_args))
    if raw_config is not None:
        inner = raw_config.get("model")
        own = inner if isinstance(inner, dict) else raw_config
        stated[CONFIG] = _renamed(weights, own)
        preset = own.get("model_type")
        if isinstance(preset, str) and preset in PRESETS and not is_hugging_face(raw_config):
            sizes = zip(("n_layer", "n_head", "n_embd"), PRESETS[preset], strict=True)
            stated[f"minGPT's {preset!r}"] = dict(sizes)
    if n_head is not None:
        stated["the argument n_head"] = {"n_head": n_head}
    stated["its tensors"] = _sizes(stored)
    merged: dict[str, Any] = {}
    stated_by: dict[str, str] = {}
    for source, fields in stated.items():
        for name, value in fields.items():
            stated_by.setdefault(name, source)
            if merged.setdefault(name, value) != value:
                raise ConfigError(
                    f"{weights}: {name} is {short_repr(merged[name])} by {stated_by[name]}, but "
                    f"{short_repr(value)} by {source}. Check that they belong together."
                )
    return merged


def _checked_args(weights: Path, model_args: object) -> dict[str, Any]:
    """Return nanoGPT's arguments, provided that they are plain values."""
    if isinstance(model_args, dict) and all(
        isinstance(name, str) and isinstance(value, int | float | str | None)
        for name, value in model_args.items()
    ):
        return model_args
    raise ConfigError(
        f"{weights}: its model_args is not a dictionary of names and numbers, as nanoGPT saves it."
    )


def _renamed(weights: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rename nanoGPT's and minGPT's arguments to Hugging Face's, and drop those that are None."""
    ignored = {"model_type", "n_embd2"}  # makemore's n_embd2 is for its other models
    fields: dict[str, Any] = {}
    for alias, value in raw.items():
        name = {"block_size": "n_positions", "num_layers": "n_layer", **ALIASES}.get(alias, alias)
        if value is None or name in ignored:
            continue
        if fields.setdefault(name, value) != value:
            raise ConfigError(
                f"{weights}: {name} is {short_repr(fields[name])}, but {short_repr(value)} under "
                f"the name {alias!r}. Remove one of them."
            )
    return fields


def _sizes(stored: dict[str, Stored]) -> dict[str, int]:
    """Return the sizes that follow from the tensors."""
    sizes = {"n_layer": len({name.split(".")[1] for name in stored if name.startswith("h.")})}
    for name, field in ((EMBEDDING, "vocab_size"), (POSITIONS, "n_positions")):
        if name in stored and len(shape := stored[name].info.shape) == 2:
            sizes |= {field: shape[0], "n_embd": shape[1]}
    return sizes


def _heads_unknown(weights: Path, n_embd: Any) -> ConfigError:
    sensible = type(n_embd) is int and 0 < n_embd < 100_000
    divisors = [str(n) for n in range(1, n_embd + 1) if n_embd % n == 0] if sensible else []
    return ConfigError(
        f"{weights} does not state the number of heads, which does not follow from the tensors. "
        'Pass n_head (--n-head), or write {"n_head": …} to a config.json beside it.'
        + (f" The divisors of n_embd = {n_embd} are {listed(divisors, 20)}." if divisors else "")
    )


def _assume_activation(kind: str, weights: Path, has_masks: bool, notes: list[str]) -> str:
    """Assume a form of GELU, which no tensor shows. Masks identify minGPT's files."""
    if kind == MINGPT and not has_masks:
        raise ConfigError(
            f"{weights} does not state its activation. It has neither nanoGPT's model_args nor the "
            "causal masks (attn.bias) of minGPT and makemore. Write to a config.json beside it "
            '{"activation_function": "gelu"} if nanoGPT wrote it, or "gelu_new" for the tanh form.'
        )
    notes.append(
        f"activation_function {ACTIVATION[kind]!r} is assumed, as in {kind}"
        + (" since 2023 (before: 'gelu_new')" if kind == NANOGPT else "")
        + ", unless a config.json beside the file states another"
    )
    return ACTIVATION[kind]


# Biases.


@dataclass
class _ZeroTensors:
    """A TensorFile of zeros."""

    infos: dict[str, TensorInfo]

    def read(self, name: str, rows: slice = ALL, mapped: bool = False) -> Tensor:
        info = self.infos[name]
        assert isinstance(info.dtype, torch.dtype)  # others are refused before anything is read
        return torch.zeros(info.shape, dtype=info.dtype)[rows]


def _zeros(
    weights: Path, config: GPT2Config, stored: dict[str, Stored], notes: list[str]
) -> dict[str, Stored]:
    """Return all biases of Hugging Face's GPT-2, for a model without biases."""
    shapes = {k: shape for k, shape in expected_shapes(config).items() if k.endswith(".bias")}
    if present := [name for name in shapes if name in stored]:
        raise CheckpointError(
            f"{weights} has biases although bias is False in its arguments: "
            f"{listed(collapse_layers(present))}. Correct its arguments."
        )
    dtype = stored[EMBEDDING].info.dtype if EMBEDDING in stored else torch.float32
    zeros = _ZeroTensors({name: TensorInfo(shape, dtype) for name, shape in shapes.items()})
    notes.append(f"bias is False, so the {len(shapes)} biases that GPT-2 has are zero")
    return {name: Stored(zeros, name) for name in shapes}
