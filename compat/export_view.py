"""A view of a model's weights as Hugging Face's tensors, each computed on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint.layout import EMBEDDING, HEAD
from compat.config import GPT2Config, as_config
from compat.dialects import dialect_of
from compat.errors import ConfigError, NameMapError, listed
from compat.name_map import NameMap, all_parameters, as_name_map, names_of, sliced
from compat.sharding import whole
from compat.validation import as_module, check_names, check_own_weights, is_dropped


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor that is computed from parameters on demand.

    If the model is divided among several ranks, every rank must compute it, and gets all of it.
    """

    sources: list[Tensor]
    op: Callable[[list[Tensor]], Tensor]

    def make(self) -> Tensor:
        """Compute the tensor, contiguous."""
        return self.view().contiguous()

    def view(self) -> Tensor:
        """Compute the tensor, sharing the model's memory if a strided view can."""
        return self.op([whole(source) for source in self.sources])

    @cached_property
    def like(self) -> Tensor:
        """A tensor of the same shape and data type on the meta device."""
        sources = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self.sources]
        return self.op(sources)


def hf_tensors(model: nn.Module, name_map: NameMap | None = None) -> dict[str, HFTensor]:
    """Return a model's Hugging Face tensors, without `transformer.`, in the order of the map.

    A head that equals the embedding is left out, unless the model's config unties it. Biases that
    the model lacks are zeros. Tensors that need no rearrangement share the model's memory.

    Args:
        model: a dialect's model, or any module with a name map.
        name_map: required for a module that is not a dialect's.

    Raises:
        ConfigError: The model is not a module.
        NameMapError: The model needs a map and has none, the map lacks parameters, a parameter that
            must be zero is not, or PEFT or torchao replaced parameters.
    """
    model = as_module(model)
    wholes = all_parameters(model)
    check_own_weights(model, wholes)
    name_map = map_of(model, name_map)
    parameters = sliced(wholes, names_of(name_map.rows))
    n_layer = name_map.count_layers(parameters)
    rows, zeros = name_map.expand(n_layer), name_map.expand_zeros(n_layer)
    check_names(model, rows, parameters, zeros)
    if filled := [name for name in zeros if whole(parameters[name]).count_nonzero()]:
        raise NameMapError(
            f"{listed(filled)} must be zero, because GPT-2 does not have them. Set them to zero."
        )
    kept = [row for row in rows if not is_dropped(row, parameters)]
    tensors = {
        row.hf: HFTensor([parameters[name].detach() for name in row.ours], row.op.save)
        for row in kept
    }
    for row in rows:
        if row.hf not in tensors:
            weight = tensors[row.hf.removesuffix("bias") + "weight"]
            tensors[row.hf] = HFTensor(weight.sources, partial(_zeros, weight.op))
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    untied = getattr(getattr(model, "config", None), "tie_word_embeddings", True) is False
    if head and embedding and not untied and torch.equal(head.make(), embedding.make()):
        del tensors[HEAD]
    return {row.hf: tensors[row.hf] for row in rows if row.hf in tensors}


def map_of(model: nn.Module, passed: NameMap | None) -> NameMap:
    """Return the name map that is passed, or that of the model's dialect.

    Raises:
        NameMapError: There is none.
    """
    if passed is not None:
        return as_name_map(passed)
    dialect = dialect_of(model)
    if dialect is None:
        raise NameMapError(
            f"{type(model).__name__} is not one of compat's models. Pass its name_map, such as "
            "adapt(model, source).name_map."
        )
    return dialect.name_map


def config_of(model: nn.Module, passed: GPT2Config | Mapping[str, Any] | None) -> GPT2Config:
    """Return the config that is passed, or the model's own.

    Raises:
        ConfigError: There is none, or they contradict each other.
    """
    own = getattr(model, "config", None)
    own = own if isinstance(own, GPT2Config) else None
    config = own if passed is None else as_config(passed)
    if config is None:
        raise ConfigError(
            f"{type(model).__name__} has no GPT2Config as its `config`. Pass `config`, for the "
            "fields that do not follow from its tensors (n_head, activation_function, "
            "layer_norm_epsilon, …)."
        )
    if own is not None and own != config:
        raise ConfigError(
            f"`config` contradicts the config of {type(model).__name__}. Leave it out."
        )
    return config


def with_head_of(config: GPT2Config, tensors: Mapping[str, HFTensor]) -> GPT2Config:
    """Return the config, tied if and only if the tensors lack a head."""
    return replace(config, tie_word_embeddings=HEAD not in tensors)


def _zeros(op: Callable[[list[Tensor]], Tensor], sources: list[Tensor]) -> Tensor:
    """Return a bias that the model lacks, with the length of the last axis of its weight."""
    weight = op(sources)
    return weight.new_zeros(weight.shape[-1])
