"""Saving a model as a Hugging Face checkpoint, in a folder that is replaced as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.checkpoint.checks import not_finite
from compat.checkpoint.layout import (
    HEAD,
    TOKENIZER_FILES,
    expected_shapes,
    has_tokenizer,
    saved_name,
)
from compat.config import DTYPES, TOKEN_IDS, GPT2Config, dtype_name
from compat.dialects import get_dialect
from compat.errors import (
    CheckpointError,
    ConfigError,
    TokenizerError,
    collapse_faults,
    described,
    lines,
    listed,
)
from compat.export_view import HFTensor, config_of, hf_tensors, with_head_of
from compat.name_map import NameMap
from compat.saving.atomic import replacing_folder
from compat.saving.shards import parse_size, write_shards
from compat.sharding import is_writer, local, raising_together, reshard
from compat.tokenizer import Tokenizer
from compat.validation import as_module, is_quantized
from compat.vocabulary import vocabulary_tables

# Names of the weights files that `transformers` (of any version) and compat write, as one file or
# in shards with an index, including variants in another data type.
_VARIANT, _SHARD = r"(\.(fp16|bf16|fp32))?", r"(-\d{5}-of-\d{5})?"
_STEMS = {"model": "safetensors", "pytorch_model": "bin", "tf_model": "h5", "flax_model": "msgpack"}
WEIGHTS = re.compile(
    "|".join(
        rf"{stem}{_VARIANT}({_SHARD}{_VARIANT}\.{ending}|\.{ending}\.index{_VARIANT}\.json)"
        for stem, ending in _STEMS.items()
    )
)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dialect_or_name_map: str | NameMap | None = None,
    tokenizer: str | Path | Checkpoint | Tokenizer | None = None,
    max_shard_size: int | str = "5GB",
    config: GPT2Config | Mapping[str, Any] | None = None,
) -> list[Path]:
    """Save a model as `transformers` saves a GPT-2, and return the paths of the files.

    All ranks of a model that is divided among several processes must call this, with the same
    arguments. The tensors are gathered one by one, and the first rank writes them.

    Everything is checked before anything is written, and the folder is replaced as a whole; see
    `compat.saving.atomic.replacing_folder`, also for what Windows does not support. Existing files
    are removed if they hold a model's weights under exactly the names that `transformers` writes
    (`model.safetensors`, `model-00001-of-00002.safetensors`, `model.fp16.safetensors`,
    `model.safetensors.index.json`, and the same for `pytorch_model.bin`, `tf_model.h5` and
    `flax_model.msgpack`) and, if `tokenizer` is passed, if they are a tokenizer's. All others are
    kept, such as a README, an optimizer's state, `model_ema.safetensors` or subfolders.

    Args:
        model: a dialect's model, or any module with a name map.
        folder: where to save; a link to a folder remains a link.
        dialect_or_name_map: None for a dialect's model; for any other module its name map, such as
            `Adaptation.name_map`, or the name of the dialect whose parameter names it has.
        tokenizer: a source whose tokenizer files are copied, or a Tokenizer, which is saved as
            vocab.json and merges.txt. A tokenizer_config.json is written if the source has none.
            None saves no tokenizer.
        max_shard_size: maximal size of a weights file that holds several tensors, in bytes or as
            a string such as "5GB" or "200MB" (units of 1000).
        config: for a model without a GPT2Config as its `config`; states `n_head` and other facts
            that do not follow from the tensors.

    Raises:
        NameMapError: The map lacks parameters.
        ConfigError: The model is not a module, or the config is missing or contradicts the tensors.
        CheckpointError: Weights are non-finite or not floating-point, or the folder cannot be
            written.
        TokenizerError: There are no tokenizer files, or the vocabulary does not fit.
    """
    limit = parse_size(max_shard_size)
    model = as_module(model)
    if not isinstance(folder, str | os.PathLike) or "\0" in os.fspath(folder):
        raise CheckpointError(f"folder is {described(folder)}, but must be a path.")
    reshard(model)
    together = partial(raising_together, list(model.parameters()))
    with together():
        _check_parameters(model)
    chosen = dialect_or_name_map
    name_map = get_dialect(chosen).name_map if isinstance(chosen, str) else chosen
    tensors = hf_tensors(model, name_map)
    config = with_head_of(config_of(model, config), tensors)
    _check_shapes(model, config, tensors)
    small = {**_config_files(config, tensors), **_tokenizer_files(tokenizer, config)}

    def superseded(name: str) -> bool:
        return bool(WEIGHTS.fullmatch(name)) or (tokenizer is not None and name in TOKENIZER_FILES)

    temporary: Path | None = None
    with ExitStack() as stack:
        with together():
            if is_writer(model.parameters()):
                temporary = stack.enter_context(replacing_folder(folder, superseded))
        saved = {saved_name(name): tensor for name, tensor in tensors.items()}
        names = write_shards(temporary, saved, limit)
        with together():
            if temporary is not None:
                _write_small(temporary, small)
                stack.close()  # replaces the folder
    return [Path(folder) / name for name in (*names, *small)]


def _write_small(folder: Path, files: Mapping[str, str | Path]) -> None:
    for name, content in files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")


def _check_parameters(model: nn.Module) -> None:
    """Check that parameters are dense, floating-point and finite, which every program can read."""
    faults = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            faults.append((name, "on the meta device, without values. Load its weights first"))
        elif is_quantized(parameter):
            faults.append((name, "quantized by torchao. Save the model before quantizing it"))
        elif parameter.dtype not in DTYPES.values() or parameter.layout != torch.strided:
            kind = dtype_name(parameter.dtype)
            faults.append((name, f"{kind}, {parameter.layout}, but must be a dense float tensor"))
        elif fault := not_finite(local(parameter.detach())):
            faults.append((name, fault))
    if faults:
        headline = f"{type(model).__name__} cannot be saved:"
        raise CheckpointError(lines(headline, collapse_faults(faults)))


def _check_shapes(model: nn.Module, config: GPT2Config, tensors: Mapping[str, HFTensor]) -> None:
    """Check that the tensors are those of a GPT-2 with this config."""
    expected = expected_shapes(config)
    if config.tie_word_embeddings:
        del expected[HEAD]
    faults = [(name, "the model has none") for name in expected if name not in tensors]
    faults += [(name, "the config has no place for it") for name in tensors if name not in expected]
    faults += [
        (name, f"found {list(tensor.like.shape)}, expected {list(expected[name])}")
        for name, tensor in tensors.items()
        if name in expected and tensor.like.shape != expected[name]
    ]
    if faults:
        headline = f"the config does not fit {type(model).__name__}:"
        raise ConfigError(lines(headline, collapse_faults(faults)))


def _config_files(config: GPT2Config, tensors: Mapping[str, HFTensor]) -> dict[str, str]:
    """Return the contents of config.json, which names the data type, and generation_config.json."""
    dtype = reduce(torch.promote_types, (tensor.like.dtype for tensor in tensors.values()))
    fields = {**config.to_hf_dict(), "dtype": dtype_name(dtype)}
    ids = {name: fields[name] for name in TOKEN_IDS}
    generation = {"_from_model_config": True, **{k: v for k, v in ids.items() if v is not None}}
    return {"config.json": _as_json(fields), "generation_config.json": _as_json(generation)}


def _tokenizer_files(
    tokenizer: str | Path | Checkpoint | Tokenizer | None, config: GPT2Config
) -> dict[str, str | Path]:
    """Return the content of each file by its name, or the path from which to copy it.

    A tokenizer_config.json is added if there is none: without its `model_max_length`, programs
    accept texts of any length.
    """
    if tokenizer is None:
        return {}
    fields = {"model_max_length": config.n_positions, "tokenizer_class": "GPT2Tokenizer"}
    added: dict[str, str | Path] = {"tokenizer_config.json": _as_json(fields)}
    if isinstance(tokenizer, Tokenizer):
        return {**_vocabulary_files(tokenizer, config), **added}
    if not isinstance(tokenizer, str | os.PathLike | Checkpoint):
        raise TokenizerError(
            f"tokenizer is {described(tokenizer)}, but must be a Tokenizer, or the source of one "
            "(a hub id, a folder or 'demo')."
        )
    is_folder = isinstance(tokenizer, str | os.PathLike) and Path(tokenizer).is_dir()
    if is_folder and tokenizer != "demo":  # it need not hold weights
        folder = Path(str(tokenizer))
    else:
        folder = open_checkpoint(tokenizer).folder
    if not has_tokenizer(folder):
        raise TokenizerError(
            f"{folder} has no tokenizer.json, nor vocab.json and merges.txt. Leave out `tokenizer` "
            "to save none."
        )
    return added | {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}


def _vocabulary_files(tokenizer: Tokenizer, config: GPT2Config) -> dict[str, str | Path]:
    vocab, merges, added = vocabulary_tables(tokenizer.vocabulary)
    if added:
        raise TokenizerError(
            f"vocab.json and merges.txt cannot hold the special tokens {listed(list(added))}. Pass "
            "the folder that the tokenizer was loaded from."
        )
    if (highest := max(vocab.values())) >= config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has id {highest}, but the config has vocab_size {config.vocab_size}. "
            "Pass the model's own tokenizer."
        )
    return {"vocab.json": _as_json(vocab), "merges.txt": "\n".join(["#version: 0.2", *merges, ""])}


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
