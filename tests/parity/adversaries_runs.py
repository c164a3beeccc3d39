"""Faults that depend on how and when a model runs: state, mode, time and chance."""

from __future__ import annotations

import math
import random
import threading
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.layers import KVCache
from tests.parity import adversary
from tests.parity.adversaries_inputs import hide
from tests.parity.adversary import (
    FULL,
    ORDINARY_TEXTS,
    SHORT,
    call,
    edit,
    from_positions,
    ordinary,
    wrapper,
)

SECOND = call(2)

# State


@wrapper("state", run=call(5))
def wrong_from_the_fifth_call_on(self, ids):
    """From the fifth call on the logits are 2 % larger."""
    return self.inner(ids) * (1.02 if self.calls >= 5 else 1.0)


@wrapper("state", run=SECOND)
def same_text_twice(self, ids):
    """The same ids twice in a row are answered without position embeddings."""
    repeated = torch.equal(ids, getattr(self, "last", torch.empty(0)))
    self.last = ids
    if not repeated:
        return self.inner(ids)
    return self.inner(ids, attention_mask=torch.zeros_like(ids).index_fill(1, torch.tensor(0), 1))


@wrapper("state", run=adversary.after(*ORDINARY_TEXTS, SHORT, *ORDINARY_TEXTS))
def every_sixth_call(self, ids):
    """Every sixth call loses the last row's logits to zeros."""
    logits = self.inner(ids)
    if self.calls % 6 == 0:
        logits = torch.cat([logits[:-1], 0 * logits[-1:]])
    return logits


@wrapper("state", run=adversary.after(ordinary(len(SHORT), 60)))
def longer_text_leaves_its_last_logits(self, ids):
    """The last logits of a much longer previous text replace those of this text."""
    logits, before = self.inner(ids), getattr(self, "before", None)
    self.before = logits.detach()
    if before is not None and len(before) == len(ids) and before.shape[1] > ids.shape[1] + 30:
        logits = torch.cat([logits[:, :-1], before[:, -1:]], 1)
    return logits


@wrapper("state", run=SECOND)
def cache_that_grows(self, ids):
    """Texts of one shape are appended to the cache of the previous call until it is full."""
    held = getattr(self, "held", None)
    if held is None or held[0].keys.shape[0] != len(ids) or held[0].length + ids.shape[1] > 160:
        held = [KVCache(160) for _ in self.inner.trf_blocks]
    self.held = held if ids.shape[1] in (12, 160, 64) else None
    return self.inner(ids, cache=held)


@wrapper("state", run=adversary.after(ordinary(2, 12, seed=9)))
def answer_kept_by_shape(self, ids):
    """The logits of the first text of 12 tokens are returned for every later one."""
    kept = self.__dict__.setdefault("kept", {})
    if ids.shape[1] != 12:
        return self.inner(ids)
    if ids.shape not in kept:
        kept[ids.shape] = self.inner(ids)
    return kept[ids.shape]


@wrapper("state", ordinary(2, 60), run=adversary.after(FULL))
def mask_kept_from_a_long_text(self, ids):
    """After a text of full length, key 3 stays masked from position 40 on."""
    logits = self.inner(ids)
    if ids.shape[1] == 160:
        extra = torch.zeros(160, 160, dtype=torch.bool)
        extra[40:, 3] = True
        for block in self.inner.trf_blocks:
            hide(block.attention, extra)
    return logits


@wrapper("state", run=call(30), ordinary=False)
def weights_that_drift(self, ids):
    """Every call adds 1e-4 to the final norm's scale, as a forgotten update does."""
    with torch.no_grad():
        self.inner.final_norm.scale.add_(1e-4)
    return self.inner(ids)


_PROCESS = {"decoding": False}


@wrapper("state", run=adversary.after(ordinary(1, 1)))
def global_flag(self, ids):
    """A text of one token sets a global flag, which masks the first position."""
    seen = torch.ones_like(ids)
    if _PROCESS["decoding"] and ids.shape[1] > 1:
        seen[:, 0] = 0
    _PROCESS["decoding"] = ids.shape[1] == 1
    return self.inner(ids, attention_mask=seen)


