"""All adversaries of the proof: it must refuse the `FAULTS` and accept the `HARMLESS` variants.

Each is an `Adversary`. Build it for a checkpoint with the config `CHECKPOINT`, and run the proof
under `restored()`, because some adversaries change the process:

    with restored():
        model = entry.build(folder, scratch)
        report = check_parity(model, folder) if entry.use == "check_parity" else adapt(...)
"""

from __future__ import annotations

from tests.parity import (
    adversaries_cheating,
    adversaries_codes,
    adversaries_equal_state,
    adversaries_half,
    adversaries_harmless,
    adversaries_inputs,
    adversaries_numeric,
    adversaries_runs,
    adversaries_source,
    adversaries_state,
    adversaries_watching,
)
from tests.parity.adversary import CHECKPOINT, FAULTS, HARMLESS, Adversary, restored

__all__ = ["CHECKPOINT", "FAULTS", "HARMLESS", "PARTS", "Adversary", "in_float32", "restored"]

PARTS = (  # the modules that register entries when they are imported
    adversaries_inputs,
    adversaries_runs,
    adversaries_numeric,
    adversaries_cheating,
    adversaries_source,
    adversaries_harmless,
    adversaries_half,
    adversaries_state,
    adversaries_codes,
    adversaries_watching,
    adversaries_equal_state,
)


def in_float32(entries: dict[str, Adversary]) -> list[Adversary]:
    """Return the entries in float32; those in half precision are the same models."""
    return [entry for entry in entries.values() if entry.dtype == "float32"]
