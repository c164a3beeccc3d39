"""Hugging Face GPT-2 weights in hand-written blocks: loaded by name, proved equal, written back."""

from compat.adaptation import Adaptation, Finding, adapt
from compat.checkpoint import Checkpoint, open_checkpoint
from compat.config import GPT2Config
from compat.decoding import PlainBlocks, left_pad
from compat.engine import Engine
from compat.errors import (
    AdaptError,
    CheckpointError,
    CompatError,
    ConfigError,
    GenerationError,
    HubError,
    NameMapError,
    ParityError,
    TokenizerError,
)
from compat.generation import (
    Completion,
    Sampling,
    TextStream,
    generate,
    generate_text,
    stream,
    stream_text,
)
from compat.inspection import Inspection, inspect_checkpoint
from compat.loading import load_block, load_into, load_pretrained, to_hf_state_dict
from compat.name_map import NameMap, Row
from compat.ops import Fused, Part, Rearrange, Rows, Same, Split, Transpose
from compat.parity import ParityReport, check_parity
from compat.saving import save_pretrained
from compat.taps import Tap
from compat.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "AdaptError",
    "Adaptation",
    "Checkpoint",
    "CheckpointError",
    "CompatError",
    "Completion",
    "ConfigError",
    "Engine",
    "Finding",
    "Fused",
    "GPT2Config",
    "GenerationError",
    "HubError",
    "Inspection",
    "NameMap",
    "NameMapError",
    "ParityError",
    "ParityReport",
    "Part",
    "PlainBlocks",
    "Rearrange",
    "Reparametrized",
    "Row",
    "Rows",
    "Same",
    "Sampling",
    "Split",
    "Tap",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "Transpose",
    "WeightNorm",
    "adapt",
    "check_parity",
    "generate",
    "generate_text",
    "inspect_checkpoint",
    "left_pad",
    "load_block",
    "load_into",
    "load_pretrained",
    "load_tokenizer",
    "open_checkpoint",
    "save_pretrained",
    "stream",
    "stream_text",
    "to_hf_state_dict",
]
