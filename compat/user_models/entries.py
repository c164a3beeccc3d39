"""Arguments and the entries of configs among them: nested, or flat as `argument.entry`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from compat.config import GPT2Config

PLAIN = (bool, int, float, str)  # types of values without entries, which can be compared


def entries_of(value: Any) -> dict[str, Any]:
    """Return a config's named entries, if it is a dictionary, a namespace or a dataclass."""
    if isinstance(value, Mapping):
        return {key: entry for key, entry in value.items() if isinstance(key, str)}
    plain = isinstance(value, (SimpleNamespace, GPT2Config)) or dataclasses.is_dataclass(value)
    return dict(vars(value)) if plain and hasattr(value, "__dict__") else {}


def attributes(value: object) -> dict[str, Any]:
    """Return an object's own attributes."""
    return dict(getattr(value, "__dict__", {}))


def nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"config.n": 1, "dim": 2}` as `{"config": {"n": 1}, "dim": 2}`."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        *owners, last = name.split(".")
        inner = found
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[last] = value
    return found


def flattened(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"config": {"n": 1}, "dim": 2}` to `{"config.n": 1, "dim": 2}`."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        inner = flattened(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{key}".rstrip("."): each for key, each in inner.items()}
    return flat


def only(arguments: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the arguments and entries `argument.entry` of these names; all without names."""
    if not names:
        return arguments
    own = dict(arguments)
    for name, value in arguments.items():
        own |= {f"{name}.{key}": entry for key, entry in entries_of(value).items()}
    for name in set(names) - set(own):  # in the body of a class of the user's
        owner, _, key = name.partition(".")
        if hasattr(arguments.get(owner), key):
            own[name] = getattr(arguments[owner], key)
    return nested({name: own[name] for name in names if name in own})


def last_part(name: str) -> str:
    """Return the entry of `argument.entry`, or the argument."""
    return name.rpartition(".")[2]
