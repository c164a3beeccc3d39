"""`load`: what becomes of every tensor."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.cli.common import (
    DialectName,
    DialectOption,
    JsonOption,
    MmapOption,
    ModelOption,
    NHeadOption,
    RevisionOption,
    VerifyOption,
    console,
    explained,
    note,
    print_json,
)
from compat.dialects import get_dialect
from compat.loading import load_pretrained
from compat.name_map import NameMap


@explained
def load_command(
    model: ModelOption = "demo",
    dialect: DialectOption = DialectName.linear,
    revision: RevisionOption = None,
    verify: VerifyOption = False,
    n_head: NHeadOption = None,
    mmap: MmapOption = False,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint by name and show which tensor went where."""
    checkpoint = open_checkpoint(model, revision, verify=verify, mmap=mmap, n_head=n_head)
    loaded = load_pretrained(checkpoint, dialect.value)
    count = sum(p.numel() for p in loaded.parameters())
    name_map = get_dialect(dialect.value).name_map
    tensors = _tensors(name_map, checkpoint)
    if as_json:
        found = {
            "model": model,
            "weights": str(checkpoint.weights),
            "dialect": dialect.value,
            "dtype": str(checkpoint.dtype).removeprefix("torch."),
            "parameters": count,
            "tensors": tensors,
            "notes": checkpoint.notes,
        }
        print_json(found)
        return
    console().print(_table(name_map, tensors, checkpoint.config.n_layer))
    print(
        f"{len(tensors)} tensors of {checkpoint.weights} → {len(list(loaded.parameters()))} "
        f"{dialect.value} parameters with {count:,} values"
        + (", the head tied to the embedding" if checkpoint.config.tie_word_embeddings else "")
    )
    for line in checkpoint.notes:
        note(f"note: {line}")


def _tensors(name_map: NameMap, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """One entry per Hugging Face tensor: name, shape, operation, and what was made of it."""
    entries = []
    for row in name_map.expand(checkpoint.config.n_layer):
        shape = checkpoint.infos[row.hf].shape
        made = row.op.load(torch.empty(shape, device="meta"))
        entries.append(
            {
                "tensor": row.hf,
                "shape": list(shape),
                "operation": str(row.op),
                "parameters": [
                    {"name": name, "shape": list(value.shape)}
                    for name, value in zip(row.ours, made, strict=True)
                ],
            }
        )
    return entries


def _table(name_map: NameMap, tensors: list[dict[str, Any]], n_layer: int) -> Table:
    """One line per row of the name map, which stands for all layers at once."""
    by_name = {entry["tensor"]: entry for entry in tensors}
    table = Table("Hugging Face tensor", "shape", "operation", "parameter", "shape", "layers")
    for row in name_map.rows:
        entry = by_name[row.at(0).hf]
        table.add_row(
            row.hf,
            str(entry["shape"]),
            entry["operation"],
            "\n".join(row.ours),
            "\n".join(str(made["shape"]) for made in entry["parameters"]),
            f"{{i}} = 0 … {n_layer - 1}" if "{i}" in row.hf else "",
        )
    return table
