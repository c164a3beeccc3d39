"""Checks of request settings."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from compat.errors import GenerationError, short_repr


def is_integer(value: object) -> bool:
    """Return whether a setting is an integer, NumPy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Return whether a setting is a finite real number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse anything but an integer from `least` on.

    Raises:
        GenerationError: the setting is something else.
    """
    if not is_integer(value) or value < least:  # type: ignore[operator]
        raise GenerationError(
            f"{name} is {short_repr(value)}, but must be an integer of at least {least}"
        )


def check_token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Return a setting that is a collection of token ids, as a tuple.

    Raises:
        GenerationError: the setting is something else.
    """
    try:
        ids = tuple(values.tolist() if isinstance(values, Tensor) else values)
    except TypeError:  # a single number, or a tensor or array of one
        ids = (None,)
    if isinstance(values, str | bytes) or not all(map(is_integer, ids)):
        raise GenerationError(
            f"{name} is {short_repr(values)}, but must be token ids, such as (50256,)"
        )
    return tuple(map(int, ids))


def check_room(T: int, max_new_tokens: int, n_positions: int) -> None:
    """Refuse a prompt of T tokens and more new ones than the model has positions for.

    Raises:
        GenerationError: the message states both lengths and the limit.
    """
    check_integer("max_new_tokens", max_new_tokens, least=0)
    if T + max_new_tokens > n_positions:
        raise GenerationError(
            f"{T} prompt tokens and {max_new_tokens} new ones make {T + max_new_tokens}, but the "
            f"model has {n_positions} positions. Ask for at most {max(0, n_positions - T)} new "
            "tokens, or shorten the prompt."
        )
