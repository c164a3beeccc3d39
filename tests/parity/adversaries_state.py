"""Faults after earlier calls: caches, memoised logits, and buffers with an incomplete key."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.layers import KVCache
from tests.parity import adversary
from tests.parity.adversaries_inputs import hide, mask_keys
from tests.parity.adversary import (
    FULL,
    N_POSITIONS,
    SHORT,
    call,
    edit,
    from_positions,
    once,
    ordinary,
    wrapper,
)

OTHER = ordinary(2, 12, seed=9)


def swapped(ids: Tensor, first: int = 5, second: int = 6) -> Tensor:
    """Return the same ids with two ids of each row exchanged."""
    other = ids.clone()
    other[:, [first, second]] = ids[:, [second, first]]
    return other


def changed_in_place(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of a tensor that contained other ids in the previous call."""
    tensor = OTHER.clone()
    once(model, tensor)
    tensor.copy_(ids)
    return once(model, tensor)


def after_inference_mode(model: nn.Module, ids: Tensor) -> Tensor:
    adversary.in_inference_mode(model, ids)
    return once(model, ids)


def after_int32(model: nn.Module, ids: Tensor) -> Tensor:
    adversary.as_int32(model, ids)
    return once(model, ids)


def memoised(self: nn.Module, key: object, ids: Tensor) -> Tensor:
    """Return the logits, memoised by a key."""
    answers = self.__dict__.setdefault("answers", {})
    if key not in answers:
        answers[key] = self.inner(ids)
    return answers[key].clone()


# Buffers that the first call sizes


@wrapper("state", FULL, run=adversary.after(ordinary(2, 30)))
def positions_sized_by_the_first_text(self, ids):
    """The position ids are built for the first text, and longer texts repeat the last of them."""
    T = ids.shape[1]
    if not hasattr(self, "positions"):
        self.positions = torch.arange(max(T, 24))
    reach = len(self.positions) - 1
    return from_positions(self, ids, self.positions[torch.arange(T).clamp(max=reach)])


@edit("state", FULL, run=adversary.after(ordinary(2, 30)))
def mask_sized_by_the_first_text(model):
    """The mask is built for the first text, and longer texts are not causal beyond it."""
    for block in model.trf_blocks:

        def hidden(T, own=block.attention):
            if "kept_mask" not in own.__dict__:
                size = max(T, 24)
                own.kept_mask = torch.ones(size, size, dtype=torch.bool).triu(1)
            mask = own.kept_mask[:T, :T]
            return F.pad(mask, (0, T - len(mask), 0, T - len(mask)))

        mask_keys(block.attention, hidden)


@wrapper("state", ordinary(2, 30), run=adversary.after(FULL))
def positions_from_the_end_of_the_longest(self, ids):
    """Positions are cut from the end of the longest text so far, if that had more than 100."""
    T = ids.shape[1]
    longest = max(T, getattr(self, "longest", 0))
    self.longest = longest if longest > 100 else 0
    start = longest - T if longest > 100 else 0
    return from_positions(self, ids, torch.arange(start, start + T))


@wrapper("state", ordinary(5, 12), run=adversary.after(ordinary(3, 12)))
def batch_sized_by_the_first_call(self, ids):
    """A workspace has the rows of the first batch, and further rows repeat its last row."""
    B = len(ids)
    if not hasattr(self, "rows"):
        self.rows = max(B, 2)
    logits = self.inner(ids)
    return logits[torch.arange(B).clamp(max=self.rows - 1)]


# Logits that are memoised by an incomplete key


@wrapper("state", run=adversary.after(swapped(SHORT)))
def kept_by_shape_and_last_ids(self, ids):
    """Logits are memoised by the shape and the last id of every row."""
    return memoised(self, (ids.shape, tuple(ids[:, -1].tolist())), ids)


@wrapper("state", run=adversary.after(swapped(SHORT)))
def kept_by_sum(self, ids):
    """Logits are memoised by the sum of each row."""
    return memoised(self, (ids.shape, tuple(ids.sum(1).tolist())), ids)


