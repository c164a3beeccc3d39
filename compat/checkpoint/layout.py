"""Hugging Face's GPT-2 checkpoint as a set of files and of tensors: names and shapes.

Tensor names are without the prefix `transformer.`.
"""

from __future__ import annotations

import math
from pathlib import Path

from compat.config import GPT2Config

CONFIG = "config.json"
# In order of preference.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
SMALL_FILES = (CONFIG, "generation_config.json", *TOKENIZER_FILES)

Shape = tuple[int, ...]
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "wte.weight", "wpe.weight"
PROJECTIONS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PREFIX = "transformer."  # begins all names but the head's in files that transformers saves
WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DDP and torch.compile


def vocabulary_files(folder: Path) -> list[str]:
    """Return the names of the `VOCABULARY_FILES` in a folder."""
    return [name for name in VOCABULARY_FILES if (folder / name).is_file()]


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer.json, or a vocab.json with a merges.txt."""
    has = vocabulary_files(folder)
    return "tokenizer.json" in has or len(has) == 2


def saved_name(name: str) -> str:
    """Return the name under which `transformers` saves a tensor."""
    return name if name == HEAD else PREFIX + name


def plain_name(saved: str) -> str:
    """Return a tensor's name without the prefixes that it may have in a file."""
    for prefix in (*WRAPPERS, PREFIX):
        saved = saved.removeprefix(prefix)
    return saved


def block_shapes(config: GPT2Config) -> dict[str, Shape]:
    """Name and shape of the tensors of one block."""
    C, inner = config.n_embd, config.d_inner
    return {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (C, 3 * C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, C),
        "mlp.c_proj.bias": (C,),
    }


def expected_shapes(config: GPT2Config) -> dict[str, Shape]:
    """Name and shape of every tensor of a GPT-2 with this config, a tied head included."""
    C, block = config.n_embd, block_shapes(config)
    return {
        EMBEDDING: (config.vocab_size, C),
        POSITIONS: (config.n_positions, C),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in block.items()},
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
        HEAD: (config.vocab_size, C),
    }


def most_bytes(config: GPT2Config) -> int:
    """Return an upper bound on a file's size: all tensors in float64, old masks, and names."""
    C, block = config.n_embd, sum(math.prod(shape) for shape in block_shapes(config).values())
    per_layer = 8 * (block + config.n_positions**2) + 10_000
    return 8 * C * (2 * config.vocab_size + config.n_positions + 2) + config.n_layer * per_layer
