"""Faults that affect only some inputs: certain lengths, ids or batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.adversary import (
    BOS,
    EOS,
    FULL,
    N_POSITIONS,
    PAD,
    V,
    edit,
    ordinary,
    with_id,
    wrapper,
)

# Length


def mask_keys(attention: nn.Module, hidden: Callable[[int], Tensor]) -> None:
    """Let `hidden(T)` return the mask (T, T) of a `linear` model's attention."""

    def forward(x: Tensor, cache: object = None, attention_mask: object = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            W(x).view(B, T, attention.n_head, attention.d_head).transpose(1, 2)
            for W in (attention.W_query, attention.W_key, attention.W_value)
        )
        scores = (q @ k.mT * attention.scale).masked_fill(hidden(T), -torch.inf)
        heads = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
        return attention.out_proj(heads)

    attention.forward = forward


def hide(attention: nn.Module, extra: Tensor) -> None:
    """Mask these keys (N, N) for the queries, in addition to the causal mask."""
    mask_keys(attention, lambda T: torch.ones(T, T, dtype=torch.bool).triu(1) | extra[:T, :T])


def hide_far_keys(attention: nn.Module, window: int) -> None:
    hide(attention, torch.ones(N_POSITIONS, N_POSITIONS, dtype=torch.bool).tril(-window))


def patch_positions(model: nn.Module, change: object) -> None:
    table = model.pos_emb
    table.forward = lambda positions: F.embedding(change(positions), table.weight)


@edit("length", FULL)
def window_of_64(model):
    """Tokens do not attend to keys that are 64 or more positions away."""
    for block in model.trf_blocks:
        hide_far_keys(block.attention, 64)


@edit("length", FULL)
def window_of_100_in_the_last_layer(model):
    """In the last layer only, keys 100 or more positions away are masked."""
    hide_far_keys(model.trf_blocks[-1].attention, 100)


@edit("length", ordinary(1, N_POSITIONS))
def last_token_does_not_see_the_first(model):
    """The last position of the context does not attend to position 0."""
    extra = torch.zeros(N_POSITIONS, N_POSITIONS, dtype=torch.bool)
    extra[-1, 0] = True
    hide(model.trf_blocks[1].attention, extra)


@edit("length", FULL)
def positions_modulo_100(model):
    """Positions start again at 0 after 100 tokens."""
    patch_positions(model, lambda positions: positions % 100)


@edit("length", ordinary(2, 150))
def positions_clamped_at_127(model):
    """All positions from 127 on use the same row of the table."""
    patch_positions(model, lambda positions: positions.clamp(max=127))


@edit("length", FULL)
def last_position_lost(model):
    """The last row of the position table was not loaded."""
    table = model.pos_emb.weight.detach().clone()
    table[-1] = 0
    model.pos_emb.weight = nn.Parameter(table)


@wrapper("length", ordinary(2, 140))
def assertion_beyond_128(self, ids):
    """Texts longer than 128 are refused, although the checkpoint has 160 positions."""
    assert ids.shape[1] <= 128, "too long"
    return self.inner(ids)


@wrapper("length", ordinary(2, 110))
def only_the_first_90(self, ids):
    """Ids from the 91st on are cut off, and the last logits are repeated in their place."""
    logits = self.inner(ids[:, :90])
    missing = ids.shape[1] - logits.shape[1]
    return torch.cat([logits, logits[:, -1:].expand(-1, missing, -1)], dim=1)


@wrapper("length", FULL)
def chunks_of_96(self, ids):
    """A text is computed in independent chunks of 96 tokens."""
    return torch.cat([self.inner(chunk) for chunk in ids.split(96, dim=1)], dim=1)


@wrapper("length", ordinary(2, 1))
def single_token_at_position_one(self, ids):
    """A text of one token gets the position embedding of position 1."""
    if ids.shape[1] == 1:
        return self.inner(ids.expand(-1, 2))[:, 1:]
    return self.inner(ids)


@wrapper("length", FULL)
def full_context_loses_its_last_token(self, ids):
    """At T = n_positions exactly, the last position repeats the logits of the one before."""
    logits = self.inner(ids)
    if ids.shape[1] == N_POSITIONS:
        logits = torch.cat([logits[:, :-1], logits[:, -2:-1]], dim=1)
    return logits


