"""The sets of blocks that ship with compat; one file each holds its modules, name map and taps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from compat.dialects import conv1d, linear
from compat.errors import ConfigError, short_repr
from compat.name_map import NameMap
from compat.taps import Tap

__all__ = ["DIALECTS", "Block", "Dialect", "Model", "dialect_of", "get_dialect"]

Model = linear.GPTModel | conv1d.GPTModel
Block = linear.TransformerBlock | conv1d.TransformerBlock


@dataclass(frozen=True)
class Dialect:
    """One set of blocks; `block_path` is where block `{i}` hangs in the model."""

    name: str
    model_class: type[Model]
    block_class: type[Block]
    block_path: str
    name_map: NameMap
    taps: tuple[Tap, ...]


DIALECTS = {
    "linear": Dialect(
        "linear",
        linear.GPTModel,
        linear.TransformerBlock,
        "trf_blocks.{i}",
        linear.NAME_MAP,
        linear.TAPS,
    ),
    "conv1d": Dialect(
        "conv1d", conv1d.GPTModel, conv1d.TransformerBlock, "h.{i}", conv1d.NAME_MAP, conv1d.TAPS
    ),
}


def get_dialect(name: str) -> Dialect:
    """The dialect of that name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in DIALECTS:
        raise ConfigError(f"unknown dialect {short_repr(name)}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def dialect_of(model: nn.Module) -> Dialect | None:
    """The dialect whose GPTModel this is, or None for any other module."""
    return next((d for d in DIALECTS.values() if isinstance(model, d.model_class)), None)
