"""Proof, layer by layer, that a model computes what `transformers` computes."""

from compat.parity.check import check_dialects, check_parity, random_ids
from compat.parity.compare import Difference, TapResult
from compat.parity.report import (
    GradientResult,
    GradientsProof,
    InputResult,
    Limit,
    LogitsProof,
    ParityReport,
    WeightDifference,
)

__all__ = [
    "Difference",
    "GradientResult",
    "GradientsProof",
    "InputResult",
    "Limit",
    "LogitsProof",
    "ParityReport",
    "TapResult",
    "WeightDifference",
    "check_dialects",
    "check_parity",
    "random_ids",
]