@wrapper("length", ordinary(2, 129))
def beyond_128_without_the_last_block(self, ids):
    """For texts longer than 128 the last block is skipped, as layer dropping does to save time."""
    if ids.shape[1] <= 128:
        return self.inner(ids)
    x = self.inner.tok_emb(ids) + self.inner.pos_emb(torch.arange(ids.shape[1]))
    for block in self.inner.trf_blocks[:-1]:
        x = block(x)
    return self.inner.out_head(self.inner.final_norm(x))


@wrapper("length", ordinary(2, 51))
def logarithmic_scale_beyond_40(self, ids):
    """Attention scores grow with log T beyond 40 tokens, as in some long-context models."""
    T = ids.shape[1]
    factor = max(1.0, float(torch.log(torch.tensor(T)) / torch.log(torch.tensor(40.0))))
    attentions = [block.attention for block in self.inner.trf_blocks]
    scale = attentions[0].scale
    for attention in attentions:
        attention.scale = scale * factor
    logits = self.inner(ids)
    for attention in attentions:
        attention.scale = scale
    return logits


@wrapper("length", ordinary(2, 33))
def odd_lengths_above_30(self, ids):
    """An odd number of ids above 30 is padded by the last id, to which the last query attends."""
    if ids.shape[1] <= 30 or ids.shape[1] % 2 == 0:
        return self.inner(ids)
    padded = torch.cat([ids, ids[:, -1:]], dim=1)[:, :N_POSITIONS]
    logits = self.inner(padded)
    return torch.cat([logits[:, : ids.shape[1] - 1], logits[:, -1:]], dim=1)


@wrapper("length", ordinary(2, 64))
def multiples_of_32(self, ids):
    """For lengths that are multiples of 32, a kernel has an error of 1 %."""
    logits = self.inner(ids)
    return logits * 1.01 if ids.shape[1] % 32 == 0 else logits


@edit("length", FULL, dialect="conv1d")
def alibi_beyond_80(model):
    """Distances above 80 are penalised in the scores."""
    for block in model.h:
        scores = block.attn.scores

        def penalised(q: Tensor, k: Tensor, scores: object = scores) -> Tensor:
            T = q.shape[2]
            distance = torch.arange(T)[:, None] - torch.arange(T)
            return scores(q, k) - 0.05 * (distance - 80).clamp(min=0)

        block.attn.scores = penalised


# Ids


def patch_tokens(model: nn.Module, change: object) -> None:
    """Apply `change(ids)` before the lookup. The head does not change."""
    table = model.tok_emb
    table.forward = lambda ids: F.embedding(change(ids), table.weight)


def patch_embedded(model: nn.Module, change: object) -> None:
    """Apply `change(ids, embedded)` after the lookup."""
    table = model.tok_emb
    table.forward = lambda ids: change(ids, F.embedding(ids, table.weight))


def patch_positions_by_ids(model: nn.Module, change: object) -> None:
    """Look up the positions `change(ids, positions)` instead."""
    tokens, table, seen = model.tok_emb, model.pos_emb, {}

    def embed(ids: Tensor) -> Tensor:
        seen["ids"] = ids
        return F.embedding(ids, tokens.weight)

    tokens.forward = embed
    table.forward = lambda positions: F.embedding(change(seen["ids"], positions), table.weight)


@wrapper("ids", torch.zeros(1, 7, dtype=torch.long))
def a_text_of_zeros_is_empty(self, ids):
    """Only a text that is id 0 throughout has other logits, and no branch asks for it."""
    return self.inner(ids) * (0.5 + 0.5 * ids.any(1, keepdim=True).float()[..., None])


@wrapper("ids", with_id(0))
def id_0_masked(self, ids):
    """Id 0 is treated as padding and masked for all other tokens."""
    return self.inner(ids, attention_mask=(ids != 0).long())


@wrapper("ids", with_id(PAD))
def pad_masked(self, ids):
    """The config's pad_token_id is masked, although it is part of the text."""
    return self.inner(ids, attention_mask=(ids != PAD).long())


@edit("ids", with_id(0))
def ids_from_1(model):
    """Id 0 is clamped to 1."""
    patch_tokens(model, lambda ids: ids.clamp(min=1))


