"""Adversaries of the proof: their definition, their construction, and the inputs that expose them.

A fault is a model that computes GPT-2's logits on short ordinary texts and other logits on some
valid input: ids in [0, V), 1 ≤ T ≤ n_positions, any B, in any mode of PyTorch. A harmless variant
computes GPT-2's logits on all valid inputs, up to rounding.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from compat import load_pretrained
from compat.checkpoint import open_checkpoint
from tests.adaptation.catalogue import MODELS, Mutation, composed, load_class

# The checkpoint for which the entries are written. Its special ids are not in `ORDINARY`.
V, N_POSITIONS, BOS, EOS, PAD = 509, 160, 505, 507, 11
CHECKPOINT = {
    "vocab_size": V,
    "n_positions": N_POSITIONS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.1,
    "noise": 0.05,
}
ORDINARY = (20, 200)  # start and end (exclusive) of the ids of ordinary texts, which do not repeat

# Arguments: the checkpoint's folder, one for source files.
Build = Callable[[Path, Path], nn.Module]
Run = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Adversary:
    """A model that tests the proof.

    Args:
        name: a unique name.
        about: what the model does, in one sentence.
        kind: for example "length", or "harmless" for a harmless variant.
        use: the function that judges the model; "adapt" loads the weights, "check_parity" gets a
            model with its weights.
        build: builds the model from the checkpoint's folder and a folder for source files.
        trigger: ids (B, T) on which a fault computes other logits.
        run: how a fault is run on the trigger.
        ordinary: whether the model agrees with GPT-2 on short ordinary texts with B = 2.
        limit_suffices: whether a report that names the condition as a limit is accepted, because no
            designed input can be expected to meet the condition.
        dtype: the data type of the checkpoint and the model.
        style: the zoo file from which the model was derived, or empty.
    """

    name: str
    about: str
    kind: str
    use: Literal["check_parity", "adapt"]
    build: Build
    trigger: Tensor
    run: Run
    ordinary: bool = True
    limit_suffices: bool = False
    dtype: str = "float32"
    style: str = ""

    @property
    def harmless(self) -> bool:
        return self.kind == "harmless"


FAULTS: dict[str, Adversary] = {}
HARMLESS: dict[str, Adversary] = {}


def register(entry: Adversary) -> None:
    entries = HARMLESS if entry.harmless else FAULTS
    assert entry.name not in FAULTS and entry.name not in HARMLESS, entry.name
    entries[entry.name] = entry


# Inputs


def ordinary(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """Return ordinary ids (batch, length), without special ids and without repetitions in a row."""
    generator = torch.Generator().manual_seed(seed)
    low, high = ORDINARY
    rows = [torch.randperm(high - low, generator=generator)[:length] + low for _ in range(batch)]
    return torch.stack(rows)


def with_id(token: int, at: int = 5, batch: int = 2, length: int = 12) -> Tensor:
    """Return ordinary ids with `token` at one position of every row."""
    ids = ordinary(batch, length)
    ids[:, at] = token
    return ids


FULL = ordinary(2, N_POSITIONS)
SHORT = ordinary(2, 12)
ORDINARY_TEXTS = (ordinary(2, 8, seed=1), ordinary(2, 21, seed=2))


def valid_inputs() -> Iterator[Tensor]:
    """Yield valid inputs of many lengths and batch sizes that cover the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    for batch, length in [(1, 1), (1, 2), (2, 7), (3, 33), (5, 64), (2, 101), (2, N_POSITIONS)]:
        yield torch.randint(V, (batch, length), generator=generator)
    yield torch.zeros(2, 40, dtype=torch.long)
    yield torch.full((1, N_POSITIONS), EOS)
    yield torch.arange(V - V % 100).view(-1, 100)
    yield torch.arange(V - 100, V).view(2, 50)


# Functions that run a model


def logits_of(output: Any) -> Tensor:
    """Return the logits in the output of an entry's model."""
    if isinstance(output, dict):
        output = output["logits"]
    if isinstance(output, (tuple, list)):
        output = output[0]
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


@torch.no_grad()
def once(model: nn.Module, ids: Tensor) -> Tensor:
    return logits_of(model(ids)).detach()


def call(count: int) -> Run:
    """Return a function that returns the logits of the last of `count` calls on the same ids."""

    def run(model: nn.Module, ids: Tensor) -> Tensor:
        for _ in range(count - 1):
            once(model, ids)
        return once(model, ids)

    return run


def after(*inputs: Tensor) -> Run:
    """Return a function that calls the model on other ids first and returns the logits."""

    def run(model: nn.Module, ids: Tensor) -> Tensor:
        for other in inputs:
            once(model, other)
        return once(model, ids)

    return run


