"""What both dialects share: the activations, the initial weights and the key/value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from compat.errors import ConfigError


class GELU(nn.Module):
    """GELU in its tanh form, 0.5x(1 + tanh(√(2/π)(x + 0.044715x³))): any shape to the same shape.

    Source: Hendrycks & Gimpel 2016, §2; OpenAI's `gpt-2/src/model.py`. The operations and their
    order are those of `transformers`' `gelu_new`, so the results agree to the bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        return (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        )


class QuickGELU(nn.Module):
    """x · sigmoid(1.702x), the sigmoid approximation of GELU: any shape to the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


# Under the names of config.json's `activation_function`.
ACTIVATIONS: dict[str, type[nn.Module] | tuple[type[nn.Module], dict[str, str]]] = {
    "gelu_new": GELU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": (nn.GELU, {"approximate": "tanh"}),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


def activation(name: str) -> nn.Module:
    """The module for config.json's `activation_function`.

    Raises:
        ConfigError: the name is not one of `ACTIVATIONS`.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config field 'activation_function' is {name!r}; known: {', '.join(ACTIVATIONS)}"
        )
    entry = ACTIVATIONS[name]
    return entry[0](**entry[1]) if isinstance(entry, tuple) else entry()


Layer = TypeVar("Layer", bound=nn.Module)


def initialized(layer: Layer, n_layer: int | None = None) -> Layer:
    """The layer, with the initial weights of GPT-2: normal with a std of 0.02, and biases of 0.

    Source: Radford et al. 2019, §2.3; `transformers`' `GPT2PreTrainedModel._init_weights`.

    Args:
        layer: a module with a `weight` and perhaps a `bias`.
        n_layer: of a projection onto the residual stream, how many layers the model has. The std is
            divided by √(2·n_layer), as each layer adds two such projections.
    """
    std = 0.02 if n_layer is None else 0.02 / math.sqrt(2 * n_layer)
    nn.init.normal_(layer.get_parameter("weight"), std=std)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.get_parameter("bias"))
    return layer


class KVCache:
    """The keys and values that one attention layer has seen, written in place.

    Args:
        capacity: how many positions it can hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys = self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add T new positions, (B, H, T, D) each; return all S so far, (B, H, S, D) each."""
        B, H, T, D = k.shape
        if self.length == 0:
            self.keys, self.values = (
                k.new_empty(B, H, self.capacity, D),
                v.new_empty(B, H, self.capacity, D),
            )
        old, self.length = self.length, self.length + T
        self.keys[:, :, old : self.length] = k
        self.values[:, :, old : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def keep(self, rows: Tensor, first: int = 0) -> None:
        """Go on with these rows of the batch alone, from position `first` on."""
        old, self.length = self.length, self.length - first
        self.keys, self.values = (
            self._copied(held[rows, :, first:old]) for held in (self.keys, self.values)
        )

    def _copied(self, held: Tensor) -> Tensor:
        """Room for `capacity` positions that begins with these, (B, H, S, D)."""
        B, H, S, D = held.shape
        room = held.new_empty(B, H, self.capacity, D)
        room[:, :, :S] = held
        return room


def fault_in_ids(input_ids: Tensor, vocab_size: int) -> str | None:
    """What is wrong with ids that should be (B, T) whole numbers below `vocab_size`, in words."""
    whole = input_ids.dtype in (torch.int32, torch.int64)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not whole:
        return (
            f"input_ids are {input_ids.dtype} of shape {list(input_ids.shape)}; expected whole "
            "numbers (B, T), at least one; an empty prompt may start from the end-of-text id"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        return (
            f"input_ids hold {low if low < 0 else high}; the vocabulary has ids 0 to "
            f"{vocab_size - 1}; is this prompt encoded by another tokenizer?"
        )
    return None


def position_ids(
    input_ids: Tensor, cache: Sequence[KVCache] | None, attention_mask: Tensor | None
) -> Tensor:
    """Positions of ids (B, T) that follow what the cache holds: (T,), or (B, T) with a mask.

    With `attention_mask` (B, S), 0 at padding, only real tokens are counted, so that a left-padded
    prompt starts at position 0.
    """
    past, T = cache[0].length if cache else 0, input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past, past + T, device=input_ids.device)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
