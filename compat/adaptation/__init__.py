"""Map a user's GPT-2 to a checkpoint, load the weights, prove parity and name the deviations."""

from compat.adaptation.adapt import adapt
from compat.adaptation.diagnosis.registry import CODES
from compat.adaptation.result import Adaptation, Finding

__all__ = ["CODES", "Adaptation", "Finding", "adapt"]
