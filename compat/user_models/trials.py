"""Find values for arguments and config entries with ambiguous names, by building the model.

Each possible value of an entry is tried in a small model. Values with which the model cannot be
built or called are discarded. Of the others, the values are chosen with which the number of
parameters is closest to that of a GPT-2 of the same sizes. After a wrong choice the proof fails,
and a note says what was built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, islice, permutations, product
from threading import get_ident
from time import process_time
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.user_models.synonyms import meanings, neutral, plain, role_of, value_of

# Builds the user's model in the sizes of a config, with additional arguments, and calls it: the
# model, and whether it could be called.
Run = Callable[[GPT2Config, Mapping[str, Any]], tuple[nn.Module, bool]]
Value = Callable[[GPT2Config], Any]

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
SIZE_ROLES = (
    "d_inner", "ratio", "n_embd", "d_head", "n_layer", "n_head", "n_positions", "vocab_size",
)  # fmt: skip
WIDTHS = ("d_inner", "n_embd", "d_head", "n_head")  # of the same matrices

# Sizes that every GPT-2 has, the most likely first where a loop runs over an unknown number.
NECESSARY = ("n_layer", "n_head", "vocab_size", "n_embd", "n_positions")
# The same in the order of their usual values.
ASCENDING = ("n_layer", "n_head", "n_positions", "n_embd", "vocab_size")


@dataclass(frozen=True)
class Code:
    """What the user's code says about its arguments.

    Args:
        text: the source.
        choices: the values of its enumerations and interfaces, by the names of these.
        roles: of the arguments and entries whose values are known.
    """

    text: str
    choices: Mapping[str, Sequence[Value]]
    roles: Collection[str | None]


class UnknownArguments(AdaptError):
    """Arguments, or entries `argument.entry` of configs, whose values are unknown.

    Attributes:
        names: the arguments and entries.
    """

    def __init__(self, text: str, names: list[str]) -> None:
        super().__init__(text)
        self.names = names


def small_config(config: GPT2Config) -> GPT2Config:
    """Return the sizes of the trial models, with the checkpoint's ratio of the MLP's width to C."""
    return replace(SMALL, n_inner=SMALL.n_embd * config.d_inner // config.n_embd)


@dataclass(frozen=True)
class Search:
    """Finds values of arguments, and of entries `argument.entry` of configs, by their names.

    In all methods, `chosen` holds the values of other arguments and entries.

    Args:
        run: builds and calls the user's model.
        config: the config of the checkpoint.
    """

    run: Run
    config: GPT2Config

    def tried(
        self, names: Iterable[str], chosen: Mapping[str, Value], code: Code
    ) -> dict[str, Value]:
        """Return values for unknown names, or {} if no values work."""
        every = {name: _candidates(name, code) for name in names}
        while True:
            best, unknown = self._best(chosen, _by_likelihood(every))
            if not unknown:
                switches = [name for name in best if is_boolean(name, code)]
                return self._with_most_used({**chosen, **best}, switches) if best else {}
            every |= {name: _candidates(name, code) for name in unknown}

    def _with_most_used(
        self, chosen: dict[str, Value], switches: Iterable[str]
    ) -> dict[str, Value]:
        """Return the values, with each switch turned where fewer parameters are unused then."""
        small = small_config(self.config)
        for name in switches:
            turned = {**chosen, name: constant(not chosen[name](small))}
            with suppress(Exception, SystemExit):
                (used, every), (more, same) = map(self._used, (chosen, turned))
                chosen = turned if more > used and every == same else chosen
        return chosen

    def _used(self, chosen: Mapping[str, Value]) -> tuple[int, int]:
        """Count the parameters of the modules that run, or 0 if none does, and of all modules."""
        small, executed = small_config(self.config), set[nn.Module]()
        hook = register_module_forward_hook(lambda module, *_: executed.add(module))
        try:
            model, _ = self.run(small, arguments_with(chosen, small))
        finally:
            hook.remove()
        own = {p for m in executed for p in m.parameters(recurse=False)}
        return sum(p.numel() for p in own), sum(p.numel() for p in model.parameters())

    def better(
        self, alternatives: Mapping[str, tuple[str, ...]], chosen: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Return values for ambiguous names, if other meanings fit GPT-2 much better.

        Args:
            alternatives: the possible roles of each name.
        """
        first = _distance(self.run, self.config, chosen)[0] if alternatives else 0.0
        if first == 0:
            return {}
        every = {name: [_of_role(role) for role in roles] for name, roles in alternatives.items()}
        most = None if first is None else first / MUCH_BETTER
        return self._best(chosen, _by_likelihood(every), most)[0]

    def unnamed(self, sizes: Mapping[str, int], chosen: Mapping[str, Value]) -> dict[str, Value]:
        """Return roles for integers whose names have none, as in code in another language.

        Each gets a role that no other name has, if that fits the number of parameters better, or,
        of a model that cannot be built otherwise, exactly. The only such name gets the only role
        that is left if the model can be built so.

        Args:
            sizes: the integers; 0 for a missing one.
        """
        small = small_config(self.config)
        names = sorted(
            (n for n in sizes if n not in chosen and _has_no_role(n)), key=sizes.__getitem__
        )
        known = {role_of(last_part(name)) for name in sizes}
        values = [value(small) for value in chosen.values()]
        roles = [r for r in ASCENDING if r not in known and value_of(r, small) not in values]
        first = _distance(self.run, self.config, chosen)[0] if names and roles else 0.0
        if first == 0:
            return {}
        count = min(len(names), len(roles))
        assigned = (
            dict(zip(some, map(_of_role, order), strict=True))
            for some, order in product(permutations(names, count), combinations(roles, count))
        )
        most = first / MUCH_BETTER if first is not None else 1.0
        if first is None and len(names) == len(roles) == 1:
            most = OTHER_VOCABULARY
        return self._best(chosen, assigned, most)[0]

    def reassigned(self, sizes: Mapping[str, int]) -> dict[str, Value]:
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
                    yield dict(zip(names, map(_of_role, found), strict=True))

        widths = [name for name, role in roles.items() if role in WIDTHS]
        changed = [*combinations(widths, 1), *combinations(widths, 2)]
        return self._best({}, chain.from_iterable(map(assigned, changed)))[0]

    def needed(self, switches: Mapping[str, bool], chosen: Mapping[str, Value]) -> dict[str, Value]:
        """Return the switches of norms and positions that nothing replaces if they are off.

        Without `use_rmsnorm`, some code has LayerNorm and other code has no norms; without
        `use_rope`, some code has learned positions and other code has none. The numbers of
        parameters tell, without those of modules that do not run.

        Args:
            switches: the user's own defaults of switches that are off otherwise.
        """
        found = dict[str, Value]()

        def count(more: Mapping[str, Value]) -> int:
            used, every = self._used({**chosen, **found, **more})
            return used or every

        for name, value in switches.items():
            kept = {name: constant(value)}
            with suppress(Exception, SystemExit):
                more = count(kept) - count({})
                positions = re.search("rope|rotary|alibi|sinus", plain(last_part(name)))
                found |= kept if more > 0 or (positions and more == 0) else {}
        return found

    def to_turn_off(self, switches: Iterable[str], chosen: Mapping[str, Value]) -> dict[str, Value]:
        """Return the switches without which a model has more nearly GPT-2's parameters.

        An example is `use_ndlinear=True`, the author's default, which selects other projections.
        """
        found = dict[str, Value]()
        for name in switches:
            others = {**chosen, **found}
            if distance := _distance(self.run, self.config, others)[0]:
                found |= self._best(others, [{name: constant(False)}], most=distance)[0]
        return found

    def _best(
        self,
        chosen: Mapping[str, Value],
        tries: Iterable[dict[str, Value]],
        most: float | None = None,
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
                distance, missing = _distance(self.run, self.config, {**chosen, **combination})
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


def _has_no_role(name: str) -> bool:
    own = last_part(name)
    return role_of(own) is None and not meanings(own) and not neutral(own)[0]


def arguments_with(values: Mapping[str, Value], config: GPT2Config) -> dict[str, Any]:
    """Return the arguments `{"config": {"n": 1}, "dim": 2}` for `config.n` and `dim`."""
    return nested({name: value(config) for name, value in values.items()})


def nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"config.n": 1, "dim": 2}` as `{"config": {"n": 1}, "dim": 2}`."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        *owners, last = name.split(".")
        inner = found
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[last] = value
    return found


def last_part(name: str) -> str:
    """Return the entry of `argument.entry`, or the argument."""
    return name.rpartition(".")[2]


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


def _distance(
    run: Run, config: GPT2Config, chosen: Mapping[str, Value]
) -> tuple[float | None, list[str]]:
    """Return how far the number of parameters is from GPT-2's, and unknown names.

    None if the model cannot be built; more if it cannot be called, or has another vocabulary.
    """
    small = small_config(config)
    try:
        with _no_larger_than(LARGEST * max(_counts(small))):
            model, works = run(small, arguments_with(chosen, small))
    except UnknownArguments as error:
        return None, error.names
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit):
        return None, []
    found = sum(parameter.numel() for parameter in model.parameters())
    words = vocabulary(model, small)
    counts = _counts(replace(small, vocab_size=words))
    distance = min(abs(found - expected) for expected in counts)
    other = 0 if words == small.vocab_size else OTHER_VOCABULARY
    return distance + other + (0 if works else UNCALLABLE), []


@contextmanager
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
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return config.vocab_size if config.vocab_size in sizes or not sizes else max(sizes)


def _counts(config: GPT2Config) -> Iterable[int]:
    """Count the parameters of a GPT-2 with a tied or separate head, with or without biases."""
    C, V, inner = config.n_embd, config.vocab_size, config.d_inner
    layer = 4 * C + 4 * C * C + 4 * C + 2 * C * inner + inner + C
    tied = (V + config.n_positions) * C + config.n_layer * layer + 2 * C
    return tied, tied + V, tied + V * C, tied + V * C + V


def _candidates(entry: str, code: Code) -> list[Value]:
    """Return the possible values of an argument or `argument.entry`, the most likely first."""
    name, text = last_part(entry), code.text
    for kind, values in code.choices.items():  # `norm_type` or `norm: NormType`
        annotated = re.search(rf"\b{re.escape(name)}\s*:\s*[\w.]*\b{kind}\b", text)
        if annotated or plain(name) in plain(kind):
            return [*values]
    if re.search(r"(layer|block|attn|attention)_?(types|kinds)$", name):  # one for each layer
        found = dict.fromkeys(re.findall(r"[\"'](\w*(?:full|global|attn|attention)\w*)[\"']", text))
        if any(kind.endswith("_attention") for kind in found):
            found |= {"full_attention": None}  # transformers' name, which code may not spell out
        usual = sorted(
            found,
            key=lambda kind: (
                kind not in ("full_attention", "global_attention"),
                re.search("full|global|causal", kind) is None,
            ),
        )
        return [partial(_per_layer, each) for each in usual]
    near = rf"\b{re.escape(name)}\b[\"'\])]*\s*(?:==|!=|(?:not\s+)?in\b)\s*(.*)"
    texts = [t for line in re.findall(near, text) for t in re.findall(r"[\"']([\w-]+)[\"']", line)]
    if texts:
        usual = [*(["learned"] if "pos" in name else []), *dict.fromkeys(texts)]
        return [constant(value) for value in usual]
    if re.search("flash|sdpa|use_?(emb|pos)", name):
        return [constant(True), constant(False)]
    if is_boolean(entry, code):
        return [constant(False), constant(True)]
    if re.search(rf"\b{re.escape(name)}\s*:\s*float\b", text):
        return [constant(number) for number in (1.0, 0.0, 10000.0)]
    sizes = [_of_role(role) for role in SIZE_ROLES]
    if "window" in plain(name):  # GPT-2's attention reaches all tokens before it
        return [_of_role("n_positions"), constant(None), *sizes]
    if re.search(rf"\brange\([^()]*\b{re.escape(name)}\b", text):
        lacking = [_of_role(role) for role in NECESSARY if role not in code.roles]
        return [*lacking, _of_role("n_layer"), *sizes, constant(1)]
    switches = [constant(False), constant(True)]
    if re.search(rf"(\b(if|not|and|or|bias=)\s*[\w.]*\b{re.escape(name)}\b(?!\s*[<>=*/+-]))", text):
        return switches
    others = [constant(None), constant(1), *sizes, constant(10000.0), constant(())]
    number = re.search(
        rf"\b{re.escape(name)}\s*(:\s*int\b|[*/%])|[*/%]\s*{re.escape(name)}\b", text
    )
    return others if number else [*switches, *others]


def is_boolean(entry: str, code: Code) -> bool:
    """Whether the code annotates an entry as a boolean, or it is named like one: `use_cache`."""
    name = re.escape(last_part(entry))
    annotated = re.search(rf"\b{name}\s*:\s*[\"']?(Optional\[)?bool\b", code.text)
    return annotated is not None or re.match("(use|is|has|enable)_", name) is not None


def _per_layer(value: str, config: GPT2Config) -> list[str]:
    return [value] * config.n_layer


def constant(value: Any) -> Value:
    return lambda config: value


def _of_role(role: str) -> Value:
    return lambda config: value_of(role, config)
