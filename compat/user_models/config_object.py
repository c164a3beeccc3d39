"""A config for a user's constructor: the dictionary, dataclass or object that it reads."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from compat.config import GPT2Config
from compat.user_models.synonyms import SIZES, neutral, plain, role_of, value_of
from compat.user_models.usage import Reads, definition, functions, is_foreign

Parameter = inspect.Parameter
CONFIG_NAMES = set(
    "config configuration cfg conf args hparams hps hp params opt opts options settings".split()
)
CONFIG_CLASS = ("config", "cfg", "conf", "args", "hparams", "params", "hyperparameters", "settings")
# The tanh GELU, which GPT-2 has, by the names that code may know it under, the plainest first.
GELUS = ("gelu_new", "gelu_tanh", "gelu_pytorch_tanh", "tanh", "gelu")
# Where the default is None, these are as likely to take a module as a number.
LOOSE = {"blocks", "emb", "embedding", "features", "ff", "ffn", "layer", "layers", "mlp", "tokens"}
NAMESPACES = {"Namespace", "SimpleNamespace", "DictConfig", "AttrDict", "EasyDict"}


class ReadableDict(dict[str, Any]):
    """For code that reads `config["key"]` here and `config.key` there."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes values for the names that `cls` reads, from the checkpoint's config."""

    cls: type[nn.Module]
    config: GPT2Config

    def value(self, role: str, read: Reads) -> Any:
        """The checkpoint's value, in the form that the class reads."""
        value = value_of(role, self.config)
        if role == "device" and read.names:
            return torch.device(value)
        if role == "activation_function" and value == GELUS[0]:
            said = _words(self.cls)
            known = next((name for name in GELUS if name in said), "gelu")
            return value if "ACT2FN" in said else known
        return value

    def make(
        self, read: Reads, hint: type | None, base: Mapping[str, Any], entries: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        """A config, and the names that it lacks.

        Args:
            read: what is read off it.
            hint: the class to build; None: a dictionary or a namespace, by how it is read.
            base: what to take for names that mean nothing here.
            entries: the user's own, over all.
        """
        if hint is not None:
            return self._through(hint, read, entries)
        values, missing = self._values(read, entries)
        values = {name: base[name] for name in missing if name in base} | values
        missing = [name for name in missing if name not in values]
        if read.by_item and read.by_attribute:
            return ReadableDict(values), missing
        return (SimpleNamespace(**values) if read.by_attribute else values), missing

    def _values(self, read: Reads, entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values: dict[str, Any] = dict(entries)
        missing: list[str] = []
        for name, child in read.names.items():
            role = role_of(name, child.passed_as, read.names)
            known, value = neutral(name)
            inner = entries.get(name, {})
            if child.names and role is None and isinstance(inner, Mapping):
                values[name], lost = self.make(child, None, {}, inner)
                missing += [f"{name}.{key}" for key in lost]
            elif name in entries:
                continue
            elif role is not None:
                values[name] = self.value(role, child)
            elif child.required and known:
                values[name] = value
            elif child.required:
                missing.append(name)
        return values, missing

    def _through(
        self, hint: type, read: Reads, entries: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        """An instance of the author's own config class, through its constructor."""
        parameters = inspect.signature(hint).parameters
        among = {*parameters, *read.names}
        known = {
            name: self.value(role, read.names.get(name, Reads()))
            for name in among
            if (role := role_of(name, read.names.get(name, Reads()).passed_as, among))
        }
        arguments, missing = dict(entries), []
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments = {key: known[key] for key in read.names if key in known} | arguments
            elif name in entries or parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif name in known and accepts(parameter, known[name]):
                arguments[name] = known[name]
            elif parameter.default is parameter.empty:
                fine, arguments[name] = neutral(name)
                missing += [] if fine else [name]
        if missing:
            return None, missing
        late = {} if parameters else entries
        made = hint(**{k: v for k, v in arguments.items() if k not in late})
        self._complete(made, {**known, **late}, fixed=bool(parameters))
        absent = [n for n, c in read.names.items() if c.required and not hasattr(made, n)]
        return made, absent

    def _complete(self, made: Any, known: Mapping[str, Any], *, fixed: bool) -> None:
        """Set what is read but not there; of a class that takes nothing, what it hard-codes too."""
        for name, value in known.items():
            derived = isinstance(getattr(type(made), name, None), property)
            if not derived and (not fixed or not hasattr(made, name)):
                setattr(made, name, value)


def accepts(parameter: Parameter, value: Any) -> bool:
    """Whether a value is of the kind that the parameter's default is of."""
    default = parameter.default
    if default is parameter.empty or type(default) is type(value):
        # Names of activations differ; where there is a default, theirs stays.
        return default is parameter.empty or not isinstance(value, str) or value == "cpu"
    if default is None:
        return parameter.name.lower() not in LOOSE and not isinstance(value, str)
    if isinstance(default, torch.device):
        return bool(value == "cpu")
    mixed = isinstance(value, bool) or isinstance(default, bool)
    numbers = isinstance(value, (int, float)) and isinstance(default, (int, float))
    return numbers and not mixed


def looks_like_config(name: str, role: str | None, read: Reads, hint: type | None) -> bool:
    """Whether a parameter takes a config rather than a number."""
    if hint is not None or plain(name) in CONFIG_NAMES:
        return True
    return bool(read.names) and (role is None or len(name) < 3)


# The class that the author made for it.


def hint_of(cls: type, parameter: Parameter, read: Reads) -> type | None:
    """The config class that the default, the annotation or else the module's names point to."""
    default = parameter.default
    for candidate in (*_annotated(cls, parameter), default, type(default)):
        if isinstance(candidate, type) and _is_config_class(candidate):
            return candidate
    if not read.names or read.by_item or plain(parameter.name) in SIZES:
        return None
    required = {name for name, child in read.names.items() if child.required}
    module = sys.modules.get(cls.__module__)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__name__.lower().endswith(CONFIG_CLASS)
        and _is_config_class(value)
        and required <= _field_names(value)
    ]
    return min(found, key=lambda value: len(_field_names(value)), default=None)


def base_of(cls: type, parameter: Parameter, read: Reads) -> Mapping[str, Any]:
    """A dictionary of the author's: the default, or one in the module that has all keys read."""
    if isinstance(parameter.default, Mapping):
        return parameter.default
    required = {name for name, child in read.names.items() if child.required}
    for value in vars(sys.modules[cls.__module__]).values():
        entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        config_like = isinstance(value, Mapping) or _is_config_class(type(value))
        if required and config_like and all(name in entries for name in required):
            return entries
    return {}


def _annotated(cls: type, parameter: Parameter) -> list[Any]:
    """The annotation, or the members of the union that it is."""
    try:
        constructor: Any = inspect.getattr_static(cls, "__init__")
        hints = typing.get_type_hints(constructor)
        annotation = hints.get(parameter.name, parameter.annotation)
    except Exception:  # a name that only a type checker sees
        annotation = parameter.annotation
    return [*typing.get_args(annotation), annotation]


def _is_config_class(value: type) -> bool:
    """A class of the user's or of a library of configs, that is no module and no dictionary."""
    if is_foreign(value) and not value.__name__.endswith("Config"):
        return False
    if issubclass(value, (nn.Module, Mapping)) or value.__name__ in NAMESPACES:
        return False
    return str(value.__module__).split(".")[0] not in sys.stdlib_module_names


def _field_names(value: type) -> set[str]:
    return {*inspect.signature(value).parameters, *dir(value)}


def _words(cls: type) -> set[str]:
    """The strings and names that stand in the code of the class and of the classes beside it."""
    beside = [v for v in vars(sys.modules[cls.__module__]).values() if isinstance(v, type)]
    found: set[str] = set()
    for one in (cls, *(v for v in beside if not is_foreign(v))):
        for node in (definition(function) for function in functions(one)):
            for inner in ast.walk(node) if node is not None else ():
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    found.add(inner.value)
                elif isinstance(inner, ast.Name):
                    found.add(inner.id)
    return found
