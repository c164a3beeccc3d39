"""The modules that compute attention, found by running them, and compat's own in their place.

Where compat does not know the attention of a model, the rest of it, such as its embeddings, norms,
MLPs and head, is mapped and diagnosed with GPT-2's attention instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from compat.adaptation.diagnosis.counterfactual import relative_rms
from compat.adaptation.tracing.calling import Forward
from compat.config import GPT2Config
from compat.dialects.linear import LayerNorm, MultiHeadAttention, TransformerBlock
from compat.user_models.eval_mode import eval_mode

# The relative RMS difference below which two results of a module are the same.
SAME = 1e-3


@dataclass
class AttentionModule:
    """A module that computes attention, and what else of a block it computes.

    Args:
        path: where the model has the module.
        module: the module.
        item: which item of its result is the hidden states; None if the result is not a tuple.
        items: how many items the tuple has.
        has_norm: whether it normalizes its input.
        shortcut: which of the hidden states among its arguments it adds to the result, if any.
        shortcut_known: whether that is certain.
        has_mlp: whether it computes the MLP too.
        attended: (T, T), whether the result at a token depends on the input at another.
    """

    path: str
    module: nn.Module
    item: int | None
    items: int
    has_norm: bool
    shortcut: int | None
    shortcut_known: bool
    has_mlp: bool
    attended: Tensor


def unknown_attention(
    model: nn.Module, call: Forward, ids: Tensor, nodes: Sequence[Node], config: GPT2Config
) -> list[AttentionModule]:
    """Return the modules that compute attention where the nodes are, and all others of their class.

    They are the innermost ones that are called with hidden states (B, T, C) and return such, whose
    results at a token depend on earlier tokens.
    """
    paths = {path for node in nodes for path in node.meta.get("modules", ())}
    classes = {type(model.get_submodule(path)) for path in paths}
    with _with_noise(model):
        calls = _calls(model, call, ids, config.n_embd)
        reading = [each for each in calls if each.reads_earlier]
        inner = [each for each in reading if not any(other.is_in(each) for other in reading)]
        found = next((type(e.module) for e in inner if type(e.module) in classes), None)
        return [each.examined() for each in calls if type(each.module) is found]


def first_block(
    model: nn.Module, call: Forward, ids: Tensor, config: GPT2Config
) -> AttentionModule | None:
    """Return the first of the outermost modules that compute attention, of a class with several."""
    with _with_noise(model):
        calls = _calls(model, call, ids, config.n_embd)
        reading = [each for each in calls if each.reads_earlier]
        count = Counter(type(each.module) for each in reading)
        several = [each for each in reading if count[type(each.module)] > 1]
        outer = (each for each in several if not any(each.is_in(other) for other in several))
        block = next(outer, None)
        return None if block is None else block.examined()


@contextmanager
def attention_replaced(
    model: nn.Module, unknown: Sequence[AttentionModule], config: GPT2Config
) -> Iterator[None]:
    """Replace these modules by compat's own in the body."""
    with ExitStack() as stack:
        for layer, each in enumerate(unknown):
            owner, _, name = each.path.rpartition(".")
            parent = model.get_submodule(owner)
            stack.callback(setattr, parent, name, each.module)
            replacement = _Replacement(each, layer, config)
            setattr(parent, name, replacement.to(next(model.parameters()).dtype))
        yield


class _Replacement(nn.Module):
    """GPT-2's attention, with those parts of a block that the replaced module computes too."""

    def __init__(self, unknown: AttentionModule, layer: int, config: GPT2Config) -> None:
        super().__init__()
        config = replace(config, attn_pdrop=0.0, resid_pdrop=0.0)
        eps, bias = config.layer_norm_epsilon, config.layer_norm_bias
        self.item, self.items, self.width = unknown.item, unknown.items, config.n_embd
        self.shortcut = None if unknown.has_mlp else unknown.shortcut
        self.own: nn.Module = MultiHeadAttention(config, layer)
        if unknown.has_mlp:
            self.own = TransformerBlock(config, layer)
        elif unknown.has_norm:
            self.own = nn.Sequential(LayerNorm(config.n_embd, eps, bias), self.own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        streams = _hidden_states((args, kwargs), self.width)
        out = self.own(streams[0])
        if self.shortcut is not None:
            out = streams[self.shortcut] + out
        if self.item is None:
            return out
        return tuple(out if item == self.item else None for item in range(self.items))


@dataclass
class _Call:
    """A call of a module with hidden states (B, T, C) among its arguments, the first of them x."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Tensor
    item: int | None
    items: int

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
        return bool(self.readers(0)[1:].any())

    def readers(self, position: int) -> Tensor:
        """Return (T,), whether the result at each token depends on the input at this position."""
        other = self.x.clone()
        other[:, position] = torch.randn_like(other[:, position])
        before, changed = self.on(self.x), self.on(other)
        difference = (changed - before).norm(dim=(0, 2))
        changed_at: Tensor = difference > SAME * before.norm(dim=(0, 2))
        return changed_at

    def examined(self) -> AttentionModule:
        x, width = self.x, self.x.shape[-1]
        with _parameters(self.module, torch.zeros_like):
            rest = self.on(x)
        streams = _hidden_states((self.args, self.kwargs), width)
        shortcut = next((i for i, a in enumerate(streams) if relative_rms(rest, a) < SAME), None)
        added = shortcut == 0
        large, larger = (self.on(s * x) - s * x * added for s in (100, 1000))
        # Attention has four matrices C × C, and the MLP as many as eight.
        matrices = [p.numel() for p in self.module.parameters() if p.ndim > 1 and width in p.shape]
        return AttentionModule(
            path=self.path,
            module=self.module,
            item=self.item,
            items=self.items,
            has_norm=relative_rms(large, larger) < SAME,
            shortcut=shortcut,
            shortcut_known=shortcut is not None or not rest.any(),
            has_mlp=sum(matrices) > 6 * width**2,
            attended=torch.stack([self.readers(s) for s in range(x.shape[1])], dim=1),
        )


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
            found = _Call(path, module, args, kwargs, streams[0], item, len(results))
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
def _with_noise(model: nn.Module) -> Iterator[None]:
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
    before = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            parameter.copy_(change(parameter))
        yield
    finally:
        for parameter, value in before:
            parameter.copy_(value)