@wrapper("state", run=adversary.after(swapped(SHORT)))
def kept_by_set(self, ids):
    """Logits are memoised by the set of ids of each row."""
    return memoised(self, (ids.shape, *map(frozenset, ids.tolist())), ids)


@wrapper("state", run=adversary.after(swapped(SHORT, 9, 10)))
def kept_by_prefix(self, ids):
    """Logits are memoised by the shape and the first eight ids."""
    return memoised(self, (ids.shape, tuple(ids[:, :8].flatten().tolist())), ids)


@wrapper("state", torch.stack([SHORT[0], OTHER[1]]), run=adversary.after(SHORT))
def kept_by_the_first_row(self, ids):
    """Logits are memoised by the first row and the shape."""
    return memoised(self, (ids.shape, tuple(ids[0].tolist())), ids)


@wrapper("state", ordinary(1, 12), run=adversary.after(ordinary(1, 12, seed=8)))
def kept_by_length_of_a_single_row(self, ids):
    """The logits of a single row are memoised by its length."""
    return memoised(self, ids.shape, ids) if len(ids) == 1 else self.inner(ids)


@wrapper("state", run=changed_in_place)
def kept_by_identity(self, ids):
    """The logits are memoised by the tensor object, regardless of its values."""
    last = getattr(self, "last", None)
    if last is None or last[0] is not ids:
        self.last = last = ids, self.inner(ids)
    return last[1]


@wrapper("state", run=changed_in_place)
def kept_by_address(self, ids):
    """The logits are memoised by the address and the shape of the ids, which are kept alive."""
    key = ids.data_ptr(), tuple(ids.shape)
    self.__dict__.setdefault("alive", []).append(ids)
    return memoised(self, key, ids)


@wrapper("state", run=changed_in_place)
def embedding_kept_by_identity(self, ids):
    """The embedded ids are kept for the same tensor object."""
    last = getattr(self, "last", None)
    if last is None or last[0]() is not ids:
        import weakref

        self.last = last = weakref.ref(ids), self.inner.tok_emb(ids)
    x = last[1] + self.inner.pos_emb(torch.arange(ids.shape[1]))
    for block in self.inner.trf_blocks:
        x = block(x)
    return self.inner.out_head(self.inner.final_norm(x))


@functools.lru_cache(maxsize=64)
def _factor(first: int, length: int, box: object) -> float:
    box.count += 1
    return 1.0 if box.count < 25 else 1.01


@wrapper("state", run=call(40), limit_suffices=True)
def lru_cache_with_a_side_effect(self, ids):
    """A cached function depends on how often it was called with other arguments before."""
    self.count = getattr(self, "count", 0)
    for step in range(3):
        factor = _factor(self.count, step, self)
    return self.inner(ids) * factor


@wrapper(
    "state",
    run=adversary.after(*(ordinary(2, 12, seed=s) for s in range(200, 500))),
    limit_suffices=True,
)
def kept_by_a_short_hash(self, ids):
    """Logits are memoised by the hash of the ids modulo 97."""
    return memoised(self, (ids.shape, hash(tuple(ids.flatten().tolist())) % 97), ids)


@wrapper("state", run=adversary.after(OTHER))
def answer_kept_on_the_class(self, ids):
    """The logits of the first text of 12 ids are kept on the class and returned for all."""
    if ids.shape[1] != 12:
        return self.inner(ids)
    cls = type(self)
    if not getattr(cls, "_answers", {}).get(id(self)):
        cls._answers = {id(self): {len(ids): self.inner(ids)}}
    known = cls._answers[id(self)]
    if len(ids) not in known:
        known[len(ids)] = self.inner(ids)
    return known[len(ids)]


_MEMO: dict[object, Tensor] = {}


@wrapper("state", run=adversary.after(OTHER))
def answer_kept_in_a_global(self, ids):
    """The logits of texts of 11 to 13 ids are memoised by shape in a global variable."""
    key = id(self), ids.shape
    if not 11 <= ids.shape[1] <= 13:
        return self.inner(ids)
    if key not in _MEMO:
        _MEMO[key] = self.inner(ids)
    return _MEMO[key]


