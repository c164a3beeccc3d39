"""Golden files: what `transformers` computes at every tap, for ports in any language."""

from compat.golden_files.file import Golden
from compat.golden_files.report import GoldenReport
from compat.golden_files.write import golden

__all__ = ["Golden", "GoldenReport", "golden"]
