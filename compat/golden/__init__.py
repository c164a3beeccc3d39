"""Golden files: what `transformers` computes at every tap, for ports in any language."""

from compat.golden.file import Golden
from compat.golden.report import GoldenReport
from compat.golden.write import golden

__all__ = ["Golden", "GoldenReport", "golden"]
