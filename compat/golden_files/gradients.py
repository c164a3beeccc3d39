"""The loss and its gradients, at every tap and of every parameter: the reference's, and exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint.layout import EMBEDDING, plain_name
from compat.golden_files.backward import next_token_loss
from compat.golden_files.contents import LOSS, TOKENS
from compat.golden_files.pieces import GPT2, Weights, chain, inputs_of, run_piece
from compat.parity.trace import Trace
from compat.tap import BLOCK_TAPS, Tap, hook_tap, tap_names


def gradients(model: nn.Module, taps: Sequence[Tap], ids: Tensor) -> Trace:
    """Run a reference forward and backward.

    Args:
        model: returns logits; its parameters have Hugging Face's names.
        taps: where gradients are recorded.
        ids: (B, T).

    Returns:
        "loss", the mean cross-entropy of ids[:, 1:] given the ids before each; and its gradients by
        the name of the tap or of the parameter.
    """
    found: Trace = {}

    def record(name: str, parts: Sequence[Tap], gradient: Tensor) -> None:
        for tap in parts:
            part = gradient if tap.part is None else gradient.chunk(3, dim=-1)[tap.part]
            found[tap.name] = part.clone()

    def observe(parts: Sequence[Tap], value: Any) -> None:
        value.register_hook(partial(record, parts[0].name, parts))

    # q, k and v are views that the model does not read, so their whole tensor is watched.
    places = {tap.name: [tap] for tap in taps if tap.part is None}
    for tap in taps:
        if tap.part is not None:
            places.setdefault(tap.module, []).append(tap)
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with torch.enable_grad(), ExitStack() as hooks:
            for parameter, _ in before:
                parameter.requires_grad_(True)
            for parts in places.values():
                whole = replace(parts[0], part=None)
                module = model.get_submodule(whole.module)
                hooks.enter_context(hook_tap(module, whole, partial(observe, parts)))
            logits = model(ids).logits
            loss = next_token_loss(logits, ids)
            torch.autograd.backward(loss)
        found["loss"] = loss.detach()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            found[plain_name(name)] = torch.zeros_like(parameter) if gradient is None else gradient
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
            parameter.grad = None
    return found


def exact_gradients(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The loss of GPT-2 in float64 and its gradients, by the name of the tap or of the parameter.

    They come in the order of the backward pass. Only the residual stream is kept from the forward
    pass, and each block is computed again, so that the memory does not grow with the depth.
    """
    config = weights.config
    names = tap_names(config.n_layer)
    stream: Trace = {}  # what enters each block, the final norm and the head
    for tap, value in chain(weights):
        if tap in ("embed", "ln_f", "logits") or tap.endswith(".out"):
            stream[tap] = value
    with torch.enable_grad():
        logits = stream.pop("logits").requires_grad_()
        loss = next_token_loss(logits, weights.ids)
        arriving: Trace = {"logits": torch.autograd.grad(loss, logits)[0]}
    yield LOSS, loss.detach()
    embedding = torch.zeros(())  # the gradient of the head, if it is the token embedding
    blocks = [[f"h.{i}.{tap}" for tap in BLOCK_TAPS] for i in range(config.n_layer)]
    for taps in [["ln_f", "logits"], *reversed(blocks), ["embed"]]:
        values = dict(stream)
        for tap in taps[:-1]:
            values[tap] = run_piece(tap, GPT2, weights, values)
        parameters: Trace = {}
        for tap in reversed(taps):
            gradient = arriving.pop(tap)
            yield tap, gradient
            for name, share in _shares(tap, weights, values, gradient):
                total = arriving if name in names else parameters
                total[name] = total[name] + share if name in total else share
        if "logits" in taps and EMBEDDING in parameters:
            embedding = parameters.pop(EMBEDDING)
        if TOKENS in parameters:
            rows, V = parameters.pop(TOKENS), config.vocab_size
            table = torch.zeros(V, config.n_embd, dtype=torch.float64)
            table.index_add_(0, weights.ids.flatten(), rows.flatten(0, 1))
            parameters[EMBEDDING] = table.add_(embedding)
        yield from parameters.items()


def _shares(
    tap: str, weights: Weights, values: Trace, gradient: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What the gradient at a tap adds to those of the taps and parameters before it."""
    leaves = {
        name: values[name].detach().requires_grad_()
        for name in inputs_of(tap, GPT2, weights.config.n_layer)
    }
    inputs = dict(leaves)

    def read(name: str) -> Tensor:
        if name not in leaves:
            leaves[name] = weights[name].detach().requires_grad_()
        return leaves[name]

    with torch.enable_grad():
        found = run_piece(tap, GPT2, replace(weights, read=read), inputs)
        shares = torch.autograd.grad(found, list(leaves.values()), gradient)
    yield from zip(leaves, shares, strict=True)
