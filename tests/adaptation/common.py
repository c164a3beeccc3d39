"""Helpers of the tests of `adapt`: models with the tiny checkpoint's sizes, each adapted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from compat import Adaptation, GPT2Config, NameMap, adapt
from compat.checkpoint import open_checkpoint
from tests.adaptation.catalogue import MODELS, ZOO, Model, load_class
from tests.conftest import noisy_reference

LAYERS, HEADS = 3, 4  # of the tiny checkpoint


@cache
def tiny_config(folder: Path) -> GPT2Config:
    return open_checkpoint(folder).config


def build(model: Model, path: Path, folder: Path) -> nn.Module:
    """Build the model of a file with the checkpoint's sizes, always with the same weights."""
    torch.manual_seed(7)
    return model.build(load_class(path, model.cls), tiny_config(folder))


def build_style(style: str, folder: Path) -> nn.Module:
    return build(MODELS[style], ZOO / MODELS[style].file, folder)


@dataclass
class Adapted:
    """A model after `adapt`, and the result of `adapt`."""

    model: nn.Module
    adaptation: Adaptation


@cache
def adapted(style: str, folder: Path) -> Adapted:
    """Adapt a zoo model to a checkpoint. The result is shared, so tests must not change it."""
    model = build_style(style, folder)
    return Adapted(model, adapt(model, folder))


@cache
def reference_logits(ids: tuple[tuple[int, ...], ...], n_layer: int) -> Tensor:
    """Return transformers' logits for these ids, with the tiny checkpoint's weights."""
    with torch.no_grad():
        logits: Tensor = noisy_reference(n_layer=n_layer)(torch.tensor(ids)).logits
    return logits


def fresh_ids(batch: int = 3, length: int = 18, seed: int = 99) -> Tensor:
    """Return ids on which `adapt` did not run the model."""
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits in the output of a zoo model, which are found by their shape."""
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        output = model.eval()(ids)
    for module, training in modes.items():
        module.training = training
    return next(t for t in _tensors(output) if t.shape == (*ids.shape, 97))


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (t for item in output.values() for t in _tensors(item))
    elif isinstance(output, (tuple, list)):
        yield from (t for item in output for t in _tensors(item))
    elif hasattr(output, "logits"):
        yield from _tensors(output.logits)


def error_of(model: nn.Module, n_layer: int = LAYERS) -> float:
    """Return the relative RMS error of a model's logits on fresh ids, against transformers."""
    ids = fresh_ids()
    expected = reference_logits(tuple(map(tuple, ids.tolist())), n_layer).double()
    difference = logits_of(model, ids).double() - expected
    return (difference.square().mean() / expected.square().mean()).sqrt().item()


def mapped(name_map: NameMap, model: nn.Module) -> dict[str, frozenset[str]]:
    """Return the map's parameters for every tensor, with all layers expanded."""
    return {row.hf: _one_name(row.ours, model) for row in name_map.expand(LAYERS)}


def expected_map(style: str, model: nn.Module) -> dict[str, frozenset[str]]:
    """Return the catalogue's parameters for every tensor, with all layers expanded."""
    found: dict[str, frozenset[str]] = {}
    for hf, names in MODELS[style].expected.items():
        for i in range(LAYERS) if "{i}" in hf else [0]:
            heads = range(HEADS) if any("{h}" in name for name in names) else [0]
            ours = [name.format(i=i, h=h) for name in names for h in heads]
            found[hf.format(i=i)] = _one_name(ours, model)
    return found


def _one_name(names: Iterable[str], model: nn.Module) -> frozenset[str]:
    """Return the names; tied parameters have the name of the first one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(parameters.items())}
    return frozenset(name if "[" in name else first[id(parameters[name])] for name in names)
