"""nanoGPT's, minGPT's and makemore's files: their arguments as a config, their projections turned.

All three name tensors as Hugging Face does, but their projections are `nn.Linear`, [out, in]. What
the files leave out differs: nanoGPT saves its sizes beside the tensors, the others only have the
tensors, which do not show the number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.files import Stored, TensorInfo, config_of
from compat.checkpoint.layout import EMBEDDING, POSITIONS, expected_shapes
from compat.config import ALIASES, GPT2Config
from compat.errors import CheckpointError, ConfigError, collapse_layers, listed, short_repr

HUGGING_FACE, NANOGPT, MINGPT = "Hugging Face", "nanoGPT", "minGPT"
IN_OUT, OUT_IN = "[in, out]", "[out, in]"
PROJECTIONS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# nanoGPT's model.py has had torch's exact GELU since 2023, minGPT and makemore the tanh form.
ACTIVATION = {NANOGPT: "gelu", MINGPT: "gelu_new"}

# The sizes that minGPT's model.py has names for: n_layer, n_head, n_embd.
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

# A config.json with no other fields may belong to either kind of file.
COMMON = {
    *("n_layer", "n_head", "n_embd", "vocab_size", "bias", "dropout"),
    *("activation_function", "layer_norm_epsilon", "tie_word_embeddings"),
}


@dataclass
class Zeros:
    """Biases that a model does not have, as Hugging Face's set of tensors has them."""

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        info = self.infos[name]
        assert isinstance(info.dtype, torch.dtype)  # others are refused before anything is read
        return torch.zeros(info.shape, dtype=info.dtype)

    def map(self, name: str) -> Tensor:
        return self.read(name)


def is_hugging_face(beside: Mapping[str, Any]) -> bool:
    """Whether a config.json has fields that only Hugging Face's has."""
    foreign = "block_size" in beside or isinstance(beside.get("model"), dict)
    return not foreign and not {ALIASES.get(name, name) for name in beside} <= COMMON


def kind_of(model_args: object, beside: Mapping[str, Any] | None, stored: dict[str, Stored]) -> str:
    """Whose file it is, by what lies in it, by its config.json, and else by its layout."""
    if model_args is not None:
        return NANOGPT
    if beside is not None and is_hugging_face(beside):
        return HUGGING_FACE
    return MINGPT if OUT_IN in layouts(stored) else HUGGING_FACE


def layouts(stored: Mapping[str, Stored]) -> dict[str, list[str]]:
    """The projections that are stored [in, out], and those [out, in]; square ones do not tell."""
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


def translated(
    kind: str,
    weights: Path,
    stored: dict[str, Stored],
    model_args: object,
    beside: Mapping[str, Any] | None,
    n_head: int | None,
    notes: list[str],
) -> tuple[GPT2Config, dict[str, Stored]]:
    """The config and the tensors of a nanoGPT or minGPT file, as Hugging Face has them.

    Args:
        kind: NANOGPT or MINGPT.
        weights: the file.
        stored: its tensors, by name.
        model_args: what nanoGPT saves beside them.
        beside: the config.json in the same folder, if there is one.
        n_head: the number of heads, where the user gives it.
        notes: what is to be told is added here.

    Raises:
        CheckpointError: projections in two layouts, or biases that the arguments deny.
        ConfigError: two statements that disagree, or one that is needed and missing.
    """
    _check_layout(kind, weights, stored)
    notes.append(f"a file as {kind} saves it: projections are {OUT_IN} and are turned to {IN_OUT}")
    fields = _merged(weights, _statements(weights, model_args, beside, n_head, stored))
    has_biases, masked = fields.pop("bias", True), "h.0.attn.bias" in stored
    if "n_head" not in fields:
        raise _heads_unknown(weights, fields.get("n_embd"))
    if "activation_function" not in fields:
        fields["activation_function"] = _activation(kind, weights, masked, notes)
    if "dropout" in fields:
        dropout = fields.pop("dropout")  # none of which is at work in eval mode
        fields = {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, **fields}
    if fields.get("vocab_size", 0) <= 50256:  # not GPT-2's vocabulary, in which that ends a text
        fields = {"bos_token_id": None, "eos_token_id": None, **fields}
    config = config_of(
        {"tie_word_embeddings": kind == NANOGPT or not masked, **fields, "model_type": "gpt2"},
        weights,
    )
    tensors = {
        name: replace(tensor, transposed=name.endswith(PROJECTIONS))
        for name, tensor in stored.items()
    }
    return config, tensors if has_biases else {**tensors, **_zeros(weights, config, stored, notes)}


def _check_layout(kind: str, weights: Path, stored: dict[str, Stored]) -> None:
    found = layouts(stored)
    if IN_OUT not in found:
        return
    ours, theirs = (listed(collapse_layers(found.get(layout, []))) for layout in (IN_OUT, OUT_IN))
    raise CheckpointError(
        f"{weights} has projections that are {IN_OUT}: {ours}"
        + (f"; and others that are {OUT_IN}: {theirs}" if theirs else "")
        + f"; expected all of them {OUT_IN}, as {kind} has them; save it again, all in one layout"
    )


# What is stated of a model, and by whom.