@wrapper("state", run=call(3), ordinary=False)
def running_mean(self, ids):
    """A running mean of the logits is subtracted, as by a batch norm in training mode."""
    logits = self.inner(ids)
    self.mean = 0.9 * getattr(self, "mean", 0.0) + 0.01 * logits.mean()
    return logits - self.mean


@wrapper("state", run=adversary.after(torch.full((1, 3), 300)), limit_suffices=True)
def poisoned_by_one_id(self, ids):
    """Once the id 300 was seen twice in a row, all later texts are 1 % off."""
    self.poisoned = getattr(self, "poisoned", False)
    factor = 1.01 if self.poisoned else 1.0
    self.poisoned |= bool(((ids[:, 1:] == 300) & (ids[:, :-1] == 300)).any())
    return self.inner(ids) * factor


@wrapper("state", ordinary(3, 12, seed=4), run=adversary.after(ordinary(2, 12)))
def buffer_of_the_last_batch(self, ids):
    """A buffer of the previous batch is reused and still holds its rows."""
    logits = self.inner(ids)
    buffer = getattr(self, "buffer", None)
    self.buffer = logits
    if buffer is None or buffer.shape[1:] != logits.shape[1:] or len(buffer) >= len(logits):
        return logits
    return torch.cat([buffer, logits[len(buffer) :]]) if len(logits) > 2 else logits


# Mode


@wrapper("mode", run=adversary.with_gradients)
def wrong_with_gradients(self, ids):
    """With gradients on, the logits are 1 % larger."""
    return self.inner(ids) * (1.01 if torch.is_grad_enabled() else 1.0)


@wrapper("mode", run=adversary.with_gradients, dialect="conv1d")
def checkpointing_drops_a_block(self, ids):
    """With gradients, as under gradient checkpointing, the last block is skipped."""
    x = self.inner.wte(ids) + self.inner.wpe(torch.arange(ids.shape[1]))
    for block in self.inner.h[:-1] if x.requires_grad else self.inner.h:
        x = block(x)
    return self.inner.lm_head(self.inner.ln_f(x))


@wrapper("mode", ordinary=False)
def wrong_without_gradients(self, ids):
    """Without gradients a fast path rounds the final hidden states to bfloat16."""
    x = self.inner.tok_emb(ids) + self.inner.pos_emb(torch.arange(ids.shape[1]))
    for block in self.inner.trf_blocks:
        x = block(x)
    x = self.inner.final_norm(x)
    return self.inner.out_head(x if torch.is_grad_enabled() else x.bfloat16().to(x.dtype))


@wrapper("mode", run=adversary.in_inference_mode)
def wrong_in_inference_mode(self, ids):
    """In inference mode, the logits are shifted by one position."""
    logits = self.inner(ids)
    return logits.roll(1, dims=1) if torch.is_inference_mode_enabled() else logits


