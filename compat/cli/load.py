"""`load`: show which tensor of a checkpoint became which parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import compat
from compat.cli import options
from compat.cli.output import console, print_json, print_notes, print_table, table

if TYPE_CHECKING:
    from compat.name_map import NameMap


def load_command(
    source: options.Source = None,
    model: options.Model = None,
    dialect: options.Dialect = "linear",
    revision: options.Revision = None,
    verify: options.Verify = False,
    n_head: options.NHead = None,
    as_json: options.Json = False,
) -> None:
    """Load a checkpoint by name and show which tensor became which parameter."""
    source = options.choose_source(source, model)
    checkpoint = compat.open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    loaded = compat.load_pretrained(checkpoint, dialect)
    parameters = list(loaded.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    from compat.dialects import get_dialect

    name_map = get_dialect(dialect).name_map
    tensors = _tensors(name_map, checkpoint)
    if as_json:
        print_json(
            {
                "model": source,
                "weights": str(checkpoint.weights),
                "dialect": dialect,
                "dtype": str(checkpoint.dtype).removeprefix("torch."),
                "parameters": count,
                "tensors": tensors,
                "notes": checkpoint.notes,
            }
        )
        return
    _show(name_map, tensors, checkpoint.config.n_layer)
    tied = ", the head tied to the embedding" if checkpoint.config.tie_word_embeddings else ""
    print(
        f"{len(tensors)} tensors of {checkpoint.weights} → {len(parameters)} {dialect} parameters "
        f"with {count:,} values{tied}"
    )
    print_notes(checkpoint.notes)


def _tensors(name_map: NameMap, checkpoint: compat.Checkpoint) -> list[dict[str, Any]]:
    """Return every Hugging Face tensor's name, shape, operation, and resulting parameters."""
    import torch

    entries = []
    for row in name_map.expand(checkpoint.config.n_layer):
        shape = checkpoint.infos[row.hf].shape
        loaded = row.op.load(torch.empty(shape, device="meta"))
        parameters = [
            {"name": name, "shape": list(value.shape)}
            for name, value in zip(row.ours, loaded, strict=True)
        ]
        entries.append(
            {
                "tensor": row.hf,
                "shape": list(shape),
                "operation": str(row.op),
                "parameters": parameters,
            }
        )
    return entries


def _show(name_map: NameMap, tensors: list[dict[str, Any]], n_layer: int) -> None:
    """Print a table with one line for each row of the name map, which covers all layers."""
    entries = {entry["tensor"]: entry for entry in tensors}
    layers = f"{{i}} = 0 … {n_layer - 1}"
    wide, narrow = [], []
    for row in name_map.rows:
        entry = entries[row.at(0).hf]
        operation = entry["operation"]
        shapes = [str(parameter["shape"]) for parameter in entry["parameters"]]
        names, all_shapes = "\n".join(row.ours), "\n".join(shapes)
        row_layers = layers if "{i}" in row.hf else ""
        wide.append([row.hf, str(entry["shape"]), operation, names, all_shapes, row_layers])
        made = "\n".join(" ".join(pair) for pair in zip(row.ours, shapes, strict=True))
        narrow.append([f"{row.hf} {entry['shape']}", operation, made])

    def stacked() -> Iterator[list[str]]:
        yield [layers]
        for tensor, operation, made in narrow:
            yield [tensor, operation]
            yield from ([f"  → {parameter}"] for parameter in made.split("\n"))

    tensor = "Hugging Face tensor"
    tables = [
        table([tensor, "shape", "operation", "parameter", "shape", "layers"], wide),
        table(
            [f"{tensor}, {layers}", "operation", "parameter"],
            narrow,
            show_edge=False,
            pad_edge=False,
        ),
    ]
    print_table(console(), tables, stacked())
