"""The files that a checkpoint is made of, by their names, and which of them are used."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from compat.checkpoint.files import read_json
from compat.errors import CheckpointError

CONFIG = "config.json"
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
# In the order in which they are looked for: safetensors first, as one file or in shards.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def gather(
    there: Collection[str],
    get: Callable[[str], Path],
    lacking: Callable[[list[str]], CheckpointError],
) -> list[Path]:
    """The files that a GPT-2 needs, the weights last.

    Args:
        there: the names of all files that can be had.
        get: gives one of them a path.
        lacking: makes the error of the names that are missing.
    """
    weights = [name for name in WEIGHT_FILES if name in there][:1]
    missing = [CONFIG] if CONFIG not in there else []
    if not weights:
        missing.append("weights (model.safetensors or pytorch_model.bin, whole or in shards)")
    elif weights[0].endswith(".index.json"):
        weight_map = read_json(get(weights[0])).get("weight_map")
        shards = weight_map.values() if isinstance(weight_map, dict) else ()
        weights += sorted({name for name in shards if isinstance(name, str)})
        missing += [name for name in weights if name not in there]
    if missing:
        raise lacking(missing)
    return [get(name) for name in (*SMALL_FILES, *weights) if name in there]
