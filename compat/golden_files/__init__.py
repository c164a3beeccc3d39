"""Golden files: hidden states of `transformers`, with which ports in any language are compared."""

from compat.golden_files.file import Golden
from compat.golden_files.report import GoldenReport
from compat.golden_files.write import golden

__all__ = ["Golden", "GoldenReport", "golden"]
