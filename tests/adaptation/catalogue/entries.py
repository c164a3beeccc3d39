"""The entries of the catalogue: a model, a deviation written into one, and how to make them."""

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
    """One hand-written model.

    `expected` maps Hugging Face's names to the model's parameters. `{i}` is the layer and `{h}`
    the head (one parameter per head); several parameters of a c_attn are in the order query,
    key, value, whatever the order in the file. A tied head has no row. The parameters in `zero`
    have no counterpart and have to be zero (a head's bias).
    """

    file: str
    cls: str
    build: Build
    expected: Expected
    zero: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutation:
    """One deviation written into the source of a zoo model: `old` becomes `new`, once.

    `more` are further replacements that the same deviation needs. `at` is a part of the line of
    the changed file where a person would put the finger, or None where no line is at fault;
    `also` are other lines that would do.
    """

    style: str
    code: str
    old: str
    new: str
    at: str | None
    also: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()


def load_class(path: Path, cls: str) -> type[nn.Module]:
    """The class `cls` of a file, imported under a name of its own."""
    name = f"_zoo_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found: type[nn.Module] = getattr(module, cls)
    return found


def changed(source: str, mutation: Mutation) -> str:
    """The source with one deviation written into it."""
    for old, new in ((mutation.old, mutation.new), *mutation.more):
        assert old in source, f"{mutation.style} has no {old!r}"
        source = source.replace(old, new, 1)
    for finger in (mutation.at, *mutation.also):
        assert finger is None or finger in source, f"{mutation.style}: no line with {finger!r}"
    return source


def composed(model: Model, mutations: Sequence[Mutation], folder: Path) -> Path:
    """Write the model's file, with these deviations in it, into `folder` and return its path."""
    source = (ZOO / model.file).read_text()
    for mutation in mutations:
        source = changed(source, mutation)
    path = folder / "_".join([*(mutation.code for mutation in mutations), model.file])
    path.write_text(source)
    return path


# How a model is built: its own names for the fields of compat's config.


def config(name: str, **fields: str) -> Build:
    """Through a config class of the model's own file: `its field = our field`."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        make = getattr(sys.modules[cls.__module__], name)
        return cls(make(**{own: getattr(config, ours) for own, ours in fields.items()}))

    return build


def keywords(**fields: str) -> Build:
    """By keyword arguments: `its argument = our field`."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        return cls(**{own: getattr(config, ours) for own, ours in fields.items()})

    return build


def positional(*fields: str) -> Build:
    """By positional arguments: our fields in its order."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        return cls(*(getattr(config, ours) for ours in fields))

    return build


def dictionary(**fields: str) -> Build:
    """From one dictionary: `its key = our field`."""

    def build(cls: type[nn.Module], config: GPT2Config) -> nn.Module:
        return cls({own: getattr(config, ours) for own, ours in fields.items()})

    return build


# Where the tensors go.

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
    """The table of a model; `block` stands before the names of `ln_1` to `out`.

    `qkv` is one fused pair, or query, key and value.
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
