"""Checks before a model is built: the tensors are exactly those that the config requires."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compat.checkpoint.contents import Stored
from compat.checkpoint.files import TensorInfo
from compat.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    Shape,
    block_shapes,
    expected_shapes,
)
from compat.config import DTYPES, TOKEN_IDS, GPT2Config
from compat.errors import (
    CheckpointError,
    ConfigError,
    collapse_faults,
    collapse_layers,
    counted,
    lines,
    listed,
)
from compat.layers import activation

MASKS = ("attn.bias", "attn.masked_bias")  # buffers that old files have in each block
OTHER_HEADS = {
    "score.weight": "sequence classification",
    "classifier.weight": "token classification",
    "classifier.bias": "token classification",
    "qa_outputs.weight": "question answering",
    "qa_outputs.bias": "question answering",
    "multiple_choice_head.summary.weight": "multiple choice",
    "multiple_choice_head.summary.bias": "multiple choice",
}
_IN_BLOCKS = [f"h.{{i}}.{name}" for name in (*block_shapes(GPT2Config()), *MASKS)]
_NEEDED = [
    *(EMBEDDING, POSITIONS, "ln_f.weight"),
    *(name for name in _IN_BLOCKS if name.endswith(".weight")),
]
_TEMPLATES = {*_NEEDED, *_IN_BLOCKS, "ln_f.bias", HEAD, *OTHER_HEADS}

# Parts of tensor names that identify another kind of model.
_KINDS = {
    "a gated model such as LLaMA": ("gate_proj", "c_gate", "w_gate", "mlp.w3", "feed_forward.w3"),
    "a recurrent network": ("rnn", "lstm", "gru", "cell.", "weight_hh"),
    "an encoder such as BERT": ("attention.self.query",),
}


def config_of(fields: Mapping[str, Any], path: Path) -> GPT2Config:
    """Return the config that these fields state; `path` is named in errors.

    Raises:
        ConfigError: A field is unknown or out of range.
    """
    try:
        config = GPT2Config.from_dict(fields)
        activation(config.activation_function)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def check_family(weights: Path, names: Collection[str], has_config: bool) -> None:
    """Refuse a model that is not a GPT-2, before the user is asked for missing facts.

    Args:
        weights: the file, for the message.
        names: the names of its tensors.
        has_config: whether Hugging Face's config states the sizes. Then `check_tensors` reports
            tensors that are missing, or unexpected in some of the blocks.

    Raises:
        CheckpointError: The tensors do not have the names of a GPT-2's.
    """
    # With {i} in place of the layer's number, since the number of layers is not yet known.
    templates = {name: re.sub(r"^h\.(0|[1-9][0-9]*)\.", "h.{i}.", name) for name in names}
    foreign = [name for name, template in templates.items() if template not in _TEMPLATES]
    missing = [template for template in _NEEDED if template not in templates.values()]
    if has_config:
        differs = bool(foreign) and (bool(missing) or _in_every_block(foreign, templates))
    else:
        differs = bool(foreign or missing)
    if not differs:
        return
    kinds = [kind for kind, parts in _KINDS.items() if any(p in n for p in parts for n in foreign)]
    faults = []
    if kinds:
        faults.append(f"its names are those of {kinds[0]}")
    if foreign:
        faults.append(f"GPT-2 does not have {listed(collapse_layers(foreign))}")
    if missing:
        faults.append(f"the file does not have {listed(missing)}")
    raise CheckpointError(
        f"{weights} is not a GPT-2: {', and '.join(faults)}.\nUse another file. If it is a GPT-2 "
        "under other names, rename its tensors, or load it into its own module, whose name map "
        "`adapt` finds."
    )


def _in_every_block(foreign: list[str], templates: dict[str, str]) -> bool:
    """Return whether some of the names occur in every block, of two blocks or more."""
    blocks = {name.split(".")[1] for name, template in templates.items() if template != name}
    counts = Counter(templates[name] for name in foreign if templates[name] != name)
    return len(blocks) > 1 and len(blocks) in counts.values()


def check_depth(weights: Path, config: GPT2Config, count: int) -> None:
    """Refuse a config of more layers than tensors before the names of all layers are listed."""
    if config.n_layer > count:
        raise CheckpointError(
            f"{weights} has {count} tensors, fewer than the {config.n_layer} layers (n_layer) "
            "of its config. Check that the two belong together."
        )


def check_tensors(
    weights: Path, config: GPT2Config, stored: dict[str, Stored]
) -> dict[str, TensorInfo]:
    """Compare names, shapes and data types with those of a GPT-2 with this config.

    Returns:
        Shape and data type of every tensor.

    Raises:
        CheckpointError: There are differences; all of them are listed, collapsed by layer.
    """
    expected = expected_shapes(config)
    infos = {name: tensor.info for name, tensor in stored.items()}
    faults = counted(
        ("missing", [name for name in expected if name not in infos]),
        ("unexpected", [name for name in infos if name not in expected]),
    )
    common = [name for name in expected if name in infos]
    faults += collapse_faults(
        (name, _shape_fault(name, infos[name].shape, expected[name]))
        for name in common
        if infos[name].shape != expected[name]
    )
    faults += collapse_faults(
        (name, f"has data type {infos[name].dtype}, but must have floating-point numbers")
        for name in common
        if infos[name].dtype not in DTYPES.values()
    )
    if faults:
        headline = f"{weights} does not hold the tensors that its config requires:"
        raise CheckpointError(
            lines(headline, faults)
            + "\nCheck that the two belong together and that the config's sizes are right."
        )
    return {name: infos[name] for name in expected}


def _shape_fault(name: str, found: Shape, expected: Shape) -> str:
    looks = "looks transposed: " if found == expected[::-1] and len(found) == 2 else ""
    text = f"{looks}expected {list(expected)}, found {list(found)}"
    field = {EMBEDDING: "vocab_size", HEAD: "vocab_size", POSITIONS: "n_positions"}.get(name)
    if field and len(found) == 2 and found[0] != expected[0] and found[1] == expected[1]:
        text += (
            f", because config.json has {field} {expected[0]} and the tensor has {found[0]} rows"
        )
    return text


# Deviations that are accepted, and reported in notes.


def drop_extra_tensors(stored: dict[str, Stored], config: GPT2Config, notes: list[str]) -> None:
    """Remove the causal masks of old files and the heads for other tasks than language."""
    masks = stored.keys() & {f"h.{i}.{name}" for i in range(config.n_layer) for name in MASKS}
    heads = [name for name in OTHER_HEADS if name in stored]
    for name in (*masks, *heads):
        del stored[name]
    if masks:
        notes.append(
            f"ignored {len(masks)} causal-mask buffers (attn.bias, attn.masked_bias), which are "
            "not weights"
        )
    if heads:
        tasks = dict.fromkeys(OTHER_HEADS[name] for name in heads)
        notes.append(f"ignored the head for {', '.join(tasks)}: {', '.join(heads)}")


def resolve_head(config: GPT2Config, stored: dict[str, Stored], notes: list[str]) -> GPT2Config:
    """Use the embedding for an absent tied head; untie a stored head that differs from it."""
    if not config.tie_word_embeddings or EMBEDDING not in stored:
        return config
    if HEAD not in stored:
        stored[HEAD] = stored[EMBEDDING]
        return config
    head, embedding = stored[HEAD], stored[EMBEDDING]
    if head.info != embedding.info or embedding.info.dtype not in DTYPES.values():
        return config  # check_tensors reports it
    if torch.equal(head.read(), embedding.read()):
        notes.append(f"{HEAD} is stored, and equal to {EMBEDDING}, as tie_word_embeddings says")
        return config
    notes.append(
        f"{HEAD} differs from {EMBEDDING} although the config says tie_word_embeddings. "
        "The stored head is used, untied, as in transformers"
    )
    return replace(config, tie_word_embeddings=False)


def note_ids(config: GPT2Config, notes: list[str]) -> None:
    """Add a note about special token ids outside the vocabulary."""
    outside = [
        f"{name} {token_id}"
        for name in TOKEN_IDS
        for token_id in config.ids_of(name)
        if not 0 <= token_id < config.vocab_size
    ]
    if outside:
        notes.append(
            f"the config has ids outside the vocabulary, which have no effect: {listed(outside)} "
            f"(the vocabulary has ids 0 to {config.vocab_size - 1})"
        )


# Values.


def all_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinite values; the products propagate both."""
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        flat = tensor.detach().view(-1)
        if math.isfinite(torch.dot(flat, flat)):  # runs at the speed of memory; may overflow
            return True
    return all(map(math.isfinite, torch.stack(torch.aminmax(tensor)).tolist()))


def not_finite(tensor: Tensor) -> str | None:
    """Return the number of NaN and infinite values and the place of the first, or None."""
    if all_finite(tensor):
        return None
    bad = (~torch.isfinite(tensor)).nonzero()
    return f"{len(bad):,} NaN or infinite values, the first at {bad[0].tolist()}"
