"""Helpers of the saving tests that read an export, also with transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import State


def stored_tensors(folder: Path) -> State:
    """Return all tensors of a folder's model.safetensors or shards, with the names in the files."""
    state: State = {}
    for pattern in ("model.safetensors", "model-?????-of-?????.safetensors"):
        for path in sorted(folder.glob(pattern)):
            state.update(load_file(path))
    return state


@contextmanager
def no_warnings() -> Iterator[None]:
    """Check that transformers logs no warnings; other warnings are errors in all tests anyway."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    level = logger.level
    logger.setLevel(logging.WARNING)
    transformers.utils.logging.warning_once.cache_clear()  # to log earlier warnings again
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert messages == []


def open_in_transformers(folder: Path) -> transformers.GPT2LMHeadModel:
    """Open the folder in transformers with its defaults, and check that it logs no warnings."""
    with no_warnings():
        model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


def their_logits(model: transformers.GPT2LMHeadModel, input_ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids).logits
    return logits
