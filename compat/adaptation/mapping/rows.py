"""From homes to a name map: rows with `{i}` for the layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import Node

from compat.adaptation.mapping.assignments import Assignments
from compat.adaptation.tracing.graph import Graph
from compat.checkpoint.layout import expected_shapes
from compat.config import GPT2Config
from compat.name_map import NameMap, Op, Row
from compat.ops import Reparametrized


def to_name_map(graph: Graph, mapping: Assignments, config: GPT2Config) -> NameMap:
    """Rows with `{i}` where the names of all layers differ in the layer's number alone."""
    n_layer = config.n_layer
    named = {hf: _row(graph, hf, nodes, op) for hf, (nodes, op) in mapping.by_tensor.items()}
    rows: list[Row] = []
    ordered = [hf for hf in expected_shapes(config) if hf in named]
    for hf, row in ((hf, named[hf]) for hf in ordered):
        parts = hf.split(".")
        if parts[0] != "h":
            rows.append(row)
        elif parts[1] == "0":
            of_all = [named.get(".".join(["h", str(i), *parts[2:]])) for i in range(n_layer)]
            template = _template(hf, row, of_all)
            rows += [template] if template else [r for r in of_all if r is not None]
        elif f"h.0.{'.'.join(parts[2:])}" not in named:
            rows.append(row)
    return NameMap(tuple(rows), zeros=tuple(graph.names[node] for node in mapping.zeroed))


def _row(graph: Graph, hf: str, nodes: Sequence[Node], op: Op) -> Row:
    names = tuple(name for node in nodes for name in graph.parameter_names(node))
    if any(node in graph.derived for node in nodes):
        derived = (graph.derived.get(node) for node in nodes)
        op = Reparametrized(op, tuple(found.op if found else None for found in derived))
    return Row(hf, names, op)


def _template(hf: str, row: Row, of_all: Sequence[Row | None]) -> Row | None:
    """The row of layer 0 with `{i}` for the number that counts the layers, if there is one."""
    ours = [_counted(name) for name in row.ours]
    for place in range(max(len(options) for options in ours)):
        if any(place >= len(options) for options in ours):
            return None
        template = Row(hf.replace("h.0.", "h.{i}.", 1), tuple(o[place] for o in ours), row.op)
        if all(r is not None and template.at(i) == r for i, r in enumerate(of_all)):
            return template
    return None


def _counted(name: str) -> list[str]:
    """The name with each of its zeros in turn replaced by `{i}`."""
    return [
        name[: found.start()] + "{i}" + name[found.end() :]
        for found in re.finditer(r"(?<!\d)0(?!\d)", name)
    ]