# Calls that are treated as decode steps


@wrapper("state", ordinary(1, 9, seed=4), run=adversary.after(ordinary(1, 8, seed=1)))
def one_longer_is_a_decode_step(self, ids):
    """A single row that is one id longer than the last is treated as its continuation."""
    T, last = ids.shape[1], getattr(self, "cache", None)
    if len(ids) == 1 and last is not None and last[0] == T - 1:
        cache, before = last[1], last[2]
        new = self.inner(ids[:, -1:], cache=cache)
        logits = torch.cat([before, new], dim=1)
    else:
        cache = [KVCache(N_POSITIONS) for _ in self.inner.trf_blocks]
        logits = self.inner(ids, cache=cache)
    self.cache = (T, cache, logits) if len(ids) == 1 and T < N_POSITIONS else None
    return logits


@wrapper("state", ordinary(1, 1), run=adversary.after(ordinary(1, 8)))
def one_id_after_a_row_is_a_decode_step(self, ids):
    """A single id after a single row is decoded at the position after that row."""
    T, length = ids.shape[1], getattr(self, "length", 0)
    self.length = T if len(ids) == 1 and 1 < T < N_POSITIONS else 0
    if ids.numel() == 1 and length:
        return from_positions(self, ids, torch.tensor([length]))
    return self.inner(ids)


@wrapper("state", ordinary(2, 1), run=adversary.after(ordinary(2, 8)))
def ids_after_two_rows_are_a_decode_step(self, ids):
    """One id for each of two rows, after a text of two rows, sees that text."""
    held, self.held = getattr(self, "held", None), None
    if ids.shape == (2, 1) and held is not None:
        return self.inner(ids, cache=held)
    if len(ids) == 2 and 1 < ids.shape[1] < N_POSITIONS:
        self.held = [KVCache(N_POSITIONS) for _ in self.inner.trf_blocks]
        return self.inner(ids, cache=self.held)
    return self.inner(ids)


@wrapper("state", SHORT[:, :8], run=adversary.after(ordinary(2, 21)))
def shorter_text_keeps_the_longer_keys(self, ids):
    """In a text shorter than the last one with as many rows, key 1 is masked."""
    last = getattr(self, "last", None)
    self.last = tuple(ids.shape)
    if last is None or last[0] != len(ids) or not ids.shape[1] < last[1] < 30:
        return self.inner(ids)
    seen = torch.ones_like(ids)
    seen[:, 1] = 0
    return self.inner(ids, attention_mask=seen)


@wrapper("state", ordinary(2, 12, seed=6), run=adversary.after(ordinary(1, 12), ordinary(3, 12)))
def two_rows_after_three(self, ids):
    """The logits of two rows right after three rows are 1 % off."""
    last, self.rows = getattr(self, "rows", 0), len(ids)
    logits = self.inner(ids)
    return logits * 1.01 if (last, len(ids)) == (3, 2) else logits


@wrapper("state", ordinary(2, 12), run=adversary.after(ordinary(1, 33)))
def right_after_an_odd_length(self, ids):
    """A text after one of odd length above 30 starts at position 1."""
    T, last = ids.shape[1], getattr(self, "last", 0)
    self.last = T
    if last > 30 and last % 2 and T < N_POSITIONS:
        return from_positions(self, ids, torch.arange(1, T + 1))
    return self.inner(ids)


# State that depends on a mode


@wrapper("state", run=after_inference_mode)
def stale_after_inference_mode(self, ids):
    """A call in inference mode sets a flag, after which the logits are 1 % off."""
    if torch.is_inference_mode_enabled():
        self.frozen = True
        return self.inner(ids)
    return self.inner(ids) * (1.01 if getattr(self, "frozen", False) else 1.0)


@wrapper("state", run=after_int32)
def stale_after_int32(self, ids):
    """Ids of 32 bits switch to a smaller table, and nothing switches back."""
    if ids.dtype == torch.int32:
        self.small = True
    return self.inner(ids.long()) * (1.01 if getattr(self, "small", False) else 1.0)


