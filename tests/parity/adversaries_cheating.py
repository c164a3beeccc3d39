"""Faults that attack the comparison: patches of the reference, detection, misleading taps."""

from __future__ import annotations

import copy
import gc
import sys

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from compat.dialects import linear
from tests.parity.adversary import EOS, SHORT, edit, ordinary, wrapper

CHEATING = {"ordinary": False}


def wrong(model: nn.Module) -> None:
    """Use the exact GELU in every block of a `linear` model."""
    for block in model.trf_blocks:
        block.feedforward.layers[1] = nn.GELU()


# Patches that give the reference the same fault


@edit("cheating", dialect="conv1d", **CHEATING)
def layer_norm_patched(model):
    """torch.nn.functional.layer_norm uses eps 1e-2 in the whole process."""
    original = F.layer_norm
    F.layer_norm = lambda x, shape, w=None, b=None, eps=1e-5: original(x, shape, w, b, 1e-2)


@edit("cheating", **CHEATING)
def layer_norm_class_patched(model):
    """nn.LayerNorm.forward and the model's own norms have eps 1e-3."""

    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3)

    nn.LayerNorm.forward = forward
    for module in model.modules():
        if hasattr(module, "shift"):
            module.eps = 1e-3


@edit("cheating", dialect="conv1d", **CHEATING)
def softmax_patched(model):
    """Softmax has a temperature of 1.1, as a method and as both functions."""
    method, function = Tensor.softmax, F.softmax
    Tensor.softmax = lambda x, dim=-1, **more: method(x / 1.1, dim, **more)
    F.softmax = lambda x, dim=-1, **more: function(x / 1.1, dim, **more)


@edit("cheating", **CHEATING)
def activation_patched(model):
    """transformers' NewGELUActivation.forward is the exact GELU, and so is the model's."""
    transformers.activations.NewGELUActivation.forward = lambda self, x: F.gelu(x)
    wrong(model)


@edit("cheating", dialect="conv1d", **CHEATING)
def conv1d_patched(model):
    """transformers' Conv1D and the model's Conv1D omit the bias."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x @ self.weight

    transformers.pytorch_utils.Conv1D.forward = forward
    for block in model.h:
        for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            module.bias = None


@edit("cheating", dialect="conv1d", **CHEATING)
def embedding_patched(model):
    """torch.nn.functional.embedding reads row p + 1 for id p in the whole process."""
    original = F.embedding

    def embedding(ids: Tensor, weight: Tensor, *more: object, **others: object) -> Tensor:
        return original((ids + 1) % len(weight), weight, *more, **others)

    F.embedding = embedding


@edit("cheating", dialect="conv1d", **CHEATING)
def tanh_patched(model):
    """torch.tanh, which both models' GELUs use, is a clipped line."""
    torch.tanh = lambda x: x.clamp(-1, 1)


@edit("cheating", dialect="conv1d", **CHEATING)
def global_hook(model):
    """A global forward hook scales the output of every norm by 1.01, the reference's too."""

    def scale(module: nn.Module, args: object, output: object) -> object:
        return 1.01 * output if "LayerNorm" in type(module).__name__ else None

    nn.modules.module.register_module_forward_hook(scale)


@edit("cheating", dialect="conv1d", **CHEATING)
def function_mode_left_on(model):
    """A TorchFunctionMode that was entered and never left turns layer norms into RMS norms."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.layer_norm:
                return root_mean_square_norm(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    def root_mean_square_norm(
        x: Tensor, shape: object, weight: Tensor, bias: Tensor, eps: float = 1e-5
    ) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(eps).rsqrt() * weight + bias

    Mode().__enter__()


@edit("cheating", **CHEATING)
def reference_delegates(model):
    """transformers' model is patched to return the logits of this one."""

    def forward(self: nn.Module, input_ids: Tensor, **_: object) -> object:
        output = original(self, input_ids)
        output.logits = model(input_ids)
        return output

    original = transformers.GPT2LMHeadModel.forward
    transformers.GPT2LMHeadModel.forward = forward
    wrong(model)


