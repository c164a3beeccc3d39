"""Proof, layer by layer, that a model computes what `transformers` computes."""

from compat.parity.check import check_parity, random_ids
from compat.parity.compare import Difference, TapResult
from compat.parity.report import InputResult, Limit, LogitsProof, ParityReport

__all__ = [
    "Difference",
    "InputResult",
    "Limit",
    "LogitsProof",
    "ParityReport",
    "TapResult",
    "check_parity",
    "random_ids",
]
