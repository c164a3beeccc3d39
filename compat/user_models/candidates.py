"""The values that an argument may have, by what the user's code does with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any

from torch import nn

from compat.config import GPT2Config
from compat.user_models.arguments import parameters_of
from compat.user_models.entries import last_part
from compat.user_models.own_calls import constants_named
from compat.user_models.synonyms import (
    CLASSES,
    meanings,
    plain,
    role_of,
    role_of_number,
    value_of,
)
from compat.user_models.usage import is_users_class, modules_text, reads, users_globals

Value = Callable[[GPT2Config], Any]  # a value in the sizes of a config

SIZE_ROLES = (
    "d_inner", "ratio", "n_embd", "d_head", "n_layer", "n_head", "n_positions", "vocab_size",
)  # fmt: skip
# Sizes that every GPT-2 has, the most likely first where a loop runs over an unknown number.
NECESSARY = ("n_layer", "n_head", "vocab_size", "n_embd", "n_positions")
MOST_OWN = 4  # of the user's own values that are tried
# How authors name the implementation of an interface that others are compared with.
USUAL = re.compile(
    "standard|default|vanilla|traditional|classic|regular|normal|learned|usual|plain", re.IGNORECASE
)
# How authors name what GPT-2 has.
OURS = re.compile(r"^(layer_?norm|ln|learned|absolute|gelu(_new)?|mha|multi_?head)", re.IGNORECASE)


class Code:
    """What the user's code says about the arguments of a class.

    Attributes:
        names: Those of the arguments, and of the entries that are read from them.
    """

    def __init__(self, target: type[nn.Module]) -> None:
        self._target, self._text = target, modules_text(target)
        # The values of its enumerations and interfaces, by the names of these.
        self._choices = _choices(target)
        names = list(parameters_of(target))
        names += [entry for name in names for entry in reads(target, name).names]
        self.names, self._roles = names, {role_of(name, names) for name in names}

    def candidates(self, entry: str) -> list[Value]:
        """Return the possible values of an argument or `argument.entry`, the most likely first.

        The user's own values of this name come first, except for a window and for a size whose
        name has several meanings, such as `qk_dim`.
        """
        by_use, name = self._by_use(entry), last_part(entry)
        own = [] if "window" in plain(name) else constants_named(self._target, name)
        roles = map(of_role, meanings(name))
        return [*roles, *map(constant, own[:MOST_OWN]), *by_use]

    def _by_use(self, entry: str) -> list[Value]:
        """Return the possible values by what the code does with them, the most likely first."""
        name, text = last_part(entry), self._text
        word = rf"\b{re.escape(name)}\b"
        for kind, values in self._choices.items():  # `norm_type` or `norm: NormType`
            if re.search(rf"{word}\s*:\s*[\w.]*\b{kind}\b", text) or plain(name) in plain(kind):
                return [*values]
        if re.search(r"(layer|block|attn|attention)_?(types|kinds)$", name):  # one for each layer
            kinds = re.findall(r"[\"'](\w*(?:full|global|attn|attention)\w*)[\"']", text)
            if any(kind.endswith("_attention") for kind in kinds):
                kinds.append("full_attention")  # transformers' name, which code may not spell out
            usual = sorted(dict.fromkeys(kinds), key=_unusual)
            return [partial(_per_layer, kind) for kind in usual]
        near = re.findall(rf"{word}[\"'\])]*\s*(?:==|!=|(?:not\s+)?in\b)\s*(.*)", text)
        if texts := [each for line in near for each in re.findall(r"[\"']([\w-]+)[\"']", line)]:
            return _strings([*(["learned"] if "pos" in name else []), *texts], OURS)
        if self.is_string(entry):  # a part of it may be compared
            compared = re.findall(r"(\w+)\s*[=!]=\s*[\"']([\w-]+)[\"']", text)
            names = {*map(last_part, self.names)}
            return _strings([each for other, each in compared if other not in names], USUAL)
        if CLASSES.fullmatch(plain(name)):
            return [of_role("vocab_size")]
        if re.search("flash|sdpa|use_?(emb|pos)", name):
            return [constant(True), constant(False)]
        switches = [constant(False), constant(True)]
        if self.is_boolean(entry):
            return switches
        if re.search(rf"{word}\s+is\s+(not\s+)?None\b", text):  # such as the path of a file
            switches = [constant(None), *switches]
        if re.search(rf"{word}\s*:\s*float\b", text):
            return [constant(number) for number in (1.0, 0.0, 10000.0)]
        lacking_first = sorted(SIZE_ROLES, key=lambda role: role in self._roles)
        sizes = [of_role(role) for role in lacking_first]
        if "window" in plain(name):  # GPT-2's attention reaches all tokens before it
            return [of_role("n_positions"), constant(None), *sizes]
        if re.search(rf"\brange\([^()]*{word}", text):
            lacking = [of_role(role) for role in NECESSARY if role not in self._roles]
            return [*lacking, of_role("n_layer"), *sizes, constant(1)]
        if re.search(rf"\b(if|not|and|or|bias=)\s*[\w.]*{word}(?!\s*[<>=*/+-])", text):
            return switches
        others = [constant(None), constant(1), *sizes, constant(10000.0), constant(())]
        if role := role_of_number(name, self.names):  # such as `head`
            others = [of_role(role), *others]
        is_size = re.search("(size|dim|length|width|channels)$", plain(name))
        is_number = re.search(rf"{word}\s*(:\s*int\b|[*/%])|[*/%]\s*{word}", text)
        return others if is_size or is_number else [*switches, *others]

    def is_string(self, entry: str) -> bool:
        """Return whether the code annotates an entry as a string."""
        return re.search(rf"\b{re.escape(last_part(entry))}\s*:\s*str\b", self._text) is not None

    def is_boolean(self, entry: str) -> bool:
        """Return whether the code annotates an entry as a boolean, or its name says so."""
        name = last_part(entry)
        annotated = rf"\b{re.escape(name)}\s*:\s*[\"']?(Optional\[)?bool\b"
        return bool(re.search(annotated, self._text) or re.match("(use|is|has|enable)_", name))


def _strings(texts: Iterable[str], first: re.Pattern[str]) -> list[Value]:
    """Return texts that the code compares, some of them first, and one that no branch is for."""
    ordered = sorted(dict.fromkeys(texts), key=lambda text: first.search(text) is None)
    return [constant(text) for text in [*ordered, "default"]]


def _unusual(kind: str) -> tuple[bool, bool]:
    """Return the key that sorts kinds of layers: GPT-2's full attention first."""
    is_full = kind in ("full_attention", "global_attention")
    return not is_full, re.search("full|global|causal", kind) is None


def _per_layer(value: str, config: GPT2Config) -> list[str]:
    return [value] * config.n_layer


def constant(value: Any) -> Value:
    return lambda config: value


def of_role(role: str) -> Value:
    return lambda config: value_of(role, config)


def _choices(target: type[nn.Module]) -> dict[str, list[Value]]:
    """Return the members of the user's enumerations, and instances of what implements an interface.

    An implementation is built without arguments. Those that are named as the usual one come first.
    """
    classes = dict.fromkeys(value for _, value in users_globals(target) if is_users_class(value))
    found: dict[str, list[Value]] = {}
    for cls in classes:
        if issubclass(cls, Enum):
            found[cls.__name__] = [constant(member) for member in cls]
        elif inspect.isabstract(cls):
            concrete = [c for c in classes if issubclass(c, cls) and not inspect.isabstract(c)]
            concrete.sort(key=lambda c: USUAL.search(c.__name__) is None)
            found[cls.__name__] = [partial(_instance, each) for each in concrete]
    return {name: values for name, values in found.items() if values}


def _instance(cls: Callable[[], Any], config: GPT2Config) -> Any:
    return cls()
