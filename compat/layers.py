"""What both dialects share: the activations, the initial weights and the key/value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compat.errors import CompatError, ConfigError, GenerationError, short_repr


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


def as_ids(
    input_ids: object, vocab_size: int, error: type[CompatError] = GenerationError
) -> Tensor:
    """Token ids (B, T) as a tensor of int64, checked.

    Args:
        input_ids: integers (B, T), as a tensor, a NumPy array or a list of rows of one length.
        vocab_size: ids are below it.
        error: raised for anything else.
    """
    ids = id_tensor(input_ids, error)
    if fault := fault_in_ids(ids, vocab_size):
        raise error(fault)
    return ids.long()


def id_tensor(input_ids: object, error: type[CompatError] = GenerationError) -> Tensor:
    """What holds ids as a tensor, of which nothing is checked yet; errors as in `as_ids`."""
    if isinstance(input_ids, Tensor):
        return input_ids
    if isinstance(input_ids, str | bytes):
        raise error(
            f"input_ids is the text {short_repr(input_ids)}; encode it first, as the tokenizer of "
            "load_tokenizer does, or call generate_text"
        )
    try:
        return torch.tensor(_as_lists(input_ids), device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as reason:
        raise error(
            f"input_ids is a {type(input_ids).__name__} that cannot be read as ids; expected "
            f"integers (B, T), all rows of one length: {reason}"
        ) from reason


def _as_lists(value: Any) -> Any:
    """Rows of arrays or tensors, and arrays of any integer type, as Python's own numbers."""
    if isinstance(value, list | tuple):
        return [_as_lists(row) for row in value]
    return value.tolist() if hasattr(value, "tolist") else value


def fault_in_ids(input_ids: Tensor, vocab_size: int | None) -> str | None:
    """What is wrong with ids that should be (B, T) whole numbers below `vocab_size`, in words.

    None for `vocab_size` leaves their values unread.
    """
    kind = input_ids.dtype
    whole = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    known = input_ids.layout == torch.strided and not (input_ids.is_meta or input_ids.is_quantized)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not (whole and known):
        where = "" if known else f" ({input_ids.layout}, on {input_ids.device})"
        return (
            f"input_ids are {kind} of shape {list(input_ids.shape)}{where}; expected whole "
            "numbers (B, T), at least one; an empty prompt may start from the end-of-text id"
        )
    if vocab_size is None:
        return None
    low, high = int(input_ids.long().min()), int(input_ids.long().max())
    if low < 0 or high >= vocab_size:
        return (
            f"input_ids hold {low if low < 0 else high}; the vocabulary has ids 0 to "
            f"{vocab_size - 1}; is this prompt encoded by another tokenizer?"
        )
    return None


def check_ids(
    input_ids: Tensor,
    cache: Sequence[KVCache] | None,
    attention_mask: Tensor | None,
    tokens: nn.Module,
    positions: nn.Module,
) -> None:
    """Refuse ids that the embeddings have no row for.

    Nothing is checked while the forward pass is traced or compiled, so that no length and no value
    of the ids enters the graph. On an accelerator the values are not read, which would wait for it.

    Raises:
        GenerationError: ids that are not integers (B, T), or are not in the vocabulary; more than
            there are positions, or than the cache has room for.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode_stack():
        return
    if not isinstance(input_ids, Tensor):
        raise GenerationError(
            f"input_ids is a {type(input_ids).__name__}; expected a tensor of integers (B, T)"
        )
    if input_ids.is_meta:  # shapes alone are computed
        return
    vocab_size = _rows(tokens) if input_ids.is_cpu else None
    if fault := fault_in_ids(input_ids, vocab_size):
        raise GenerationError(fault)
    past, T, n = cache[0].length if cache else 0, input_ids.shape[1], _rows(positions)
    if cache and past + T > cache[0].capacity:
        raise GenerationError(
            f"{T} ids after {past} cached ones; the cache has {cache[0].capacity} positions"
        )
    if n is not None and attention_mask is None and past + T > n:
        cached = f" after {past} cached ones" if past else ""
        raise GenerationError(
            f"{T} ids{cached}; the model has {n} positions; shorten the text, or keep its last part"
        )


def _rows(embedding: nn.Module) -> int | None:
    """How many an embedding has; None where it was replaced by something else."""
    weight = getattr(embedding, "weight", None)
    return len(weight) if isinstance(weight, Tensor) else None


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
