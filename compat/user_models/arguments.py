"""The arguments of a user's class or function, found by their names.

A parameter of a constructor has the first of these values that exists: a stand-in for a vocabulary,
a config, what the caller sets, the checkpoint's value for its name, a neutral value for its name,
and a module of the user's. What has none and no default is unknown; see trials.py.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from torch import Tensor, nn

from compat.config import GPT2Config
from compat.errors import AdaptError, listed
from compat.user_code import MAKE_MODEL, translated
from compat.user_models.config_object import ConfigMaker, known_arguments, merged, value_by_name
from compat.user_models.entries import PLAIN, nested
from compat.user_models.synonyms import (
    CONFIG_NAMES,
    SIZES,
    plain,
    role_of,
    symbols,
    takes_sizes,
    value_of,
)
from compat.user_models.usage import (
    compared_strings,
    counts,
    forwarded,
    init_source,
    is_users_class,
    items_of,
    reads,
    users_globals,
)
from compat.user_models.vocabulary_argument import vocabulary_for

Parameter = inspect.Parameter
TAKES_CLASS = re.compile("_(class|cls|type)$|Class$")
LIST_OF_CONFIGS = re.compile(r"(typing\.)?(list|List|Sequence)\[(typing\.)?(dict|Dict)\b")


class UnknownArguments(AdaptError):
    """Arguments, or entries `argument.entry` of configs, whose values are unknown.

    Attributes:
        names: the arguments and entries.
    """

    def __init__(self, text: str, names: list[str]) -> None:
        super().__init__(text)
        self.names = names


def found_arguments(
    target: Callable[..., nn.Module],
    config: GPT2Config,
    kwargs: Mapping[str, Any],
    config_name: str | None = None,
) -> dict[str, Any]:
    """Return the arguments that the target is called with.

    Raises:
        AdaptError: One of them cannot be found.
    """
    given = dict(kwargs)
    parameters = parameters_of(target)
    wrong = [name for name in given if name not in parameters]
    if wrong and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        takes = listed(list(parameters)) if parameters else "no arguments"
        raise AdaptError(f"{target.__name__} has no argument {listed(wrong)}; it has {takes}")
    named = {}
    if config_name is not None:
        positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        first = next((name for name, p in parameters.items() if p.kind in positional), None)
        if first is None:
            failed = f"{target.__name__} has no argument that could be a config"
            raise AdaptError(f"{failed}. {MAKE_MODEL}")
        named[first] = merged(_config_named(target, config_name), given.pop(first, {}))
    with translated(f"the arguments of {target.__name__} cannot be determined"):
        for name, cls in _modules_taken(target, parameters):
            if name not in given:
                named[name] = _made(cls, config, other_ways=False)
        if isinstance(target, type) or takes_sizes(parameters):
            arguments, missing = _arguments(target, parameters, config, given, named)
        else:
            arguments, missing = _function_arguments(parameters, config, given | named)
    if missing:
        raise _unknown(target, missing, config)
    return arguments


def _function_arguments(
    parameters: dict[str, Parameter], config: GPT2Config, given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the checkpoint's config as the one argument that a function takes, if it takes any."""
    free = [p for name, p in parameters.items() if name not in given]
    free = [p for p in free if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in free if p.default is p.empty]
    optional = [p.name for p in free if plain(p.name) in CONFIG_NAMES]
    return given | dict.fromkeys((required or optional)[:1], config), required[1:]


def _config_named(target: Callable[..., Any], config_name: str) -> Any:
    """Return the config of that name in the target's module."""
    module = sys.modules[target.__module__]
    if hasattr(module, config_name):
        return getattr(module, config_name)
    configs = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isinstance(value, dict) or "onfig" in name)
    ]
    there_are = f"; it has {listed(configs)}" if configs else ""
    place = getattr(module, "__file__", None) or module.__name__
    raise AdaptError(f"no config {config_name!r} in {place}{there_are}")


def _modules_taken(
    target: Callable[..., nn.Module], parameters: Mapping[str, Parameter]
) -> Iterator[tuple[str, type[nn.Module]]]:
    """Return required arguments named like a class of the user's modules: `gpt` for `GPT`."""
    classes = {
        plain(name): value for name, value in users_globals(target)
        if isinstance(value, type) and issubclass(value, nn.Module) and value is not target
    }  # fmt: skip
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and role_of(name, parameters) is None:
            if plain(name) in classes:
                yield name, classes[plain(name)]