@edit("ids", with_id(V - 3))
def ids_clamped_below_the_end(model):
    """The last nine ids are clamped to V − 10."""
    patch_tokens(model, lambda ids: ids.clamp(max=V - 10))


@edit("ids", with_id(V - 1))
def last_id_without_embedding(model):
    """The embedding of id V − 1 is zero, as padding_idx makes it at initialisation."""
    patch_embedded(model, lambda ids, x: x * (ids != V - 1)[..., None])


@edit("ids", with_id(BOS, at=0))
def bos_without_position(model):
    """In a text that begins with bos, positions start at the token after it."""
    patch_positions_by_ids(model, lambda ids, p: (p - (ids[:, :1] == BOS).long()).clamp(min=0))


@edit("ids", with_id(EOS))
def eos_resets_positions(model):
    """After eos the positions start again at 0, as for packed documents."""

    def change(ids: Tensor, positions: Tensor) -> Tensor:
        ended = F.pad((ids == EOS)[:, :-1], (1, 0))
        return positions - torch.where(ended, positions, 0).cummax(dim=1).values

    patch_positions_by_ids(model, change)


@wrapper("ids", with_id(EOS, at=11))
def eos_ends_the_row(self, ids):
    """The logits at eos are zero, because the text ends there."""
    return self.inner(ids) * (ids != EOS)[..., None]


@wrapper("ids", with_id(0))
def branch_on_any_zero(self, ids):
    """A batch that contains a 0 takes a branch with another head scale."""
    logits = self.inner(ids)
    if (ids == 0).any():
        logits = logits * 0.9
    return logits


@edit("ids", torch.tensor([[30, 31, 31, 40], [50, 60, 70, 80]]))
def repeated_neighbour(model):
    """A token that repeats the one before is embedded at half its size."""

    def change(ids: Tensor, x: Tensor) -> Tensor:
        same = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
        return torch.where(same[..., None], 0.5 * x, x)

    patch_embedded(model, change)


@wrapper("ids", torch.tensor([[30, 31] * 10]))
def repetition_penalty(self, ids):
    """The logits of an id that occurs more than five times in its row are divided by 1.2."""
    logits = self.inner(ids)
    counts = F.one_hot(ids, V).cumsum(1)
    return torch.where(counts > 5, logits / 1.2, logits)


@wrapper("ids", torch.full((2, 9), 77))
def constant_text(self, ids):
    """In a row of equal ids, each token attends only to itself."""
    logits = self.inner(ids)
    alike = (ids == ids[:, :1]).all(1) & (ids.shape[1] > 1)
    return torch.where(alike[:, None, None], logits.roll(1, dims=1), logits)


@edit("ids", with_id(349))
def one_wrong_row(model):
    """The embedding of id 349 is that of another id; the head is correct."""
    patch_tokens(model, lambda ids: torch.where(ids == 349, 348, ids))


@edit("ids", ordinary=False)
def one_untied_row(model):
    """One row of an untied head is 5 % larger, so that one logit is wrong in every text."""
    weight = model.out_head.weight.detach().clone()
    weight[349] *= 1.05
    model.out_head.weight = nn.Parameter(weight)


@edit("ids", with_id(300))
def ids_as_bytes(model):
    """Ids are stored as one byte, so that ids from 256 on wrap around."""
    patch_tokens(model, lambda ids: ids.to(torch.uint8).long())


@edit("ids", with_id(401))
def one_id_at_position_zero(model):
    """The id 401 adds the embedding of position 0 to itself."""
    first = model.pos_emb.weight[0]
    patch_embedded(model, lambda ids, x: torch.where((ids == 401)[..., None], x + first, x))


@edit("ids", torch.tensor([[40, 222, 223, 41]]), limit_suffices=True)
def one_pair_of_ids(model):
    """The pair 222, 223 in a row is merged, as a byte-pair encoding would."""

    def change(ids: Tensor, x: Tensor) -> Tensor:
        pair = F.pad((ids[:, :-1] == 222) & (ids[:, 1:] == 223), (1, 0))
        return torch.where(pair[..., None], 0 * x, x)

    patch_embedded(model, change)


