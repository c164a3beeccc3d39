"""The compiled decode step of one sequence: a few large kernels instead of many small ones."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compat.decoding.transformer import Cache, Transformer
from compat.errors import ConfigError

# Weights become constants, no Python runs between operators, and one thread computes what is small.
SETTINGS = {"freezing": True, "cpp_wrapper": True, "cpp.threads": 1}


class CompiledTransformer(Transformer):
    """A transformer whose decode step of a single sequence is compiled.

    Prefill and batches run without compilation, on the same weights and the same cache. Building
    one takes about half a minute and needs a C++ compiler.

    Raises:
        ConfigError: the compiler is missing, or compilation fails.
    """

    def __init__(self, *arguments: Any) -> None:
        _import_compiler()
        from torch._inductor import config  # an import of a second

        super().__init__(*arguments)
        # Options of `torch.compile` come too late for freezing. torch restores what is patched, and
        # the patch holds for this thread alone.
        self.patched = partial(config.patch, SETTINGS)
        # Static but for the positions: for a second engine of the process torch would otherwise
        # make dynamic what differs from the first, and generate code that does not compile.
        self.step = torch.compile(self._step, fullgraph=True, dynamic=False)
        with torch.inference_mode():
            self.positions = torch.arange(self.config.n_positions)
            try:
                self.next_logits(torch.zeros(1, dtype=torch.long), self.new_cache(1), 3)
            except Exception as error:  # torch and the compiler raise errors of many types
                reason = " ".join(str(error).split("\n")[:2])
                raise ConfigError(
                    f"torch.compile failed: {reason}. Install a C++ compiler, or use compile=False."
                ) from error

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        if not isinstance(start, int) or not self._fits(len(tokens), cache, start):
            return super().next_logits(tokens, cache, start)
        positions = self.positions[: start + 1]  # (S,)
        torch._dynamo.mark_dynamic(positions, 0)
        with self.patched():  # for a recompilation, as with another number of threads
            logits: Tensor = self.step(tokens.clone(), positions, cache.per_layer)
        return logits

    def _step(self, tokens: Tensor, positions: Tensor, per_layer: list[Tensor]) -> Tensor:
        """The decode step at the last of `positions`, whose number is a dynamic shape."""
        return self.logits(self(tokens[:, None], per_layer, len(positions) - 1)[:, 0])

    def _fits(self, batch: int, cache: Cache, start: int) -> bool:
        """Whether the compiled graph covers this step.

        It does not for the rest of a batch (a view of a larger cache), for the last position
        (another shape), and for weights with a NaN (another attention).
        """
        alone = batch == 1 and cache.kv.is_contiguous()
        return alone and start + 1 < len(self.positions) and self.attention is nullcontext


def _import_compiler() -> None:
    """Import the module of torch's compiler that warns about itself, even if warnings are errors.

    Only then the warning filters of the process are changed, during one import.
    """
    try:
        import torch.utils.mkldnn
    except DeprecationWarning:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import torch.utils.mkldnn  # noqa: F401
