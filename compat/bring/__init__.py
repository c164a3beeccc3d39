"""Somebody's own model: its class found in a file, notebook or package, and built to size."""

from compat.bring.construct import construct
from compat.bring.module_sizes import resized
from compat.bring.target import load_class

__all__ = ["construct", "load_class", "resized"]
