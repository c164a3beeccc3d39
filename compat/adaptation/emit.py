"""From assignments to a name map, and from a name map to Python source.

The source has the format of `ruff format` with 100 columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from compat.adaptation.mapping.assignments import Assignment, Assignments
from compat.adaptation.tracing.graph import Graph
from compat.checkpoint.layout import expected_shapes
from compat.config import GPT2Config
from compat.name_map import NameMap, Row
from compat.ops import Reparametrized

WIDTH = 100


def to_name_map(graph: Graph, assignments: Assignments, config: GPT2Config) -> NameMap:
    """Return one row with `{i}` for tensors whose parameters differ only in the layer's number."""
    found = assignments.by_tensor
    named = {hf: _row(graph, hf, found[hf]) for hf in expected_shapes(config) if hf in found}
    rows: list[Row] = []
    for pattern in dict.fromkeys(re.sub(r"^h\.\d+\.", "h.{i}.", hf) for hf in named):
        if pattern in named:  # a tensor outside of the layers
            rows.append(named[pattern])
            continue
        layers = [named.get(pattern.replace("{i}", str(i))) for i in range(config.n_layer)]
        template = _template(pattern, layers)
        rows += [template] if template else [r for r in layers if r is not None]
    return NameMap(tuple(rows), zeros=tuple(graph.names[node] for node in assignments.zeroed))


def _row(graph: Graph, hf: str, assignment: Assignment) -> Row:
    nodes, op = assignment
    names = tuple(name for node in nodes for name in graph.parameter_names(node))
    if any(node in graph.derived for node in nodes):
        derived = (graph.derived.get(node) for node in nodes)
        op = Reparametrized(op, tuple(found.op if found else None for found in derived))
    return Row(hf, names, op)


def _template(pattern: str, layers: Sequence[Row | None]) -> Row | None:
    """Return the row that expands to those of all layers, if there is one."""
    first = layers[0]
    if first is None:
        return None
    for names in zip(*map(_with_layer, first.ours), strict=False):
        template = Row(pattern, names, first.op)
        if all(row is not None and template.at(i) == row for i, row in enumerate(layers)):
            return template
    return None


def _with_layer(name: str) -> list[str]:
    """Return the name with each of its zeros in turn replaced by `{i}`."""
    return [
        name[: found.start()] + "{i}" + name[found.end() :]
        for found in re.finditer(r"(?<!\d)0(?!\d)", name)
    ]


def to_python(name_map: NameMap) -> str:
    """Return a module that defines `name_map`: the imports from compat, then the table."""
    imports = f"from compat import {', '.join(sorted(_classes(name_map)))}"
    return f"{imports}\n\nname_map = {_wrapped(name_map, '', len('name_map = '))}\n"


def _classes(value: Any) -> set[str]:
    """Return the names of all classes that the source of `value` names."""
    inside = [x for _, x in _arguments(value)] if is_dataclass(value) else value
    own = {type(value).__name__} if is_dataclass(value) else set()
    return own.union(*map(_classes, inside)) if isinstance(inside, (list, tuple)) else own


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a dataclass's arguments: `("", value)`, or `("name=", value)` if not the default."""
    for field in fields(value):
        argument = getattr(value, field.name)
        if field.default is MISSING:
            yield "", argument
        elif argument != field.default:
            yield f"{field.name}=", argument


def _flat(value: Any) -> str:
    """Return the source of a value on one line."""
    if is_dataclass(value):
        inside = ", ".join(name + _flat(x) for name, x in _arguments(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_flat, value))}{',' if len(value) == 1 else ''})"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Return the text in double quotes if that needs no backslash."""
    written = repr(text)
    return f'"{written[1:-1]}"' if '"' not in written else written


def _wrapped(value: Any, indent: str, before: int, after: int = 0) -> str:
    """Return the source of a value on as few lines as fit.

    The arguments of a call are on the same line, on a line of their own, or on one line each.

    Args:
        value: the value to write.
        indent: the indent of the line on which it begins.
        before: characters before it on that line, without the indent.
        after: characters after it on its last line.
    """
    flat = _flat(value)
    if len(indent) + before + len(flat) + after <= WIDTH or not flat.endswith(")"):
        return flat
    deeper = indent + "    "
    parts = list(_arguments(value)) if is_dataclass(value) else [("", x) for x in value]
    opening = f"{type(value).__name__}(" if is_dataclass(value) else "("
    together = ", ".join(name + _flat(x) for name, x in parts)
    if is_dataclass(value) and len(deeper) + len(together) <= WIDTH:
        return f"{opening}\n{deeper}{together}\n{indent})"
    comma = "" if is_dataclass(value) and len(parts) == 1 else ","
    lines = [deeper + n + _wrapped(x, deeper, len(n), len(comma)) + comma for n, x in parts]
    return "\n".join([opening, *lines, f"{indent})"])
