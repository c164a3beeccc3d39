"""Build a user's model in a checkpoint's sizes.

The arguments of its constructor are found in three steps, of which the last is only taken if the
model cannot be built or called without it:

1. `found_arguments` finds values by the names of the arguments and of the entries of configs.
2. `Search.inferred` tries values for unknown and ambiguous names in small models.
3. `Search.other_ways` tries the user's own values, and other sizes.

Arguments that the caller sets are used in all steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from textwrap import shorten
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from compat.config import GPT2Config
from compat.errors import AdaptError, listed
from compat.user_code import MAKE_MODEL, translated
from compat.user_models.arguments import (
    UnknownArguments,
    entries_known,
    found_arguments,
    parameters_of,
    required_names,
)
from compat.user_models.building import constructed, runs
from compat.user_models.config_files import config_in_files, literals
from compat.user_models.config_object import merged
from compat.user_models.entries import PLAIN, attributes, entries_of, flattened
from compat.user_models.module_sizes import resized, undefined_sizes
from compat.user_models.synonyms import SIZES, plain, role_of
from compat.user_models.trials import Runs, Search
from compat.user_models.usage import reads, tree_of

# Names of methods that initialize parameters and buffers.
INITIALIZES = re.compile(r"^_?(re)?(init|reset)(ialize)?_?(parameters|weights|params|buffers)?$")
# Roles whose values are the checkpoint's, or change no logits in eval mode.
UNTOLD = SIZES | {"embd_pdrop", "attn_pdrop", "resid_pdrop", "device", "init"}


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
    runs: Runs = runs,
) -> tuple[nn.Module, str]:
    """Return the model of `construct`, and the call that built it as text.

    Entries of configs in the target's module that the call contradicts follow, other than sizes and
    dropout, and names that were assumed, because the code reads and does not define them.

    Args:
        target, config, kwargs, config_name, other_ways: as for `construct`.
        runs: Returns whether a model can be called. Other ways are tried if it cannot.
    """
    kwargs = kwargs or {}
    if not isinstance(target, type) or config_name is not None or not other_ways:
        return _built(target, config, kwargs, config_name)
    with _quietly(), translated(f"{target.__name__} cannot be built", advice=MAKE_MODEL):
        search = Search(target, config, kwargs)
        inferred = search.inferred()
    kwargs = merged(inferred, kwargs)
    more = f"; found by trying: {_listed_entries(inferred)}" if inferred else ""
    if undefined := undefined_sizes(target, config):
        values = _listed_entries(undefined)
        more += f"; your code reads names that it does not define, so compat set {values}"
    failure: AdaptError | None = None
    try:
        model, described = _built(target, config, kwargs)
    except AdaptError as error:
        failure = error
    with _quietly():
        works = not failure and runs(model, config)
        if not works and not failure and _has_wider_buffers(model) and runs(model.float(), config):
            works = True
            more += "; your code only runs after model.float()"
        elif not works and not failure and _has_mixed_parameters(model):
            if works := runs(_with_float32_parameters(model), config):
                more += "; outside autocast, your code only runs with float32 parameters"
        if not works and not failure and (method := _initialized(model, config, runs)):
            works = True
            more += f"; your code only runs after model.{method}()"
        other = None if works else next(Search(target, config, kwargs, runs).other_ways(), None)
    if other is not None:
        sizes, own = other
        model, described = _built(target, sizes, merged(own, kwargs))
        if sizes == config:
            more += f"; your code only runs with {_listed_entries(own)}"
        elif sizes.n_embd != config.n_embd:
            more += f"; your code runs in width {sizes.n_embd} and not in {config.n_embd}"
        else:
            count = "one layer" if sizes.n_layer == 1 else f"{sizes.n_layer} layers"
            more += f"; your code runs with {count} and not with {config.n_layer}"
    elif isinstance(failure, UnknownArguments) and search.errors:
        values = "each value" if len(search.errors) == 1 else "most values"
        raised = f"With {values} that compat tried, {target.__name__} raised"
        text = f"{failure}\n  {raised} {search.errors.most_common(1)[0][0]}"
        raise UnknownArguments(text, failure.names)
    elif failure is not None:
        raise failure
    return model, described + more


def _initialized(model: nn.Module, config: GPT2Config, runs: Runs) -> str:
    """Call the method of the user's that initializes what the model needs to run.

    An example is `init_weights`, which code calls that builds models without memory first.

    Returns:
        The name of the method, or "" if no method lets the model run.
    """
    for name in filter(INITIALIZES.search, dir(type(model))):
        with contextlib.suppress(Exception), torch.no_grad():
            method = getattr(model, name)
            if not required_names(method):
                method()
                if runs(model, config):
                    return name
    return ""


def _has_wider_buffers(model: nn.Module) -> bool:
    """Return whether all parameters are float32 and a buffer, as made with NumPy, is float64."""
    types = {parameter.dtype for parameter in model.parameters()}
    return types == {torch.float32} and any(b.dtype == torch.float64 for b in model.buffers())


def _has_mixed_parameters(model: nn.Module) -> bool:
    """Return whether parameters have different types, as a bfloat16 embedding and other layers."""
    return len({p.dtype for p in model.parameters() if p.is_floating_point()}) > 1


def _with_float32_parameters(model: nn.Module) -> nn.Module:
    """Convert the parameters to float32, and no buffers, which the code may check."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


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
            other = None if runs else next(Search(target, config, own).other_ways(), None)
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
    described = _described_call(target, arguments)
    with translated(f"{_call(target, arguments)} cannot be built", advice=MAKE_MODEL):
        with entries_known(target, arguments, config), resized(target, config):
            model = constructed(target, arguments, config)
            for module in getattr(model, "modules", list)():
                hash(module)  # which torch needs; a class with __eq__ alone has none
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise AdaptError(f"{target.__name__} returns {found}; it must return an nn.Module")
    return model, described


