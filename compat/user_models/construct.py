"""Build a user's model in a checkpoint's sizes."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.user_code import MAKE_MODEL, translated
from compat.user_models.arguments import entries_known, found_arguments
from compat.user_models.building import constructed, runs
from compat.user_models.call_text import call_text, described_call, listed_entries
from compat.user_models.config_object import merged
from compat.user_models.module_sizes import resized, undefined_sizes
from compat.user_models.trials import Search


def construct(
    target: Callable[..., nn.Module],
    config: GPT2Config,
    *,
    kwargs: Mapping[str, Any] | None = None,
    config_name: str | None = None,
    other_ways: bool = True,
) -> nn.Module:
    """Build the user's model in the sizes of `config`.

    A function is called with `config` if it takes an argument, and its model is returned
    unchanged. The arguments of a class are found by their names: sizes, or a config that is a
    dictionary, a namespace or an instance of the user's config class. Sizes in the globals of the
    class's modules are replaced while the constructor runs.

    Args:
        target: The user's class or function.
        config: The config of the checkpoint.
        kwargs: Arguments that replace those found; a dictionary for the config argument replaces
            only its own entries.
        config_name: The name of a config in the target's module, which becomes the first argument
            unchanged.
        other_ways: Whether to try other arguments and sizes; without, all that are not found by
            their names must be in `kwargs`.

    Raises:
        AdaptError: An argument cannot be found, or the user's code raises.
    """
    return construct_with_call(
        target, config, kwargs=kwargs, config_name=config_name, other_ways=other_ways
    )[0]


def construct_with_call(
    target: Callable[..., nn.Module],
    config: GPT2Config,
    *,
    kwargs: Mapping[str, Any] | None = None,
    config_name: str | None = None,
    other_ways: bool = True,
) -> tuple[nn.Module, str]:
    """Return the model of `construct`, and the call that built it as text.

    Entries of configs in the target's module that the call contradicts follow, other than sizes and
    dropout, and names that were assumed, because the code reads and does not define them.
    """
    kwargs = kwargs or {}
    if not isinstance(target, type) or config_name is not None or not other_ways:
        return _built(target, config, kwargs, config_name)
    with _quietly(), translated(f"{target.__name__} cannot be built", advice=MAKE_MODEL):
        inferred = Search(target, config, kwargs).inferred()
    kwargs = merged(inferred, kwargs)
    more = f"; found by trying: {listed_entries(inferred)}" if inferred else ""
    if undefined := undefined_sizes(target, config):
        values = listed_entries(undefined)
        more += f"; your code reads names that it does not define, so compat set {values}"
    failure: AdaptError | None = None
    try:
        model, described = _built(target, config, kwargs)
    except AdaptError as error:
        failure = error
    with _quietly():
        works = not failure and runs(model, config)
        other = None if works else Search(target, config, kwargs).other_way()
    if other is not None:
        sizes, own, why = other
        model, described = _built(target, sizes, merged(own, kwargs))
        more += f"; your code {why}"
    elif failure is not None:
        raise failure
    return model, described + more


def found_by_trying(
    target: Callable[..., nn.Module],
    config: GPT2Config,
    kwargs: Mapping[str, Any] | None,
    *,
    runs: bool = True,
) -> dict[str, Any] | None:
    """Return `kwargs` and the arguments of a class that `construct` finds by trying.

    Args:
        target, config, kwargs: as for `construct`.
        runs: Whether the model runs with the arguments that are found first. Otherwise others are
            returned, or None if there are none or if it runs in other sizes only.
    """
    own = dict(kwargs or {})
    if isinstance(target, type):
        with _quietly(), contextlib.suppress(AdaptError, ModuleNotFoundError):
            own = merged(Search(target, config, own).inferred(), own)
            other = None if runs else Search(target, config, own).other_way()
            if other is not None and other[0] == config:
                own, runs = merged(other[1], own), True
    return own if runs else None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Run the body without output, warnings and messages of loggers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _built(
    target: Callable[..., nn.Module],
    config: GPT2Config,
    kwargs: Mapping[str, Any],
    config_name: str | None = None,
) -> tuple[nn.Module, str]:
    """Return the model in the sizes of `config`, and the call that built it."""
    arguments = found_arguments(target, config, kwargs, config_name)
    described = described_call(target, arguments)
    with translated(f"{call_text(target, arguments)} cannot be built", advice=MAKE_MODEL):
        with entries_known(target, arguments, config), resized(target, config):
            model = constructed(target, arguments, config)
            for module in getattr(model, "modules", list)():
                hash(module)  # which torch needs; a class with __eq__ alone has none
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise AdaptError(f"{target.__name__} returns {found}; it must return an nn.Module")
    return model, described
