"""Shared by both dialects: activations, initial weights, attention scores, KV cache, checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compat.config import GPT2Config, as_config
from compat.errors import CompatError, ConfigError, GenerationError, short_repr

if TYPE_CHECKING:
    ConfigLike = GPT2Config | Mapping[str, Any]

Self = TypeVar("Self")
Arguments = ParamSpec("Arguments")


def takes_config(
    init: Callable[Concatenate[Self, GPT2Config, Arguments], None],
) -> Callable[Concatenate[Self, ConfigLike, Arguments], None]:
    """Let an `__init__` that takes a GPT2Config also accept a dictionary of its fields."""

    @wraps(init)
    def converting(
        self: Self, config: ConfigLike, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> None:
        init(self, as_config(config), *args, **kwargs)

    return converting  # type: ignore[return-value]


class GELU(nn.Module):
    """GELU in its tanh form, 0.5x(1 + tanh(√(2/π)(x + 0.044715x³))): any shape to the same shape.

    Source: Hendrycks & Gimpel 2016, §2; OpenAI's `gpt-2/src/model.py`. The operations and their
    order are those of `transformers`' `gelu_new`, so that the results are bit-identical.
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


# The keys are values of config.json's `activation_function`.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu_new": GELU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


def activation(name: str) -> nn.Module:
    """Return the module for config.json's `activation_function`.

    Raises:
        ConfigError: the name is not one of `ACTIVATIONS`.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config field 'activation_function' is {name!r}, but must be one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]()


Layer = TypeVar("Layer", bound=nn.Module)


def initialized(layer: Layer, n_layer: int | None = None) -> Layer:
    """Set GPT-2's initial weights, normal with a standard deviation of 0.02 and biases of 0.

    Source: Radford et al. 2019, §2.3; `transformers`' `GPT2PreTrainedModel._init_weights`.

    Args:
        layer: a module with a `weight` and optionally a `bias`. It is returned.
        n_layer: number of the model's layers, for a projection onto the residual stream. The
            standard deviation is divided by √(2·n_layer), as each layer adds two such projections.
    """
    std = 0.02 if n_layer is None else 0.02 / math.sqrt(2 * n_layer)
    nn.init.normal_(layer.get_parameter("weight"), std=std)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.get_parameter("bias"))
    return layer


def attention_scores(q: Tensor, k: Tensor, scale: float, upcast: bool = False) -> Tensor:
    """Return scores q·kᵀ · scale (B, H, T, S) of queries (B, H, T, D) and keys (B, H, S, D).

    With `upcast`, the config's `reorder_and_upcast_attn`, they are computed in float32, by the
    operations of `transformers`' `GPT2Attention._upcast_and_reordered_attn`.
    """
    if not upcast:
        return q @ k.transpose(-2, -1) * scale
    B, H, T, S = *q.shape[:3], k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        rows = q.float().reshape(B * H, T, -1)
        columns = k.float().transpose(-2, -1).reshape(B * H, -1, S)
        out = torch.baddbmm(rows.new_empty(B * H, T, S), rows, columns, beta=0, alpha=scale)
    return out.view(B, H, T, S)


class KVCache:
    """The keys and values of one attention layer, written in place.

    Args:
        capacity: the number of positions that it can hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys = self.values = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add T positions, (B, H, T, D) each; return all S positions so far, (B, H, S, D) each."""
        if self.length == 0:
            self.keys, self.values = self._buffer(k), self._buffer(v)
        past, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, past : self.length] = k
        self.values[:, :, past : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def keep(self, rows: Tensor, first: int = 0) -> None:
        """Keep only these rows of the batch, from position `first` on."""
        keys = self.keys[rows, :, first : self.length]
        values = self.values[rows, :, first : self.length]
        self.length = 0
        self.append(keys, values)

    def _buffer(self, like: Tensor) -> Tensor:
        B, H, _, D = like.shape
        # Not `new_empty`, with which every rank of a divided model would hold all heads.
        room = like[:, :, :1].expand(B, H, self.capacity, D)
        return torch.empty_like(room, memory_format=torch.contiguous_format)


def as_ids(
    input_ids: object, vocab_size: int, error: type[CompatError] = GenerationError
) -> Tensor:
    """Return token ids (B, T) as a checked int64 tensor.

    Args:
        input_ids: integers (B, T), as a tensor, a NumPy array or a list of rows of one length.
        vocab_size: all ids must be below it.
        error: the exception class that is raised for anything else.
    """
    ids = id_tensor(input_ids, error)
    if fault := fault_in_ids(ids, vocab_size):
        raise error(fault)
    return ids.long()


def id_tensor(input_ids: object, error: type[CompatError] = GenerationError) -> Tensor:
    """Convert any container of ids to a tensor. Values are not checked; errors as `as_ids`."""
    if isinstance(input_ids, Tensor):
        return input_ids
    if isinstance(input_ids, str | bytes):
        raise error(
            f"input_ids is the text {short_repr(input_ids)}, but must be token ids. Encode it with "
            "load_tokenizer(…).encode, or call generate_text."
        )
    try:
        return torch.tensor(_as_lists(input_ids), device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as reason:
        raise error(
            f"input_ids is a {type(input_ids).__name__}, but must be integers (B, T), all "
            f"rows of one length ({reason})"
        ) from reason


def _as_lists(value: Any) -> Any:
    """Return rows of arrays or tensors, and arrays of any integer type, as Python's numbers."""
    if isinstance(value, list | tuple):
        return [_as_lists(row) for row in value]
    return value.tolist() if hasattr(value, "tolist") else value


