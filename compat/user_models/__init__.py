"""Somebody's own model: its class found in a file, notebook or package, and built to size."""

from compat.user_models.construct import construct
from compat.user_models.module_sizes import resized
from compat.user_models.target import load_class

__all__ = ["construct", "load_class", "resized"]
