"""A user's own model: its class or function found in a file, notebook or package, and called."""

from compat.user_models.accelerators import on_available_device
from compat.user_models.construct import construct, construct_with_call, found_by_trying
from compat.user_models.edited import edited_sources
from compat.user_models.module_sizes import resized
from compat.user_models.target import (
    downloads,
    imported_siblings,
    load_forward,
    load_target,
    other_targets,
    part_classes,
    restore_siblings,
)

__all__ = [
    "construct",
    "construct_with_call",
    "downloads",
    "edited_sources",
    "found_by_trying",
    "imported_siblings",
    "load_forward",
    "load_target",
    "on_available_device",
    "other_targets",
    "part_classes",
    "resized",
    "restore_siblings",
]
