"""Find arguments of a user's class that their names leave open, by building its model.

What the code makes of an argument may tell its role, as in `num_heads=units`. Otherwise, each
possible value is tried in a small model. Values with which the model cannot be built or called are
discarded. Of the others, the values are chosen with which the number of parameters is closest to
that of a GPT-2 of the same sizes, or the shapes of the parameters are those of such a model. After
a wrong choice the proof fails, and a note says what was built.

If that is not enough, because a model in the checkpoint's sizes cannot be built or called, it is
built in another way: with switches and arguments of the user's own, or in other sizes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice, permutations, product
from threading import get_ident
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.parity.outputs import find_logits
from compat.user_code import exception_report
from compat.user_models.arguments import (
    UnknownArguments,
    entries_known,
    found_arguments,
    missing_entries,
    parameters_of,
)
from compat.user_models.building import called, constructed, runs
from compat.user_models.candidates import Code, Value, constant, of_role
from compat.user_models.config_object import merged
from compat.user_models.entries import (
    PLAIN,
    attributes,
    entries_of,
    flattened,
    last_part,
    nested,
    only,
)
from compat.user_models.eval_mode import eval_mode
from compat.user_models.missing import ReadableDict
from compat.user_models.module_sizes import resized
from compat.user_models.own_calls import own_calls
from compat.user_models.synonyms import SIZES, meanings, neutral, plain, role_of, value_of
from compat.user_models.usage import (
    embedding_widths,
    factors_of,
    is_of_one_head,
    is_users_class,
    reads,
    roles_by_use,
    users_nodes,
)

# Builds the user's model in the sizes of a config, with additional arguments, and calls it: the
# model, and whether it could be called.
Run = Callable[[GPT2Config, Mapping[str, Any]], tuple[nn.Module, bool]]
# Returns whether a model of these sizes can be called.
Runs = Callable[[nn.Module, GPT2Config], bool]

MOST_BUILDS = 400
MOST_SECONDS = 30  # of one search
LARGEST = 16  # times the parameters of GPT-2 in the same sizes, in a model that is tried
# How much nearer to GPT-2's number of parameters another meaning of a known name must come.
MUCH_BETTER = 4
UNCALLABLE = 1e9  # added to the distance of a model that cannot be called with ids
OTHER_VOCABULARY = 1e8  # added to that of a model with a vocabulary of its own
# Sizes for trials, all different, and rare as defaults. Some code has heads of 64 channels.
SMALL = GPT2Config(
    vocab_size=89, n_positions=24, n_embd=192, n_layer=5, n_head=3, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
# A context that is shorter than most sizes by which a mask may be cut by mistake: the length with
# which `adapt` usually traces a model.
SHORT = 13
COMPUTED = ("d_inner", "d_head", "n_head")  # sizes that code may compute from others
WIDTHS = ("d_inner", "n_embd", "d_head", "n_head")  # of the same matrices
ASCENDING = ("n_layer", "n_head", "n_positions", "n_embd", "vocab_size")  # usually
ALWAYS = {"vocab_size", "n_embd", "n_layer"}  # sizes of every model
# Names of numbers that GPT-2 does not have, such as that of experts and the rank of an adapter.
NO_SIZE = re.compile(
    "expert|rank|lora|kernel|conv|group|kv|key|value|topk|multiple|divisor|buffer|state|memory"
    "|codebook|class|label|pad|bucket|gram"
)
POSITIONS = re.compile("rope|rotary|alibi|sinus")
OWN_CONFIGS = (dict, ReadableDict, SimpleNamespace)  # configs that compat makes


class Search:
    """Finds values of a class's arguments, and of entries `argument.entry` of configs.

    Args:
        target: The user's class.
        config: The config of the checkpoint.
        kwargs: Arguments that the caller sets.
        runs: Returns whether a model of these sizes can be called, for `other_ways`.

    Attributes:
        small: The sizes of the trial models.
        chosen: The values that were found so far. Every further trial has them.
        errors: Descriptions of what the trial models raised when they were built or called, with
            their numbers.
    """

    def __init__(
        self,
        target: type[nn.Module],
        config: GPT2Config,
        kwargs: Mapping[str, Any],
        runs: Runs = runs,
    ) -> None:
        self.target, self.config, self.kwargs, self.runs = target, config, kwargs, runs
        self.small = small_config(config)
        self.chosen: dict[str, Value] = {}
        self.errors = Counter[str]()

    def inferred(self) -> dict[str, Any]:
        """Return values for arguments with unknown or ambiguous names.

        If all names are known, other meanings of ambiguous names are tried, then roles of integers
        whose names have none, then switches. If some are unknown, they get the roles that the code
        gives them, then roles are tried, then what the code does with them, then the user's calls.
        """
        try:
            arguments = self._arguments_in(self.small)
            self._choose_meanings(self._ambiguous(arguments))
            sizes = self._without_zeros(self._sizes(arguments))
            self._choose_by_use([*sizes, *self._unset_entries(arguments)], sizes)
            self._choose_roles(sizes)
            self._explain_shapes(sizes)
            self._choose_vocabulary(sizes)
            self._keep_switches_needed()
            self._turn_off_switches(arguments)
            if any(isinstance(v, OWN_CONFIGS) or attributes(v) for v in arguments.values()):
                self.run(self.small, arguments_with(self.chosen, self.small))
        except UnknownArguments as error:
            if not self._choose_unknown(error.names):
                return next(chain(self._as_called(error.names), self._as_called()), {})
        except ModuleNotFoundError:
            raise
        except (Exception, SystemExit):
            return {}  # the model in the checkpoint's sizes will raise it again
        return arguments_with(self.chosen, self.config)

    def run(self, sizes: GPT2Config, more: Mapping[str, Any]) -> tuple[nn.Module, bool]:
        """Return the model in these sizes, and whether it can be called with ids.

        Raises:
            AdaptError: an argument or an entry of a config is unknown.
            Exception: what the constructor raises.
        """
        arguments = self._arguments_in(sizes, more)
        with entries_known(self.target, arguments, sizes), resized(self.target, sizes):
            try:
                model = constructed(self.target, arguments, sizes)
            except Exception as error:
                self._keep_error(error, arguments)
                raise
            try:
                found = called(model, sizes)
            except Exception as error:
                if not self._keep_error(error, arguments):
                    raise
                return model, False
            # Logits are as wide as the vocabulary. Other objects than tensors may hold them.
            words, tensors = vocabulary(model, sizes), _tensors(found)
            return model, not tensors or any(words in tensor.shape for tensor in tensors)

    def _keep_error(self, error: Exception, arguments: Mapping[str, Any]) -> bool:
        """Keep what the user's code raised, unless a library or an entry of a config is missing."""
        missing = isinstance(error, ModuleNotFoundError | AdaptError)
        if missing or missing_entries(self.target, arguments, error):
            return False
        self.errors[exception_report(error)] += 1
        return True

    def _arguments_in(
        self, sizes: GPT2Config, more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the arguments in these sizes, with more of them set."""
        return found_arguments(self.target, sizes, merged(more or {}, self.kwargs))

    def _with_entries(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments and their entries `argument.entry`, without those the caller sets."""
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in self.kwargs:
                own = entries_of(value) or ({} if isinstance(value, PLAIN) else attributes(value))
                found |= {name: value} | {f"{name}.{key}": entry for key, entry in own.items()}
        return found

    def _sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Return the integers among arguments and their entries, and the constructor's defaults.

        What a data class does not declare, compat sets in case it is read, as `h` of
        `self.transformer.h` may be. It is left out.
        """
        values = {**_defaults(self.target), **arguments}
        undeclared = {
            f"{name}.{key}"
            for name, value in values.items() if dataclasses.is_dataclass(value)
            for key in vars(value).keys() - {field.name for field in dataclasses.fields(value)}
        }  # fmt: skip
        entries = self._with_entries(values)
        return {n: v for n, v in entries.items() if type(v) is int and n not in undeclared}

    def _without_zeros(self, sizes: dict[str, int]) -> dict[str, int]:
        """Return the sizes without those of parts that are off, if the model runs so.

        An example is `hash_size=0`, the rows of a table that the model does not have then.
        """
        nonzero = {name: value for name, value in sizes.items() if value}
        distance = self._distance({})[0] if len(nonzero) < len(sizes) else None
        return sizes if distance is None or distance >= UNCALLABLE else nonzero

    # Ambiguous names.

    def _ambiguous(self, arguments: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
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
        keys = [name for name, roles in found.items() if roles == meanings("d_k")]
        if any(is_of_one_head(self.target, last_part(name)) for name in keys):
            found = {name: roles for name, roles in found.items() if name not in keys}
        inner = (name for name in sizes if role_of(last_part(name)) == "d_inner")
        for name in inner:  # a ratio in `d_ff * d_model`
            if "n_embd" in map(role_of, factors_of(self.target, last_part(name))):
                found[name] = ("d_inner", "ratio")
        return found

    def _choose_meanings(self, ambiguous: Mapping[str, tuple[str, ...]]) -> bool:
        """Choose other roles for ambiguous names, if they fit GPT-2 much better."""
        first = self._distance({})[0] if ambiguous else 0.0
        if first == 0:
            return False
        every = {name: [of_role(role) for role in roles] for name, roles in ambiguous.items()}
        most = None if first is None else first / MUCH_BETTER
        return self._choose(_by_likelihood(every), most)

    def _choose_roles(self, sizes: Mapping[str, int]) -> bool:
        """Choose roles for integers whose names have none, as in code in another language.

        Each gets a role that no other name has, if that fits the number of parameters better, or,
        of a model that cannot be built otherwise, exactly. The only such name gets the only role
        that is left if the model can be built so.

        Args:
            sizes: the integers; 0 for a missing one.
        """
        names = sorted(
            (n for n in sizes if n not in self.chosen and _has_no_role(n)), key=sizes.__getitem__
        )
        known = {role_of(last_part(name)) for name in sizes}
        values = [value(self.small) for value in self.chosen.values()]
        roles = [r for r in ASCENDING if r not in known and value_of(r, self.small) not in values]
        first = self._distance({})[0] if names and roles else 0.0
        if first == 0:
            return False
        count = min(len(names), len(roles))
        assigned = (
            dict(zip(some, map(of_role, order), strict=True))
            for some, order in product(permutations(names, count), combinations(roles, count))
        )
        most = first / MUCH_BETTER if first is not None else 1.0
        if first is None and len(names) == len(roles) == 1:
            most = OTHER_VOCABULARY
        return self._choose(assigned, most)

    def _explain_shapes(self, sizes: Mapping[str, int]) -> None:
        """Choose roles for integers whose names have none, by the shapes of the parameters.

        Such an integer keeps the author's value, as 256 in `Config(units=256)`. If that is in the
        shape of a parameter, and a size that no parameter has yet explains more shapes in its
        place, it gets that size's role.
        """
        names = {n: v for n, v in sizes.items() if n not in self.chosen and _may_be_size(n)}
        known = {role_of(last_part(name)) for name in sizes}
        while names and (built := self._shapes({})):
            fits = dict[tuple[str, str], tuple[int, bool, float]]()
            works, distance, shapes = built
            in_shapes = {n for n, v in names.items() if shapes.may_have(v, self.small.n_embd)}
            every = [*ASCENDING, "d_inner"]
            lacking = [role for role in every if role not in known | shapes.roles]
            for name, role in product(sorted(in_shapes - {*self.chosen}), lacking):
                if tried := self._shapes({name: of_role(role)}):
                    also_works, other, found = tried
                    fewer = role in found.roles and len(found.unexplained) < len(shapes.unexplained)
                    if also_works >= works and fewer and (role in ALWAYS or other <= distance):
                        fits[name, role] = len(found.unexplained), role == "d_inner", other
            if not fits:
                return
            name, role = min(fits, key=fits.__getitem__)
            self.chosen[name] = of_role(role)
            known.add(role)

    def _choose_vocabulary(self, sizes: Mapping[str, int]) -> None:
        """Choose the vocabulary for the size that is the number of logits, if they are fewer.

        An example is `p` of a model that adds numbers modulo p, which has ids for signs as well.
        """
        names = [n for n in sizes if n not in self.chosen and role_of(last_part(n)) not in SIZES]
        distance = self._distance({})[0] if names else 0.0
        if distance is not None and distance >= UNCALLABLE:
            self._choose(({name: of_role("vocab_size")} for name in names), most=UNCALLABLE)

    def _choose_by_use(self, names: Iterable[str], others: Iterable[str]) -> None:
        """Choose the roles that the code gives to names that have none.

        They are only kept if the model can be built with them, and if it can still be called and
        has no other vocabulary than before.

        Args:
            names: those of arguments, and of entries `argument.entry` of configs.
            others: the names of all sizes. No other role than theirs is chosen.
        """
        found, known = dict[str, list[str]](), {role_of(last_part(name)) for name in others}
        for name in names:
            if name not in self.chosen and _may_be_size(name):
                roles = roles_by_use(self.target, last_part(name)) - known
                if 0 < len(roles) <= 2:
                    found[name] = sorted(roles)
                    known |= roles if len(roles) == 1 else set()
        assigned = [
            dict(zip(found, map(of_role, roles), strict=True))
            for roles in islice(product(*found.values()), MOST_BUILDS)
            if len({*roles}) == len(roles)
        ]
        if found and assigned:
            before = self._distance({})[0]
            most = math.inf if before is None else before + OTHER_VOCABULARY / 2
            best, unknown = self._best(assigned, most)
            self.chosen |= assigned[0] if unknown else best  # values of others are unknown

    def _unset_entries(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the entries that are None, if the model cannot be built or called with them."""
        entries = self._with_entries({**_defaults(self.target), **arguments})
        names = [name for name, value in entries.items() if value is None and _may_be_size(name)]
        distance = self._distance({})[0] if names else 0.0
        return names if distance is None or distance >= UNCALLABLE else []

    # Unknown names.

    def _choose_unknown(self, names: Sequence[str]) -> bool:
        """Choose values for unknown names, and return whether the model can be built with them."""
        code = Code(self.target)
        missing = {n: 0 for n in names if not code.is_boolean(n) and not code.is_string(n)}
        self._choose_by_use(missing, code.names)
        if self.chosen:
            names = self._distance({})[1]
        if names and self._choose_roles({**self._sizes({}), **missing}):
            return True
        if names and not self._choose_candidates(names, code):
            return False
        with contextlib.suppress(AdaptError):
            arguments = self._arguments_in(self.small, arguments_with(self.chosen, self.small))
            others = self._ambiguous(arguments)
            before = dict(self.chosen)
            if self._choose_meanings({n: roles for n, roles in others.items() if n not in before}):
                # What was found beside the wrong meaning may be wrong too.
                self.chosen = {n: value for n, value in self.chosen.items() if n not in before}
                if not self._choose_candidates(before, code):
                    self.chosen = before
            self._choose_roles(self._sizes(arguments))
            self._explain_shapes(self._sizes(arguments))
        return True

    def _choose_candidates(self, names: Iterable[str], code: Code) -> bool:
        """Choose values for unknown names by what the code does with them."""
        every = {name: code.candidates(name) for name in names}
        while True:
            best, unknown = self._best(_by_likelihood(every))
            if not unknown:
                break
            every |= {name: code.candidates(name) for name in unknown}
        self.chosen |= best
        for name in filter(code.is_boolean, best):
            self._turn_if_more_is_used(name)
            self._turn_if_causal(name)
        return bool(best)

    def _turn_if_more_is_used(self, name: str) -> None:
        """Give a switch its other value if fewer parameters are unused then."""
        turned = {name: constant(not self.chosen[name](self.small))}
        with contextlib.suppress(Exception, SystemExit):
            (used, every), (more, same) = map(self._used, ({}, turned))
            self.chosen |= turned if more > used and every == same else {}

    def _turn_if_causal(self, name: str) -> None:
        """Give a switch its other value if tokens attend to later ones only without it."""
        turned = {name: constant(not self.chosen[name](self.small))}
        with contextlib.suppress(Exception, SystemExit):
            self.chosen |= turned if self._is_causal(turned) and not self._is_causal({}) else {}

    def _is_causal(self, more: Mapping[str, Value]) -> bool:
        """Return whether the last token changes no logits but its own."""
        model = self.run(self.small, arguments_with({**self.chosen, **more}, self.small))[0]
        ids = torch.arange(6)[None]
        with resized(self.target, self.small), eval_mode(model):
            one, two = (find_logits(model(each), ids) for each in (ids, ids.clamp(max=4)))
        return torch.equal(one[:, :-1], two[:, :-1])

    # Switches.

    def _keep_switches_needed(self) -> None:
        """Keep the user's switches of norms and positions that nothing replaces if they are off.

        Without `use_rmsnorm`, some code has LayerNorm and other code has no norms; without
        `use_rope`, some code has learned positions and other code has none. The numbers of
        parameters tell, without those of modules that do not run.
        """

        def count(more: Mapping[str, Value]) -> int:
            used, every = self._used(more)
            return used or every

        for name, value in flattened(self._own_switches(self.small)).items():
            short, kept = plain(last_part(name)), {name: constant(value)}
            is_position = POSITIONS.search(short) is not None
            if is_position or "rms" in short:
                with contextlib.suppress(Exception, SystemExit):
                    more = count(kept) - count({})
                    self.chosen |= kept if more > 0 or (is_position and more == 0) else {}

    def _turn_off_switches(self, arguments: Mapping[str, Any]) -> None:
        """Turn off unknown switches without which a model has more nearly GPT-2's parameters.

        An example is `use_ndlinear=True`, the author's default, which selects other projections.
        """
        on = [name for name, value in self._with_entries(arguments).items() if value is True]
        ours = (n for n in on if last_part(n).startswith("use_") and _has_no_role(n))
        for name in sorted(ours, key=lambda name: "." in name):  # arguments before entries
            if distance := self._distance({})[0]:
                self._choose([{name: constant(False)}], most=distance)

    def _own_switches(self, config: GPT2Config) -> dict[str, Any]:
        """Return the user's values of the booleans that are passed with the opposite value.

        They are those of the config in the class's module, or the defaults. Without a default,
        either value may be the user's.
        """
        found: dict[str, Any] = {}
        configs = list(vars(sys.modules[self.target.__module__]).values())
        parameters = parameters_of(self.target)
        with contextlib.suppress(AdaptError):
            for name, value in self._arguments_in(config).items():
                default = parameters[name].default if name in parameters else None
                if default is inspect.Parameter.empty and isinstance(value, bool):
                    default = not value
                same = (c for c in configs if type(c) is type(value) and entries_of(c))
                mine = next(same, type(value))
                defaults = {key: getattr(mine, key, None) for key in entries_of(value)}
                passed: dict[str, Any] = {name: value, **entries_of(value)}
                own = {key: each for key, each in {name: default, **defaults}.items()
                       if isinstance(each, bool) and passed[key] is (not each)}  # fmt: skip
                if own:
                    found[name] = own.get(name, own)
        return found

    # Other ways.

    def other_ways(self) -> Iterator[tuple[GPT2Config, dict[str, Any]]]:
        """Yield other widths or other arguments with which the model runs.

        Switches have the user's defaults, arguments whose default is None have a value, the number
        of layers is one that the code contains, all arguments are those of a call of the user's,
        sizes have other meanings than their names, the width is a number that the code contains, as
        in `nn.LayerNorm(384)` beside sizes that are arguments, the context is shorter, or there is
        one layer.
        """
        config, C = self.config, self.config.n_embd
        if not self._runs_in(C, {}):  # or else the reason is another size, such as the context's
            with_more = (own for own in self._more_values() if own and self._runs_in(C, own))
            yield from ((config, own) for own in with_more)
            depths = [replace(config, n_layer=n) for n in self._numbers(2, 32)]
            deeper = product(depths, ({}, *self._other_heads()))
            yield from ((sizes, own) for sizes, own in deeper if self._runs(sizes, own, sizes))
            yield from ((config, own) for own in self._as_called())
            widths = (n for n in self._numbers(8, 4096) if self._runs_in(n, {}))
            yield from ((self._in_width(width, config), {}) for width in widths)
            with contextlib.suppress(AdaptError, ModuleNotFoundError):
                sizes = self._sizes(self._arguments_in(config))
                if found := arguments_with(self._reassigned(sizes), config):
                    yield config, found
        if own := self._shorter():
            yield config, own
        elif not self._runs(config, {}, config):
            one = replace(config, n_layer=1)  # a block may not accept the result of another block
            if self._runs(one, {}, one):
                yield one, {}

    def _more_values(self) -> Iterator[dict[str, Any]]:
        """Yield the user's switches, and other values for single arguments and entries of configs.

        The name of a model may replace the sizes, a size may be None where only a script sets it,
        and the code may compute what is None by default. An attribute that is read with a default
        may be one that other classes read, code that casts to bfloat16 needs such parameters, code
        may want fewer heads of keys than of queries, and the number of heads may be written in it,
        as in `x.view(B, T, 8, -1)`. A vocabulary may have to be as large as the user's, which is
        padded to a multiple of 64, because an id of it is written in the code. A switch may select
        a variant of attention that the author has not finished, also by default.
        """
        yield self._own_switches(self.config)
        entries = self._entries()
        roles = {name: role_of(last_part(name)) for name, value in entries.items() if value is None}
        sizes = {name: of_role(role) for name, role in roles.items() if role in SIZES}
        yield from (arguments_with({name: size}, self.config) for name, size in sizes.items())
        yield arguments_with(sizes, self.config)
        for name in parameters_of(self.target):
            defaulted = {f"{name}.{entry}" for entry in reads(self.target, name).with_default}
            yield from (nested({entry: None}) for entry in sorted(defaulted & {*entries}))
        on = [name for name, value in entries.items() if value is True]
        needless = [name for name in on if neutral(last_part(name)) == (True, False)]
        yield nested(dict.fromkeys(needless, False))  # such as gradient checkpointing
        presets = [name for name in entries if plain(last_part(name)) == "modeltype"]
        yield nested(dict.fromkeys(presets))
        types = [name for name, value in entries.items() if value is torch.float32]
        yield arguments_with(dict.fromkeys(types, constant(torch.bfloat16)), self.config)
        optional = [name for name, p in parameters_of(self.target).items() if p.default is None]
        known = {name: neutral(name)[1] for name in optional if neutral(name)[1] is not None}
        known |= {name: torch.device("cpu") for name in optional if role_of(name) == "device"}
        yield from ({name: value} for name, value in known.items())
        words = [name for name in entries if role_of(last_part(name)) == "vocab_size"]
        larger = [n for n in self._numbers(self.config.vocab_size + 1, 2**18) if n % 64 == 0]
        yield from (nested(dict.fromkeys(words, n)) for n in larger if words)
        yield from self._other_heads()
        values = {**_defaults(self.target), **self._of_classes(), **entries}
        switches = [n for n, value in values.items() if type(value) is bool]
        others = [n for n in switches if _has_no_role(n) or role_of(last_part(n)) in SIZES]
        yield from (nested({name: not values[name]}) for name in others)
        names, unset = [*map(last_part, entries)], sorted(entries.keys() & self._unset())
        computed = (name for name in unset if role_of(last_part(name), names) in COMPUTED)
        yield from (nested({name: None}) for name in computed)

    def _other_heads(self) -> Iterator[dict[str, Any]]:
        """Yield fewer heads of keys than of queries, and numbers of heads that the code contains.

        One head is last, for code with a fixed width of the heads.
        """
        numbers = [n for n, value in self._entries().items() if isinstance(value, int | None)]
        heads = [name for name in numbers if role_of(last_part(name)) == "n_head"]
        of_keys = [name for name in heads if "kv" in plain(last_part(name))]
        if of_keys:
            yield nested(dict.fromkeys(of_keys, self.config.n_head // 2))
        divisors = [n for n in self._numbers(2, 64) if self.config.n_embd % n == 0] + [1]
        yield from (nested(dict.fromkeys(heads, n)) for n in divisors if heads)

    def _unset(self) -> set[str]:
        """Return the arguments, and the entries of config classes, whose default is None."""
        found = {name for name, p in parameters_of(self.target).items() if p.default is None}
        with contextlib.suppress(AdaptError):
            for name, made in self._arguments_in(self.config).items():
                unset = (key for key in entries_of(made) if getattr(type(made), key, made) is None)
                found |= {f"{name}.{key}" for key in unset}
        return found

    def _entries(self) -> dict[str, Any]:
        """Return the arguments in the checkpoint's sizes and their entries, if all are known."""
        with contextlib.suppress(AdaptError):
            return self._with_entries(self._arguments_in(self.config))
        return {}

    def _of_classes(self) -> dict[str, Any]:
        """Return the attributes of the classes of configs, which their instances may replace."""
        found: dict[str, Any] = {}
        with contextlib.suppress(AdaptError):
            for name, made in self._arguments_in(self.config).items():
                classes = [cls for cls in reversed(type(made).__mro__) if is_users_class(cls)]
                own = {key: value for cls in classes for key, value in vars(cls).items()}
                found |= {f"{name}.{key}": value for key, value in own.items()}
        return found

    def _shorter(self) -> dict[str, Any]:
        """Return a context with which alone the model runs; {} if the code has no such size.

        A mask may be shorter than the context, as where its size is that of a head. The token
        embedding may by mistake be as wide as the context is long.
        """
        entries = self._entries()
        names = [name for name in entries if role_of(last_part(name), entries) == "n_positions"]
        sizes = replace(self.config, n_layer=1)
        if not names or self._runs(sizes, {}, sizes):
            return {}
        for length in (SHORT, self.config.n_embd):
            own = nested(dict.fromkeys(names, length))
            if self._runs(sizes, own, replace(sizes, n_positions=length)):
                return own
        return {}

    def _numbers(self, least: int, most: int) -> list[int]:
        """Return the integers in the user's code between these but seeds, the most common first."""
        nodes = list(users_nodes(self.target))
        seeds = {
            id(argument) for node in nodes if isinstance(node, ast.Call)
            if "seed" in ast.unparse(node.func) for argument in node.args
        }  # fmt: skip
        constants = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in seeds]
        numbers = Counter(n for n in constants if type(n) is int and least <= n <= most)
        return [number for number, _ in numbers.most_common(12)]

    def _in_width(self, width: int, sizes: GPT2Config) -> GPT2Config:
        """Return sizes with another width, and with as many heads as divide it."""
        inner = width * self.config.d_inner // self.config.n_embd
        heads = math.gcd(width, self.config.n_head)
        return replace(sizes, n_embd=width, n_head=heads, n_inner=inner)

    def _runs_in(self, width: int, own: Mapping[str, Any]) -> bool:
        """Return whether a small model of this width can be called, with more arguments set."""
        sizes = replace(self._in_width(width, self.small), n_layer=1)
        return self._runs(sizes, own, sizes)

    def _runs(self, sizes: GPT2Config, own: Mapping[str, Any], called_in: GPT2Config) -> bool:
        """Return whether a model of these sizes can be called in others, with `own` arguments."""
        with contextlib.suppress(Exception, SystemExit):
            arguments = self._arguments_in(sizes, own)
            with resized(self.target, sizes):
                return self.runs(constructed(self.target, arguments, sizes), called_in)
        return False

    def _as_called(self, names: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the arguments of the user's own calls with which the model runs, in other sizes.

        Args:
            names: The only arguments, and entries `argument.entry` of configs, that are taken over,
                or all of them.
        """
        for call in own_calls(self.target):
            with contextlib.suppress(Exception, SystemExit):
                if self.run(self.small, only(call.arguments(self.small), names))[1]:
                    yield only(call.arguments(self.config), names)

    def _reassigned(self, sizes: Mapping[str, int]) -> dict[str, Value]:
        """Find other roles for one or two integers with which the model can be called, or {}.

        Some authors call the number of heads `head_size`, or the width `head_dim`. A name of a
        dimension is only given the role of a width, and no two names are given the same role,
        except that of the width.
        """
        roles = {name: role_of(last_part(name), sizes) for name in sizes}

        def others(name: str) -> list[str]:
            excluded = {roles[name], "n_head" if "dim" in plain(last_part(name)) else None}
            return [role for role in WIDTHS if role not in excluded]

        def assigned(names: Sequence[str]) -> Iterator[dict[str, Value]]:
            kept = {role for name, role in roles.items() if name not in names} - {"n_embd"}
            for found in product(*map(others, names)):
                if len(set(found)) == len(found) and not kept.intersection(found):
                    yield dict(zip(names, map(of_role, found), strict=True))

        widths = [name for name, role in roles.items() if role in WIDTHS]
        changed = [*combinations(widths, 1), *combinations(widths, 2)]
        return self._best(chain.from_iterable(map(assigned, changed)))[0]

    # Trials.

    def _used(self, more: Mapping[str, Value]) -> tuple[int, int]:
        """Count the parameters of the modules that run, or 0 if none does, and of all modules."""
        executed = set[nn.Module]()
        hook = register_module_forward_hook(lambda module, *_: executed.add(module))
        try:
            values = arguments_with({**self.chosen, **more}, self.small)
            model, _ = self.run(self.small, values)
        finally:
            hook.remove()
        own = {p for m in executed for p in m.parameters(recurse=False)}
        return sum(p.numel() for p in own), sum(p.numel() for p in model.parameters())

    def _choose(self, tries: Iterable[dict[str, Value]], most: float | None) -> bool:
        """Choose the best combination of values, and return whether there is one."""
        best = self._best(tries, most)[0]
        self.chosen |= best
        return bool(best)

    def _best(
        self, tries: Iterable[dict[str, Value]], most: float | None = None
    ) -> tuple[dict[str, Value], list[str]]:
        """Return the best combination of values, or {} and further unknown names.

        A combination is returned only if the model can be called with it and differs from a GPT-2
        by at most `most` parameters.

        Raises:
            ModuleNotFoundError: no combination works, at least one because of a missing library.
        """
        best, least = dict[str, Value](), UNCALLABLE if most is None else most
        errors: list[ModuleNotFoundError] = []
        end = process_time() + MOST_SECONDS
        for combination in islice(tries, MOST_BUILDS):
            if process_time() > end:
                break
            try:
                distance, missing = self._distance(combination)
            except ModuleNotFoundError as error:
                errors.append(error)
                continue
            unknown = [name for name in missing if name not in combination]
            if unknown and not best:
                return {}, unknown
            if distance is not None and distance < least:
                best, least = combination, distance
            if least == 0:
                break
        if errors and not best and most is None:
            raise errors[0]
        return best, []

    def _distance(self, more: Mapping[str, Value]) -> tuple[float | None, list[str]]:
        return _distance(self.run, self.config, {**self.chosen, **more})

    def _shapes(self, more: Mapping[str, Value]) -> tuple[bool, float, _Shapes] | None:
        """Return whether the model can be called, its distance, and the shapes of its parameters.

        None if it cannot be built.
        """
        with contextlib.suppress(Exception, SystemExit):
            model, works = _trial(self.run, self.small, {**self.chosen, **more})
            return works, _difference(model, self.small), _shapes(model, self.small)
        return None


def _tensors(found: Any) -> list[Tensor]:
    """Return the tensors that a model returns, alone or in tuples and lists."""
    if isinstance(found, tuple | list):
        return [tensor for each in found for tensor in _tensors(each)]
    return [found] if isinstance(found, Tensor) else []


def small_config(config: GPT2Config) -> GPT2Config:
    """Return the sizes of the trial models, with the checkpoint's ratio of the MLP's width to C."""
    return replace(SMALL, n_inner=SMALL.n_embd * config.d_inner // config.n_embd)


def _defaults(target: type[nn.Module]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in parameters_of(target).items()}


def _has_no_role(name: str) -> bool:
    own = last_part(name)
    return role_of(own) is None and not meanings(own) and not neutral(own)[0]


def _may_be_size(name: str) -> bool:
    return _has_no_role(name) and not NO_SIZE.search(plain(last_part(name)))


def arguments_with(values: Mapping[str, Value], config: GPT2Config) -> dict[str, Any]:
    """Return the arguments `{"config": {"n": 1}, "dim": 2}` for `config.n` and `dim`."""
    return nested({name: value(config) for name, value in values.items()})


def _by_likelihood(every: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """Yield all combinations of the values, those from the front of the lists first."""

    def places(sizes: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
        if not sizes:
            yield from [()] if total == 0 else []
            return
        for last in range(min(total + 1, sizes[-1])):
            yield from ((*rest, last) for rest in places(sizes[:-1], total - last))

    sizes = [len(values) for values in every.values()]
    for total in range(sum(sizes)):
        for chosen in places(sizes, total):
            pairs = zip(every.items(), chosen, strict=True)
            yield {name: values[i] for (name, values), i in pairs}


def _trial(run: Run, small: GPT2Config, chosen: Mapping[str, Value]) -> tuple[nn.Module, bool]:
    """Build a model of these sizes, which must not be much larger than GPT-2, and call it."""
    with _no_larger_than(LARGEST * max(_counts(small))):
        return run(small, arguments_with(chosen, small))


def _distance(
    run: Run, config: GPT2Config, chosen: Mapping[str, Value]
) -> tuple[float | None, list[str]]:
    """Return how far the number of parameters is from GPT-2's, and unknown names.

    None if the model cannot be built; more if it cannot be called, or has another vocabulary.
    """
    small = small_config(config)
    try:
        model, works = _trial(run, small, chosen)
    except UnknownArguments as error:
        return None, error.names
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit):
        return None, []
    return _difference(model, small) + (0 if works else UNCALLABLE), []


def _difference(model: nn.Module, small: GPT2Config) -> float:
    """Return how far the number of parameters is from GPT-2's; more with another vocabulary."""
    found = sum(parameter.numel() for parameter in model.parameters())
    words = vocabulary(model, small)
    counts = _counts(replace(small, vocab_size=words))
    other = 0 if words == small.vocab_size else OTHER_VOCABULARY
    return min(abs(found - expected) for expected in counts) + other


@dataclass
class _Shapes:
    """What is known of the shapes of a model's parameters.

    Attributes:
        roles: Those of the sizes in the shapes. The number of heads is known by their width, and
            that of layers by how often a parameter occurs.
        unexplained: Parameters, with numbers in their names as `*`, and sizes that have no role.
    """

    roles: set[str]
    unexplained: set[tuple[str, int]]

    def may_have(self, value: int, width: int) -> bool:
        """Return whether a size without a role is a multiple of a value, or that of `value` heads.

        Args:
            value: an integer among the arguments.
            width: that of the model.
        """
        sizes = {size for _, size in self.unexplained}
        return value > 1 and any(n % value == 0 or n * value == width for n in sizes)


def _shapes(model: nn.Module, small: GPT2Config) -> _Shapes:
    """Return what is known of the shapes of a model of these sizes."""
    C, D = small.n_embd, small.n_embd // small.n_head
    roles = {
        1: None, 2 * C: None, 3 * C: None, small.n_head: None, D: "n_head", C: "n_embd",
        small.d_inner: "d_inner", small.vocab_size: "vocab_size", small.n_positions: "n_positions",
    }  # fmt: skip
    times = Counter(
        (re.sub(r"\d+", "*", name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    )
    unexplained = {(name, n) for name, shape in times for n in shape if n not in roles}
    repeated = {(name, n) for (name, _), n in times.items() if n > 1 and n % small.n_layer}
    found = {role for _, shape in times for n in shape if (role := roles.get(n))}
    if any(n > 1 and n % small.n_layer == 0 for n in times.values()):
        found.add("n_layer")
    return _Shapes(found, unexplained | repeated)


@contextlib.contextmanager
def _no_larger_than(most: int) -> Iterator[None]:
    """Raise an exception in the constructor of a model with more parameters, in this thread.

    A wrong value may be the number of layers, and building thousands of them takes gigabytes.
    """
    thread, total = get_ident(), 0

    def add(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        if parameter is not None and not is_lazy(parameter) and get_ident() == thread:
            total += parameter.numel()
            if total > most:
                raise AdaptError(f"the model has more than {most} parameters")

    hook = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        hook.remove()


def vocabulary(model: nn.Module, config: GPT2Config) -> int:
    """Return the size of a model's vocabulary, which may be a tokenizer's and not the config's."""
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)} - {0}
    return config.vocab_size if config.vocab_size in sizes or not sizes else max(sizes)


def _counts(config: GPT2Config) -> Iterable[int]:
    """Count the parameters of a GPT-2 with a tied or separate head, with or without biases."""
    C, V, inner = config.n_embd, config.vocab_size, config.d_inner
    layer = 4 * C + 4 * C * C + 4 * C + 2 * C * inner + inner + C
    tied = (V + config.n_positions) * C + config.n_layer * layer + 2 * C
    return tied, tied + V, tied + V * C, tied + V * C + V
