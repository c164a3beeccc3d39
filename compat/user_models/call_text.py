"""The call that builds a user's model, as text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from textwrap import shorten
from types import FunctionType
from typing import Any

from torch import nn

from compat.errors import listed
from compat.user_models.arguments import parameters_of
from compat.user_models.config_files import config_in_files, literals
from compat.user_models.entries import attributes, entries_of, flattened
from compat.user_models.synonyms import SIZES, plain, role_of
from compat.user_models.usage import reads, tree_of

PLAIN = (bool, int, float, str)  # types whose values are compared
# Roles whose values are the checkpoint's, or change no logits in eval mode.
UNTOLD = SIZES | {"embd_pdrop", "attn_pdrop", "resid_pdrop", "device", "init"}


def described_call(target: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> str:
    """Return the call, and what the target's defaults and its module's configs have instead."""
    passed: dict[str, Any] = dict(arguments)
    for value in arguments.values():
        passed |= entries_of(value)
    text = call_text(target, arguments)
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


def call_text(target: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> str:
    """Return the call of a target with these arguments."""
    shown = ", ".join(
        f"{name}={shorten(_shown(value), 200, placeholder=' …')}"
        for name, value in arguments.items()
    )
    return f"{target.__name__}({shown})"


def listed_entries(entries: Mapping[str, Any]) -> str:
    """Write `{"config": {"n": 1}, "dim": 2}` as `config.n=1, dim=2`."""
    texts = {name: (repr(value), _shown(value)) for name, value in flattened(entries).items()}
    return ", ".join(
        f"{n}={long if len(long) < 60 else short}" for n, (long, short) in texts.items()
    )


def _shown(value: object) -> str:
    """Return a value as text; an object whose class shows no values, with its attributes."""
    if type(value).__repr__ is object.__repr__:
        entries = ", ".join(f"{name}={each!r}" for name, each in attributes(value).items())
        return f"{type(value).__name__}({entries})"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(…)"
    return value.__name__ if isinstance(value, FunctionType) else repr(value)
