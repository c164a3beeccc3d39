"""Log-probabilities of tokens: many texts, and many continuations of one text, in one pass.

Axes: B rows of a pass, T tokens of a row, N scored tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compat.decoding.transformer import Transformer

BATCH_POSITIONS = 768  # positions read together; more need more padding and are not faster
ROW_POSITIONS = 4096  # positions of a context and its continuations, to bound the memory
LOGITS_AT_ONCE = 256  # positions whose logits are held at once

# The ids of a context and of its continuations, each with at least one id.
Request = tuple[Tensor, Sequence[Tensor]]


class Score(NamedTuple):
    """The scores of the T tokens of one continuation.

    Attributes:
        logprobs: the log-probability of each token in nats, float32 (T,).
        is_greedy: whether greedy decoding would choose the token, bool (T,).
    """

    logprobs: Tensor
    is_greedy: Tensor


class _Row:
    """A context and some of its continuations, concatenated.

    The positions of each continuation start after the context, and it attends to the context and
    itself, so that the context is processed only once. The last token of a continuation is
    predicted but not an input.
    """

    def __init__(self, context: Tensor) -> None:
        self.context_length = self.length = len(context)
        self.tokens, self.positions = [context], [_count(len(context))]
        self.owners = [torch.zeros_like(context)]  # 0: the context, 1, 2, …: the continuations
        self.scored: list[tuple[tuple[int, int], Tensor, Tensor]] = []  # key, ids, their logits

    def add(self, key: tuple[int, int], ids: Tensor) -> None:
        read, S = _count(len(ids) - 1), self.context_length
        self.scored.append((key, ids, torch.cat([self.positions[0][-1:], self.length + read])))
        self.tokens.append(ids[:-1])
        self.positions.append(S + read)
        self.owners.append(torch.full_like(read, len(self.scored)))
        self.length += len(read)


def _count(n: int) -> Tensor:
    """Return 0, 1, … n − 1 on the CPU, even if torch's default device is another one."""
    return torch.arange(n, device="cpu")


def score_requests(
    transformer: Transformer, requests: Sequence[Request]
) -> Iterator[tuple[tuple[int, int], Score]]:
    """Yield the scores of all continuations.

    Each comes with a key: the index of its request, and its own index in the request. Rows of
    similar lengths are batched, starting with the longest.
    """
    rows = sorted(_rows(requests), key=lambda row: -row.length)
    while rows:
        together = max(1, BATCH_POSITIONS // rows[0].length)
        batch, rows = rows[:together], rows[together:]
        yield from _score_rows(transformer, batch)


def _rows(requests: Sequence[Request]) -> Iterator[_Row]:
    """Convert requests to rows: several if the continuations of a request do not fit into one."""
    for number, (context, continuations) in enumerate(requests):
        row = _Row(context)
        for i, ids in enumerate(continuations):
            if row.scored and row.length + len(ids) - 1 > ROW_POSITIONS:
                yield row
                row = _Row(context)
            row.add((number, i), ids)
        yield row


def _score_rows(
    transformer: Transformer, rows: Sequence[_Row]
) -> Iterator[tuple[tuple[int, int], Score]]:
    device = transformer.device
    tokens = _padded([row.tokens for row in rows], 0).to(device)  # (B, T)
    positions = _padded([row.positions for row in rows], 0).to(device)  # (B, T)
    mask = None
    if any(len(row.scored) > 1 for row in rows):
        owner = _padded([row.owners for row in rows], -1).to(device)  # (B, T)
        seen = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])
        mask = seen.tril()[:, None]  # (B, 1, T, T)
    hidden = transformer.read(tokens, positions, mask)  # (B, T, C)
    keys = [key for row in rows for key, _, _ in row.scored]
    ids = [ids for row in rows for _, ids, _ in row.scored]
    before = [hidden[b, at] for b, row in enumerate(rows) for _, _, at in row.scored]  # (T, C) each
    parts = zip(
        torch.split(torch.cat(before), LOGITS_AT_ONCE),
        torch.split(torch.cat(ids).to(device), LOGITS_AT_ONCE),
        strict=True,
    )
    found = [_score(transformer.logits(part), following) for part, following in parts]
    lengths = [len(one) for one in ids]
    logprobs, is_greedy = (
        torch.split(torch.cat(values), lengths) for values in zip(*found, strict=True)
    )
    yield from zip(keys, map(Score, logprobs, is_greedy), strict=True)


def _padded(rows: Sequence[Sequence[Tensor]], value: int) -> Tensor:
    """Concatenate the parts of each row, and pad the rows with the value to (B, T)."""
    return pad_sequence([torch.cat(list(row)) for row in rows], True, value)


def _score(logits: Tensor, following: Tensor) -> Score:
    """Score tokens (N,) with the logits (N, V) that predict them."""
    logprobs = logits.log_softmax(-1).gather(-1, following[:, None])[:, 0]
    return Score(logprobs, logits.argmax(dim=-1) == following)
