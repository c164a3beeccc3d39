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
from compat.generation import generate, left_pad, stream
from compat.loading import load_block, load_into, load_pretrained, to_hf_state_dict
from compat.name_map import NameMap, Row, Same, Split, Transpose
from compat.parity import ParityReport, check_parity
from compat.taps import Tap
from compat.tokenizer import Tokenizer, load_tokenizer

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
    "ParityReport",
    "Row",
    "Same",
    "Split",
    "Tap",
    "Tokenizer",
    "TokenizerError",
    "Transpose",
    "check_parity",
    "generate",
    "left_pad",
    "load_block",
    "load_into",
    "load_pretrained",
    "load_tokenizer",
    "stream",
    "to_hf_state_dict",
]