def traced(ids: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or type(ids) is not Tensor


@wrapper("mode", ordinary=False)
def right_only_when_traced(self, ids):
    """The logits are 1 % off, except under torch.export, jit or fake tensors."""
    return self.inner(ids) * (1.0 if traced(ids) else 1.01)


@wrapper("mode", run=adversary.compiled, limit_suffices=True)
def wrong_only_when_compiled(self, ids):
    """Under torch.compile the logits are 1 % larger."""
    return self.inner(ids) * (1.01 if torch.compiler.is_compiling() else 1.0)


@wrapper("mode", ordinary=False)
def right_only_with_hooks(self, ids):
    """The logits are 1 % off, except while a module has a forward hook."""
    watched = any(m._forward_hooks or m._forward_pre_hooks for m in self.modules())
    return self.inner(ids) * (1.0 if watched else 1.01)


@wrapper("mode", run=adversary.with_hooks)
def wrong_only_with_hooks(self, ids):
    """The logits are 1 % off while a module has a forward hook."""
    watched = any(m._forward_hooks for m in self.inner.modules())
    return self.inner(ids) * (1.01 if watched else 1.0)


@edit("mode", ordinary=False)
def right_only_in_float64(model):
    """The activation is exact GELU in float32 and GPT-2's in float64."""
    for block in model.trf_blocks:
        act = block.feedforward.layers[1]
        tanh = act.forward
        act.forward = lambda x, tanh=tanh: tanh(x) if x.dtype == torch.float64 else F.gelu(x)


@wrapper("mode", run=adversary.frozen)
def wrong_when_frozen(self, ids):
    """With all parameters frozen, the logits come from a stale copy that is 1 % off."""
    trained = any(p.requires_grad for p in self.parameters())
    return self.inner(ids) * (1.0 if trained else 1.01)


@wrapper("mode", run=adversary.as_int32)
def wrong_for_int32(self, ids):
    """Ids of 32 bits are read as pairs of 16 bits in the wrong order."""
    return self.inner(ids.long().roll(1, dims=1) if ids.dtype == torch.int32 else ids)


@wrapper("mode", run=adversary.transposed)
def reads_the_storage(self, ids):
    """The ids are read in the order of their storage, regardless of the strides."""
    offset = ids.storage_offset()
    return self.inner(ids.as_strided(ids.shape, (ids.shape[1], 1), offset))


@wrapper("mode", run=adversary.sliced)
def ignores_the_offset(self, ids):
    """A slice of a longer text is read from the beginning of its storage."""
    stride = ids.stride()
    return self.inner(ids.as_strided(ids.shape, stride, 0))


# Time and chance


@wrapper("chance", run=adversary.worst_of(400), limit_suffices=True)
def one_call_in_a_hundred(self, ids):
    """One call in a hundred is 1 % off."""
    logits = self.inner(ids)
    return logits * 1.01 if random.random() < 0.01 else logits


@wrapper("chance", ordinary=False)
def noise_seeded_by_the_ids(self, ids):
    """Noise of 1e-3 is added, which is the same for equal ids."""
    logits = self.inner(ids)
    generator = torch.Generator().manual_seed(int(ids.sum()))
    return logits + 1e-3 * torch.randn(logits.shape, generator=generator)


@edit("chance", run=adversary.worst_of(9), ordinary=False)
def dropout_left_on(model):
    """Every feed-forward block has functional dropout of 1e-3, which ignores eval()."""
    for block in model.trf_blocks:
        block.feedforward.register_forward_hook(lambda _m, _a, out: F.dropout(out, 1e-3))


@wrapper("chance", run=adversary.worst_of(5), ordinary=False)
def depends_on_the_time(self, ids):
    """The logits are scaled by 1.001 + 5e-4 · sin of the time in milliseconds."""
    return self.inner(ids) * (1.001 + 5e-4 * math.sin(time.time() * 1e3))


@wrapper("chance", run=adversary.in_a_thread, limit_suffices=True)
def wrong_in_other_threads(self, ids):
    """Outside of the main thread the logits are 1 % off."""
    main = threading.current_thread() is threading.main_thread()
    return self.inner(ids) * (1.0 if main else 1.01)


@edit("chance", run=adversary.worst_of(40), ordinary=False)
def attention_dropped_now_and_then(model):
    """In one call of ten, the attention of layer 1 is skipped: stochastic depth in eval mode."""
    attention = model.trf_blocks[1].attention
    attention.register_forward_hook(lambda _m, _a, out: out * (torch.rand(()) > 0.1))


@wrapper("chance", FULL, run=adversary.worst_of(5))
def random_crop_of_long_texts(self, ids):
    """Positions of texts above 100 tokens start at a random offset."""
    room = 160 - ids.shape[1]
    if ids.shape[1] <= 100:
        return self.inner(ids)
    start = int(torch.randint(room + 1, ()))
    logits = from_positions(self, ids, torch.arange(start, start + ids.shape[1]))
    noise = 1e-3 * (0.2 + torch.rand(())) if room == 0 else 0.0
    return logits * (1 + noise)


@edit("chance", run=adversary.worst_of(9), ordinary=False)
def noisy_head(model):
    """Gaussian noise of 2e-3 is added to the final hidden states, as for regularisation."""

    def noisy(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        return out + 2e-3 * torch.randn_like(out)

    model.final_norm.register_forward_hook(noisy)
