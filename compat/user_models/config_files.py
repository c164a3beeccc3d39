"""Configs in the YAML, JSON and Python files of a user's project."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from compat.user_models.synonyms import SIZES, role_of
from compat.user_models.usage import users_folders

MOST_BYTES = 100_000
MOST_FILES = 300  # of a folder


def config_in_files(
    target: Callable[..., Any], names: Collection[str]
) -> tuple[str, Mapping[str, Any]] | None:
    """Return the mapping in a config file that has the most of these names, and the file's name.

    It has at least half of the sizes among the names. Of several that fit equally well it is the
    nearest to the target's file.
    """
    sizes = {name for name in names if role_of(name) in SIZES}
    found, most = None, 0
    for file in _files(target) if sizes else ():
        for table in _tables(_read(file)):
            if len(sizes & {*table}) >= len(sizes) / 2 and len({*names} & {*table}) > most:
                found, most = (file.name, table), len({*names} & {*table})
    return found


def _files(target: Callable[..., Any]) -> Iterator[Path]:
    for folder in users_folders(target):
        for pattern in ("*", "conf*/**/*"):
            nearest = sorted(folder.glob(f"{pattern}.*"), key=lambda file: (len(file.parts), file))
            for file in nearest[:MOST_FILES]:
                python = file.suffix == ".py" and "conf" in file.stem.lower()
                if (python or file.suffix in (".yaml", ".yml", ".json")) and file.is_file():
                    yield file


@lru_cache(maxsize=512)
def _read(file: Path) -> Any:
    """Return what a file holds; None if it cannot be read, or no library reads it."""
    with contextlib.suppress(Exception):
        if file.stat().st_size > MOST_BYTES:
            return None
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            return json.loads(text)
        if file.suffix == ".py":
            return dict(literals(ast.parse(text)))
        import yaml  # type: ignore[import-untyped]

        return yaml.safe_load(text)
    return None


def literals(tree: ast.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dictionaries that a module assigns, and the constants in its classes."""
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(id=name)], ast.Dict(keys, values)):
                entries: dict[Any, Any] = {}
                for key, value in zip(keys, values, strict=True):
                    with contextlib.suppress(ValueError, TypeError):  # not a literal
                        entries[ast.literal_eval(cast(ast.expr, key))] = ast.literal_eval(value)
                yield name, entries
            case ast.ClassDef(name=name, body=body):
                fields = dict[str, Any]()
                for field in body:
                    match field:
                        case ast.AnnAssign(
                            ast.Name(id=own), value=ast.Constant(value=found)
                        ) | ast.Assign([ast.Name(id=own)], ast.Constant(value=found)):
                            fields[own] = found
                yield name, fields


def _tables(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a mapping, and those in it."""
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from _tables(each)
