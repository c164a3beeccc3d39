"""A config for a user's constructor: a dictionary, a namespace or the user's own config class."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from compat.config import GPT2Config
from compat.user_models.activations import GELUS, activation_for
from compat.user_models.config_files import config_in_files
from compat.user_models.missing import ReadableDict, Unknown, is_missing
from compat.user_models.synonyms import (
    AMBIGUOUS,
    CONFIG_CLASSES,
    NO_ID,
    SIZES,
    is_config_name,
    meanings,
    neutral,
    plain,
    role_of,
    role_of_number,
    symbols,
    takes_sizes,
    value_of,
)
from compat.user_models.usage import (
    Usage,
    compared_strings,
    counts,
    factors_of,
    indexed,
    init_source,
    is_number_of_heads,
    is_of_one_head,
    is_users_class,
    is_width,
    modules_text,
    tree_of,
    unpacked_values,
    user_modules,
)

Parameter = inspect.Parameter
# Parts of a config that have entries of their own: `config.model.n_layer`.
SECTIONS = set(
    "model data architecture arch network transformer gpt decoder languagemodel lm".split()
)
# Values for entries that the model does not read, such as those for its training, by their type.
UNREAD = {"int": 1, "float": 1.0, "str": "", "bool": False}
# Code that passes all entries of a config on, as `**asdict(config)` does.
UNPACKED = re.compile(r"\*\*(vars\(|[\w.]+(\.__dict__|asdict\(|\.dict\(|\.model_dump\())")
# The number of heads that share keys, and factors of widths. With a default of None, the code
# computes the number, or needs no factor.
_COMPUTED = re.compile("kv|key|group|multiplier")
# A line that asks for a file, as `assert Path(corpus).exists()` does.
_ASKS_FOR_A_FILE = re.compile(r"\b(exists|is_?file|is_?dir)\(")
_OF_FILES = re.compile("_(dir(ectory)?|path|file|folder)$")
_WIDTH = re.compile("dim|embd?|model|width|size")
INT = (int, "int")  # annotations of a number
TEXT = (str, "str", Parameter.empty)
LARGEST_FACTOR = 16  # by which a default multiplies the width
# Names of entries that choose the formula of the MLP.
_MLP_KIND = re.compile("(mlp|ffn?|feedforward)(type|kind|variant|impl)")


def known_arguments(
    cls: Callable[..., Any],
    parameters: Mapping[str, Parameter],
    config: GPT2Config,
    names: Collection[str] = (),
) -> dict[str, Any]:
    """Return the checkpoint's values for the parameters of a constructor, or for more `names`.

    A width that the code uses as a factor is the ratio of the MLP's width. The id of a padding
    token that the checkpoint's vocabulary does not have is replaced by one that no token has.
    """
    numbers = {n for n, p in parameters.items() if type(p.default) is int or p.annotation in INT}
    known = _known_values(cls, names or parameters, config, numbers)
    for name in _off_by_default(parameters):
        known.pop(name, None)
    for name, parameter in parameters.items():
        is_number = type(parameter.default) is int and parameter.default >= config.vocab_size
        if is_number and neutral(name) == (True, NO_ID):
            known[name] = NO_ID
    return known | {
        name: value_of("ratio", config) for name, parameter in parameters.items()
        if type(parameter.default) is int and parameter.default <= LARGEST_FACTOR
        and role_of(name, parameters) == "d_inner"
        and any(_WIDTH.search(factor) for factor in factors_of(cls, name))
    }  # fmt: skip


def _off_by_default(parameters: Mapping[str, Parameter]) -> Iterator[str]:
    """Yield sizes whose default is 0 beside others of the same role, as of further heads.

    An example is `mtp_num_heads=0`, the number of heads that predict later tokens.
    """
    for name, parameter in parameters.items():
        if type(parameter.default) is int and parameter.default == 0:
            role = role_of(name, parameters)
            alike = [p for n, p in parameters.items() if role_of(n, parameters) == role]
            if role in SIZES and any(p.default != 0 for p in alike):
                yield name


def _known_values(
    cls: Callable[..., Any], names: Iterable[str], config: GPT2Config, numbers: Collection[str]
) -> dict[str, Any]:
    """Return the checkpoint's value for each name with a role, a number for those in `numbers`.

    A name that the code compares with strings, such as `ffn` in `ffn == "gelu"`, is not a size. One
    like `n_hidden` is the width of the stream if the code multiplies it by 4 or normalizes it.
    """
    among = list(names)
    roles = {n: (role_of_number if n in numbers else role_of)(n, among) for n in among}
    for name, role in roles.items():
        if role == "d_inner" and "n_embd" in meanings(name) and is_width(cls, name):
            roles[name] = "n_embd"
        if role == "n_embd" and "d_head" in meanings(name) and is_of_one_head(cls, name):
            roles[name] = "d_head"
        if role == "d_head" and is_number_of_heads(cls, name):
            roles[name] = "n_head"
    if any(role in SIZES for role in roles.values()):
        for name, strings in compared_strings(cls).items():
            if roles.get(name) in SIZES:
                roles[name] = "activation_function" if strings & {*GELUS} else None
    values = {n: value_of(role, config) for n, role in roles.items() if role}
    text = modules_text(cls)
    for name in (name for name, role in roles.items() if role in ("ratio", "cap")):
        may_be_none = re.search(rf"\b{name} is (not )?None\b", text) is not None
        must_be_positive = re.search(rf"\b{name}\s*<=?\s*[0.]", text) is not None
        if roles[name] == "ratio" and may_be_none:  # without it, the model has one of its own
            values[name] = None
        elif roles[name] == "cap" and must_be_positive and not may_be_none:
            del values[name]  # None, as GPT-2 has, cannot be compared with 0
    for name, role in roles.items():  # a kind of MLP: "gelu" and not the author's "swiglu"
        if role is None and _MLP_KIND.search(plain(name)):
            gelus = "|".join(GELUS)
            own = re.search(rf"""\b{name}\b["'\])]*\s*(?:==|=|,)\s*["']({gelus})["']""", text)
            values |= {name: own[1]} if own else {}
    names_of_gelu = [n for n, value in values.items() if value == "gelu_new"]
    return values | {name: activation_for(cls, name) for name in names_of_gelu}


@dataclass(frozen=True)
class ConfigMaker:
    """Makes the config that a constructor takes.

    Args:
        cls: The user's class.
        parameter: The parameter of its constructor.
        usage: The names that the class reads from it.
        config: The checkpoint's config.
    """

    cls: Callable[..., Any]
    parameter: Parameter
    usage: Usage
    config: GPT2Config

    def is_config(self) -> bool:
        """Return whether the parameter takes a config and not a single value."""
        parameter = self.parameter
        if callable(parameter.default) and not isinstance(parameter.default, type):
            return False  # an object that makes a module, as functools.partial does
        if _config_class(self.cls, parameter) or isinstance(parameter.default, Mapping):
            return True
        if parameter.default is None and not is_config_name(parameter.name):
            # Such as a tokenizer, or a module that takes the place of the model's own.
            compared = re.search(rf"\b{parameter.name} is (not )?None\b", init_source(self.cls))
            if neutral(parameter.name)[0] or compared:
                return False
        short = role_of(parameter.name) is None or len(parameter.name) < 3
        return bool(self.usage.names) and (short or is_config_name(parameter.name))

    def make(self, entries: Mapping[str, Any]) -> tuple[Any, list[str]]:
        """Return a config with the checkpoint's values, and the names whose value is unknown.

        Args:
            entries: Entries that the caller sets.
        """
        annotated = _config_class(self.cls, self.parameter)
        template = annotated or self._similar()
        if annotated is not None and self._is_empty(annotated):  # a base of the configs
            similar = self._similar()
            if isinstance(similar, type) and issubclass(similar, annotated):
                template = similar
        if isinstance(template, type):
            try:
                return self._instance(template, entries)
            except (OSError, TypeError):
                if not self._is_empty(template):
                    raise
                template = {}  # the sizes are in a file that its constructor reads
        return self._mapping(template, entries), []

    def _mapping(self, template: Mapping[str, Any], entries: Mapping[str, Any]) -> Any:
        """Return a dictionary or a namespace with the names that are read, and the template's."""
        usage = self.usage
        values = {name: value for name in usage.names for known, value in [neutral(name)] if known}
        for name, strings in compared_strings(self.cls).items():
            if isinstance(values.get(name), torch.dtype):
                values[name] = "float32" if "float32" in strings else min(strings)
        values |= {name: {} for name in usage.tables}  # of presets; the checkpoint is none of them
        numbers = [name for name, value in template.items() if type(value) is int]
        names = {*usage.names, *template} - usage.tables
        known = _known_values(self.cls, sorted(names), self.config, numbers)
        values |= template
        values |= {name: v for name, v in known.items() if v is not None or not values.get(name)}
        counted = {name: symbols(name, self.config) for name in known if counts(self.cls, name)}
        values |= {name: characters for name, characters in counted.items() if characters}
        lists = {n: size for n, size in indexed(self.cls).items() if type(values.get(n)) is float}
        values |= {name: [values[name]] * size for name, size in lists.items()}
        values |= {name: entry for name, entry in entries.items() if name not in usage.sections}
        form, sections = self._form(), self._sections()

        def with_sections(own: Mapping[str, Any], depth: int) -> dict[str, Any]:
            inner = {n: own.get(n, template.get(n, {})) for n in sections} if depth else {}
            return {**own, **values} | {
                name: form(**with_sections(section, depth - 1))
                for name, section in inner.items() if isinstance(section, Mapping)
            }  # fmt: skip

        values = with_sections(template, 2)  # config["model"]["attention"]
        ordered = unpacked_values(self.cls, self.parameter.name)
        values = {name: values[name] for name in ordered if name in values} | values
        if embeddings := self._embeddings():
            values |= {"config": form(**values), **embeddings}
        return merged(form(**values), entries)

    def _form(self) -> type:
        """Return the class of a config that is read as the user's code reads it."""
        usage, name = self.usage, self.parameter.name
        bases = [f"{base.__module__}.{base.__name__}" for base in getattr(self.cls, "__mro__", ())]
        if "transformers.modeling_utils.PreTrainedModel" in bases:  # which accepts no other config
            form: type = sys.modules["transformers"].PretrainedConfig
            return form
        by_attribute = (n for n in usage.attributes if role_of(n) in SIZES or n in usage.sections)
        if usage.items and not any(by_attribute):
            return dict
        if usage.items or not usage.attributes or self._exports():
            return ReadableDict
        unpacked = re.search(rf"\*\*{name}\b|\bdict\({name}\)", init_source(self.cls))
        return ReadableDict if unpacked else SimpleNamespace

    def _instance(self, template: type, entries: Mapping[str, Any]) -> tuple[Any, list[str]]:
        """Return an instance of the user's config class, with the attributes that it lacks."""
        cls, config, usage = self.cls, self.config, self.usage
        parameters = inspect.signature(template).parameters
        known = known_arguments(cls, parameters, config, self._names(template))
        arguments: dict[str, Any] = {}
        missing, unread = list[str](), list[str]()
        sections: set[str] = set()
        read = set(parameters) if UNPACKED.search(modules_text(cls)) else {*usage.names}
        for name, parameter in parameters.items():
            given = entries.get(name, {})
            required = parameter.default is parameter.empty
            if parameter.kind is parameter.VAR_KEYWORD:
                more = (n for n in usage.names if n in known and n not in {*parameters, *entries})
                arguments |= {n: known[n] for n in more if _replaces(template, n, known)}
                others = {*usage.names} - {*known, *parameters, *entries, *dir(template)}
                arguments |= {n: v for n in sorted(others) for has, v in [neutral(n)] if has}
            elif parameter.kind is parameter.VAR_POSITIONAL or not isinstance(given, Mapping):
                continue
            elif required and counts(template, name):
                arguments[name] = symbols(name, config) or known.get(name)
                missing += [] if arguments[name] else [name]
            elif (by_name := value_by_name(parameter, known))[0]:
                arguments[name] = by_name[1]
            elif (required or given) and (section := _config_class(template, parameter)):
                sections.add(name)
                arguments[name], unknown = self._instance(section, given)
                missing += [f"{name}.{key}" for key in unknown]
            elif name in entries:
                continue
            elif required and "Path" in str(parameter.annotation):  # of data, which no layer reads
                arguments[name] = Path(name)
            elif required and _OF_FILES.search(name) and parameter.annotation in TEXT:
                arguments[name] = name
            elif required and name not in read - usage.sections:
                arguments[name] = _unread(parameter.annotation)
                unread.append(name)
            elif required:
                missing.append(name)
        in_file = self._settings_in_files(parameters) if [*missing, *unread] else {}
        arguments |= {name: in_file[name] for name in (*missing, *unread) if name in in_file}
        if missing := [name for name in missing if name not in in_file]:
            return None, missing
        own = {n: entry for n, entry in entries.items() if n in parameters and n not in sections}
        try:
            made = _made(template, {**arguments, **own}, {} if parameters else {**known, **entries})
        except Exception:  # a setting must have the value that it has in a file, or its default
            needed = {n for n, p in parameters.items() if p.default is Parameter.empty}
            kept = {
                name: value for name, value in arguments.items()
                if role_of(name, parameters) in SIZES or name in needed
            }  # fmt: skip
            if not in_file and kept == arguments:
                raise
            made = _made(template, {**(arguments if in_file else kept), **in_file, **own})
        self._complete(made, template, known, entries)
        for name in self._sections():
            section = getattr(made, name, made)
            with contextlib.suppress(Exception):  # of a property, or a constructor of the user's
                if section is not made and is_namespace(section) and name not in sections:
                    section = self._instance(type(section), {})[0] or section
                setattr(made, name, section)
        if self._exports() and not hasattr(made, "to_dict"):
            exported = dict(vars(made)) if hasattr(made, "__dict__") else {}
            set_attribute(made, "to_dict", lambda: exported)
        return made, []

    def _is_empty(self, template: type) -> bool:
        """Return whether a config class has none of the sizes that are read."""
        sizes = {name for name in self.usage.names if role_of(name) in SIZES}
        return bool(sizes) and not sizes.intersection(
            {*inspect.signature(template).parameters, *dir(template)}
        )

    def _names(self, template: type) -> list[str]:
        """Return the names that a config class may have values for, always in the same order."""
        parameters = inspect.signature(template).parameters
        return sorted({*parameters, *self.usage.names, *dir(template), *_constants(template)})

    def _complete(
        self, made: Any, template: type, known: Mapping[str, Any], entries: Mapping[str, Any]
    ) -> None:
        """Set attributes of an instance that are not parameters of its class."""
        parameters, names = inspect.signature(template).parameters, self._names(template)
        # Values in the body of a class without parameters, or of its constructor, are replaced.
        constants = _constants(template) - {*parameters, *entries}
        for name, value in (known if parameters else {**known, **entries}).items():
            if inspect.isfunction(getattr(template, name, None)):  # returns one of the attributes
                continue
            replaced = not parameters or (name in constants and role_of(name, names) in SIZES)
            needed = name in self.usage.names and name not in {*self.usage.optional, *entries}
            if replaced or (needed and not hasattr(made, name)):
                set_attribute(made, name, value)
        for name, value in _computed_in_body(template):
            if name not in entries:
                with contextlib.suppress(Exception):
                    set_attribute(
                        made, name, eval(value, {n: getattr(made, n) for n in value.co_names})
                    )
        # Entries that the class lacks, because the model has outgrown it, or has in its body.
        for name, value in entries.items():
            of_class = name in vars(template)
            if name not in {*parameters, *self.usage.sections}:
                if not hasattr(made, name) or (of_class and name not in vars(made)):
                    set_attribute(made, name, value)
        # Fields of a class whose decorator is that of a missing library, such as attrs.
        for name, annotation in inspect.get_annotations(template).items():
            if not parameters and not hasattr(made, name):
                has_neutral, value = neutral(name)
                setattr(made, name, value if has_neutral else _unread(annotation))

    def _settings_in_files(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values of names other than sizes in a config file of the project."""
        table = (config_in_files(self.cls, names) or ("", {}))[1]
        return {n: table[n] for n in names if n in table and role_of(n) not in SIZES}

    def _sections(self) -> set[str]:
        """Return the names of the parts of a config that have entries of their own."""
        sections = self.usage.sections
        return {n for n in self.usage.names if n.lower() in SECTIONS or n in sections}

    def _embeddings(self) -> dict[str, nn.Module]:
        """Return the embeddings that a constructor takes from a transformers GPT-2."""
        read = re.findall(rf"\b{self.parameter.name}\.(wte|wpe)\b", init_source(self.cls))
        rows = {"wte": self.config.vocab_size, "wpe": self.config.n_positions}
        return {name: nn.Embedding(rows[name], self.config.n_embd) for name in read}

    def _exports(self) -> bool:
        """Return whether the code calls a config's `to_dict`, as with those of transformers."""
        return ".to_dict()" in modules_text(self.cls)

    def _similar(self) -> type | Mapping[str, Any]:
        """Return the config class or dictionary in the class's modules that fits best, or {}.

        It is named like the parameter, as `TrainConfig` is for `train_cfg`, or has at least half of
        the sizes that are read. If several fit equally well, the one with most of the other names
        that are read is used, or else the one nearest to the class. If the modules have none, it is
        that of a config file.
        """
        parameter, usage = self.parameter, self.usage
        if isinstance(parameter.default, Mapping):
            return parameter.default
        sizes = {name for name in usage.names if role_of(name) in SIZES}
        best: type | Mapping[str, Any] = {}
        most = (0, 0)
        modules = user_modules(self.cls)
        for module in modules:  # of a script, only what the class needs was executed
            for node in tree_of(module).body:
                if isinstance(node, ast.ClassDef) and node.name.lower().endswith(CONFIG_CLASSES):
                    with contextlib.suppress(Exception):
                        getattr(module, node.name)
        for name, value in (item for m in modules for item in list(vars(m).items())):
            names: set[str] = set()
            if (
                isinstance(value, type)
                and issubclass(value, dict)
                and value.__init__ is dict.__init__
            ):
                continue  # whose items are read as attributes; it has no names of its own
            if isinstance(value, type) and _is_named_like(parameter, value):
                return value
            is_config_class = isinstance(value, type) and name.lower().endswith(CONFIG_CLASSES)
            if is_config_class and usage.attributes:
                names = {*inspect.signature(value).parameters, *dir(value), *_constants(value)}
            elif isinstance(value, Mapping) and usage.items:
                names = {*value}.union(*(v for v in value.values() if isinstance(v, Mapping)))
            found = len(names & sizes), len(names.intersection(usage.names))
            if most < found and 0 < found[0] >= len(sizes) / 2:
                best, most = value, found
        in_file = None if best else config_in_files(self.cls, usage.names)
        if in_file is None:
            return best
        # An integer without a role may be a size of a model of another width, unless it is how far
        # attention reaches. A script replaces the name of a data type by the type, if the model
        # does not.
        as_names = "getattr(torch" in modules_text(self.cls)
        entries = {
            n: v for n, v in in_file[1].items()
            if (type(v) is not int or role_of(n) or "window" in plain(n))
            and (as_names or type(v) is not str or not isinstance(neutral(n)[1], torch.dtype))
        }  # fmt: skip
        return _readable(entries)


def set_attribute(config: Any, name: str, value: Any) -> None:
    """Set an attribute, unless it is a property or the object is frozen."""
    # pydantic's error is a ValueError.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        setattr(config, name, value)


def _unread(annotation: Any) -> Any:
    """Return a value of this type for an entry that the model does not read."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation), None)
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)[0]
    return UNREAD.get(getattr(annotation, "__name__", str(annotation)))


def _made(
    template: type, arguments: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
) -> Any:
    """Return an instance of a config class.

    After its fields are set, a data class may look for a file with data that the machine lacks. A
    value in the place of a `default_factory` is the default.

    Args:
        template: the class.
        arguments: those of its constructor.
        attributes: the values of attributes that the constructor sets to constants. Others are
            computed from these, as in `self.d_head = self.n_embd // self.n_head`.
    """
    if not dataclasses.is_dataclass(template):
        if attributes and "__setattr__" not in vars(template):
            return _with_attributes(template, attributes)
        return template(**arguments)
    made = object.__new__(template)
    factories = {field.name: field.default_factory for field in dataclasses.fields(template)}
    values = {name: value for name, value in factories.items()
              if value is not dataclasses.MISSING and not callable(value)}  # fmt: skip
    try:
        inspect.getattr_static(template, "__init__")(made, **{**values, **arguments})
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.name == "__post_init__"]
        lines = [frame.line or "" for frame in own]
        if not own or not (isinstance(error, OSError) or any(map(_ASKS_FOR_A_FILE.search, lines))):
            raise
    return made


def _with_attributes(template: type, attributes: Mapping[str, Any]) -> Any:
    """Return an instance whose constructor sets attributes to these values instead of its own."""
    constants = {name: attributes[name] for name in _constants(template) if name in attributes}
    original: Any = template.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        original(self, name, constants.get(name, value))

    with patch.object(template, "__setattr__", set_attribute):
        return template()


def _constants(template: type) -> set[str]:
    """Return the attributes that a config class's constructor sets to a constant.

    The size of the vocabulary is one of them, unless it is among the parameters: the constructor
    asks a tokenizer for it.
    """
    own = init_source(template)
    parameters = inspect.signature(template).parameters
    constant = r"[ \t]*(?:-?[\d._]+(?:e-?\d+)?|True|False|None|[\"'].*[\"'])[ \t]*(?:#.*)?$"
    found = {*re.findall(rf"\bself\.(\w+)\s*(?::[^=\n]+)?={constant}", own, re.MULTILINE)}
    if all(role_of(name, parameters) != "vocab_size" for name in parameters):
        set_to = re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=", own)
        found |= {name for name in set_to if role_of(name) == "vocab_size"}
    return found


def _computed_in_body(template: type) -> Iterator[tuple[str, CodeType]]:
    """Yield attributes such as `hidden = n_embd` in the body of a class, and the code of each."""
    module = sys.modules.get(template.__module__)
    nodes = [] if module is None else tree_of(module).body
    classes = (n for n in nodes if isinstance(n, ast.ClassDef) and n.name == template.__name__)
    for node in [each for cls in classes for each in cls.body]:
        match node:
            case ast.Assign([ast.Name(name)], ast.Name() | ast.BinOp() as value):
                yield name, compile(ast.Expression(value), "<config>", "eval")


def value_by_name(parameter: Parameter, known: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether a parameter has a value by its name alone, and the value.

    It is the checkpoint's or, of a required parameter, one that does not affect the logits.

    Args:
        parameter: The parameter of a constructor, also of a config class.
        known: The checkpoint's values by name, as from `known_arguments`.
    """
    name = parameter.name
    if name in known and _accepts(parameter, known[name]):
        return True, known[name]
    return neutral(name) if parameter.default is parameter.empty else (False, None)


def _replaces(template: type, name: str, known: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint's value replaces what a class's body assigns to a name."""
    default = getattr(template, name, Parameter.empty)
    annotation = inspect.get_annotations(template).get(name, Parameter.empty)
    own = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return value_by_name(own, known)[0]


def _accepts(parameter: Parameter, value: Any) -> bool:
    """Return whether a value has the type of the parameter's default or annotation.

    A string default is kept, except that of a gated MLP, whose parameters GPT-2 does not have.
    """
    default = parameter.default
    if _MLP_KIND.search(plain(parameter.name)) and value in GELUS:
        return default is parameter.empty or (isinstance(default, str) and "glu" in default.lower())
    if value is None:
        return default is None or re.search("None|Optional", str(parameter.annotation)) is not None
    if isinstance(default, Unknown):
        return True
    annotation = str(parameter.annotation)
    if choices := re.search(r"\bLiteral\[(.*?)\]", annotation):
        return repr(value) in re.split(r",\s*", choices[1].replace('"', "'"))
    if parameter.annotation in (str, "str") and not isinstance(value, str):
        return False
    if default is None and parameter.annotation in (str, "str"):  # which is assigned later
        return True
    if default is None:
        is_number = not isinstance(value, str) and not callable(value)
        return (
            parameter.name.lower() not in AMBIGUOUS
            and is_number
            and not (isinstance(value, bool) and re.search("bool|_empty", annotation) is None)
            and not re.search(r"\b([Ll]ist|[Tt]uple|Sequence|str)\b", annotation)
            and not _COMPUTED.search(plain(parameter.name))
        )
    if default is parameter.empty or isinstance(value, str):
        return default is parameter.empty or (value == "cpu" and isinstance(default, str))
    if isinstance(value, bool) or isinstance(default, bool):
        return type(value) is type(default)
    if isinstance(value, float) and 0 <= value < 1 and type(default) is int and default > 1:
        return False  # a probability, for a letter that means another number
    return isinstance(default, (int, float))


def is_namespace(value: Any) -> bool:
    """Return whether a value is a config class or an instance of one, by its name or its sizes."""
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, nn.Module) or not hasattr(value, "__dict__"):
        return False
    named = cls.__name__.lower().endswith((*CONFIG_CLASSES, "namespace"))
    integers = [name for name, entry in vars(value).items() if type(entry) is int]
    return named or (is_users_class(cls) and takes_sizes(integers))


def merged(base: Any, entries: Any) -> Any:
    """Return a copy of a config with entries replaced, those of its sections too."""
    if not isinstance(entries, Mapping):
        return entries
    old = base if isinstance(base, Mapping) else vars(base)
    new = {n: merged(old[n], value) if n in old else value for n, value in entries.items()}
    if dataclasses.is_dataclass(base) and not isinstance(base, type):
        declared = {field.name for field in dataclasses.fields(base)}
        changed = dataclasses.replace(base, **{n: v for n, v in new.items() if n in declared})
        more = {name: value for name, value in old.items() if not hasattr(changed, name)}
        for name, value in {**more, **new}.items():
            if name not in declared:  # as in a config of transformers
                set_attribute(changed, name, value)
        return changed
    changed = copy.copy(base)
    if isinstance(changed, dict):
        changed.update(new)
    else:
        for name, value in new.items():
            setattr(changed, name, value)
    return changed


def _config_class(cls: Callable[..., Any], parameter: Parameter) -> type | None:
    """Return the user's config class, by the parameter's annotation or default.

    A subclass of a model of transformers names it in its attribute `config_class`.
    """
    named = getattr(cls, "config_class", None)
    if isinstance(named, type) and is_config_name(parameter.name):
        return named
    try:
        hints = typing.get_type_hints(inspect.getattr_static(cls, "__init__"))
        annotation = hints.get(parameter.name, parameter.annotation)
    except Exception:  # a name that only a type checker sees
        annotation = parameter.annotation
    default = parameter.default
    if isinstance(default, (bool, int, float, str)):  # whatever the annotation is
        return None
    for value in (*typing.get_args(annotation), annotation, default, type(default)):
        library = str(getattr(value, "__module__", "")).split(".")[0]
        if not isinstance(value, type) or library in {"torch", *sys.stdlib_module_names}:
            continue
        interface = inspect.isabstract(value) or getattr(value, "_is_protocol", False)
        if is_missing(value) or interface or value is Unknown:  # an interface, as of a tokenizer
            continue
        if not issubclass(value, (nn.Module, Mapping, Enum)):
            return value
    return None


def _readable(table: Mapping[str, Any]) -> dict[str, Any]:
    """Let inner mappings be read by attributes as well, as those of OmegaConf."""
    return {name: ReadableDict(_readable(value)) if isinstance(value, Mapping) else value
            for name, value in table.items()}  # fmt: skip


def _is_named_like(parameter: Parameter, cls: type) -> bool:
    stem, ending = plain(parameter.name), f"({'|'.join(CONFIG_CLASSES)})$"
    stems = [re.sub(ending, "", stem), re.sub(ending, "", plain(cls.__name__))]
    return stems[0] == stems[1] != "" and is_config_name(parameter.name)