def _arguments(
    cls: Callable[..., nn.Module],
    parameters: dict[str, Parameter],
    config: GPT2Config,
    given: dict[str, Any],
    named: dict[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Return a constructor's arguments, and the names of unknown ones (`cfg.name` in a config).

    A function that takes sizes is called like a constructor.
    """
    arguments = given | named
    missing: list[str] = []
    known = known_arguments(cls, parameters, config)
    for name, parameter in parameters.items():
        entries = given.get(name, {})
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in named:
            continue
        maker = ConfigMaker(cls, parameter, reads(cls, name), config)
        required = parameter.default is parameter.empty
        inner = _inner_class(cls, parameter)
        is_module = inner is not None and _annotation(parameter) == inner.__name__
        words = None if name in given else vocabulary_for(cls, parameter, config)
        # Of `MHA(**params)`, the dictionary that is unpacked into another constructor.
        unpacked = [each for each in forwarded(cls, name) if is_users_class(each[0])]
        unknown: list[str] = []
        if words is not None and not is_module:
            arguments[name] = words
        elif unpacked and isinstance(entries, Mapping):
            callee, passed = unpacked[0]
            own = {n: p for n, p in parameters_of(callee).items() if n not in passed}
            arguments[name], unknown = _arguments(callee, own, config, dict(entries), {})
        elif required and name not in given and inner is None and _is_embedding(parameter):
            arguments[name] = _embedding(name, maker.usage.names, config)
        elif isinstance(entries, Mapping) and not is_module and maker.is_config():
            arguments[name], unknown = maker.make(entries)
        elif name in given:
            continue
        elif required and LIST_OF_CONFIGS.match(_annotation(parameter)):
            maker = replace(maker, usage=reads(cls, "config"))
            entry, unknown = maker.make({})
            arguments[name] = [copy.copy(entry) for _ in range(config.n_layer)]
        elif (
            (required or parameter.default is None)
            and counts(cls, name)
            and (characters := symbols(name, config))
        ):
            is_list = re.search(rf"(type|isinstance)\(\s*{name}\b.*\blist\b", init_source(cls))
            arguments[name] = [*characters] if is_list else characters
        elif required and plain(name) == "modeltype" and not SIZES & {*map(role_of, parameters)}:
            arguments[name] = "gpt2"  # the name of a preset
        elif (by_name := value_by_name(parameter, known))[0]:
            arguments[name] = by_name[1]
        elif required and inner is not None:
            takes_class = TAKES_CLASS.search(name) is not None
            arguments[name] = inner if takes_class else _made_beside(inner, arguments, config)
        elif required:
            missing.append(name)
        missing += [f"{name}.{key}" for key in unknown]
    return arguments, missing


def _is_embedding(parameter: Parameter) -> bool:
    """Return whether a parameter is annotated as an embedding, or as a module and named so."""
    annotated = _annotation(parameter).rpartition(".")[2]
    return annotated == "Embedding" or (annotated == "Module" and "emb" in plain(parameter.name))


def _embedding(name: str, read: Iterable[str], config: GPT2Config) -> nn.Embedding:
    """Return an embedding of ids or positions, with the sizes that are read from it."""
    rows = config.n_positions if "pos" in name else config.vocab_size
    made = nn.Embedding(rows, config.n_embd)
    for size in read:
        if not hasattr(made, size) and (role := role_of(size)) is not None:
            setattr(made, size, value_of(role, config))
    return made


def _made(cls: type[nn.Module], config: GPT2Config, *, other_ways: bool = True) -> nn.Module:
    from compat.user_models.construct import construct  # which finds the arguments here

    return construct(cls, config, other_ways=other_ways)


def _made_beside(
    cls: type[nn.Module], arguments: Mapping[str, Any], config: GPT2Config
) -> nn.Module:
    """Return the module that a constructor takes beside other arguments, such as its config."""
    required = required_names(cls)
    if required and {*required} <= {*arguments}:
        return cls(**{name: arguments[name] for name in required})
    return _made(cls, config)


def _annotation(parameter: Parameter) -> str:
    named = isinstance(parameter.annotation, type) and not get_args(parameter.annotation)
    return parameter.annotation.__name__ if named else str(parameter.annotation)


def _inner_class(cls: Callable[..., Any], parameter: Parameter) -> type[nn.Module] | None:
    """Return the class of a module that a constructor takes, such as GPT of `LMHead(gpt)`."""
    classes = [
        value for value in vars(sys.modules[cls.__module__]).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value is not cls
        and is_users_class(value)
    ]  # fmt: skip
    annotated = [c for c in classes if c.__name__ == _annotation(parameter)]
    named = [c for c in classes if plain(c.__name__) == plain(parameter.name)]
    if _annotation(parameter) == "Module":  # `attention: nn.Module`, such as a FlashAttention
        named += [c for c in classes if plain(parameter.name) in plain(c.__name__)]
    return next((_implementation(c) for c in [*annotated, *named]), None)


def _implementation(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class that implements an interface, from a file beside it; others unchanged."""
    package, _, _ = cls.__module__.rpartition(".")
    file = Path(getattr(sys.modules[cls.__module__], "__file__", None) or "")
    for beside in sorted(file.parent.glob("*.py")) if inspect.isabstract(cls) else ():
        pattern = rf"^class (\w+)\(.*\b{cls.__name__}\b"
        for name in re.findall(pattern, beside.read_text(errors="replace"), re.MULTILINE):
            with contextlib.suppress(Exception):
                module = importlib.import_module(f"{package}.{beside.stem}".lstrip("."))
                found = getattr(module, name)
                if issubclass(found, cls) and not inspect.isabstract(found):
                    return cast(type[nn.Module], found)
    return cls


def parameters_of(target: Callable[..., Any]) -> dict[str, Parameter]:
    """Return a function's parameters, or a constructor's with those of bases for its **kwargs.

    What it reads from its **kwargs are parameters too: `kwargs["bias"]`, and of what has a default
    the sizes, as in `kwargs.get("block_size", 8)`; and those of the classes that it passes its
    **kwargs to.
    """
    if not isinstance(target, type):
        return dict(inspect.signature(target).parameters)
    found: dict[str, Parameter] = {}
    for base in target.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            break
        if "__init__" in vars(base):
            own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            for parameter in own:
                if parameter.kind is parameter.VAR_KEYWORD:
                    items = items_of(base, parameter.name).items()
                    read = [n for n, required in items if required or _is_size(n, base)]
                    found |= {n: Parameter(n, Parameter.KEYWORD_ONLY) for n in read}
                    for inner, passed in forwarded(base, parameter.name):
                        more = parameters_of(inner).items()
                        found = {n: p for n, p in more if n not in passed} | found
                found.setdefault(parameter.name, parameter)
            if not any(p.kind is p.VAR_KEYWORD and _passes_on(base, p.name) for p in own):
                break
    return found


def required_names(target: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a constructor requires."""
    parameters = inspect.signature(target).parameters.values()
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]


def _is_size(name: str, cls: type) -> bool:
    """Return whether a name denotes a size, and the code does not compare it with strings."""
    return role_of(name) in SIZES and name not in compared_strings(cls)


def _passes_on(cls: type, keywords: str) -> bool:
    """Return whether a constructor passes its `**keywords` on, as far as its source is known."""
    source = init_source(cls)
    named = re.findall(rf"\b{keywords}\b", source)  # first in the signature
    return not source or len(named) > 1


@contextlib.contextmanager
def entries_known(
    target: Callable[..., nn.Module], arguments: Mapping[str, Any], config: GPT2Config
) -> Iterator[None]:
    """Name the missing entry in the error if the body fails to read it from a config."""
    try:
        yield
    except (KeyError, AttributeError) as error:
        missing = missing_entries(target, arguments, error)
        if not missing:
            raise
        raise _unknown(target, missing, config) from error


def missing_entries(
    target: Callable[..., Any], arguments: Mapping[str, Any], error: Exception
) -> list[str]:
    """Return `["config.foo"]` if the error is that the config has no entry `foo`."""
    if not isinstance(error, (KeyError, AttributeError)):
        return []
    key = error.args[0] if isinstance(error, KeyError) else error.name
    owner = getattr(error, "obj", None)
    read = {name: value for name, value in arguments.items() if value is owner}
    if not read and isinstance(owner, (tuple, list, Tensor, nn.Module, *PLAIN)):  # no config
        return []
    return [
        f"{name}.{key}"
        for name, value in (read or arguments).items()
        if isinstance(target, type) and key in reads(target, name).names
        if not (key in value if isinstance(value, Mapping) else hasattr(value, str(key)))
    ]


def _unknown(
    target: Callable[..., Any], missing: list[str], config: GPT2Config
) -> UnknownArguments:
    """Return an error that says what is missing, what is known, and how to pass it."""
    sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner")
    known = ", ".join(f"{name} {getattr(config, name)}" for name in sizes)
    noun = "arguments" if len(missing) > 1 else "argument"
    text = json.dumps(nested(dict.fromkeys(missing, "..."))).replace('"..."', "...")
    return UnknownArguments(
        f"{target.__name__} needs the {noun} {listed(missing)}, and compat knows no value for "
        f"{'these names' if len(missing) > 1 else 'this name'}. The checkpoint has {known}. "
        f"{MAKE_MODEL}; or pass --kwargs '{text}', or the name of a config in the file with "
        "--config-name",
        missing,
    )