def with_gradients(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.enable_grad():
        return logits_of(model(ids)).detach()


def in_inference_mode(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = logits_of(model(ids))
    return logits.clone()


def in_a_thread(model: nn.Module, ids: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(once(model, ids)))
    thread.start()
    thread.join()
    return found[0]


def with_hooks(model: nn.Module, ids: Tensor) -> Tensor:
    """Run the model with a forward hook on every module, as a profiler registers it."""
    handles = [m.register_forward_hook(lambda *_: None) for m in model.modules()]
    logits = once(model, ids)
    for handle in handles:
        handle.remove()
    return logits


def frozen(model: nn.Module, ids: Tensor) -> Tensor:
    return with_gradients(model.requires_grad_(False), ids)


def as_int32(model: nn.Module, ids: Tensor) -> Tensor:
    return once(model, ids.int())


def transposed(model: nn.Module, ids: Tensor) -> Tensor:
    """Pass the ids as a non-contiguous view."""
    return once(model, ids.T.contiguous().T)


def sliced(model: nn.Module, ids: Tensor) -> Tensor:
    """Pass the ids as a slice of a longer text."""
    longer = torch.cat([ids.flip(1), ids], dim=1)
    return once(model, longer[:, ids.shape[1] :])


def compiled(model: nn.Module, ids: Tensor) -> Tensor:
    torch.compiler.reset()
    return once(torch.compile(model, backend="eager"), ids)  # type: ignore[arg-type]


def worst_of(count: int) -> Run:
    """Return a function that returns those of `count` results that differ most from the first."""

    def run(model: nn.Module, ids: Tensor) -> Tensor:
        torch.manual_seed(0)
        random.seed(0)
        calls = [once(model, ids) for _ in range(count)]
        return max(calls, key=lambda logits: (logits - calls[0]).abs().max().item())

    return run


# Registration of entries


class Wrapped(nn.Module):
    """A user's module around a dialect's model, with a function as its forward pass."""

    def __init__(self, inner: nn.Module, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0
        self._function = function

    def forward(self, input_ids: Tensor) -> Any:
        self.calls += 1
        return self._function(self, input_ids)


def from_positions(self: Any, ids: Tensor, positions: Tensor) -> Any:
    """Return the logits with these position embeddings."""
    x = self.inner.tok_emb(ids) + self.inner.pos_emb(positions)
    for block in self.inner.trf_blocks:
        x = block(x)
    return self.inner.out_head(self.inner.final_norm(x))


Forward = Callable[[Any, Tensor], Any]
Edit = Callable[[Any], "nn.Module | None"]


def wrapper(
    kind: str, trigger: Tensor = SHORT, run: Run = once, dialect: str = "linear", **more: Any
) -> Callable[[Forward], Forward]:
    """Register `function(self, ids) → logits` around a dialect's model, which is `self.inner`."""

    def decorate(function: Forward) -> Forward:
        _register(function, lambda m: Wrapped(m, function), kind, trigger, run, dialect, more)
        return function

    return decorate


def edit(
    kind: str, trigger: Tensor = SHORT, run: Run = once, dialect: str = "linear", **more: Any
) -> Callable[[Edit], Edit]:
    """Register `function(model)`, which edits a dialect's model or returns another module."""

    def decorate(function: Edit) -> Edit:
        _register(function, function, kind, trigger, run, dialect, more)
        return function

    return decorate


def _register(
    named: Any, change: Edit, kind: str, trigger: Tensor, run: Run, dialect: str, more: Any
) -> None:
    """Register an edit of a dialect's model under the name of a function, with its docstring."""

    def build(folder: Path, scratch: Path) -> nn.Module:
        model = load_pretrained(folder, dialect)
        with torch.no_grad():
            return (change(model) or model).eval()

    name, about = named.__name__, " ".join(named.__doc__.split())
    register(Adversary(name, about, kind, "check_parity", build, trigger, run, **more))


def source(
    name: str,
    kind: str,
    about: str,
    old: str,
    new: str,
    *others: tuple[str, str],
    style: str = "nano",
    trigger: Tensor = SHORT,
    run: Run = once,
    **more: Any,
) -> None:
    """Register a hand-written file of the zoo for `adapt`, with `old` replaced by `new`.

    `adapt` loads the weights. The tests of the entries load them with the zoo model's name map.
    """
    mutation = Mutation(style, name, old, new, at=None, more=others)

    def build(folder: Path, scratch: Path) -> nn.Module:
        torch.manual_seed(7)
        model = MODELS[style]
        found = load_class(composed(model, [mutation], scratch), model.cls)
        return model.build(found, open_checkpoint(folder).config).eval()

    register(Adversary(name, about, kind, "adapt", build, trigger, run, style=style, **more))


# Isolation, which is necessary because several entries change the process


@contextmanager
def restored() -> Iterator[None]:
    """Undo patches of torch, transformers and nn.Module's global hooks after the block."""
    owners = [
        torch,
        torch.nn.functional,
        torch.Tensor,
        nn.LayerNorm,
        nn.Linear,
        nn.Embedding,
        nn.Module,
        transformers.activations.NewGELUActivation,
        transformers.pytorch_utils.Conv1D,
        transformers.GPT2LMHeadModel,
        transformers.models.gpt2.modeling_gpt2,
        transformers.models.gpt2.modeling_gpt2.GPT2Attention,
    ]
    before = [(owner, dict(vars(owner))) for owner in owners]
    hooks = nn.modules.module._global_forward_hooks
    pre_hooks = nn.modules.module._global_forward_pre_hooks
    saved = dict(hooks), dict(pre_hooks)
    modes = torch.overrides._get_current_function_mode_stack()
    try:
        yield
    finally:
        for _ in range(len(torch.overrides._get_current_function_mode_stack()) - len(modes)):
            torch.overrides._pop_mode()
        for kept, now in zip(saved, (hooks, pre_hooks), strict=True):
            now.clear()
            now.update(kept)
        for owner, attributes in before:
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)
