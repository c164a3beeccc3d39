"""A model's hidden states one block at a time, while the model runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from queue import Queue
from threading import Event, Thread

import torch
from torch import Tensor, nn

from compat.tap import Tap, hook_tap


class _Stopped(Exception):
    """Raised in the model's thread when nobody reads its hidden states any more."""


def stream_taps(model: nn.Module, taps: Sequence[Tap], ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Run a model on ids (B, T) and yield a copy of every hidden state as soon as it is computed.

    The model runs in a thread that waits for the reader, so that only a few hidden states are in
    memory at a time. They come in the order in which the model computes them.
    """
    queue: Queue[tuple[str, Tensor] | BaseException | None] = Queue(maxsize=1)
    stopped = Event()

    def record(tap: str, value: Tensor) -> None:
        queue.put((tap, value.detach().clone()))
        if stopped.is_set():
            raise _Stopped

    def run() -> None:
        try:
            with torch.no_grad(), ExitStack() as hooks:
                for tap in taps:
                    module = model.get_submodule(tap.module)
                    hooks.enter_context(hook_tap(module, tap, partial(record, tap.name)))
                model(ids)
            queue.put(None)
        except BaseException as error:  # raised again where the hidden states are read
            queue.put(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        while thread.is_alive():  # the thread may wait for room in the queue
            if not queue.empty():
                queue.get()
            thread.join(0.01)
