"""The types of the catalogue's entries, models and mutations, and helpers for writing them."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compat import GPT2Config

ZOO = Path(__file__).parents[1] / "zoo"

Build = Callable[[type[nn.Module], GPT2Config], nn.Module]
Expected = dict[str, tuple[str, ...]]

_numbers = itertools.count()


@dataclass(frozen=True)
class Model:
    """A hand-written model.

    Args:
        file: the name of the file in `ZOO`.
        cls: the name of the model's class.
        build: creates the model for a config of compat.
        expected: the model's parameters for every Hugging Face name. `{i}` stands for the layer,
            and `{h}` for the head if there is one parameter per head. The parameters of c_attn are
            in the order query, key, value. A tied head has no row.
        zero: parameters without a counterpart in GPT-2 that must be zero, such as the bias of a
            head.
    """

    file: str
    cls: str
    build: Build
    expected: Expected
    zero: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutation:
    """A deviation that is written into the source of a zoo model.

    Args:
        style: the name of the model.
        code: the code that `adapt` must report.
        old: the text that is replaced once by `new`.
        new: the replacement.
        at: a part of the line, in the mutated file, that a person would blame, or None.
        also: parts of other lines that are accepted, too.
        more: further replacements that the same deviation needs.
    """

    style: str
    code: str
    old: str
    new: str
    at: str | None
    also: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()


def load_class(path: Path, cls: str) -> type[nn.Module]:
    """Import a file under a unique module name, and return its class `cls`."""
    name = f"_zoo_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found: type[nn.Module] = getattr(module, cls)
    return found


def changed(source: str, mutation: Mutation) -> str:
    """Return a source with a mutation."""
    for old, new in ((mutation.old, mutation.new), *mutation.more):
        assert old in source, f"{mutation.style} has no {old!r}"
        source = source.replace(old, new, 1)
    for mark in (mutation.at, *mutation.also):
        assert mark is None or mark in source, f"{mutation.style}: no line with {mark!r}"
    return source


def composed(model: Model, mutations: Sequence[Mutation], folder: Path) -> Path:
    """Write the model's file with these mutations into `folder`, and return its path."""
    source = (ZOO / model.file).read_text()
    for mutation in mutations:
        source = changed(source, mutation)
    path = folder / "_".join([*(mutation.code for mutation in mutations), model.file])
    path.write_text(source)
    return path


# How a model is built: the model's names for the fields of compat's config


def config(name: str, **fields: str) -> Build:
    """Build the model with a config class of its file: `field of the model = our field`."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        make = getattr(sys.modules[cls.__module__], name)
        return cls(make(**{own: getattr(config, ours) for own, ours in fields.items()}))

    return build


def keywords(**fields: str) -> Build:
    """Build the model with keyword arguments: `argument of the model = our field`."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        return cls(**{own: getattr(config, ours) for own, ours in fields.items()})

    return build


def positional(*fields: str) -> Build:
    """Build the model with positional arguments: our fields in the order of the arguments."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        return cls(*(getattr(config, ours) for ours in fields))

    return build


def dictionary(**fields: str) -> Build:
    """Build the model with one dictionary: `key of the model = our field`."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        return cls({own: getattr(config, ours) for own, ours in fields.items()})

    return build


# The parameters for each tensor

Names = str | tuple[str, str]  # a module with `weight` and `bias`, or the two parameters


def table(
    wte: str,
    wpe: str,
    block: str,
    ln_1: Names,
    qkv: Names | list[str] | list[tuple[str, str]],
    proj: Names,
    ln_2: Names,
    fc: Names,
    out: Names,
    ln_f: Names,
    head: str | None = None,
) -> Expected:
    """Return the table of expected parameters of a model.

    `block` is the prefix of the names from `ln_1` to `out`. `qkv` is one fused pair, or a list with
    query, key and value.
    """
    names: Expected = {"wte.weight": (wte,), "wpe.weight": (wpe,)}
    parts = [_both(part, block) for part in qkv] if isinstance(qkv, list) else [_both(qkv, block)]
    for name, pairs in {
        "h.{i}.ln_1": [_both(ln_1, block)],
        "h.{i}.attn.c_attn": parts,
        "h.{i}.attn.c_proj": [_both(proj, block)],
        "h.{i}.ln_2": [_both(ln_2, block)],
        "h.{i}.mlp.c_fc": [_both(fc, block)],
        "h.{i}.mlp.c_proj": [_both(out, block)],
        "ln_f": [_both(ln_f)],
    }.items():
        names[f"{name}.weight"] = tuple(weight for weight, _ in pairs)
        names[f"{name}.bias"] = tuple(bias for _, bias in pairs)
    return {**names, "lm_head.weight": (head,)} if head else names


def _both(names: Names, prefix: str = "") -> tuple[str, str]:
    weight, bias = (f"{names}.weight", f"{names}.bias") if isinstance(names, str) else names
    return prefix + weight, prefix + bias
