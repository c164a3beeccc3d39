"""Build a user's model class in a checkpoint's sizes, whatever its author called them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from compat.config import GPT2Config
from compat.errors import AdaptError, listed
from compat.user_code import described
from compat.user_models import notebook
from compat.user_models.config_object import Maker, accepts, base_of, hint_of, looks_like_config
from compat.user_models.module_sizes import resized
from compat.user_models.synonyms import neutral, role_of
from compat.user_models.usage import reads

Parameter = inspect.Parameter


def construct(
    cls: type[nn.Module],
    config: GPT2Config,
    *,
    kwargs: Mapping[str, Any] | None = None,
    config_name: str | None = None,
) -> nn.Module:
    """Build `cls` with the sizes of `config`, which its arguments and globals are found to mean.

    Args:
        cls: the user's class.
        config: of the checkpoint.
        kwargs: arguments of the constructor, over those worked out; a dictionary for its config
            argument is merged into that one.
        config_name: a config in the class's module to pass as it is, as the first argument.

    Raises:
        AdaptError: an argument cannot be worked out, or the constructor raises.
    """
    parameters = _parameters(cls)
    given = dict(kwargs or {})
    _check_given(cls, parameters, given)
    if config_name is not None:
        first = _first(cls, parameters)
        named = _named(cls, config_name)
        given[first] = _merged(named, given[first]) if first in given else named
    with _explained(cls, "the arguments of {} cannot be worked out"):
        arguments, missing = _arguments(cls, parameters, config, given, config_name is not None)
    if missing:
        raise AdaptError(_unknown(cls, missing, config))
    return _built(cls, parameters, arguments, config)


# Arguments.


def _parameters(cls: type) -> dict[str, Parameter]:
    """The constructor's parameters, and behind its **kwargs those of the constructors above it."""
    found: dict[str, Parameter] = {}
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            break
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for parameter in own:
            found.setdefault(parameter.name, parameter)
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


def _arguments(
    cls: type[nn.Module],
    parameters: dict[str, Parameter],
    config: GPT2Config,
    given: dict[str, Any],
    config_named: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The arguments worked out, those given over them, and what is missing, config keys dotted."""
    maker = Maker(cls, config)
    arguments: dict[str, Any] = {}
    missing: list[str] = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        read = reads(cls, name)
        role = role_of(name, read.passed_as, parameters)
        hint = hint_of(cls, parameter, read)
        is_config = looks_like_config(name, role, read, hint)
        entries = given.get(name, {})
        merge = is_config and isinstance(entries, Mapping) and not config_named
        if name in given and not merge:
            arguments[name] = entries
        elif is_config and (read.names or hint is not None or entries):
            base = base_of(cls, parameter, read)
            arguments[name], lost = maker.make(read, hint, base, entries)
            missing += [f"{name}.{key}" for key in lost]
        elif role is not None and accepts(parameter, value := maker.value(role, read)):
            arguments[name] = value
        elif parameter.default is parameter.empty:
            known, arguments[name] = neutral(name)
            if not known:
                missing.append(name)
    arguments |= {name: value for name, value in given.items() if name not in arguments}
    return arguments, missing


# What the caller gives.


def _check_given(cls: type, parameters: dict[str, Parameter], given: Mapping[str, Any]) -> None:
    """Refuse arguments that the constructor does not take."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    wrong = [name for name in given if name not in parameters]
    if wrong:
        takes = listed(list(parameters)) if parameters else "no arguments"
        raise AdaptError(f"{cls.__name__} takes no argument {listed(wrong)}; it takes {takes}")


def _first(cls: type, parameters: dict[str, Parameter]) -> str:
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return name
    raise AdaptError(f"{cls.__name__} takes no argument that a config could be passed as")


def _named(cls: type, config_name: str) -> Any:
    """The config of that name in the class's module."""
    module = sys.modules[cls.__module__]
    try:
        return notebook.lookup(module, config_name)
    except AttributeError:
        have = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and (isinstance(value, dict) or "onfig" in name)
        ]
        hint = f"; there are {listed(have)}" if have else ""
        raise AdaptError(
            f"no config {config_name!r} in {module.__file__ or module.__name__}{hint}"
        ) from None
    except (Exception, SystemExit) as error:
        raise AdaptError(f"{config_name} cannot be made: {described(error)}") from error


def _merged(base: Any, entries: Any) -> Any:
    """A config with entries changed; the user's own object stays as it is."""
    if not isinstance(entries, Mapping):
        return entries
    if isinstance(base, Mapping):
        return {**base, **entries}
    if dataclasses.is_dataclass(base) and not isinstance(base, type):
        return dataclasses.replace(base, **entries)
    changed = copy.copy(base)
    for name, value in entries.items():
        setattr(changed, name, value)
    return changed


# Building.


def _built(
    cls: type[nn.Module],
    parameters: dict[str, Parameter],
    arguments: dict[str, Any],
    config: GPT2Config,
) -> nn.Module:
    positional = [
        arguments.pop(name)
        for name, p in parameters.items()
        if p.kind is p.POSITIONAL_ONLY and name in arguments
    ]
    failed = f"{{}}({_shown(arguments)}) cannot be built"
    with _explained(cls, failed, list(arguments)[:1]), resized(cls, config):
        return cls(*positional, **arguments)


@contextlib.contextmanager
def _explained(cls: type, failed: str, names: Sequence[str] = ()) -> Iterator[None]:
    """Turn whatever the user's code raises into an AdaptError that says what and where."""
    try:
        yield
    except AdaptError:
        raise
    except (Exception, SystemExit) as error:
        advice = f"\n  to give other arguments: {_advice(list(names))}" if names else ""
        raise AdaptError(
            f"{failed.replace('{}', cls.__name__, 1)}: {described(error)}{advice}"
        ) from error


def _advice(names: list[str]) -> str:
    """`--kwargs '{"config": {"foo": ...}}'` for "config.foo"."""
    tree: dict[str, Any] = {}
    for name in names:
        *path, last = name.split(".")
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[last] = "..."
    return "--kwargs '" + json.dumps(tree).replace('"..."', "...") + "'"


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.200}" for name, value in arguments.items())


def _unknown(cls: type, missing: list[str], config: GPT2Config) -> str:
    """What is missing, what is known, and how to give it."""
    sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner")
    known = ", ".join(f"{name} {getattr(config, name)}" for name in sizes)
    what = "arguments" if len(missing) > 1 else "argument"
    return (
        f"{cls.__name__} needs the {what} {listed(missing)}, which stands for nothing that the "
        f"checkpoint has ({known}); give it: {_advice(missing)}, or write a subclass whose "
        "constructor gives it"
    )
