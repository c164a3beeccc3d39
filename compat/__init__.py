"""Load Hugging Face GPT-2 checkpoints into hand-written GPT-2 blocks, prove that they compute what
`transformers` computes, and generate text.

Public names are imported on first use, so that `import compat` and the help of the command line do
not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compat.collector import collector_paused
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

if TYPE_CHECKING:
    # From the modules of `adapt` and `generate`: mypy takes the packages' names for these modules.
    from compat.adaptation import Adaptation, Finding
    from compat.adaptation.adapt import adapt
    from compat.checkpoint import Checkpoint, open_checkpoint
    from compat.config import GPT2Config
    from compat.decoding import PlainBlocks, left_pad
    from compat.engine import Engine
    from compat.generation import Completion, Sampling, TextStream, generate_text, stream_text
    from compat.generation.generate import generate, stream
    from compat.golden_files import Golden, GoldenReport, golden
    from compat.inspection import Inspection, inspect_checkpoint
    from compat.loading import load_block, load_into, load_pretrained, to_hf_state_dict
    from compat.lora import lora_from_hf, lora_to_hf, merge_lora
    from compat.name_map import NameMap, Row
    from compat.ops import (
        Affine,
        Fused,
        Part,
        Rearrange,
        Reparametrized,
        Rows,
        Same,
        Split,
        Transpose,
        WeightNorm,
    )
    from compat.packing import pack_checkpoint
    from compat.parity import ParityReport, check_parity
    from compat.parity.trace import taps, trace, tracing
    from compat.saving import save_pretrained
    from compat.sharding import distribute
    from compat.tap import Tap
    from compat.tokenizer import Tokenizer, load_tokenizer

    __version__: str

_NAMES = {
    "adaptation": "Adaptation Finding adapt",
    "checkpoint": "Checkpoint open_checkpoint",
    "config": "GPT2Config",
    "decoding": "PlainBlocks left_pad",
    "engine": "Engine",
    "generation": "Completion Sampling TextStream generate generate_text stream stream_text",
    "golden_files": "Golden GoldenReport golden",
    "inspection": "Inspection inspect_checkpoint",
    "loading": "load_block load_into load_pretrained to_hf_state_dict",
    "lora": "lora_from_hf lora_to_hf merge_lora",
    "name_map": "NameMap Row",
    "ops": "Affine Fused Part Rearrange Reparametrized Rows Same Split Transpose WeightNorm",
    "packing": "pack_checkpoint",
    "parity": "ParityReport check_parity",
    "parity.trace": "taps trace tracing",
    "saving": "save_pretrained",
    "sharding": "distribute",
    "tap": "Tap",
    "tokenizer": "Tokenizer load_tokenizer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AdaptError",
    "Adaptation",
    "Affine",
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
    "Golden",
    "GoldenReport",
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
    "__version__",
    "adapt",
    "check_parity",
    "distribute",
    "generate",
    "generate_text",
    "golden",
    "inspect_checkpoint",
    "left_pad",
    "load_block",
    "load_into",
    "load_pretrained",
    "load_tokenizer",
    "lora_from_hf",
    "lora_to_hf",
    "merge_lora",
    "open_checkpoint",
    "pack_checkpoint",
    "save_pretrained",
    "stream",
    "stream_text",
    "taps",
    "to_hf_state_dict",
    "trace",
    "tracing",
]


def __getattr__(name: str) -> Any:
    """Import a public name, and keep it."""
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("gpt2-compat")
    elif name in _MODULES:
        with collector_paused():  # it may import torch
            value = getattr(import_module(f"compat.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
