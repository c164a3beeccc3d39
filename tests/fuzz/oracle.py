"""Reads a mutated file without compat, and compares it with what compat loaded."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from compat import GPT2Config, Tokenizer, load_pretrained, load_tokenizer, to_hf_state_dict
from compat.checkpoint import open_checkpoint
from tests.faults.builder import PROJECTIONS

TEXT = "the thin thing, within 22 things:\n\n  it's (th)ther  \t\x00~"
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"


@dataclass
class Loaded:
    """The values that compat loads from a folder."""

    weights: Path
    config: GPT2Config
    notes: list[str]
    tensors: dict[str, Tensor]
    of_model: dict[str, Tensor]
    tokenizer: Tokenizer


Loader = Callable[[Path], Loaded]


def load(folder: Path) -> Loaded:
    """Load all tensors, a model and its tokenizer."""
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.read(name) for name in checkpoint.infos}
    of_model = to_hf_state_dict(load_pretrained(checkpoint, "conv1d"))
    tokenizer = load_tokenizer(checkpoint)
    return Loaded(
        checkpoint.weights, checkpoint.config, checkpoint.notes, tensors, of_model, tokenizer
    )


def wrong(loaded: Loaded) -> Iterator[str]:
    """Yield the differences between the loaded values and the files."""
    yield from _wrong_tensors(loaded)
    yield from _wrong_config(loaded)
    yield from _wrong_tokenizer(loaded)


def _wrong_tensors(loaded: Loaded) -> Iterator[str]:
    stored, no_biases = _stored(loaded.weights)
    for name, tensor in loaded.tensors.items():
        theirs = stored.get(name, stored.get("wte.weight") if name == "lm_head.weight" else None)
        if theirs is None and no_biases and name.endswith(".bias"):
            theirs = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if theirs is None or not _same(tensor, theirs):
            yield f"{name} is not what the file has"
    notes = " ".join(loaded.notes)
    for name in stored.keys() - loaded.tensors.keys():
        if name.rpartition(".")[0] not in notes and "mask" not in notes:
            yield f"{name} is passed over without a word"
    for name, tensor in loaded.of_model.items():
        short = name.removeprefix("transformer.")
        if not _same(tensor, loaded.tensors[short].to(tensor.dtype)):
            yield f"the model's {short} is not the tensor that was read"


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (ours, theirs)))


def _stored(weights: Path) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors with Hugging Face's names and layout, and whether biases are zero."""
    names = [weights.name]
    if weights.name.endswith(".index.json"):
        names = sorted(set(json.loads(weights.read_bytes())["weight_map"].values()))
    raw: dict[str, Any] = {}
    for name in names:
        path = weights.parent / name
        safe = path.suffix == ".safetensors"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs; compat's own count
            raw |= load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
    args = raw.get("model_args", {})
    tensors = {
        re.sub(r"^((module|_orig_mod|transformer)\.)*", "", name): tensor.detach()
        for name, tensor in (raw["model"] if "model_args" in raw else raw).items()
    }
    if weights.suffix == ".pt":  # these have the layout of nn.Linear
        tensors = {k: v.t() if k.endswith(PROJECTIONS) else v for k, v in tensors.items()}
    return tensors, args.get("bias") is False


def _wrong_config(loaded: Loaded) -> Iterator[str]:
    path = loaded.weights.parent / "config.json"
    raw = json.loads(path.read_bytes()) if path.exists() else {}
    for field in fields(GPT2Config):
        ours, theirs = getattr(loaded.config, field.name), raw.get(field.name)
        theirs = tuple(theirs) if isinstance(theirs, list) else theirs
        if theirs is not None and ours != theirs and field.name != "tie_word_embeddings":
            yield f"config.{field.name} is {ours!r}, not {theirs!r}"


def _wrong_tokenizer(loaded: Loaded) -> Iterator[str]:
    ids = loaded.tokenizer.encode(TEXT)
    if loaded.tokenizer.decode(ids) != TEXT:
        yield "the tokenizer does not give the text back"
    if ids != (theirs := _encoded(*_tables(loaded.weights.parent))):
        yield f"the tokenizer makes {ids}, not {theirs}"


def _tables(folder: Path) -> tuple[dict[str, int], list[list[str]]]:
    if (folder / "tokenizer.json").exists():
        model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
        merges = model.get("merges", [])
        return model["vocab"], [m.split(" ") if isinstance(m, str) else m for m in merges]
    rows = (folder / "merges.txt").read_bytes().decode().split("\n")
    merges = [row.split(" ") for row in rows if row and not row.startswith("#version")]
    return json.loads((folder / "vocab.json").read_bytes()), merges


def _encoded(vocab: dict[str, int], merges: list[list[str]]) -> list[int]:
    """Encode by the definition of byte-level BPE: always merge the adjacent pair of lowest rank."""
    ranks = {(left, right): rank for rank, (left, right) in enumerate(merges)}
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    ids: list[int] = []
    for piece in re.findall(PIECES, TEXT):
        parts = [chr(256 + hidden.index(b)) if b in hidden else chr(b) for b in piece.encode()]
        while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
            at = list(pairwise(parts)).index(min(pairs, key=ranks.__getitem__))
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        ids += [vocab[part] for part in parts]
    return ids
