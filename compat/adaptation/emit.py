"""A name map as Python source, laid out as `ruff format` lays it out at 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from compat.name_map import NameMap

WIDTH = 100


def to_python(name_map: NameMap) -> str:
    """A module that defines `name_map`: the imports from compat, then the table."""
    imports = f"from compat import {', '.join(sorted(_classes(name_map)))}"
    return f"{imports}\n\nname_map = {_laid_out(name_map, '', len('name_map = '))}\n"


def _classes(value: Any) -> set[str]:
    """The names of all classes that the source of `value` calls."""
    inside = [x for _, x in _arguments(value)] if is_dataclass(value) else value
    own = {type(value).__name__} if is_dataclass(value) else set()
    return own.union(*map(_classes, inside)) if isinstance(inside, (list, tuple)) else own


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    """What a dataclass was made of: `("", value)` in order, `("name=", value)` off its default."""
    for field in fields(value):
        given = getattr(value, field.name)
        if field.default is MISSING:
            yield "", given
        elif given != field.default:
            yield f"{field.name}=", given


def _flat(value: Any) -> str:
    """In one line."""
    if is_dataclass(value):
        inside = ", ".join(name + _flat(x) for name, x in _arguments(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_flat, value))}{',' if len(value) == 1 else ''})"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """In double quotes where that needs no backslash."""
    written = repr(text)
    return f'"{written[1:-1]}"' if '"' not in written else written


def _laid_out(value: Any, indent: str, before: int, after: int = 0) -> str:
    """In as few lines as fit: on one, the arguments of a call on one of their own, or one each.

    Args:
        value: what to write.
        indent: of the line that it begins on.
        before: how many characters stand before it on that line, the indent not counted.
        after: how many come after it on its last line.
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
    lines = [deeper + n + _laid_out(x, deeper, len(n), len(comma)) + comma for n, x in parts]
    return "\n".join([opening, *lines, f"{indent})"])
