"""compat pauses Python's garbage collector and resumes it."""

from __future__ import annotations

import gc

import pytest

from compat.collector import collector_paused
from tests.command_line import python

# Counts full collections while torch and transformers are imported and the reference is loaded.
CODE = """
import contextlib, gc
runs = []
gc.callbacks.append(lambda phase, info: runs.append((phase, info["generation"])))
import compat
from compat import open_checkpoint
if not {paused}:
    import compat.parity.reference
    compat.parity.reference.collector_paused = contextlib.nullcontext
    import torch
from compat.parity.reference import Reference
Reference(open_checkpoint("demo"), open_checkpoint("demo").dtype)
print(runs.count(("start", 2)))
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_restored_to_its_previous_state(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError), collector_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("paused", [True, False])
def test_torch_and_transformers_are_imported_without_full_collections(paused: bool) -> None:
    done = python(CODE.format(paused=paused))
    assert (int(done.stdout) == 0) is paused, done.stdout
