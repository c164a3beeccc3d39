"""Deviations of decode steps through a KV cache, if the forward pass without a cache is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from compat.golden_files.deviations import Proposal, Values, with_formula
from compat.golden_files.pieces import (
    GPT2,
    Piece,
    Pieces,
    Weights,
    attention_formula,
    cached_reads,
    chain,
    context,
    embedding,
    pattern,
    split_heads,
)


def step_logits(weights: Weights, steps: Tensor, values: Values) -> Iterator[Proposal]:
    """Yield the logits (B, N, V) of the decode steps under each known deviation.

    Args:
        weights: the weights of the checkpoint, and the ids before the decode steps.
        steps: the ids (B, N) of the decode steps.
        values: the values for the placeholders of the code's message and fix.

    Raises:
        MissingWeightError: a weight is not available.
    """
    (_, T), N = weights.ids.shape, steps.shape[1]
    ids = torch.cat([weights.ids, steps], dim=1)
    extended = replace(weights, ids=ids, read=cached_reads(weights.read, ids), dtype=torch.float32)
    for found, pieces in _deviations(extended, T, N):
        for tap, value in chain(extended, {**GPT2, **pieces}):
            if tap == "logits":
                yield Proposal("kv_cache", value[:, T:].double(), {**values, "found": found})


def _deviations(w: Weights, T: int, N: int) -> Iterator[tuple[str, Pieces]]:
    past, n = torch.arange(T), torch.arange(N)
    for found, positions in (
        ("every step has position 0", 0 * n),
        (f"every step has position {T}", T + 0 * n),
        ("the positions of the steps start at 0 again", n),
        (f"the first step has position {T - 1}, but in GPT-2 position {T}", T - 1 + n),
        (f"the first step has position {T + 1}, but in GPT-2 position {T}", T + 1 + n),
    ):
        if positions.max() < w.config.n_positions:
            yield found, {"embed": embedding(torch.cat([past, positions]))}
    if T + N < w.config.n_positions:
        found = "with a cache, the positions start at 1"
        yield found, {"embed": embedding(1 + torch.cat([past, T + n]))}
    usual = attention_formula(w, 0).allowed  # (T + N, T + N)
    own = torch.eye(T + N, dtype=torch.bool)
    row, column = torch.arange(T + N)[:, None], torch.arange(T + N)
    step = row >= T
    for found, hidden in (
        ("a step attends to itself only", step),
        ("a step attends to the prompt and to itself, but not to earlier steps",
         step & (column >= T)),
        ("a step attends to the steps only, and not to the prompt", step & (column < T)),
        ("a step does not attend to the first token", step & (column == 0)),
        ("a step does not attend to the last token of the prompt", step & (column == T - 1)),
    ):  # fmt: skip
        yield found, {"probs": pattern(with_formula(allowed=usual & (~hidden | own)))}
    for token, found in ((0, "the first token"), (T - 1, "the last token of the prompt")):
        yield f"the keys and values of {found} are 0 in the cache", _with_zeros(T, token)


def _with_zeros(T: int, token: int) -> Pieces:
    """Replace the key and value of a token by zeros, for the queries from position T on."""

    def without(w: Weights, x: Tensor) -> Tensor:
        return split_heads(w, x.index_fill(1, torch.tensor([token]), 0.0))

    def in_steps(changed: Piece, usual: Piece, axis: int) -> Piece:
        def run(w: Weights, i: int, *inputs: Tensor) -> Tensor:
            before, after = (piece.run(w, i, *inputs) for piece in (usual, changed))
            return torch.cat(
                [before.narrow(axis, 0, T), after.narrow(axis, T, after.shape[axis] - T)], axis
            )

        return Piece(usual.inputs, run)

    return {
        "probs": in_steps(pattern(split_k=without), GPT2["probs"], 2),
        "heads": in_steps(context(without), GPT2["heads"], 1),
    }