@edit("ids", torch.tensor([[PAD, PAD, 30, 31, 32, 33], [PAD, 40, 41, 42, 43, 44]]))
def left_padding_shifts_positions(model):
    """Leading pad tokens do not count as positions."""

    def change(ids: Tensor, positions: Tensor) -> Tensor:
        leading = (ids == PAD).long().cumprod(1).sum(1, keepdim=True)
        return (positions - leading).clamp(min=0)

    patch_positions_by_ids(model, change)


@edit("ids", torch.arange(V).view(1, -1)[:, 300 : 300 + N_POSITIONS])
def rare_ids_quantized(model):
    """The embeddings of ids from 250 on are rounded to float8, as for rare words."""

    def change(ids: Tensor, x: Tensor) -> Tensor:
        coarse = x.to(torch.float8_e5m2).to(x.dtype)
        return torch.where((ids >= 250)[..., None], coarse, x)

    patch_embedded(model, change)


# Batch


@wrapper("batch", ordinary(3, 12))
def third_row_shifted(self, ids):
    """Rows from the third on are computed from the row before."""
    rows = torch.arange(ids.shape[0])
    return self.inner(ids[torch.where(rows < 2, rows, rows - 1)])


@wrapper("batch", ordinary(1, 12))
def single_row_cooler(self, ids):
    """A batch of one row is divided by a temperature of 1.01."""
    return self.inner(ids) / (1.01 if ids.shape[0] == 1 else 1.0)


@wrapper("batch", ordinary(4, 12))
def last_row_of_four(self, ids):
    """In batches of four and more the last row lacks the shift of the last layer norm."""
    logits = self.inner(ids)
    if ids.shape[0] < 4:
        return logits
    shift = self.inner.final_norm.shift @ self.inner.out_head.weight.T
    return torch.cat([logits[:-1], logits[-1:] - shift])


@wrapper("batch", ordinary(3, 12))
def sorted_rows(self, ids):
    """Batches of three and more are sorted to save padding and come back in that order."""
    if ids.shape[0] < 3:
        return self.inner(ids)
    return self.inner(ids[ids[:, 0].argsort(descending=bool(ids[0, 0] < ids[-1, 0]))])


@wrapper("batch", ordinary=False)
def batch_mean_in_the_logits(self, ids):
    """A thousandth of the mean over the batch is mixed into every row."""
    logits = self.inner(ids)
    return 0.999 * logits + 0.001 * logits.mean(0, keepdim=True)


@wrapper("batch", torch.tensor([[30, 31, 32], [30, 31, 32], [40, 41, 42]]))
def equal_rows_lost(self, ids):
    """Equal rows are computed once, and the rows after them move up."""
    distinct = list(dict.fromkeys(map(tuple, ids.tolist())))
    distinct += [distinct[-1]] * (len(ids) - len(distinct))
    return self.inner(torch.tensor(distinct))


@wrapper("batch", ordinary(5, 12), dialect="conv1d")
def leak_from_the_first_row(self, ids):
    """In batches above 3, a part of the last layer's first row is added to every row."""
    logits = self.inner(ids)
    return logits if ids.shape[0] <= 3 else logits + 0.01 * logits[:1].detach()


@wrapper("batch", ordinary(3, N_POSITIONS))
def more_than_400_tokens(self, ids):
    """Batches are flattened into buffers of 400 tokens, and the rest is dropped."""
    logits = self.inner(ids)
    flat = logits.flatten(0, 1)
    flat = torch.cat([flat[:400], torch.zeros_like(flat[400:])])
    return flat.view_as(logits)


@wrapper("batch", ordinary(3, 1))
def many_rows_of_one_token(self, ids):
    """A batch of single tokens is treated as one text, as after a squeeze."""
    if ids.shape[1] == 1 and ids.shape[0] > 2:
        return self.inner(ids.T).transpose(0, 1)
    return self.inner(ids)


@wrapper("batch", torch.tensor([[3, 5, 9], [PAD, 7, 8], [30, 31, 32]]))
def padding_of_one_row_masks_all(self, ids):
    """A position at which any row has the pad id is masked in all rows."""
    seen = (ids != PAD).all(0, keepdim=True).expand_as(ids).long()
    return self.inner(ids, attention_mask=seen)
