"""`load`: what becomes of every tensor."""

from __future__ import annotations

from collections.abc import Iterator
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
    handle_errors,
    note,
    print_json,
)
from compat.cli.tables import print_table
from compat.dialects import get_dialect
from compat.loading import load_pretrained
from compat.name_map import NameMap, Row


@handle_errors
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
    checkpoint = open_checkpoint(model, revision=revision, verify=verify, mmap=mmap, n_head=n_head)
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
    content = name_map, tensors, checkpoint.config.n_layer
    print_table(console(), [_table(*content), _narrow_table(*content)], _stacked(*content))
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


def _by_row(
    name_map: NameMap, tensors: list[dict[str, Any]]
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Every row of the name map, which stands for all layers at once, with its first entry."""
    by_name = {entry["tensor"]: entry for entry in tensors}
    for row in name_map.rows:
        yield row, by_name[row.at(0).hf]


def _layers(n_layer: int) -> str:
    return f"{{i}} = 0 … {n_layer - 1}"


def _table(name_map: NameMap, tensors: list[dict[str, Any]], n_layer: int) -> Table:
    """A column for everything."""
    table = Table("Hugging Face tensor", "shape", "operation", "parameter", "shape", "layers")
    for row, entry in _by_row(name_map, tensors):
        table.add_row(
            row.hf,
            str(entry["shape"]),
            entry["operation"],
            "\n".join(row.ours),
            "\n".join(str(made["shape"]) for made in entry["parameters"]),
            _layers(n_layer) if "{i}" in row.hf else "",
        )
    return table


def _narrow_table(name_map: NameMap, tensors: list[dict[str, Any]], n_layer: int) -> Table:
    """Shapes behind their names, and the layers in the heading."""
    heading = f"Hugging Face tensor, {_layers(n_layer)}"
    table = Table(heading, "operation", "parameter", show_edge=False, pad_edge=False)
    for row, entry in _by_row(name_map, tensors):
        tensor, parameters = _named_shapes(row, entry)
        table.add_row(tensor, entry["operation"], "\n".join(parameters))
    return table


def _stacked(name_map: NameMap, tensors: list[dict[str, Any]], n_layer: int) -> Iterator[list[str]]:
    """A tensor and its operation, then its parameters below."""
    yield [_layers(n_layer)]
    for row, entry in _by_row(name_map, tensors):
        tensor, parameters = _named_shapes(row, entry)
        yield [tensor, entry["operation"]]
        yield from ([f"  → {parameter}"] for parameter in parameters)


def _named_shapes(row: Row, entry: dict[str, Any]) -> tuple[str, list[str]]:
    """`name [shape]` of the tensor and of what is made of it."""
    shapes = [made["shape"] for made in entry["parameters"]]
    made = [f"{name} {shape}" for name, shape in zip(row.ours, shapes, strict=True)]
    return f"{row.hf} {entry['shape']}", made
