"""The dialects: two implementations of GPT-2, each in one file with its name map and taps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from compat.dialects import conv1d, linear
from compat.errors import ConfigError, short_repr
from compat.name_map import NameMap
from compat.tap import Tap

__all__ = ["DIALECTS", "Block", "Dialect", "Model", "dialect_of", "get_dialect"]

Model = linear.GPTModel | conv1d.GPTModel
Block = linear.TransformerBlock | conv1d.TransformerBlock


@dataclass(frozen=True)
class Dialect:
    """An implementation of GPT-2; `block_path` is the path of block `{i}` in the model."""

    name: str
    model_class: type[Model]
    block_class: type[Block]
    block_path: str
    name_map: NameMap
    taps: tuple[Tap, ...]


DIALECTS = {
    name: Dialect(name, file.GPTModel, file.TransformerBlock, path, file.NAME_MAP, file.TAPS)
    for name, file, path in (("linear", linear, "trf_blocks.{i}"), ("conv1d", conv1d, "h.{i}"))
}


def get_dialect(name: str) -> Dialect:
    """Return the dialect with this name.

    Raises:
        ConfigError: there is no such dialect.
    """
    if not isinstance(name, str) or name not in DIALECTS:
        raise ConfigError(
            f"dialect is {short_repr(name)}, but must be one of {', '.join(DIALECTS)}"
        )
    return DIALECTS[name]


def dialect_of(model: nn.Module) -> Dialect | None:
    """Return the dialect of a model; None for any other module."""
    return next((d for d in DIALECTS.values() if isinstance(model, d.model_class)), None)
