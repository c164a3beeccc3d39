"""Streams of a model's hidden states and gradients while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import Queue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint.layout import plain_name
from compat.golden_files.backward import next_token_loss
from compat.golden_files.contents import LOSS
from compat.tap import Tap, hook_taps

Record = Callable[[str, Tensor], None]


class _Stopped(Exception):
    """Raised in the model's thread when the reader has stopped."""


def stream_taps(model: nn.Module, taps: Sequence[Tap], ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Run a model on ids (B, T) and yield a copy of each hidden state as soon as it is computed."""
    modules = dict(model.named_modules())

    def run(record: Record) -> None:
        def copy(tap: Tap, value: Tensor) -> None:
            record(tap.name, value.detach().clone())

        with torch.no_grad(), hook_taps(modules, taps, copy):
            model(ids)

    return _stream(run)


def stream_gradients(
    model: nn.Module, taps: Sequence[Tap], ids: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Run a reference forward and backward, and yield every gradient as soon as it is computed.

    Args:
        model: a model of transformers. Its parameters are set to require gradients.
        taps: the taps whose gradients are recorded.
        ids: the token ids (B, T).

    Yields:
        "loss" with the mean cross-entropy of the next ids, and then the name of a tap or parameter
        with its gradient.
    """
    # The model does not read the views q, k and v, so the gradient of their fused tensor is used.
    parts: dict[Tap, list[Tap]] = {}
    for tap in taps:
        fused = tap if tap.part is None else replace(tap, name=tap.module, part=None)
        parts.setdefault(fused, []).append(tap)
    modules = dict(model.named_modules())

    def run(record: Record) -> None:
        without: dict[str, Any] = {
            plain_name(name): parameter for name, parameter in model.named_parameters()
        }

        def record_tap(fused: Tap, gradient: Tensor) -> None:
            for tap in parts[fused]:
                part = gradient if tap.part is None else gradient.chunk(3, dim=-1)[tap.part]
                record(tap.name, part.clone())

        def observe(fused: Tap, value: Any) -> None:
            value.register_hook(partial(record_tap, fused))

        def record_parameter(name: str, parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            del without[name]
            record(name, gradient)

        with torch.enable_grad(), hook_taps(modules, parts, observe) as hooks:
            for name, parameter in without.items():
                parameter.requires_grad_(True)
                hook = parameter.register_post_accumulate_grad_hook(partial(record_parameter, name))
                hooks.callback(hook.remove)
            loss = next_token_loss(model(ids).logits, ids)
            record(LOSS, loss.detach())
            torch.autograd.backward(loss)
        for name, parameter in without.items():
            record(name, torch.zeros_like(parameter))

    return _stream(run)


def _stream(run: Callable[[Record], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a function records while it runs.

    The function runs in a thread that waits for the reader, so only a few tensors are in memory at
    a time.
    """
    queue: Queue[tuple[str, Tensor] | BaseException | None] = Queue(maxsize=1)
    stopped = Event()

    def record(name: str, value: Tensor) -> None:
        queue.put((name, value))
        if stopped.is_set():
            raise _Stopped

    def in_thread() -> None:
        try:
            run(record)
            queue.put(None)
        except BaseException as error:  # raised again in the reader's thread
            queue.put(error)

    thread = Thread(target=in_thread, daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        while thread.is_alive():  # the thread may be waiting for space in the queue
            if not queue.empty():
                queue.get()
            thread.join(0.01)


def match_by_name(
    ours: Iterator[tuple[str, Tensor]], *others: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, tuple[Tensor, ...]]]:
    """Match tensors by name between runs that compute them in slightly different orders.

    Args:
        ours: the names and tensors of the first run.
        others: the other runs, which share one order and have the same names as the first.

    Yields:
        The name, the tensor of the first run, and the tensors of the other runs.
    """
    waiting: dict[str, Tensor] = {}
    waiting_others: dict[str, tuple[Tensor, ...]] = {}
    for (name, tensor), *found in zip(ours, *others, strict=True):
        waiting[name] = tensor
        waiting_others[found[0][0]] = tuple(value for _, value in found)
        for each in (name, found[0][0]):
            if each in waiting and each in waiting_others:
                yield each, waiting.pop(each), waiting_others.pop(each)
