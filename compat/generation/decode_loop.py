"""The loop of decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compat.decoding import Decoder, NotFiniteError, PreviewSampling


def decode_loop(
    decoder: Decoder,
    contexts: list[list[int]],
    choose: Callable[[Tensor, list[int]], Tensor],
    ends: Callable[[int, int], bool],
    preview_sampling: PreviewSampling | None = None,
) -> Iterator[dict[int, int]]:
    """Yield the new token of every running sequence, {index: id}, until all sequences have ended.

    Args:
        decoder: starts on the contexts. A sequence that has ended leaves its batch.
        contexts: token ids of each sequence, to which the new ones are appended.
        choose: returns new ids (B,) for logits (B, V) and the indices of their B sequences.
        ends: whether a sequence, by its index, ends with this id. Called after the id was yielded.
        preview_sampling: predicts how the tokens of a single sequence will be chosen.

    Raises:
        GenerationError: logits are non-finite. The message names the first layer with such values.
    """
    live = list(range(len(contexts)))
    logits = decoder.start(contexts, preview_sampling if len(contexts) == 1 else None)
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
        running = [row for row, (i, token_id) in enumerate(found.items()) if not ends(i, token_id)]
        if not running:
            return
        if len(running) < len(live):
            rows = torch.tensor(running, device=ids.device)
            decoder.keep(rows)
            live, ids = [live[row] for row in running], ids[rows]
        logits = decoder.step(ids)
