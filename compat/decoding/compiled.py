"""The pass of one id, compiled: a few large operators instead of a thousand small ones.

B batch (here 1), S seen so far, N positions there are, C channels, H heads, D head size.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.decoding.matrices import Matrix
from compat.decoding.transformer import Cache, Transformer
from compat.errors import ConfigError

# Weights as constants, no Python between operators, and one thread for what is small.
SETTINGS = {"freezing": True, "cpp_wrapper": True, "cpp.threads": 1}


class CompiledTransformer(Transformer):
    """A transformer whose pass of a single id of a single sequence is compiled.

    Longer passes and batches run as they are, on the same weights and the same cache. To make one
    takes about half a minute and a C++ compiler.

    Raises:
        ConfigError: the compiler is missing, or cannot do it.
    """

    def __init__(self, *arguments: Any) -> None:
        _import_compiler()
        from torch._inductor import config  # which takes a second

        super().__init__(*arguments)

        # Options of `torch.compile` come too late for freezing. torch restores what is patched, and
        # it holds for this thread alone.
        self.patched = partial(config.patch, SETTINGS)
        self.step = torch.compile(_Step(self).eval(), fullgraph=True)
        with torch.inference_mode():
            self.positions = torch.arange(self.config.n_positions)
            try:
                self.next_logits(torch.zeros(1, dtype=torch.long), self.new_cache(1), 3)
            except Exception as error:  # of any kind: torch's, the compiler's
                reason = " ".join(str(error).split("\n")[:2])
                raise ConfigError(f"the engine cannot be compiled here: {reason}") from error

    @torch.inference_mode()
    def next_logits(self, ids: Tensor, cache: Cache, start: int | Tensor) -> Tensor:
        if not isinstance(start, int) or not self._fits(len(ids), cache, start):
            return super().next_logits(ids, cache, start)
        positions = self.positions[: start + 1]  # (S,)
        torch._dynamo.mark_dynamic(positions, 0)
        with self.patched():  # should it be compiled anew, as with other threads
            logits: Tensor = self.step(ids.clone(), positions, cache.apart)
        return logits

    def _fits(self, batch: int, cache: Cache, start: int) -> bool:
        """Whether it is what was compiled: a cache of its own, room in it, fast attention.

        What is left of a batch lies within its cache; the last position makes another shape; and a
        NaN is shown by another attention.
        """
        alone = batch == 1 and cache.both.is_contiguous()
        return alone and start + 1 < len(self.positions) and self.attention is nullcontext


def _import_compiler() -> None:
    """Import the module of torch's compiler that warns of itself, also where warnings are errors.

    Only there the filters of the process are changed, once, as nothing else lets it be imported.
    """
    try:
        import torch.utils.mkldnn
    except DeprecationWarning:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import torch.utils.mkldnn  # noqa: F401


class _Step(nn.Module):
    """`Transformer.__call__` and `logits` for one id, of modules, which the compiler takes in."""

    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.transformer = transformer
        self.wte, self.wpe = (nn.Buffer(rows) for rows in transformer.embedding)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                _Norm(part) if isinstance(part, tuple) else _Product(part) for part in block
            )
            for block in transformer.blocks
        )
        self.ln_f, self.head = _Norm(transformer.ln_f), _Product(transformer.head)

    def forward(self, ids: Tensor, positions: Tensor, cache: list[Tensor]) -> Tensor:
        t, start, S = self.transformer, positions[-1:], len(positions)
        eps = t.config.layer_norm_epsilon
        x = self.wte[ids].to(t.dtype) + self.wpe[start]  # (1, C)
        for i, block in enumerate(self.blocks):
            ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj = cast(nn.ModuleList, block)
            keys, values = cache[2 * i : 2 * i + 2]  # (1, H, N, D)
            qkv = c_attn(ln_1(x, eps)).to(keys.dtype)
            q, k, v = qkv.view(3, 1, t.config.n_head, 1, -1).unbind(0)  # (1, H, 1, D)
            keys.index_copy_(2, start, k)
            values.index_copy_(2, start, v)
            seen = keys[:, :, :S], values[:, :, :S]
            heads = F.scaled_dot_product_attention(q, *seen, scale=t.scales[i])
            x = x + attn_proj(heads.reshape(1, -1).to(t.dtype))
            x = x + mlp_proj(t.act(c_fc(ln_2(x, eps))))
        logits: Tensor = self.head(self.ln_f(x, eps)).float()
        return logits


class _Norm(nn.Module):
    def __init__(self, norm: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = map(nn.Buffer, norm)

    def forward(self, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)


class _Product(nn.Module):
    """A matrix, whose tensors are buffers here."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        for name, value in vars(matrix).items():
            setattr(self, name, nn.Buffer(value) if isinstance(value, Tensor) else value)
        self.product = type(matrix).__call__

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self, x)