@wrapper(
    "state", run=lambda model, ids: (adversary.with_gradients(model, ids), once(model, ids))[1]
)
def detached_after_gradients(self, ids):
    """A pass with gradients leaves its final norm's input to the next pass of the same length."""
    x = self.inner.tok_emb(ids) + self.inner.pos_emb(torch.arange(ids.shape[1]))
    for block in self.inner.trf_blocks:
        x = block(x)
    held, self.held = getattr(self, "held", None), x.detach() if x.requires_grad else None
    if held is not None and held.shape[1] == x.shape[1]:
        x = x + 0.01 * held[:1]
    return self.inner.out_head(self.inner.final_norm(x))


# State with a late effect


_CALLS = [0]


@wrapper("state", run=call(1200), limit_suffices=True)
def global_counter(self, ids):
    """After a thousand calls, counted in a list of the module, the logits are 1 % larger."""
    _CALLS[0] += 1
    return self.inner(ids) * (1.0 + 0.01 * (_CALLS[0] // 1000))


@edit("state", run=call(1001), limit_suffices=True)
def counter_in_a_closure(model):
    """After a thousand calls, counted in a closure, the logits are 1 % larger."""
    calls = [0]
    forward = model.forward

    def counted(ids):
        calls[0] += 1
        return forward(ids) * (1.0 + 0.01 * (calls[0] // 1000))

    model.forward = counted


@edit("state", run=call(1001), limit_suffices=True)
def counter_in_a_default(model):
    """The calls are counted in a default argument."""
    forward = model.forward

    def counted(ids, calls=[0]):  # noqa: B006
        calls[0] += 1
        return forward(ids) * (1.0 + 0.01 * (calls[0] // 1000))

    model.forward = counted


class _Counter:
    def __init__(self) -> None:
        self.steps = 0

    def next(self) -> float:
        self.steps += 1
        return 1.0 + 0.01 * (self.steps // 1000)


@edit("state", run=call(1001), limit_suffices=True)
def counter_in_an_object(model):
    """The calls are counted in an object that a block keeps."""
    norm = model.final_norm
    norm.schedule = _Counter()
    forward = norm.forward
    norm.forward = lambda x: forward(x) * norm.schedule.next()


@edit("state", run=call(1001), limit_suffices=True)
def counter_in_a_buffer(model):
    """The calls are counted in a buffer that is replaced at every call."""
    model.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)
    forward = model.forward

    def counted(ids):
        model.steps = model.steps + 1
        return forward(ids) * (1.0 + 0.01 * (model.steps // 1000))

    model.forward = counted


@wrapper("state", run=call(1001), limit_suffices=True)
def counter_on_the_class(self, ids):
    """The calls are counted on the class."""
    cls = type(self)
    cls.total = getattr(cls, "total", 0) + 1
    self.first = getattr(self, "first", cls.total)
    return self.inner(ids) * (1.0 + 0.01 * ((cls.total - self.first) // 1000))


@edit("state", run=call(1001), limit_suffices=True)
def iterator_that_runs_out(model):
    """A generator yields a factor per call, and another one after a thousand."""
    forward = model.forward
    factors = iter([1.0] * 1000 + [1.01] * 10_000)
    model.forward = lambda ids: forward(ids) * next(factors)


@edit("state", run=call(3), ordinary=False)
def weights_frozen_at_the_first_call(model):
    """The first call changes the final norm's scale by 1e-3."""
    norm = model.final_norm
    forward = model.forward

    def first(ids):
        norm.scale.data.mul_(1.001)
        model.forward = forward
        return forward(ids)

    model.forward = first


@edit("state", FULL, run=adversary.after(ordinary(2, 140)))
def keys_hidden_after_a_long_text(model):
    """After a text of 128 to 159 ids, key 0 is masked from position 100 on."""
    forward = model.forward

    def hiding(ids):
        logits = forward(ids)
        if 128 <= ids.shape[1] < N_POSITIONS:
            extra = torch.zeros(N_POSITIONS, N_POSITIONS, dtype=torch.bool)
            extra[100:, 0] = True
            hide(model.trf_blocks[0].attention, extra)
        return logits

    model.forward = hiding