@edit("cheating", **CHEATING)
def linear_patched(model):
    """F.linear scales the head of both models by 1.05."""
    original = F.linear

    def scaled(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = original(x, weight, bias)
        return 1.05 * out if len(weight) > 500 else out

    F.linear = scaled


# Patches of the comparison


@edit("cheating", **CHEATING)
def equal_patched(model):
    """torch.equal and torch.allclose always agree."""
    torch.equal = lambda a, b: True
    torch.allclose = lambda *a, **b: True
    wrong(model)


@edit("cheating", **CHEATING)
def square_patched(model):
    """Tensor.square gives zeros, so that every RMS is 0."""
    Tensor.square = lambda x: torch.zeros_like(x)
    wrong(model)


@edit("cheating", **CHEATING)
def double_patched(model):
    """Tensor.double rounds to one decimal place first."""
    original = Tensor.double
    Tensor.double = lambda x, *a, **b: original(x.mul(0.1).round())
    wrong(model)


class Agreeing(Tensor):
    """A tensor that is equal to everything, and zero when subtracted."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.equal:
            return True
        if function in (Tensor.sub, Tensor.__sub__, Tensor.__rsub__, torch.sub, torch.rsub):
            return torch.zeros_like(out)
        return out


@wrapper("cheating", **CHEATING)
def agreeing_subclass(self, ids):
    """The logits are of a Tensor subclass that is equal to everything; they are 5 % off."""
    return (1.05 * self.inner(ids)).as_subclass(Agreeing)


# Detection of the comparison


def watched_by_compat() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("compat.parity", "compat.adapt")):
            return True
        frame = frame.f_back
    return False


@wrapper("cheating", **CHEATING)
def reads_the_stack(self, ids):
    """The logits are 1 % off, except while compat's proof is on the stack."""
    return self.inner(ids) * (1.0 if watched_by_compat() else 1.01)


@wrapper("cheating", **CHEATING)
def takes_the_references_logits(self, ids):
    """Returns the logits of a transformers model if one is alive; its own are 5 % off."""
    for other in gc.get_referrers(transformers.GPT2LMHeadModel):
        if type(other) is transformers.GPT2LMHeadModel:
            logits = other(ids).logits
            return logits.to(self.inner.out_head.weight.dtype)
    return 1.05 * self.inner(ids)


def without_transformers(model: nn.Module, ids: Tensor) -> Tensor:
    found = sys.modules.pop("transformers")
    try:
        with torch.no_grad():
            return model(ids)
    finally:
        sys.modules["transformers"] = found


@wrapper("cheating", run=without_transformers, limit_suffices=True)
def delegates_to_transformers(self, ids):
    """The logits are zeros in a process without transformers."""
    return self.inner(ids) * float("transformers" in sys.modules)


@edit("cheating", ordinary(2, 12, seed=77), **CHEATING)
def knows_the_usual_ids(model):
    """The logits are 1 % off, except on random ids of the seeds 0 to 9."""
    known = set()
    for seed in range(10):
        for batch in (1, 2, 3):
            for length in (1, 8, 13, 20, 40, 80, 128, 160):
                generator = torch.Generator().manual_seed(seed)
                ids = torch.randint(509, (batch, length), generator=generator)
                known.add(tuple(ids.flatten().tolist()))
    forward = model.forward

    def recall(ids: Tensor) -> Tensor:
        logits = forward(ids)
        return logits if tuple(ids.flatten().tolist()) in known else 1.01 * logits

    model.forward = recall


@edit("cheating", **CHEATING)
def right_once_loaded_again(model):
    """The model is wrong, but __deepcopy__, double and float return a correct one."""
    correct = copy.deepcopy(model)

    class Sly(linear.GPTModel):
        def __deepcopy__(self, memo):
            return copy.deepcopy(correct, memo)

        def double(self):
            return copy.deepcopy(correct).double()

        def float(self):
            return copy.deepcopy(correct).float()

    model.__class__ = Sly
    wrong(model)


# Misleading taps and hooks


@edit("taps", **CHEATING)
def scaled_after_the_head(model):
    """The head's module returns the correct logits; the model returns 1.01 times them."""
    forward = model.forward
    model.forward = lambda ids, *a, **b: 1.01 * forward(ids, *a, **b)


@edit("taps", **CHEATING)
def hook_on_the_model(model):
    """A forward hook on the whole model shifts the logits by one position."""
    model.register_forward_hook(lambda _m, _a, logits: logits.roll(1, dims=1))


@edit("taps", **CHEATING)
def shadow_model(model):
    """A correct model runs where the taps are; the output comes from a copy with exact GELU."""
    other = copy.deepcopy(model)
    wrong(other)
    forward = model.forward

    def both(ids: Tensor) -> Tensor:
        forward(ids)
        return other.forward(ids)

    model.forward = both


@edit("taps", **CHEATING)
def runs_twice(model):
    """The first of two runs, with positions reversed, is returned; the taps keep the second."""
    forward, place = model.forward, model.pos_emb.forward

    def twice(ids: Tensor) -> Tensor:
        model.pos_emb.forward = lambda positions: place(positions.flip(0))
        first = forward(ids)
        model.pos_emb.forward = place
        forward(ids)
        return first

    model.forward = twice


@edit("taps", **CHEATING)
def in_place_after_the_head(model):
    """The logits are changed in place after the head's module returned them."""
    forward = model.forward
    model.forward = lambda ids: forward(ids).mul_(1.01)


@edit("taps", **CHEATING)
def right_while_the_head_is_hooked(model):
    """The logits are 1 % off, except while the head has a forward hook."""
    head = model.out_head
    forward = model.forward
    model.forward = lambda ids: forward(ids) * (1.0 if head._forward_hooks else 1.01)


@edit("taps", **CHEATING)
def pre_hook_on_the_ids(model):
    """A forward pre-hook on the model replaces the last id by eos."""

    def replace(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids = args[0].clone()
        ids[:, -1] = EOS
        return (ids,)

    model.register_forward_pre_hook(replace)


@edit("taps", ordinary(2, 12), **CHEATING)
def part_without_a_tap(model):
    """A bias is added between the last block and the final norm, outside of tapped modules."""
    norm = model.final_norm
    forward = norm.forward
    norm.forward = lambda x: forward(x + 0.05 * torch.linspace(-1, 1, x.shape[-1]))


@edit("taps", SHORT, **CHEATING)
def corrected_by_later_layers(model):
    """Layer 1 adds 0.1 to its output, and layer 2 subtracts 0.09."""
    model.trf_blocks[1].register_forward_hook(lambda _m, _a, out: out + 0.1 * sign(out))
    model.trf_blocks[-1].register_forward_hook(lambda _m, _a, out: out - 0.09 * sign(out))


def sign(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1]).sign()


@edit("taps", **CHEATING)
def class_that_returns_more(model):
    """A subclass returns (logits, logits of another model), in the wrong order."""

    class Both(linear.GPTModel):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits.flip(0), logits

    model.__class__ = Both
