"""Variants with state that compute GPT-2's logits after any calls, and variants in unusual code."""

from __future__ import annotations

import functools
import threading
import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.layers import KVCache
from tests.parity.adversaries_codes import patch_each_token, patch_embedded
from tests.parity.adversary import N_POSITIONS, V, edit, from_positions, wrapper

KIND = "harmless"


@wrapper(KIND)
def equal_continues_a_cache(self, ids):
    """A row whose ids continue those of the last text is decoded from the cache."""
    T, last = ids.shape[1], getattr(self, "last", None)
    if (
        last is not None
        and last[0].shape == (len(ids), T - 1)
        and torch.equal(last[0], ids[:, :-1])
    ):
        logits = torch.cat([last[2], self.inner(ids[:, -1:], cache=last[1])], dim=1)
        self.last = ids.clone(), last[1], logits
        return logits.clone()
    cache = [KVCache(N_POSITIONS) for _ in self.inner.trf_blocks]
    logits = self.inner(ids, cache=cache)
    self.last = ids.clone(), cache, logits
    return logits.clone()


@wrapper(KIND)
def equal_cache_object_reused(self, ids):
    """The KV caches are stored for one shape and reset for every text."""
    held = self.__dict__.setdefault("held", {})
    held.clear()
    held[len(ids)] = [KVCache(N_POSITIONS) for _ in self.inner.trf_blocks]
    return self.inner(ids, cache=held[len(ids)])


@wrapper(KIND)
def equal_memoised_by_content(self, ids):
    """Logits are memoised by all ids and the shape."""
    answers = self.__dict__.setdefault("answers", {})
    key = ids.shape, tuple(ids.flatten().tolist())
    if key not in answers:
        answers[key] = self.inner(ids).detach()
    return answers[key].clone()


@wrapper(KIND)
def equal_memoised_by_version(self, ids):
    """Logits are memoised by the tensor, its version and the grad mode."""
    last = getattr(self, "seen", None)
    if last is None or last[0]() is not ids or ids.is_inference() or last[1] != ids._version:
        logits = self.inner(ids)
        if ids.is_inference():
            return logits
        self.seen = last = weakref.ref(ids), ids._version, logits
    return last[2].clone()


@wrapper(KIND)
def equal_counter(self, ids):
    """Calls and tokens are counted on the module and on the class."""
    self.tokens = getattr(self, "tokens", 0) + ids.numel()
    type(self).total = getattr(type(self), "total", 0) + 1
    return self.inner(ids)


@functools.lru_cache
def _positions(T: int) -> Tensor:
    return torch.arange(T)


@wrapper(KIND)
def equal_positions_cached(self, ids):
    """Position ids of every length are cached by an lru_cache."""
    return from_positions(self, ids, _positions(ids.shape[1]))


@wrapper(KIND)
def equal_mask_that_grows(self, ids):
    """The mask is a buffer, which is rebuilt for a longer text."""
    T = ids.shape[1]
    mask = getattr(self, "mask", torch.ones(0, 0))
    if len(mask) < T:
        self.mask = mask = torch.ones(T, T)
    return self.inner(ids, attention_mask=mask[-1, :T].expand(ids.shape).long())


@wrapper(KIND)
def equal_workspace(self, ids):
    """Logits are written into a workspace that grows, and copied out of it."""
    logits = self.inner(ids).detach()
    space = getattr(self, "space", torch.empty(0))
    if space.numel() < logits.numel():
        self.space = space = torch.empty(logits.numel())
    out = space[: logits.numel()].view(logits.shape)
    out.copy_(logits)
    return out.clone()


@wrapper(KIND)
def equal_last_logits_kept(self, ids):
    """The last logits are kept for inspection."""
    self.last_logits = self.inner(ids)
    return self.last_logits


@wrapper(KIND)
def equal_behind_a_lock(self, ids):
    """The forward pass runs under a lock."""
    lock = self.__dict__.setdefault("lock", threading.Lock())
    with lock:
        return self.inner(ids)


@wrapper(KIND)
def equal_thread_local_scratch(self, ids):
    """Every thread has its own scratch space."""
    local = self.__dict__.setdefault("local", threading.local())
    local.ids = ids.clone()
    return self.inner(local.ids)


@wrapper(KIND)
def equal_statistics(self, ids):
    """A buffer holds a histogram of ids, which nothing reads."""
    if not hasattr(self, "histogram"):
        self.register_buffer("histogram", torch.zeros(V), persistent=False)
    self.histogram += torch.bincount(ids.flatten(), minlength=V)
    return self.inner(ids)


@edit(KIND)
def equal_special_ids_listed(model):
    """A set and a dictionary of special ids lead to the same embedding."""
    model.specials = {5: 5, 77: 77, 300: 300}
    model.stop_ids = frozenset({317, 318})
    table = model.specials
    patch_each_token(model, lambda t: table.get(t, t))


@edit(KIND)
def equal_table_of_ones(model):
    """Embeddings are multiplied by a table of factors that are all 1."""
    factors = torch.ones(V)
    patch_embedded(model, lambda ids, x: x * factors[ids][..., None])


@wrapper(KIND)
def equal_numpy_inside(self, ids):
    """The ids are converted to NumPy and back."""
    return self.inner(torch.from_numpy(ids.numpy().copy()))


@edit(KIND)
def equal_linear_head_by_rows(model):
    """The head runs position by position."""
    head = model.out_head
    head.forward = lambda x: torch.stack(
        [F.linear(x[:, t], head.weight) for t in range(x.shape[1])], dim=1
    )


@wrapper(KIND)
def equal_in_chunks_of_rows(self, ids):
    """Batches run in parts of two rows."""
    return torch.cat([self.inner(part) for part in ids.split(2)])


@wrapper(KIND)
def equal_trims_equal_rows(self, ids):
    """Equal rows are computed once and then copied."""
    rows, where = torch.unique(ids, dim=0, return_inverse=True)
    return self.inner(rows)[where]


@wrapper(KIND)
def equal_asserts_int64(self, ids):
    """Ids that are not int64 raise an error."""
    if ids.dtype != torch.long:
        raise TypeError(f"ids must be int64, not {ids.dtype}")
    return self.inner(ids)


@wrapper(KIND)
def equal_asserts_contiguous(self, ids):
    """Ids that are not contiguous raise an error."""
    assert ids.is_contiguous()
    return self.inner(ids)


@wrapper(KIND)
def equal_deletes_hidden_states(self, ids):
    """Hidden states are stored during the forward pass and deleted after it."""
    self.hidden = self.inner.tok_emb(ids)
    logits = self.inner(ids)
    del self.hidden
    return logits


@wrapper(KIND)
def equal_mask_per_inference(self, ids):
    """In inference mode, the module keeps an inference tensor."""
    if torch.is_inference_mode_enabled():
        self.kept = torch.arange(ids.shape[1])
    return self.inner(ids)
