"""Faults that detect the comparison or abort it."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.parity import adversary
from tests.parity.adversary import SHORT, Forward, V, edit, once, ordinary, wrapper

CHEATING = {"ordinary": False}


@wrapper("cheating", **CHEATING)
def right_under_a_tracer(self, ids):
    """The logits are 1 % off, except while sys.settrace is active."""
    return self.inner(ids) * (1.0 if sys.gettrace() else 1.01)


@wrapper("cheating", **CHEATING)
def right_with_compat_on_the_stack(self, ids):
    """The logits are 1 % off, unless a file of compat is on the stack."""
    frame, below = sys._getframe(), []
    while frame is not None:
        below.append(frame.f_code.co_filename)
        frame = frame.f_back
    return self.inner(ids) * (1.0 if any("/compat/" in name for name in below) else 1.01)


@wrapper("cheating", **CHEATING)
def borrows_the_references_class(self, ids):
    """The forward pass of transformers' class is called on an instance in memory."""
    if not self.__dict__.get("collected"):  # models of earlier tests are not the reference
        gc.collect()
        self.collected = True
    for other in gc.get_referrers(transformers.GPT2LMHeadModel):
        if type(other) is transformers.GPT2LMHeadModel:
            return type(other).forward(other, ids).logits.to(self.inner.out_head.weight.dtype)
    return 1.05 * self.inner(ids)


def again_in_a_thread(model: nn.Module, ids: Tensor) -> Tensor:
    once(model, ids)
    return adversary.in_a_thread(model, ids)


@wrapper("cheating", run=again_in_a_thread)
def off_in_a_thread_without_a_condition(self, ids):
    """The factor comes from a thread-local variable that only the building thread has set."""
    local = self.__dict__.setdefault("local", threading.local())
    if not self.__dict__.get("made"):
        local.factor, self.made = 1.0, True
    return self.inner(ids) * local.__dict__.get("factor", 1.01)


@wrapper("cheating", run=adversary.with_hooks)
def hooked_blocks_skip_a_norm(self, ids):
    """Where the last block has a forward hook, logits are 1 % larger."""
    return self.inner(ids) * (1 + 0.01 * len(self.inner.trf_blocks[-1]._forward_hooks))


# Runs that are aborted


def logits_or_nan(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits, or NaN if the run raises or returns no numbers."""
    try:
        return 1.0 * torch.real(once(model, ids).to_dense().cpu())
    except BaseException:
        return torch.full((*ids.shape, V), torch.nan)


def on_long_texts(respond: Forward) -> Forward:
    """Register a model that returns `respond(self, ids)` for texts above 128."""

    @functools.wraps(respond)
    def forward(self: Any, ids: Tensor) -> Any:
        return respond(self, ids) if ids.shape[1] > 128 else self.inner(ids)

    wrapper("length", ordinary(1, 140), run=logits_or_nan)(forward)
    return respond


@on_long_texts
def exits_on_long_texts(self, ids):
    """Texts above 128 end the process by sys.exit."""
    sys.exit("too long")


class Stop(BaseException):
    pass


@on_long_texts
def raises_a_base_exception(self, ids):
    """Texts above 128 raise a BaseException."""
    raise Stop("too long")


@on_long_texts
def recursion_without_end(self, ids):
    """Texts above 128 cause endless recursion."""
    return self(ids)


@on_long_texts
def raises_generator_exit(self, ids):
    """Texts above 128 raise GeneratorExit."""
    raise GeneratorExit


@wrapper("batch", ordinary(3, 12))
def nan_in_the_third_row(self, ids):
    """The third row is NaN."""
    logits = self.inner(ids)
    logits[2:] = torch.nan
    return logits


@wrapper("batch", ordinary(3, 12))
def too_few_rows(self, ids):
    """Only the logits of the first two rows are returned."""
    return self.inner(ids)[:2]


@on_long_texts
def none_for_long_texts(self, ids):
    """The output is None for texts above 128."""
    return None


@on_long_texts
def sparse_for_long_texts(self, ids):
    """The output is a sparse tensor of zeros for texts above 128."""
    return (0 * self.inner(ids)).to_sparse()


@on_long_texts
def on_meta_for_long_texts(self, ids):
    """The output is on the meta device for texts above 128."""
    return self.inner(ids).to("meta")


@on_long_texts
def complex_for_long_texts(self, ids):
    """The logits are complex for texts above 128."""
    return self.inner(ids) * 1j


@on_long_texts
def out_of_memory_for_long_texts(self, ids):
    """Texts above 128 cause a huge allocation."""
    return torch.empty(10**15)


class RaisingOutput:
    @property
    def logits(self) -> Tensor:
        raise ZeroDivisionError("no logits")


@on_long_texts
def property_that_raises(self, ids):
    """The logits of the output are a property that raises."""
    return RaisingOutput()


class ErrorWithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@on_long_texts
def error_without_a_text(self, ids):
    """Texts above 128 raise an exception whose `__str__` raises."""
    raise ErrorWithoutText


@edit("ids", **CHEATING)
def attribute_that_raises(model):
    """The head is wrong, and the repr and comparison of an attribute raise."""

    class Hostile(float):
        def __repr__(self):
            raise RuntimeError("no repr")

        def __eq__(self, other):
            raise RuntimeError("no comparison")

        __hash__ = float.__hash__

    model.hostile = Hostile(1.0)
    model.out_head = nn.Linear(32, 509, bias=False)


@wrapper("ids", SHORT, **CHEATING)
def condition_that_raises(self, ids):
    """The logits are 1 % off, and the truth value of a compared object exits."""

    class Exits:
        def __bool__(self):
            raise SystemExit(3)

    odd = Exits()
    names = [name for name in ("a", "b") if name == "a"]
    return self.inner(ids) * 1.01 if names and odd is not None else self.inner(ids)
