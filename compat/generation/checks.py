"""Settings of a request: numbers that are numbers, and ids that are ids."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from compat.errors import GenerationError, shown


def is_whole(value: object) -> bool:
    """Whether a setting is an integer, NumPy's included; in Python True is one, but not here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a setting is a real number, neither NaN nor infinite nor too large for a float."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def whole_number(name: str, value: Any, least: int) -> int:
    """A setting that is an integer.

    Raises:
        GenerationError: it is something else, or below `least`.
    """
    if not is_whole(value) or value < least:
        raise GenerationError(f"{name} is {shown(value)}; expected at least {least}, an integer")
    return int(value)


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """A setting that is a collection of ids.

    Raises:
        GenerationError: it is something else.
    """
    try:
        ids = tuple(values.tolist() if isinstance(values, Tensor) else values)
    except TypeError:  # a single number, or a tensor or array of one
        ids = (None,)
    if isinstance(values, str | bytes) or not all(map(is_whole, ids)):
        raise GenerationError(f"{name} is {shown(values)}; expected token ids, such as (50256,)")
    return tuple(map(int, ids))
