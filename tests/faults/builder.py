"""A correct checkpoint in every layout, small enough to be broken thousands of times.

It is written from tables in this file, without the help of compat or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]

V, N, C, LAYERS, HEADS = 262, 8, 8, 2, 2
CONFIG: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": V,
    "n_positions": N,
    "n_ctx": N,
    "n_embd": C,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "attn_pdrop": 0.1,
    "bos_token_id": 260,
    "eos_token_id": 260,
    "tie_word_embeddings": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}

BLOCK = {
    "ln_1.weight": (C,),
    "ln_1.bias": (C,),
    "attn.c_attn.weight": (C, 3 * C),
    "attn.c_attn.bias": (3 * C,),
    "attn.c_proj.weight": (C, C),
    "attn.c_proj.bias": (C,),
    "ln_2.weight": (C,),
    "ln_2.bias": (C,),
    "mlp.c_fc.weight": (C, 4 * C),
    "mlp.c_fc.bias": (4 * C,),
    "mlp.c_proj.weight": (4 * C, C),
    "mlp.c_proj.bias": (C,),
}
EMBEDDINGS_AND_NORM = {
    "wte.weight": (V, C), "wpe.weight": (N, C), "ln_f.weight": (C,), "ln_f.bias": (C,)
}  # fmt: skip
PROJECTIONS = tuple(name for name, shape in BLOCK.items() if len(shape) == 2)

END = "<|endoftext|>"
MERGES = ["t h", "th e", "i n"]


def state() -> State:
    """Return all tensors by Hugging Face's names, with the same noise in every call."""
    generator = torch.Generator().manual_seed(4)
    shapes = EMBEDDINGS_AND_NORM | {
        f"h.{i}.{k}": shape for i in range(LAYERS) for k, shape in BLOCK.items()
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def prefixed(tensors: State) -> State:
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def linear(tensors: State) -> State:
    """Return the same state with projections in the layout of `nn.Linear` and an untied head."""
    transposed = {
        name: tensor.t().contiguous() if name.endswith(PROJECTIONS) else tensor
        for name, tensor in tensors.items()
    }
    return {**transposed, "lm_head.weight": tensors["wte.weight"].clone()}


def vocab() -> dict[str, int]:
    """Return the 256 bytes in GPT-2's characters, the results of merges, and end-of-text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*map(chr, printable), *hidden, *(m.replace(" ", "") for m in MERGES)]
    return {token: i for i, token in enumerate(tokens)} | {END: 260}


def tokenizer_json() -> dict[str, Any]:
    """Return the same tokenizer as the content of one file."""
    return {
        "version": "1.0",
        "added_tokens": [{"id": 260, "content": END, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "vocab": vocab(), "merges": MERGES},
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    write_json(folder / "vocab.json", vocab())
    text = "\n".join(["#version: 0.2", *MERGES, ""])
    (folder / "merges.txt").write_text(text, encoding="utf-8")


def _one_file(folder: Path) -> None:
    save_file(state(), folder / "model.safetensors")


def _with_prefix(folder: Path) -> None:
    save_file(prefixed(state()), folder / "model.safetensors", {"format": "pt"})


def shard(tensors: State, folder: Path, stem: str, write: Callable[[State, Path], None]) -> None:
    """Write two files and their index, for example model.safetensors.index.json."""
    names, (start, ending) = list(tensors), stem.split(".")
    files = [f"{start}-0000{k}-of-00002.{ending}" for k in (1, 2)]
    parts = [{name: tensors[name] for name in names[k::2]} for k in (0, 1)]
    for file, part in zip(files, parts, strict=True):
        write(part, folder / file)
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    write_json(folder / f"{stem}.index.json", index)


def _shards(folder: Path) -> None:
    shard(prefixed(state()), folder, "model.safetensors", save_file)


def _bin_shards(folder: Path) -> None:
    shard(prefixed(state()), folder, "pytorch_model.bin", torch.save)


def _bin(folder: Path) -> None:
    torch.save(prefixed(state()), folder / "pytorch_model.bin")


def _legacy(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save(state(), path, _use_new_zipfile_serialization=False)


def nanogpt() -> dict[str, Any]:
    """Return the checkpoint as nanoGPT's train.py saves it, without the optimizer."""
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": C, "block_size": N, "vocab_size": V}
    tensors = {f"_orig_mod.transformer.{k}": v for k, v in linear(state()).items()}
    tensors["_orig_mod.lm_head.weight"] = tensors["_orig_mod.transformer.wte.weight"]
    del tensors["_orig_mod.transformer.lm_head.weight"]
    return {
        "model": tensors,
        "model_args": {**sizes, "bias": True, "dropout": 0.0},
        "iter_num": 100,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "betas": (0.9, 0.95)},
    }


def _nanogpt(folder: Path) -> None:
    (folder / "config.json").unlink()
    torch.save(nanogpt(), folder / "ckpt.pt")


def _mingpt(folder: Path) -> None:
    """Save the checkpoint as minGPT and makemore do, with masks, and with sizes in another file."""
    masks = {f"h.{i}.attn.bias": torch.ones(N, N).tril()[None, None] for i in range(LAYERS)}
    tensors = {f"transformer.{name}": v for name, v in (linear(state()) | masks).items()}
    tensors["lm_head.weight"] = tensors.pop("transformer.lm_head.weight")
    torch.save(tensors, folder / "model.pt")
    write_json(folder / "config.json", {"n_head": HEADS, "n_layer": LAYERS, "block_size": N})


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "safetensors": _one_file,
    "prefixed": _with_prefix,
    "shards": _shards,
    "bin": _bin,
    "bin shards": _bin_shards,
    "legacy": _legacy,
    "nanogpt": _nanogpt,
    "mingpt": _mingpt,
}


def build(folder: Path, layout: str = "safetensors") -> Path:
    """Write a valid checkpoint with its tokenizer, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    write_tokenizer(folder)
    LAYOUTS[layout](folder)
    return folder
