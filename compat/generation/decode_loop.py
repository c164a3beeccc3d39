"""The loop around a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compat.decoding import Decoder, NotFiniteError, Rehearse


def rounds(
    decoder: Decoder,
    contexts: list[list[int]],
    choose: Callable[[Tensor, list[int]], Tensor],
    ends: Callable[[int, int], bool],
    rehearse: Rehearse | None = None,
) -> Iterator[dict[int, int]]:
    """The new id of every running sequence, {index: id}, round after round until all have ended.

    Args:
        decoder: starts on the contexts; a sequence that has ended leaves its batch.
        contexts: the ids of each sequence; they grow by the new ones.
        choose: from logits (B, V) and the indices of their B sequences to new ids (B,).
        ends: whether a sequence, by its index, ends with this id; asked after the id was yielded.
        rehearse: how the ids of a sequence alone will be chosen.

    Raises:
        GenerationError: logits that are not finite; it names the first layer with such values.
    """
    live = list(range(len(contexts)))
    logits = decoder.start(contexts, rehearse if len(contexts) == 1 else None)
    while True:
        try:
            ids = choose(logits, live)
        except NotFiniteError:
            row = int(torch.isfinite(logits).all(dim=1).int().argmin())
            raise NotFiniteError(decoder.why_not_finite(contexts[live[row]])) from None
        found = dict(zip(live, ids.tolist(), strict=True))
        for i, token_id in found.items():
            contexts[i].append(token_id)
        yield found
        going = [row for row, (i, token_id) in enumerate(found.items()) if not ends(i, token_id)]
        if not going:
            return
        if len(going) < len(live):
            rows = torch.tensor(going, device=ids.device)
            decoder.keep(rows)
            live, ids = [live[row] for row in going], ids[rows]
        logits = decoder.step(ids)
