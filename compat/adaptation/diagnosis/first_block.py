"""Which part of GPT-2 a module is, and the modules of a model's first block, found by running them.

They are examined alone where the whole model cannot be mapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from compat.adaptation.diagnosis.attention_nodes import MOST_IN_ATTENTION
from compat.adaptation.diagnosis.counterfactual import relative_rms
from compat.adaptation.tracing.calling import Forward
from compat.config import GPT2Config
from compat.user_models.eval_mode import eval_mode, restore_weights, saved_weights

# The relative RMS difference below which two results of a module are the same.
SAME = 1e-3
# The MLP has two matrices, seldom narrower than C × C; a single one is a projection.
LEAST_IN_MLP = 2


def first_block(
    model: nn.Module, call: Forward, ids: Tensor, config: GPT2Config
) -> list[tuple[nn.Module, str]]:
    """Return the module of the first block, "h.0", and that of its attention, "h.0.attn".

    They are the outermost that compute attention, of a class with several, and those inside of it.
    One that computes more than attention and less than a block is left out.
    """
    with with_noise(model):
        calls = [c for c in _calls(model, call, ids, config.n_embd) if c.reads_earlier]
        count = Counter(type(each.module) for each in calls)
        several = [each for each in calls if count[type(each.module)] > 1]
        outer = [each for each in several if not any(each.is_in(other) for other in several)]
        inner = [each for each in several if outer and each.is_in(outer[0])]
        return [(each.module, each.name) for each in [*outer[:1], *inner] if each.name]


@dataclass
class _Call:
    """A call of a module with hidden states (B, T, C) among its arguments, the first of them x."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Tensor
    item: int | None

    def on(self, x: Tensor) -> Tensor:
        """Return the hidden states that the module computes from others."""
        args, kwargs = tree_map(lambda a: x if a is self.x else a, (self.args, self.kwargs))
        result = self.module(*args, **kwargs)
        out: Tensor = result if self.item is None else result[self.item]
        return out

    def is_in(self, other: _Call) -> bool:
        """Return whether the module is a submodule of another's."""
        return self.path.startswith(f"{other.path}.")

    @property
    def reads_earlier(self) -> bool:
        """Whether the results at later tokens depend on the first one."""
        return _reads_earlier(self.on, self.x)

    @property
    def name(self) -> str:
        """Which part of GPT-2 the module is, or ""."""
        return part_name(self.module, self.on, self.x)


def part_name(module: nn.Module, on: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Return which part of GPT-2 a module is: h.0, h.0.attn, h.0.mlp, h.0.ln_1, or "" for none.

    Args:
        module: the module.
        on: calls it with hidden states, and returns those that it computes.
        x: hidden states (B, T, C).
    """
    width = x.shape[-1]
    matrices = sum(p.numel() for p in module.parameters() if p.ndim > 1 and width in p.shape)
    reads_earlier = _reads_earlier(on, x)
    if reads_earlier and matrices > MOST_IN_ATTENTION * width**2:
        return "h.0"
    with _parameters(module, torch.zeros_like):
        adds_nothing = not on(x).any()
    normalizes = relative_rms(on(100 * x), on(1000 * x)) < SAME
    if normalizes:
        return "" if matrices or reads_earlier else "h.0.ln_1"
    if not adds_nothing:
        return ""
    if reads_earlier:
        return "h.0.attn"
    return "h.0.mlp" if matrices >= LEAST_IN_MLP * width**2 else ""


def _reads_earlier(on: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether the results at later tokens depend on the first one."""
    other = x.clone()
    other[:, 0] = torch.randn_like(other[:, 0])
    before, changed = on(x), on(other)
    difference = (changed - before).norm(dim=(0, 2))
    return bool((difference > SAME * before.norm(dim=(0, 2)))[1:].any())


def _calls(model: nn.Module, call: Forward, ids: Tensor, width: int) -> list[_Call]:
    """Return the first call of each module that converts hidden states to such."""
    calls: dict[str, _Call | None] = {}

    def keep(
        path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        results = result if isinstance(result, tuple) else (result,)
        streams = _hidden_states((args, kwargs), width)
        items = [i for i, each in enumerate(results) if _hidden_states(each, width)]
        found = None
        if streams and items and results[items[0]].shape == streams[0].shape:
            item = items[0] if isinstance(result, tuple) else None
            found = _Call(path, module, args, kwargs, streams[0], item)
        calls.setdefault(path, found)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(partial(keep, path), with_kwargs=True)
            hooks.enter_context(hook)
        call(model, ids)
    return [found for found in calls.values() if found is not None]


def _hidden_states(values: object, width: int) -> list[Tensor]:
    """Return the tensors (B, T, C) among nested values."""
    return [
        a for a in tree_leaves(values)
        if isinstance(a, Tensor) and a.is_floating_point() and a.ndim == 3 and a.shape[-1] == width
    ]  # fmt: skip


@contextmanager
def with_noise(model: nn.Module) -> Iterator[None]:
    """Add noise to all parameters in the body; a projection may be initialized with zeros."""

    def noisy(parameter: Tensor) -> Tensor:
        return parameter + 0.1 * torch.randn_like(parameter)

    with eval_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with _parameters(model, noisy):
            yield


@contextmanager
def _parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change a module's parameters in the body."""
    before = saved_weights(module)
    try:
        restore_weights(module, [change(value) for value in before])
        yield
    finally:
        restore_weights(module, before)
