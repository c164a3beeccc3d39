"""Decode steps on a CUDA device, captured as CUDA graphs.

A decode step of GPT-2 runs more than a hundred kernels of a few microseconds each, and Python takes
several times as long to launch them one by one. A captured graph launches all of them at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from compat.decoding.transformer import Cache, Transformer

FEWEST_POSITIONS = 256  # of the cache that a graph reads

# Held while a graph is captured: torch captures one at a time, and other threads may not draw from
# its global random generator meanwhile.
capture_lock = Lock()


class GraphCache(Cache):
    """A KV cache with the graphs that read and write it.

    Attributes:
        kv: the keys and values of the rows that still run, as in `Cache`.
        all_kv: those of all rows.
        graphs: the decode steps by their transformer, their rows and their positions.
    """

    def __init__(self, all_kv: Tensor, graphs: dict[Any, DecodeGraph]) -> None:
        self.kv = self.all_kv = all_kv
        self.graphs = graphs


class DecodeGraph:
    """A decode step as a CUDA graph, captured while it computes the step of these tokens.

    Args:
        transformer: computes the logits.
        kv: the part of the cache that the step reads and writes, as of `Transformer.forward`.
        tokens: the tokens (B,), for up to as many rows as `kv` has.
        start: their position, or positions (B,).
    """

    def __init__(
        self, transformer: Transformer, kv: Tensor, tokens: Tensor, start: int | Tensor
    ) -> None:
        self.tokens = torch.zeros(kv.shape[2], dtype=torch.long, device=kv.device)
        self.start = torch.zeros_like(self.tokens)
        self._write(tokens, start)
        # In float32, torch's fused attention of a single query is slow for long texts.
        unfused = kv.dtype == torch.float32

        def step() -> Tensor:
            with sdpa_kernel(SDPBackend.MATH) if unfused else nullcontext():
                hidden = transformer(self.tokens[:, None], kv, self.start)
            return transformer.logits(hidden[:, 0])

        with torch.inference_mode():
            self.replay, self.logits = captured(step, kv.device)

    def __call__(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        """Return float32 logits (B, V) of the token after each of `tokens` (B,)."""
        self._write(tokens, start)
        self.replay()
        return self.logits[: len(tokens)].clone()

    def _write(self, tokens: Tensor, start: int | Tensor) -> None:
        """Write the inputs. Further rows have ended, and compute something that is not read."""
        self.tokens[: len(tokens)] = tokens
        self.start[: len(tokens)] = start


def captured(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """Capture a step, and return a function that runs it and the tensor to which it writes."""
    graph = torch.cuda.CUDAGraph()
    with capture_lock, torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # libraries allocate memory in their first call
            step()
        current.wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = step()
    return graph.replay, result


class CudaTransformer(Transformer):
    """A transformer whose decode steps are CUDA graphs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A mask that is added to the scores. Torch would make it from a boolean one in every layer.
        zeros = torch.zeros(self.causal.shape, dtype=self.wte.dtype, device=self.device)
        self.causal = zeros.masked_fill(~self.causal, -torch.inf)
        self._unused: dict[int, tuple[Tensor, dict[Any, DecodeGraph]]] = {}  # by batch, at most one

    def new_cache(self, batch: int) -> GraphCache:
        """Return an empty cache, with memory and graphs of the last text if that has ended."""
        kv, graphs = self._unused.pop(batch, (None, {}))
        if kv is None:
            with torch.inference_mode(False):  # tensors that were made in it change only in it
                kv = super().new_cache(batch).kv
        cache = GraphCache(kv.zero_(), graphs)
        weakref.finalize(cache, _keep_only, self._unused, batch, (kv, graphs)).atexit = False
        return cache

    def next_logits(self, tokens: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        if not isinstance(cache, GraphCache) or not len(tokens):
            return super().next_logits(tokens, cache, start)
        B, last = len(tokens), start if isinstance(start, int) else int(start.max())
        # Powers of two, so that few graphs are captured.
        rows = min(cache.all_kv.shape[2], 1 << (B - 1).bit_length())
        positions = min(self.config.n_positions, max(FEWEST_POSITIONS, 1 << last.bit_length()))
        key = weakref.ref(self), rows, positions
        if key not in cache.graphs:
            kv = cache.all_kv[:, :, :rows, :, :positions]
            cache.graphs[key] = DecodeGraph(self, kv, tokens, start)
        return cache.graphs[key](tokens, start)


def _keep_only(unused: dict[int, Any], batch: int, parts: tuple[Any, ...]) -> None:
    unused.clear()
    unused[batch] = parts