def _statements(
    weights: Path,
    model_args: object,
    beside: Mapping[str, Any] | None,
    n_head: int | None,
    stored: dict[str, Stored],
) -> dict[str, dict[str, Any]]:
    """Hugging Face's fields, by who states them."""
    said: dict[str, dict[str, Any]] = {}
    if model_args is not None:
        said["its model_args"] = _fields(weights, _plain(weights, model_args))
    if beside is not None:
        inner = beside.get("model")
        own = inner if isinstance(inner, dict) else beside
        said["config.json"] = _fields(weights, own)
        name = own.get("model_type")
        if isinstance(name, str) and name in PRESETS and not is_hugging_face(beside):
            sizes = zip(("n_layer", "n_head", "n_embd"), PRESETS[name], strict=True)
            said[f"minGPT's {name!r}"] = dict(sizes)
    if n_head is not None:
        said["the argument n_head"] = {"n_head": n_head}
    said["its tensors"] = _sizes(stored)
    return said


def _plain(weights: Path, model_args: object) -> dict[str, Any]:
    """nanoGPT's arguments, which are numbers, truth values and words."""
    proper = isinstance(model_args, dict) and all(
        isinstance(name, str) and isinstance(value, int | float | str | None)
        for name, value in model_args.items()
    )
    if not isinstance(model_args, dict) or not proper:
        raise ConfigError(
            f"{weights}: its model_args is no dictionary of names and numbers, as nanoGPT saves it"
        )
    return model_args


def _fields(weights: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """nanoGPT's and minGPT's arguments under Hugging Face's names; None means not given.

    Raises:
        ConfigError: two names of one field that disagree.
    """
    passed_over = {"model_type", "n_embd2"}  # makemore's n_embd2 is for its other models
    fields: dict[str, Any] = {}
    for given, value in raw.items():
        name = {"block_size": "n_positions", "num_layers": "n_layer", **ALIASES}.get(given, given)
        if value is None or name in passed_over:
            continue
        if fields.setdefault(name, value) != value:
            raise ConfigError(
                f"{weights}: {name} is {short_repr(fields[name])}, and {short_repr(value)} as "
                f"{given!r}"
            )
    return fields


def _sizes(stored: dict[str, Stored]) -> dict[str, int]:
    """What the shapes show."""
    sizes = {"n_layer": len({name.split(".")[1] for name in stored if name.startswith("h.")})}
    for name, field in ((EMBEDDING, "vocab_size"), (POSITIONS, "n_positions")):
        if name in stored and len(shape := stored[name].info.shape) == 2:
            sizes |= {field: shape[0], "n_embd": shape[1]}
    return sizes


def _merged(weights: Path, said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All statements in one; no two may disagree."""
    merged: dict[str, Any] = {}
    by: dict[str, str] = {}
    for who, fields in said.items():
        for name, value in fields.items():
            by.setdefault(name, who)
            if merged.setdefault(name, value) != value:
                raise ConfigError(
                    f"{weights}: {name} is {short_repr(merged[name])} by {by[name]}, but "
                    f"{short_repr(value)} "
                    f"by {who}; check that they belong together"
                )
    return merged


# What has to be known besides.


def _heads_unknown(weights: Path, n_embd: Any) -> ConfigError:
    sensible = type(n_embd) is int and 0 < n_embd < 100_000
    possible = [str(n) for n in range(1, n_embd + 1) if n_embd % n == 0] if sensible else []
    return ConfigError(
        f"{weights} does not hold the number of heads, and no tensor shows it; give n_head "
        '(--n-head), or write {"n_head": …} to a config.json beside it'
        + (f"; n_embd is {n_embd}, which {listed(possible, 20)} divide" if possible else "")
    )


def _activation(kind: str, weights: Path, masked: bool, notes: list[str]) -> str:
    """The form of GELU, which no tensor shows; minGPT's files are known by their masks."""
    if kind == MINGPT and not masked:
        raise ConfigError(
            f"{weights} does not tell its activation: it has neither nanoGPT's model_args nor the "
            "causal masks (attn.bias) of minGPT and makemore; write to a config.json beside it "
            '{"activation_function": "gelu"} if nanoGPT made it, "gelu_new" for the tanh form'
        )
    notes.append(
        f"activation_function {ACTIVATION[kind]!r} is taken, as {kind} has it"
        + (" since 2023 (before: 'gelu_new')" if kind == NANOGPT else "")
        + "; a config.json beside the file decides otherwise"
    )
    return ACTIVATION[kind]


def _zeros(
    weights: Path, config: GPT2Config, stored: dict[str, Stored], notes: list[str]
) -> dict[str, Stored]:
    """Every bias of Hugging Face's set, for a model that has none."""
    shapes = {k: shape for k, shape in expected_shapes(config).items() if k.endswith(".bias")}
    if there := [name for name in shapes if name in stored]:
        raise CheckpointError(
            f"{weights} has biases although bias is False in its arguments: "
            f"{listed(collapse_layers(there))}"
        )
    dtype = stored[EMBEDDING].info.dtype if EMBEDDING in stored else torch.float32
    zeros = Zeros({name: TensorInfo(shape, dtype) for name, shape in shapes.items()})
    notes.append(f"bias is False: the {len(shapes)} biases that GPT-2 has besides are zero")
    return {name: Stored(zeros, name) for name in shapes}
