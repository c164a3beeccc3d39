"""Loaders with one mistake each, all of which the harness must detect."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

from compat.errors import CheckpointError
from tests.fuzz.oracle import Loaded, load


def lets_a_key_error_escape(folder: Path) -> Loaded:
    try:
        return load(folder)
    except CheckpointError as error:
        raise KeyError("wte.weight") from error


def returns_other_weights(folder: Path) -> Loaded:
    loaded = load(folder)
    loaded.tensors["ln_f.bias"] = loaded.tensors["ln_f.bias"].nextafter(
        loaded.tensors["ln_f.weight"]
    )
    return loaded


def returns_another_config(folder: Path) -> Loaded:
    loaded = load(folder)
    return replace(loaded, config=replace(loaded.config, n_head=1))


def returns_another_tokenizer(folder: Path) -> Loaded:
    loaded = load(folder)
    loaded.tokenizer._ids.reverse()
    return loaded


def exits(folder: Path) -> Loaded:
    os._exit(3)


def crashes(folder: Path) -> Loaded:
    ctypes.string_at(0)
    return load(folder)


def hangs(folder: Path) -> Loaded:
    time.sleep(1000)
    return load(folder)


def takes_memory(folder: Path) -> Loaded:
    held = b"x" * (300 << 20)
    del held
    return load(folder)


def takes_too_much_memory(folder: Path) -> Loaded:
    held = b"x" * (2000 << 20)
    del held
    return load(folder)


def takes_long(folder: Path) -> Loaded:
    end = time.process_time() + 2.5
    while time.process_time() < end:
        pass
    return load(folder)


def prints(folder: Path) -> Loaded:
    print("loading", file=sys.stderr, flush=True)
    return load(folder)


def warns(folder: Path) -> Loaded:
    warnings.warn("loading", stacklevel=1)
    return load(folder)


def does_not_say_where(folder: Path) -> Loaded:
    try:
        return load(folder)
    except CheckpointError:
        raise CheckpointError("something is wrong") from None


def sends_the_terminal_commands(folder: Path) -> Loaded:
    class Raw(CheckpointError):
        __str__ = Exception.__str__

    raise Raw(f"{folder} holds \x1b[2J")
