"""Hugging Face GPT-2 weights in hand-written blocks: loaded by name, proved equal, written back."""

from compat.config import GPT2Config
from compat.errors import (
    CheckpointError,
    CompatError,
    ConfigError,
    GenerationError,
    HubError,
    NameMapError,
    ParityError,
    TokenizerError,
)
from compat.loading import load_block, load_into, load_pretrained, to_hf_state_dict
from compat.name_map import NameMap, Row, Same, Split, Transpose

__all__ = [
    "CheckpointError",
    "CompatError",
    "ConfigError",
    "GPT2Config",
    "GenerationError",
    "HubError",
    "NameMap",
    "NameMapError",
    "ParityError",
    "Row",
    "Same",
    "Split",
    "TokenizerError",
    "Transpose",
    "load_block",
    "load_into",
    "load_pretrained",
    "to_hf_state_dict",
]
