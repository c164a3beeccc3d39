"""Build a user's model in a checkpoint's sizes."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import inspect
import io
import json
import logging
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain
from textwrap import shorten
from types import FunctionType, SimpleNamespace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compat.config import GPT2Config
from compat.errors import AdaptError, listed
from compat.user_code import MAKE_MODEL, translated
from compat.user_models.config_files import config_in_files, literals
from compat.user_models.config_object import (
    accepts,
    factors,
    is_number,
    known_values,
    make_config,
    merged,
    takes_config,
)
from compat.user_models.eval_mode import eval_mode
from compat.user_models.missing import ReadableDict
from compat.user_models.module_sizes import resized, undefined_sizes
from compat.user_models.own_calls import own_calls
from compat.user_models.synonyms import (
    CONFIG_NAMES,
    SIZES,
    meanings,
    neutral,
    plain,
    role_of,
    symbols,
    takes_sizes,
)
from compat.user_models.trials import (
    Code,
    Search,
    UnknownArguments,
    Value,
    arguments_with,
    constant,
    is_boolean,
    last_part,
    nested,
    small_config,
    vocabulary,
)
from compat.user_models.usage import (
    counts,
    embedding_widths,
    factors_of,
    forwarded,
    is_users_class,
    items_of,
    modules_text,
    reads,
    tree_of,
    users_globals,
    users_nodes,
)
from compat.user_models.vocabulary_argument import vocabulary_for

Parameter = inspect.Parameter
PLAIN = (bool, int, float, str)  # types whose values are compared
LIST_OF_CONFIGS = re.compile(r"(typing\.)?(list|List|Sequence)\[(typing\.)?(dict|Dict)\b")
# How authors name the implementation of an interface that others are compared with.
USUAL = re.compile(
    "standard|default|vanilla|traditional|classic|regular|normal|learned|usual|plain", re.IGNORECASE
)
OWN_CONFIGS = (dict, ReadableDict, SimpleNamespace)  # configs that are made here
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
) -> tuple[nn.Module, str]:
    """Return the model of `construct`, and the call that built it as text.

    Entries of configs in the target's module that the call contradicts follow, other than sizes and
    dropout, and names that were assumed, because the code reads and does not define them.
    """
    kwargs = kwargs or {}
    if not isinstance(target, type) or config_name is not None or not other_ways:
        return _built(target, config, kwargs, config_name)
    with _quietly(), translated(f"{target.__name__} cannot be built", advice=MAKE_MODEL):
        inferred = _Attempts(target, config, kwargs).inferred()
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
        runs = not failure and _runs(model, config)
        other = None if runs else _Attempts(target, config, kwargs).other_way()
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
            own = merged(_Attempts(target, config, own).inferred(), own)
            other = None if runs else _Attempts(target, config, own).other_way()
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
    arguments = _found_arguments(target, config, kwargs, config_name)
    described = _described_call(target, arguments)
    with translated(f"{_call(target, arguments)} cannot be built", advice=MAKE_MODEL):
        with _entries_known(target, arguments, config), resized(target, config):
            model = _constructed(target, arguments, config)
            for module in getattr(model, "modules", list)():
                hash(module)  # which torch needs; a class with __eq__ alone has none
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise AdaptError(f"{target.__name__} returns {found}; it must return an nn.Module")
    return model, described


class _NewTensors(TorchFunctionMode):
    """Fills `torch.empty(C)` with ones, and limits the size of all new tensors together.

    Authors that load weights of their own leave parameters uninitialized, as in `self.weight =
    nn.Parameter(torch.empty(C))` of a norm. A parameter that no checkpoint fills would make every
    run different, or its logits NaN. An author's own sizes, such as 32 layers of width 4096, or a
    mask for 65,536 positions, may need more memory than there is, so that the system would end the
    process without a message.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        weights = 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd
        self.limit = 4 * weights + 2**29  # elements; the constant allows sizes fixed in the code
        self.elements = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _FACTORIES:  # others are called by the million, as by a loop over elements
            return func(*args, **(kwargs or {}))
        self._count(func, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        if func is torch.empty and found.dim() == 1 and found.is_floating_point():
            found.fill_(1.0)
        return found

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a MemoryError if a new tensor would exceed the limit, before it is created."""
        meta = torch.device("meta")
        if meta in (torch.get_default_device(), torch.device(kwargs.get("device") or "cpu")):
            return
        with contextlib.suppress(Exception):  # the call itself raises it with the user's line
            size = {name: each for name, each in kwargs.items() if name != "generator"}
            self.elements += func(*args, **{**size, "device": meta}).numel()
        if self.elements > self.limit:
            raise MemoryError(f"its tensors have more than {self.limit:,} elements")


_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})


def _constructed(
    target: Callable[..., nn.Module], arguments: Mapping[str, Any], config: GPT2Config
) -> nn.Module:
    """Return what the target returns, also if it has a list of tied weights, as in transformers 4.

    Version 5 expects a dictionary in its place. The head is tied as version 4 tied it.

    Raises:
        MemoryError: the tensors are far larger than those of a model with the sizes of `config`.
    """
    values = [value for _, value in users_globals(target)]
    lists: dict[Any, list[str]] = {
        value: vars(value)["_tied_weights_keys"] for value in values
        if is_users_class(value) and isinstance(vars(value).get("_tied_weights_keys"), list)
    }  # fmt: skip
    for cls in lists:
        cls._tied_weights_keys = {}
    try:
        with _NewTensors(config):
            model: Any = target(**arguments)
    finally:
        for cls, names in lists.items():
            cls._tied_weights_keys = names
    if type(model) in lists and getattr(model.config, "tie_word_embeddings", False):
        with contextlib.suppress(AttributeError, NotImplementedError):
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return cast(nn.Module, model)


def _needs_more_than_ids(model: nn.Module) -> bool:
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _runs(model: nn.Module, config: GPT2Config) -> bool:
    """Return whether a model can be called with ids."""
    with contextlib.suppress(Exception, SystemExit):
        _called(model, config)
        return True
    return False


def _called(model: nn.Module, config: GPT2Config) -> Any:
    """Call a model on a few ids or, if that fails, on a full context or a single sequence.

    None if it needs more than ids.
    """
    if _needs_more_than_ids(model):
        return None
    full = torch.arange(config.n_positions)[None] % config.vocab_size
    with eval_mode(model):
        try:
            return model(full[:, :6])
        except Exception:
            for ids in (full, full[0, :6]):
                with contextlib.suppress(Exception):
                    return model(ids)
            raise


@dataclass(frozen=True)
class _Attempts:
    """Finds arguments of a user's class by building its model and calling it.

    Args:
        target: The user's class.
        config: The config of the checkpoint.
        kwargs: Arguments that the caller sets.
    """

    target: type[nn.Module]
    config: GPT2Config
    kwargs: Mapping[str, Any]

    def inferred(self) -> dict[str, Any]:
        """Return values for arguments with ambiguous names, from small models; see trials.py."""
        small, chosen = small_config(self.config), dict[str, Value]()
        search = Search(self.run, self.config)
        try:
            arguments = self._arguments_in(small)
            chosen = search.better(self._alternatives(arguments), {})
            chosen |= search.unnamed(self._sizes(arguments), chosen)
            chosen |= search.needed(self._replaceable(small), chosen)
            chosen |= search.to_turn_off(self._unknown_switches(arguments), chosen)
            if any(isinstance(v, OWN_CONFIGS) or _attributes(v) for v in arguments.values()):
                self.run(small, arguments_with(chosen, small))
        except UnknownArguments as error:
            code = Code(modules_text(self.target), _choices(self.target), _roles(self.target))
            sizes = self._sizes({})
            sizes |= {name: 0 for name in error.names if not is_boolean(name, code)}
            if found := search.unnamed(sizes, chosen):
                return arguments_with({**chosen, **found}, self.config)
            chosen = search.tried(error.names, chosen, code)
            if not chosen:
                return next(self._as_called(error.names), {})
            with contextlib.suppress(AdaptError):
                arguments = self._arguments_in(small, arguments_with(chosen, small))
                others = self._alternatives(arguments)
                others = {name: roles for name, roles in others.items() if name not in chosen}
                other = search.better(others, chosen)
                if other:  # what was found beside the wrong meaning may be wrong too
                    chosen = search.tried(chosen, other, code) or chosen
                chosen |= search.unnamed(self._sizes(arguments), chosen)
        except ModuleNotFoundError:
            raise
        except (Exception, SystemExit):
            return {}  # the model in the checkpoint's sizes will raise it again
        return arguments_with(chosen, self.config)

    def other_way(self) -> tuple[GPT2Config, dict[str, Any], str] | None:
        """Return other sizes and arguments with which the model runs, and why, or None.

        Switches have the user's defaults, arguments whose default is None have a value, all
        arguments are those of a call of the user's, sizes have other meanings than their names, or
        the width is a number that the code contains, as in `nn.LayerNorm(384)` beside sizes that
        are arguments.
        """
        config = self.config

        def with_width(sizes: GPT2Config, width: int) -> GPT2Config:
            heads, inner = math.gcd(width, config.n_head), width * config.d_inner // config.n_embd
            return replace(sizes, n_embd=width, n_head=heads, n_inner=inner)

        def runs(width: int, own: Mapping[str, Any]) -> bool:
            sizes = replace(with_width(small_config(config), width), n_layer=1)
            with contextlib.suppress(Exception, SystemExit):
                arguments = self._arguments_in(sizes, own)
                with resized(self.target, sizes):
                    return _runs(_constructed(self.target, arguments, sizes), sizes)
            return False

        if runs(config.n_embd, {}):
            return None  # other sizes are the reason
        optional = [name for name, p in _parameters(self.target).items() if p.default is None]
        known = {name: neutral(name)[1] for name in optional if neutral(name)[1] is not None}
        known |= {name: torch.device("cpu") for name in optional if role_of(name) == "device"}
        more = [self._own_switches(config), *({n: value} for n, value in known.items())]
        with_more = (own for own in more if own and runs(config.n_embd, own))
        for own in chain(with_more, self._as_called()):
            return config, own, f"only runs with {_listed_entries(own)}"
        constants = [n.value for n in users_nodes(self.target) if isinstance(n, ast.Constant)]
        numbers = Counter(n for n in constants if type(n) is int and 8 <= n <= 4096)
        width = next((n for n, _ in numbers.most_common(12) if runs(n, {})), None)
        if width is not None:
            why = f"runs in width {width} and not in {config.n_embd}"
            return with_width(config, width), {}, why
        with contextlib.suppress(AdaptError, ModuleNotFoundError):
            sizes = self._sizes(self._arguments_in(config))
            meant = Search(self.run, config).reassigned(sizes)
            if found := arguments_with(meant, config):
                return config, found, f"only runs with {_listed_entries(found)}"
        return None

    def run(self, sizes: GPT2Config, more: Mapping[str, Any]) -> tuple[nn.Module, bool]:
        """Return the model in these sizes, and whether it can be called with ids.

        Raises:
            AdaptError: an argument or an entry of a config is unknown.
            Exception: what the constructor raises.
        """
        arguments = self._arguments_in(sizes, more)
        with _entries_known(self.target, arguments, sizes), resized(self.target, sizes):
            model = _constructed(self.target, arguments, sizes)
            try:
                found = _called(model, sizes)
            except ModuleNotFoundError:
                raise
            except Exception as error:
                if _missing_entries(self.target, arguments, error):
                    raise
                return model, False
            # Logits are as wide as the vocabulary. Other objects than tensors may hold them.
            words = vocabulary(model, sizes)
            return model, not isinstance(found, Tensor) or words in found.shape

    def _arguments_in(
        self, sizes: GPT2Config, more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the arguments in these sizes, with more of them set."""
        return _found_arguments(self.target, sizes, merged(more or {}, self.kwargs))

    def _as_called(self, names: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the arguments of the user's own calls with which the model runs, in other sizes.

        Args:
            names: The only arguments, and entries `argument.entry` of configs, that are taken over,
                or all of them.
        """
        small = small_config(self.config)
        for call in own_calls(self.target):
            with contextlib.suppress(Exception, SystemExit):
                if self.run(small, _only(call.arguments(small), names))[1]:
                    yield _only(call.arguments(self.config), names)

    def _own_switches(self, config: GPT2Config) -> dict[str, Any]:
        """Return the user's values of the booleans that are passed with the opposite value.

        They are those of the config in the class's module, or the defaults. Without a default,
        either value may be the user's.
        """
        found: dict[str, Any] = {}
        configs = list(vars(sys.modules[self.target.__module__]).values())
        parameters = _parameters(self.target)
        with contextlib.suppress(AdaptError):
            for name, value in self._arguments_in(config).items():
                default = parameters[name].default if name in parameters else None
                if default is Parameter.empty and isinstance(value, bool):
                    default = not value
                same = (c for c in configs if type(c) is type(value) and _entries(c))
                mine = next(same, type(value))
                defaults = {key: getattr(mine, key, None) for key in _entries(value)}
                passed: dict[str, Any] = {name: value, **_entries(value)}
                own = {key: each for key, each in {name: default, **defaults}.items()
                       if isinstance(each, bool) and passed[key] is (not each)}  # fmt: skip
                if own:
                    found[name] = own.get(name, own)
        return found

    def _replaceable(self, config: GPT2Config) -> dict[str, bool]:
        """Return the user's switches of norms and positions whose opposite is passed.

        Examples are `use_rope=True` and `remove_rmsnorm=False`.
        """
        kinds = re.compile("rms|rope|rotary|alibi|sinus")
        own = _flat(self._own_switches(config))
        return {n: v for n, v in own.items() if kinds.search(plain(last_part(n)))}

    def _unknown_switches(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the arguments and entries `use_…` that are on, and whose meaning is not known."""
        on = [name for name, value in self._with_entries(arguments).items() if value is True]
        ours = (n for n in on if last_part(n).startswith("use_") and not neutral(last_part(n))[0])
        return sorted(ours, key=lambda name: "." in name)  # arguments before entries

    def _alternatives(self, arguments: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Return the arguments and config entries with ambiguous names, and their roles."""
        entries, widths = self._with_entries(arguments), embedding_widths(self.target)
        sizes = [name for name, value in entries.items() if type(value) is int]
        ambiguous = {name: roles for name in sizes if (roles := meanings(last_part(name)))}
        found = {name: roles for name, roles in ambiguous.items() if last_part(name) not in widths}
        if any(role_of(last_part(name)) == "n_embd" for name in sizes if name not in ambiguous):
            # `hidden_dim` beside `embedding_dim` is the MLP's width, unless it is that of a head.
            found = {
                name: roles for name, roles in found.items()
                if "d_inner" not in roles
                or any("head" in each for each in factors_of(self.target, last_part(name)))
            }  # fmt: skip
        return found

    def _sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Return the integers among arguments and their entries, and the constructor's defaults."""
        defaults = {name: p.default for name, p in _parameters(self.target).items()}
        entries = self._with_entries({**defaults, **arguments})
        return {name: value for name, value in entries.items() if type(value) is int}

    def _with_entries(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments and their entries `argument.entry`, without those the caller sets."""
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in self.kwargs:
                own = _entries(value) or ({} if isinstance(value, PLAIN) else _attributes(value))
                found |= {name: value} | {f"{name}.{key}": entry for key, entry in own.items()}
        return found


def _only(arguments: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the arguments and entries `argument.entry` of these names; all without names."""
    if not names:
        return arguments
    own = dict(arguments)
    for name, value in arguments.items():
        own |= {f"{name}.{key}": entry for key, entry in _entries(value).items()}
    return nested({name: own[name] for name in names if name in own})


def _roles(target: type[nn.Module]) -> set[str | None]:
    """Return the roles of a constructor's arguments, and of the entries that are read from them."""
    names = list(_parameters(target))
    names += [entry for name in names for entry in reads(target, name).names]
    return {role_of(name, names) for name in names}


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


def _attributes(value: object) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


@contextlib.contextmanager
def _entries_known(
    target: Callable[..., nn.Module], arguments: Mapping[str, Any], config: GPT2Config
) -> Iterator[None]:
    """Name the missing entry in the error if the body fails to read it from a config."""
    try:
        yield
    except (KeyError, AttributeError) as error:
        missing = _missing_entries(target, arguments, error)
        if not missing:
            raise
        raise _unknown(target, missing, config) from error


def _described_call(target: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> str:
    """Return the call, and what the target's defaults and its module's configs have instead."""
    passed: dict[str, Any] = dict(arguments)
    for value in arguments.values():
        passed |= _entries(value)
    text = _call(target, arguments)
    module = sys.modules.get(target.__module__)
    defaults = {name: parameter.default for name, parameter in _parameters(target).items()}
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
        own = {} if isinstance(value, type) or name.startswith("_") else _entries(value)
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


def _entries(value: Any) -> dict[str, Any]:
    """Return a config's named entries, if it is a dictionary, a namespace or a dataclass."""
    if isinstance(value, Mapping):
        return {key: entry for key, entry in value.items() if isinstance(key, str)}
    plain = isinstance(value, (SimpleNamespace, GPT2Config)) or dataclasses.is_dataclass(value)
    return dict(vars(value)) if plain and hasattr(value, "__dict__") else {}


def _listed_entries(entries: Mapping[str, Any]) -> str:
    """Write `{"config": {"n": 1}, "dim": 2}` as `config.n=1, dim=2`."""
    texts = {name: (repr(value), _shown(value)) for name, value in _flat(entries).items()}
    return ", ".join(
        f"{n}={long if len(long) < 60 else short}" for n, (long, short) in texts.items()
    )


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"config": {"n": 1}, "dim": 2}` to `{"config.n": 1, "dim": 2}`."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        inner = _flat(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{key}".rstrip("."): each for key, each in inner.items()}
    return flat


def _call(target: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> str:
    shown = ", ".join(
        f"{name}={shorten(_shown(value), 200, placeholder=' …')}"
        for name, value in arguments.items()
    )
    return f"{target.__name__}({shown})"


def _shown(value: object) -> str:
    """Return a value as text; an object whose class shows no values, with its attributes."""
    if type(value).__repr__ is object.__repr__:
        attributes = ", ".join(f"{name}={each!r}" for name, each in _attributes(value).items())
        return f"{type(value).__name__}({attributes})"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(…)"
    return value.__name__ if isinstance(value, FunctionType) else repr(value)


def _found_arguments(
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
    parameters = _parameters(target)
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
                named[name] = _built(cls, config, {})[0]
        if isinstance(target, type) or takes_sizes(parameters):
            arguments, missing = _arguments(target, parameters, config, given, named)
        else:
            arguments, missing = _function_arguments(parameters, config, given | named)
    if missing:
        raise _unknown(target, missing, config)
    return arguments


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


def _parameters(target: Callable[..., Any]) -> dict[str, Parameter]:
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
                    read = [n for n, required in items if required or role_of(n) in SIZES]
                    found |= {n: Parameter(n, Parameter.KEYWORD_ONLY) for n in read}
                    for inner, passed in forwarded(base, parameter.name):
                        more = _parameters(inner).items()
                        found = {n: p for n, p in more if n not in passed} | found
                found.setdefault(parameter.name, parameter)
            if not any(p.kind is p.VAR_KEYWORD and _passes_on(base, p.name) for p in own):
                break
    return found


def _passes_on(cls: type, keywords: str) -> bool:
    """Return whether a constructor passes its `**keywords` on, as far as its source is known."""
    try:
        source = inspect.getsource(vars(cls)["__init__"])
    except (OSError, TypeError):
        return True
    return len(re.findall(rf"\b{keywords}\b", source)) > 1  # the first is in the signature


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
    numbers = {name for name, parameter in parameters.items() if is_number(parameter)}
    sizes = known_values(cls, parameters, config, numbers) | factors(cls, parameters, config)
    for name, parameter in parameters.items():
        entries = given.get(name, {})
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in named:
            continue
        usage = reads(cls, name)
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
            own = {n: p for n, p in _parameters(callee).items() if n not in passed}
            arguments[name], unknown = _arguments(callee, own, config, dict(entries), {})
        elif isinstance(entries, Mapping) and not is_module and takes_config(cls, parameter, usage):
            arguments[name], unknown = make_config(cls, parameter, usage, config, entries)
        elif name in given:
            continue
        elif required and LIST_OF_CONFIGS.match(_annotation(parameter)):
            entry, unknown = make_config(cls, parameter, reads(cls, "config"), config, {})
            arguments[name] = [copy.copy(entry) for _ in range(config.n_layer)]
        elif required and counts(cls, name) and symbols(name, config):
            arguments[name] = symbols(name, config)
        elif name in sizes and accepts(parameter, sizes[name]):
            arguments[name] = sizes[name]
        elif required:
            has_neutral, arguments[name] = neutral(name)
            if plain(name) == "modeltype" and not any(role_of(n) in SIZES for n in parameters):
                arguments[name] = "gpt2"  # the name of a preset
            if not has_neutral and inner is not None:
                arguments[name] = construct(inner, config)
            elif not has_neutral:
                missing.append(name)
        missing += [f"{name}.{key}" for key in unknown]
    return arguments, missing


def _annotation(parameter: Parameter) -> str:
    named = isinstance(parameter.annotation, type) and not get_args(parameter.annotation)
    return parameter.annotation.__name__ if named else str(parameter.annotation)


def _inner_class(cls: Callable[..., Any], parameter: Parameter) -> type[nn.Module] | None:
    """Return the class of a module that a constructor takes, such as GPT of `LMHead(gpt)`."""
    classes = {
        value for value in vars(sys.modules[cls.__module__]).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value is not cls
        and is_users_class(value)
    }  # fmt: skip
    named = (_annotation(parameter), plain(parameter.name))
    found = (c for c in classes if c.__name__ == named[0] or plain(c.__name__) == named[1])
    return next(found, None)


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


def _missing_entries(
    target: Callable[..., Any], arguments: Mapping[str, Any], error: Exception
) -> list[str]:
    """Return `["config.foo"]` if the error is that the config has no entry `foo`."""
    if not isinstance(error, (KeyError, AttributeError)):
        return []
    key = error.args[0] if isinstance(error, KeyError) else error.name
    return [
        f"{name}.{key}"
        for name, value in arguments.items()
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
    example = arguments_with(dict.fromkeys(missing, lambda config: "..."), config)
    text = json.dumps(example).replace('"..."', "...")
    return UnknownArguments(
        f"{target.__name__} needs the {noun} {listed(missing)}, and compat knows no value for "
        f"{'these names' if len(missing) > 1 else 'this name'}. The checkpoint has {known}. "
        f"{MAKE_MODEL}; or pass --kwargs '{text}', or the name of a config in the file with "
        "--config-name",
        missing,
    )
