"""Helpers that write sharded checkpoints and check the contents of an open one."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from compat.checkpoint import Checkpoint
from tests.conftest import State


def check_contents(checkpoint: Checkpoint, state: State) -> None:
    """Check that the checkpoint has exactly these tensors, bit for bit, and a tied head."""
    wanted = {"lm_head.weight": state["wte.weight"], **state}
    assert checkpoint.infos.keys() == wanted.keys()
    for name, tensor in wanted.items():
        read = checkpoint.read(name)
        assert read.dtype == checkpoint.infos[name].dtype == tensor.dtype, name
        assert read.shape == checkpoint.infos[name].shape, name
        assert torch.equal(read, tensor), name


def save_sharded(folder: Path, tiny: Path) -> Path:
    """Save the checkpoint in shards of at most 20 KB."""
    model = transformers.GPT2LMHeadModel.from_pretrained(tiny)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()
    return folder
