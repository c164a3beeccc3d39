"""Hugging Face's GPT-2 as a set of tensors: names (without `transformer.`) and shapes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection

from compat.config import GPT2Config

Shape = tuple[int, ...]
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "wte.weight", "wpe.weight"
PREFIX = "transformer."  # of all names but the head's, in files that transformers saves
WRAPPERS = ("module.", "_orig_mod.")  # of all names, where DDP or torch.compile was around
MASKS = ("attn.bias", "attn.masked_bias")  # in blocks, of old files
OTHER_HEADS = {
    "score.weight": "sequence classification",
    "classifier.weight": "token classification",
    "classifier.bias": "token classification",
    "qa_outputs.weight": "question answering",
    "qa_outputs.bias": "question answering",
    "multiple_choice_head.summary.weight": "multiple choice",
    "multiple_choice_head.summary.bias": "multiple choice",
}


def saved_name(name: str) -> str:
    """The name under which `transformers` saves a tensor."""
    return name if name == HEAD else PREFIX + name


def plain_name(saved: str) -> str:
    """A tensor's name without what may stand before it in a file."""
    for prefix in (*WRAPPERS, PREFIX):
        saved = saved.removeprefix(prefix)
    return saved


def block_shapes(config: GPT2Config) -> dict[str, Shape]:
    """The tensors of one block."""
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
    """Every tensor that a GPT-2 of this configuration has, the head included even if tied."""
    C, block = config.n_embd, block_shapes(config)
    return {
        EMBEDDING: (config.vocab_size, C),
        POSITIONS: (config.n_positions, C),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in block.items()},
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
        HEAD: (config.vocab_size, C),
    }


def foreign_names(names: Collection[str]) -> list[str]:
    """Those that no GPT-2 of Hugging Face's, nanoGPT or minGPT has, of whatever size."""
    return [name for name in names if _template(name) not in _TEMPLATES]


def missing_templates(names: Collection[str]) -> list[str]:
    """Weights, such as `h.{i}.mlp.c_fc.weight`, that every GPT-2 has and that none of these is."""
    there = {_template(name) for name in names}
    return [name for name in _NEEDED if name not in there]


def in_every_block(names: Collection[str], among: Collection[str]) -> list[str]:
    """Those of `names` whose likes are in every block that there is, of two blocks or more.

    Args:
        names: of tensors of one kind.
        among: the names of all tensors.
    """
    blocks = {name.split(".")[1] for name in among if _template(name) != name}
    counts = Counter(_template(name) for name in names if _template(name) != name)
    return [name for name in names if counts[_template(name)] == len(blocks) > 1]


def _template(name: str) -> str:
    """The name with {i} for the layer."""
    return re.sub(r"^h\.(0|[1-9][0-9]*)\.", "h.{i}.", name)


def most_bytes(config: GPT2Config) -> int:
    """What a file of this configuration can need: all in float64, old masks and room for names."""
    C, block = config.n_embd, sum(math.prod(shape) for shape in block_shapes(config).values())
    per_layer = 8 * (block + config.n_positions**2) + 10_000
    return 8 * C * (2 * config.vocab_size + config.n_positions + 2) + config.n_layer * per_layer


def mask_buffers(config: GPT2Config) -> set[str]:
    """The causal masks that old files carry beside the weights: known, and ignored."""
    return {f"h.{i}.{name}" for i in range(config.n_layer) for name in MASKS}


_IN_BLOCKS = [f"h.{{i}}.{name}" for name in (*block_shapes(GPT2Config()), *MASKS)]
_NEEDED = [
    *(EMBEDDING, POSITIONS, "ln_f.weight"),
    *(name for name in _IN_BLOCKS if name.endswith(".weight")),
]
_TEMPLATES = {*_NEEDED, *_IN_BLOCKS, "ln_f.bias", HEAD, *OTHER_HEADS}