def _described_call(target: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> str:
    """Return the call, and what the target's defaults and its module's configs have instead."""
    passed: dict[str, Any] = dict(arguments)
    for value in arguments.values():
        passed |= entries_of(value)
    text = _call(target, arguments)
    module = sys.modules.get(target.__module__)
    defaults = {name: parameter.default for name, parameter in parameters_of(target).items()}
    if other := _different(defaults, arguments):
        text += f"; your default is {listed(other)}"
    # What follows a line that fails is in the source only.
    written = {} if module is None else dict(literals(tree_of(module)))
    configs = list({**written, **vars(module or target)}.items())
    for made in filter(dataclasses.is_dataclass, arguments.values()):
        fields = {each.name: each.default for each in dataclasses.fields(made)}
        configs.append((type(made).__name__, fields))
    for name in arguments if isinstance(target, type) else ():
        configs += [found] if (found := config_in_files(target, reads(target, name).names)) else []
    for name, value in configs:
        own = {} if isinstance(value, type) or name.startswith("_") else entries_of(value)
        if other := _different(own, passed):
            text += f"; your {name} has {listed(other)}"
    return text


def _different(own: Mapping[str, Any], passed: Mapping[str, Any]) -> list[str]:
    """Return the entries whose values are not those that were passed, as `name=value`.

    Sizes are left out, except a number of key heads that is not the number of heads.
    """
    heads = {key: value for key, value in own.items() if role_of(key) == "n_head"}
    grouped = {key for key in heads if "kv" in plain(key)} if len({*heads.values()}) > 1 else set()
    return [
        f"{key}={value!r}" for key, value in own.items()
        if isinstance(value, PLAIN) and isinstance(passed.get(key), PLAIN)
        and (role_of(key) not in UNTOLD or key in grouped) and passed[key] != value
    ]  # fmt: skip


def _call(target: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> str:
    """Return the call of a target with these arguments."""
    shown = ", ".join(
        f"{name}={shorten(_shown(value), 200, placeholder=' …')}"
        for name, value in arguments.items()
    )
    return f"{target.__name__}({shown})"


def _listed_entries(entries: Mapping[str, Any]) -> str:
    """Write `{"config": {"n": 1}, "dim": 2}` as `config.n=1, dim=2`."""
    shown = {
        name: _shown(value) if isinstance(value, type) or len(_repr(value)) >= 60 else _repr(value)
        for name, value in flattened(entries).items()
    }
    return ", ".join(f"{name}={text}" for name, text in shown.items())


def _shown(value: object) -> str:
    """Return a value as text; an object whose class shows no values, with its attributes."""
    if type(value).__repr__ is object.__repr__:
        entries = ", ".join(f"{name}={each!r}" for name, each in attributes(value).items())
        return f"{type(value).__name__}({entries})"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(…)"
    if isinstance(value, (FunctionType, ModuleType, type)):
        return value.__name__
    return _repr(value)


def _repr(value: object) -> str:
    """Return the repr of a value, whose own method may fail."""
    try:
        return repr(value)
    except Exception:
        return f"{type(value).__name__}(…)"
