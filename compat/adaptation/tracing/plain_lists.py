"""Modules in Python lists, tuples or dictionaries, which torch does not register."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class PlainList:
    """An attribute that holds modules without registering them.

    Args:
        owner: the module that has the attribute.
        path: the path of the attribute, from the model.
        value: the list, tuple or dictionary.
    """

    owner: nn.Module
    path: str
    value: Any

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@contextmanager
def registered(model: nn.Module) -> Iterator[list[PlainList]]:
    """Replace such attributes by nn.ModuleList and nn.ModuleDict in the body, then restore them."""
    found: list[PlainList] = []
    try:
        while fresh := _plain_lists(model):
            for plain in fresh:
                del plain.owner.__dict__[plain.name]
                kind = nn.ModuleDict if isinstance(plain.value, dict) else nn.ModuleList
                setattr(plain.owner, plain.name, kind(plain.value))
            found += fresh
        yield found
    finally:
        for plain in reversed(found):
            delattr(plain.owner, plain.name)
            plain.owner.__dict__[plain.name] = plain.value


def _plain_lists(model: nn.Module) -> list[PlainList]:
    known = set(model.modules())
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)) or not value:
                continue
            items = list(value.values()) if isinstance(value, dict) else list(value)
            # Modules that are registered elsewhere as well are parameters of the model.
            if not all(isinstance(item, nn.Module) for item in items) or known & set(items):
                continue
            if any(next(item.parameters(), None) is not None for item in items):
                found.append(PlainList(module, f"{path}.{name}" if path else name, value))
    return found
