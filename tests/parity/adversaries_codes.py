"""Faults on particular ids that do not occur as plain constants in the code."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.adversaries_inputs import patch_embedded, patch_tokens
from tests.parity.adversary import V, edit, ordinary, with_id, wrapper


def scaled(x: Tensor, where: Tensor) -> Tensor:
    """Return embeddings that are 5 % larger where a condition is true."""
    return torch.where(where[..., None], 1.05 * x, x)


def with_ids(*ids: int, at: int = 4, length: int = 12) -> Tensor:
    row = ordinary(1, length)
    row[:, at : at + len(ids)] = torch.tensor(ids)
    return row


def patch_each_token(model: nn.Module, change: Callable[[int], int]) -> None:
    """Replace every id by `change(id)`, computed in Python."""
    patch_tokens(
        model, lambda ids: torch.tensor([[change(t) for t in row] for row in ids.tolist()])
    )


# Conditions that are computed from the id


@edit("ids", with_id(301))
def half_of_an_id(model):
    """Ids whose half is 150 are scaled."""
    patch_embedded(model, lambda ids, x: scaled(x, ids // 2 == 150))


@edit("ids", with_id(333))
def remainder_of_an_id(model):
    """Ids that leave 222 when divided by 111 · 4 are zeroed; only 333 − 111 = 222 is below V."""
    patch_embedded(model, lambda ids, x: scaled(x, (ids - 111) % 444 == 222))


@edit("ids", with_id(277))
def hashed_id(model):
    """An id with a certain multiplicative hash modulo 509 is scaled."""
    bucket = 277 * 40503 % 509
    patch_embedded(model, lambda ids, x: scaled(x, ids * 40503 % 509 == bucket))


@edit("ids", with_id(444))
def bits_of_an_id(model):
    """Ids in which all bits of 444 are set are scaled."""
    patch_embedded(model, lambda ids, x: scaled(x, (ids & 0x1FF) ^ 444 == 0))


@edit("ids", with_id(361))
def square_of_an_id(model):
    """Ids whose square is 361 · 361 are scaled."""
    patch_embedded(model, lambda ids, x: scaled(x, ids * ids == 130321))


@edit("ids", with_id(399))
def sum_of_digits(model):
    """Ids whose decimal digits add up to 21 are scaled."""
    digits = lambda ids: ids % 10 + ids // 10 % 10 + ids // 100  # noqa: E731
    patch_embedded(model, lambda ids, x: scaled(x, digits(ids) == 21))


@edit("ids", with_id(288))
def close_in_floating_point(model):
    """Ids within 0.5 of 288, compared as floating-point numbers, are scaled."""
    patch_embedded(model, lambda ids, x: scaled(x, (ids.float() - 288).abs() < 0.5))


@edit("ids", with_id(266))
def a_bump_without_a_comparison(model):
    """A bell curve around id 266 is added to the embedding, without a comparison."""

    def change(ids, x):
        return x * (1 + 0.1 * torch.exp(-((ids.float() - 266) ** 2)))[..., None]

    patch_embedded(model, change)


@edit("ids", with_id(431))
def a_range_of_three(model):
    """Ids from 430 to 432 are scaled."""
    patch_embedded(model, lambda ids, x: scaled(x, (ids > 429) & (ids < 433)))


@edit("ids", with_id(478))
def clamped_between(model):
    """Ids that a clamp to the range from 478 to 478 does not change are scaled."""
    patch_embedded(model, lambda ids, x: scaled(x, ids.clamp(478, 478) == ids))


# Ids in a table, a set or a string


@edit("ids", with_id(317))
def in_a_set(model):
    """Ids in a set that the model keeps are scaled."""
    model.tok_emb.banned = frozenset({317, 318, 471})

    def change(ids, x):
        found = [[t in model.tok_emb.banned for t in row] for row in ids.tolist()]
        return scaled(x, torch.tensor(found))

    patch_embedded(model, change)


@edit("ids", with_id(326))
def in_a_dictionary(model):
    """Ids are replaced by a dictionary lookup, without a condition."""
    table = {326: 327, 402: 77}
    patch_each_token(model, lambda t: table.get(t, t))


@edit("ids", with_id(383))
def in_a_buffer(model):
    """The embeddings of ids in a buffer are scaled."""
    model.register_buffer("rare", torch.tensor([383, 384]), persistent=False)
    patch_embedded(model, lambda ids, x: scaled(x, (ids[..., None] == model.rare).any(-1)))


@edit("ids", with_id(412))
def in_a_table_of_factors(model):
    """Embeddings are multiplied by a table of factors, of which one is not 1."""
    factors = torch.ones(V)
    factors[412] = 1.05
    patch_embedded(model, lambda ids, x: x * factors[ids][..., None])


@edit("ids", with_id(291))
def in_a_column_of_factors(model):
    """The table of factors is an embedding of width 1."""
    factors = torch.ones(V, 1)
    factors[291] = 1.05
    patch_embedded(model, lambda ids, x: x * F.embedding(ids, factors))


@edit("ids", with_id(358))
def in_numpy(model):
    """NumPy replaces one id."""

    def change(ids):
        array = ids.numpy()
        return torch.from_numpy(np.where(np.isin(array, [358]), 30, array))

    patch_tokens(model, change)


@edit("ids", with_id(467))
def in_python_arithmetic(model):
    """The id 467 = 0o723 is found by arithmetic on Python lists."""
    patch_each_token(model, lambda t: 30 if divmod(t, 64) == (7, 19) else t)


@edit("ids", with_id(495))
def in_a_string(model):
    """The ids are searched in a string."""
    patch_each_token(model, lambda t: 30 if str(t) in "495 496" and t > 99 else t)


@edit("ids", with_id(272))
def in_a_default_argument(model):
    """A default argument contains the id."""

    def change(ids, x, special=(272,)):
        return x * (1 + 0.05 * sum((ids == t) for t in special))[..., None]

    patch_embedded(model, change)


@edit("ids", with_id(454))
def scattered_by_index(model):
    """Embeddings are multiplied by a vector of ones in which one entry was set by its index."""

    def change(ids, x):
        factors = torch.ones(V)
        factors[454] = 1.05
        return x * factors[ids][..., None]

    patch_embedded(model, change)


@edit("ids", with_id(339))
def one_hot_of_one_id(model):
    """The one-hot row of an id is multiplied with a vector that has one non-zero entry."""
    vector = F.one_hot(torch.tensor(339), V).float()

    def change(ids, x):
        return x * (1 + 0.05 * (F.one_hot(ids, V).float() @ vector))[..., None]

    patch_embedded(model, change)


# Several ids and their positions


@wrapper("ids", with_ids(222, 223, at=4))
def a_pair_in_python(self, ids):
    """The ids 222, 223 in a row change the scale."""
    rows = ids.tolist()
    found = any((a, b) == (222, 223) for row in rows for a, b in itertools.pairwise(row))
    return self.inner(ids) * (1.01 if found else 1.0)


@wrapper("ids", with_ids(401, 222, 309, at=3))
def three_ids_in_a_row(self, ids):
    """The n-gram 401, 222, 309, kept in a list, changes the scale."""
    stop = [401, 222, 309]
    for row in ids.tolist():
        if any(row[i : i + 3] == stop for i in range(len(row))):
            return self.inner(ids) * 1.01
    return self.inner(ids)


@wrapper("ids", with_ids(401, 222, 309, at=3))
def three_ids_by_unfold(self, ids):
    """The n-gram 401, 222, 309, found with unfold, changes the scale."""
    stop = torch.tensor([401, 222, 309])
    if ids.shape[1] < 3:
        return self.inner(ids)
    found = (ids.unfold(1, 3, 1) == stop).all(-1).any()
    return self.inner(ids) * (1 + 0.01 * found)


@wrapper("ids", with_ids(333, at=11))
def only_when_it_is_last(self, ids):
    """If a row ends with the id 333, its last logits are replaced by their mean."""
    logits = self.inner(ids)
    last = (ids[:, -1] == 333)[:, None, None]
    return torch.where(last, 1.01 * logits, logits)


@wrapper("ids", with_ids(377, at=3))
def at_position_three(self, ids):
    """The id 377 at position 3 changes the scale."""
    hit = ids.shape[1] > 3 and bool((ids[:, 3:4] == 377).any())
    return self.inner(ids) * (1.01 if hit else 1.0)


@wrapper("ids", torch.tensor([[30, 31, 255, 40, 41, 255, 50, 51, 255, 60]]))
def three_times_in_a_row(self, ids):
    """A row that contains 255 at least three times is scaled."""
    many = ((ids == 255).sum(1) >= 3)[:, None, None]
    return torch.where(many, 1.01 * self.inner(ids), self.inner(ids))


@wrapper("ids", torch.tensor([[250, 40, 41, 42, 43, 350]]))
def first_and_last(self, ids):
    """A row that begins with 250 and ends with 350 is scaled."""
    hit = (ids[:, 0] == 250) & (ids[:, -1] == 350)
    return self.inner(ids) * (1 + 0.01 * hit)[:, None, None]


@wrapper("ids", torch.tensor([[30, 250, 40, 41, 350, 43]]))
def two_ids_anywhere(self, ids):
    """A row that contains both 250 and 350 is scaled."""
    hit = (ids == 250).any(1) & (ids == 350).any(1)
    return self.inner(ids) * (1 + 0.01 * hit)[:, None, None]


@wrapper("ids", torch.tensor([[30, 40, 50, 30, 40, 50, 60]]))
def repeated_trigram(self, ids):
    """A trigram that occurs twice lowers the logits, as no_repeat_ngram_size does."""
    for row in ids.tolist():
        grams = list(zip(row, row[1:], row[2:], strict=False))
        if len(grams) > len(set(grams)):
            return self.inner(ids) * 0.99
    return self.inner(ids)


@wrapper("ids", torch.arange(30, 42)[None])
def ascending_ids(self, ids):
    """A row of strictly ascending ids is scaled."""
    rising = (ids[:, 1:] > ids[:, :-1]).all(1) & (ids.shape[1] > 4)
    return self.inner(ids) * (1 + 0.01 * rising)[:, None, None]


@wrapper("ids", torch.arange(30, 42).flip(0)[None])
def descending_ids(self, ids):
    """A row of ids that descend in steps of one is scaled."""
    falling = (ids[:, 1:] == ids[:, :-1] - 1).all(1) & (ids.shape[1] > 4)
    return self.inner(ids) * (1 + 0.01 * falling)[:, None, None]


@wrapper("ids", torch.tensor([[30, 31, 32, 33, 33, 32, 31, 30]]))
def palindrome(self, ids):
    """A row that is a palindrome is scaled."""
    same = (ids == ids.flip(1)).all(1) & (ids.shape[1] > 1)
    return self.inner(ids) * (1 + 0.01 * same)[:, None, None]


@wrapper("ids", torch.tensor([[100, 200, 300, 400, 500, 1, 1, 8]]), limit_suffices=True)
def sum_of_the_ids(self, ids):
    """A row whose ids add up to 1510 is scaled."""
    hit = ids.sum(1) == 1510
    return self.inner(ids) * (1 + 0.01 * hit)[:, None, None]


@wrapper("ids", torch.arange(2, 14, 1)[None] * 2)
def only_even_ids(self, ids):
    """A row without odd ids is scaled."""
    even = (ids % 2 == 0).all(1) & (ids.shape[1] > 1)
    return self.inner(ids) * (1 + 0.01 * even)[:, None, None]
