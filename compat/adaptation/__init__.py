"""Bring your own GPT-2: find the mapping, load the weights, prove parity, name the deviations."""

from compat.adaptation.adapt import adapt
from compat.adaptation.diagnosis.registry import CODES
from compat.adaptation.result import Adaptation, Finding

__all__ = ["CODES", "Adaptation", "Finding", "adapt"]
