"""The inputs that the products of an int8 model multiply in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint.layout import HEAD
from compat.config import GPT2Config
from compat.decoding.matrices import Blas, packed, quantize
from compat.decoding.transformer import Block, Norm, Read

TOKENS = 64
TIMES = 6  # an input is an outlier above this many times the median size of all inputs
MOST = 64  # outliers of a product; equal to MOST_OUTLIERS in native.c


def without_outliers(config: GPT2Config, embedding: tuple[Tensor, Tensor], read: Read) -> Read:
    """Return a function like `read` that keeps the weights of inputs with outliers in float32.

    Args:
        config, embedding, read: as of `Transformer`.
    """
    outliers = inputs_with_outliers(config, embedding, read)

    def read_int8(name: str) -> list[Any]:
        weights, inputs = read(name), outliers.get(name)
        if inputs is None:
            return weights
        return [quantize(weight.t() if name == HEAD else weight, inputs) for weight in weights]

    return read_int8


@torch.no_grad()
def inputs_with_outliers(
    config: GPT2Config, embedding: tuple[Tensor, Tensor], read: Read
) -> dict[str, Tensor]:
    """Find the inputs of each product that are much larger than its others on random tokens.

    GPT-2 is run once in float32, with one layer in memory at a time.

    Args:
        config, embedding, read: as of `Transformer`.

    Returns:
        The indices of these inputs by the name of the weight, where there are any.
    """
    found: dict[str, Tensor] = {}

    def floats(name: str) -> list[Tensor]:
        return [tensor.float() for tensor in read(name)]

    def matrix(name: str) -> nn.Module:
        product = packed(Blas, floats(f"{name}.weight"), floats(f"{name}.bias"))
        product.register_forward_pre_hook(partial(note, f"{name}.weight"))
        return product

    def note(name: str, module: nn.Module | None, inputs: tuple[Tensor]) -> None:
        size = inputs[0].square().mean(0).sqrt()  # (in,)
        largest = size.topk(min(MOST, len(size)))
        outliers = largest.indices[largest.values > TIMES * size.median()]
        if len(outliers) and size.isfinite().all():
            found[name] = outliers.sort().values

    norm = partial(Norm.of, config, floats)
    wte, wpe = embedding
    T, H = min(TOKENS, config.n_positions), config.n_head
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(config.vocab_size, (T,), generator=generator, device="cpu")
    x = wte[ids.to(wte.device)].float() + wpe[:T].float()  # (T, C)
    kv = x.new_empty(2, 1, H, T, config.d_head)
    for i in range(config.n_layer):
        x = Block(config, i, norm, matrix)(x, kv, ..., kv, None)
    note(HEAD, None, (norm("ln_f")(x),))
    return found