def fault_in_ids(input_ids: Tensor, vocab_size: int | None) -> str | None:
    """Return an error message for a tensor that does not hold token ids (B, T); None if it does.

    With None for `vocab_size` the values are not read.
    """
    dtype = input_ids.dtype
    integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    dense = input_ids.layout == torch.strided and not (input_ids.is_meta or input_ids.is_quantized)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not (integers and dense):
        where = "" if dense else f" ({input_ids.layout}, on {input_ids.device})"
        return (
            f"input_ids is a tensor of {dtype} and shape {list(input_ids.shape)}{where}, but must "
            "be integers (B, T), at least one. Start an empty prompt from the end-of-text token."
        )
    if vocab_size is None:
        return None
    low, high = int(input_ids.long().min()), int(input_ids.long().max())
    if low < 0 or high >= vocab_size:
        return (
            f"input_ids contains {low if low < 0 else high}, but the vocabulary has ids 0 to "
            f"{vocab_size - 1}. Encode the prompt with the checkpoint's own tokenizer."
        )
    return None


def check_ids(
    input_ids: Tensor,
    cache: Sequence[KVCache] | None,
    attention_mask: Tensor | None,
    tokens: nn.Module,
    positions: nn.Module,
) -> None:
    """Refuse ids for which the embeddings have no row.

    Nothing is checked while the forward pass is traced or compiled, so that no length and no value
    of the ids enters the graph. On an accelerator the values are not read, because that would wait
    for the device.

    Raises:
        GenerationError: ids are not integers (B, T) or not in the vocabulary, or there are more
            positions than the model has or than fit into the cache.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode_stack():
        return
    if not isinstance(input_ids, Tensor):
        raise GenerationError(
            f"input_ids is a {type(input_ids).__name__}, but must be a tensor of integers (B, T)"
        )
    if input_ids.is_meta:  # only shapes are computed
        return
    vocab_size = _rows(tokens) if input_ids.is_cpu else None
    if fault := fault_in_ids(input_ids, vocab_size):
        raise GenerationError(fault)
    past, T, n = cache[0].length if cache else 0, input_ids.shape[1], _rows(positions)
    if cache and past + T > cache[0].capacity:
        raise GenerationError(
            f"{T} ids after {past} cached ones exceed the {cache[0].capacity} positions of the "
            "cache. Build KVCache with a larger capacity."
        )
    if n is not None and attention_mask is None and past + T > n:
        cached = f" after {past} cached ones" if past else ""
        raise GenerationError(
            f"{T} ids{cached} exceed the {n} positions of the model. Shorten the text, or keep "
            "its last part."
        )


def _rows(embedding: nn.Module) -> int | None:
    """Return the number of rows of an embedding; None if another kind of module replaced it."""
    weight = getattr(embedding, "weight", None)
    return len(weight) if isinstance(weight, Tensor) else None


def position_ids(
    input_ids: Tensor, cache: Sequence[KVCache] | None, attention_mask: Tensor | None
) -> Tensor:
    """Return positions of ids (B, T) that follow the cached ones: (T,), or (B, T) with a mask.

    With `attention_mask` (B, S), 0 at padding, only real tokens are counted, so that a left-padded
    prompt starts at position 0.
    """
    past, T = cache[0].length if cache else 0, input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past, past + T, device=input_ids.device)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
