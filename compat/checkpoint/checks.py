"""What must hold before a model is built: the tensors are those that the config asks for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compat.checkpoint.files import Stored, TensorInfo
from compat.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    OTHER_HEADS,
    POSITIONS,
    Shape,
    expected_shapes,
    foreign_names,
    in_every_block,
    mask_buffers,
    missing_templates,
)
from compat.config import GPT2Config
from compat.errors import CheckpointError, collapse_layers, folded_faults, lines, listed

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# Parts of names that show which other kind of model it is.
_KINDS = {
    "a gated model such as LLaMA": ("gate_proj", "c_gate", "w_gate", "mlp.w3", "feed_forward.w3"),
    "a recurrent network": ("rnn", "lstm", "gru", "cell.", "weight_hh"),
    "an encoder such as BERT": ("attention.self.query",),
}


def check_family(weights: Path, names: Collection[str], facts_known: bool) -> None:
    """Tensors with the names of a GPT-2's, before anything that they do not show is asked for.

    Args:
        weights: the file, for the message.
        names: of its tensors.
        facts_known: whether a config of Hugging Face's states the sizes; then it is left to
            `check_tensors` to list tensors that are missing, or left over in some of the blocks.

    Raises:
        CheckpointError: the file is not a GPT-2's.
    """
    foreign, missing = foreign_names(names), missing_templates(names)
    if facts_known:
        differs = foreign and (missing or in_every_block(foreign, names))
    else:
        differs = foreign or missing
    if not differs:
        return
    found = [kind for kind, parts in _KINDS.items() if any(p in n for p in parts for n in foreign)]
    faults = []
    if foreign:
        faults.append(f"GPT-2 does not have {listed(collapse_layers(foreign))}")
    if missing:
        faults.append(f"the file does not have {listed(missing)}")
    raise CheckpointError(
        f"{weights} is not a GPT-2: "
        + (f"by its names it is {found[0]}; " if found else "")
        + "; ".join(faults)
        + "\nGive another file. If it is a GPT-2 under other names, rename its tensors, or load it "
        "into its own module, whose name map `adapt` finds."
    )


def check_depth(weights: Path, config: GPT2Config, count: int) -> None:
    """Before a million names are written out.

    Raises:
        CheckpointError: there are fewer tensors than layers.
    """
    if config.n_layer > count:
        raise CheckpointError(
            f"{weights} has {count} tensors, fewer than the {config.n_layer} layers (n_layer) "
            "of its config.json; check that the two belong together"
        )


def drop_masks(stored: dict[str, Stored], config: GPT2Config, notes: list[str]) -> None:
    """Old files carry causal masks beside the weights: passed over, and noted."""
    masks = stored.keys() & mask_buffers(config)
    for name in masks:
        del stored[name]
    if masks:
        notes.append(
            f"ignored {len(masks)} causal-mask buffers (attn.bias, attn.masked_bias): no weights"
        )


def drop_other_heads(stored: dict[str, Stored], notes: list[str]) -> None:
    """What was put onto GPT-2 for another task than language is passed over, and named."""
    there = [name for name in OTHER_HEADS if name in stored]
    for name in there:
        del stored[name]
    if there:
        tasks = dict.fromkeys(OTHER_HEADS[name] for name in there)
        notes.append(f"ignored the head for {', '.join(tasks)}: {', '.join(there)}")


def settle_head(config: GPT2Config, stored: dict[str, Stored], notes: list[str]) -> GPT2Config:
    """An absent tied head is the embedding; a stored one is compared with it."""
    if not config.tie_word_embeddings or EMBEDDING not in stored:
        return config
    if HEAD not in stored:
        stored[HEAD] = stored[EMBEDDING]
        return config
    head, embedding = stored[HEAD], stored[EMBEDDING]
    if head.info != embedding.info or embedding.info.dtype not in FLOATS:
        return config  # the check of all tensors says so
    if torch.equal(head.read(), embedding.read()):
        notes.append(f"{HEAD} is stored, and equal to {EMBEDDING}, as tie_word_embeddings says")
        return config
    notes.append(
        f"{HEAD} differs from {EMBEDDING} although the config says tie_word_embeddings; "
        "the stored head is used, untied, as transformers does"
    )
    return replace(config, tie_word_embeddings=False)


def note_ids(config: GPT2Config, notes: list[str]) -> None:
    """Ids that begin, end or fill up texts and lie outside the vocabulary never occur in one."""
    outside = [
        f"{name} {token_id}"
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        for token_id in config.ids_of(name)
        if not 0 <= token_id < config.vocab_size
    ]
    if outside:
        notes.append(
            f"{', '.join(outside)}: outside the vocabulary, which has ids 0 to "
            f"{config.vocab_size - 1}; no text has such an id"
        )


def all_finite(tensor: Tensor) -> bool:
    """NaN and infinities show in the least and the greatest value."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def not_finite(tensor: Tensor) -> str | None:
    """In words, how many values are NaN or infinite and where the first is; None if none are."""
    if all_finite(tensor):
        return None
    bad = (~torch.isfinite(tensor)).nonzero()
    return f"{len(bad):,} NaN or infinite values, the first at {bad[0].tolist()}"


def check_tensors(
    weights: Path, config: GPT2Config, stored: dict[str, Stored]
) -> dict[str, TensorInfo]:
    """Every tensor of a GPT-2 of this configuration and no other, with its shape, of floats.

    Raises:
        CheckpointError: something is otherwise; everything that is, folded by layer.
    """
    expected = expected_shapes(config)
    infos = {name: tensor.info for name, tensor in stored.items()}
    faults = []
    if missing := [name for name in expected if name not in infos]:
        faults.append(f"{len(missing)} missing: {listed(collapse_layers(missing))}")
    if unexpected := [name for name in infos if name not in expected]:
        faults.append(f"{len(unexpected)} left over: {listed(collapse_layers(unexpected))}")
    shared = [name for name in expected if name in infos]
    faults += folded_faults(
        (name, _shape_fault(name, infos[name].shape, expected[name]))
        for name in shared
        if infos[name].shape != expected[name]
    )
    faults += folded_faults(
        (name, f"data type {infos[name].dtype}; weights must be floating-point numbers")
        for name in shared
        if infos[name].dtype not in FLOATS
    )
    if faults:
        headline = f"{weights} does not hold the tensors that its config asks for:"
        raise CheckpointError(
            lines(headline, faults)
            + "\nCheck that the two belong together and its sizes are right."
        )
    return {name: infos[name] for name in expected}


def _shape_fault(name: str, found: Shape, expected: Shape) -> str:
    looks = "looks transposed: " if found == expected[::-1] and len(found) == 2 else ""
    text = f"{looks}expected {list(expected)}, found {list(found)}"
    field = {EMBEDDING: "vocab_size", HEAD: "vocab_size", POSITIONS: "n_positions"}.get(name)
    if field and len(found) == 2 and found[0] != expected[0] and found[1] == expected[1]:
        text += f": config.json has {field} {expected[0]}, the tensor {found[0]} rows"
    return text
