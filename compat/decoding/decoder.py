"""What computes the logits, one id after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from compat.config import GPT2Config
from compat.errors import GenerationError, described, shown

# Logits (1, V) of the id after a text's ids → the id that will be chosen there. The function that
# gives it begins a rehearsal: what it draws is drawn again, in earnest, by whoever chooses.
Choose = Callable[[Tensor, Sequence[int]], int]
Rehearse = Callable[[], Choose]


class Decoder(Protocol):
    """A batch of sequences that grows by an id each at a time; its state is the cache."""

    @property
    def config(self) -> GPT2Config:
        """Of the model."""

    def start(self, prompts: Sequence[Sequence[int]], rehearse: Rehearse | None = None) -> Tensor:
        """Begin a new batch: float32 logits (B, V) of the id after each prompt, of any lengths.

        `rehearse` tells how the ids of a sequence alone will be chosen, to those who guess ahead.
        """

    def step(self, ids: Tensor) -> Tensor:
        """Add an id to each sequence, (B,): float32 logits (B, V) of the id after it."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch alone, in this order."""

    def why_not_finite(self, context: Sequence[int]) -> str:
        """Where the first value comes up that is not finite, in words."""


@runtime_checkable
class HasDecoder(Protocol):
    """A model with a way of its own to decode."""

    def decoder(self) -> Decoder:
        """A decoder with a batch of its own."""


def check_prompts(prompts: Sequence[Sequence[int]], most: int | None = None) -> None:
    """Refuse an empty batch, an empty prompt, and more prompts than there is room for.

    Raises:
        GenerationError: one of these.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise GenerationError("a prompt is empty; start from the end-of-text id instead")
    if most is not None and len(prompts) > most:
        raise GenerationError(f"{len(prompts)} prompts at once; this engine has room for {most}")


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Unequal prompts as one batch: ids (B, T) and attention mask (B, T), 0 at the padding.

    Raises:
        GenerationError: no prompt, an empty one, or one that is not made of token ids.
    """
    try:
        rows, filler = [[index(i) for i in prompt] for prompt in prompts], index(pad_id)
    except TypeError:
        raise GenerationError(
            f"the prompts are {described(prompts)} and pad_id is {shown(pad_id)}; expected lists "
            "of token ids and a token id, such as left_pad([[15, 7], [4]], pad_id=0)"
        ) from None
    check_prompts(rows)
    T = max(map(len, rows))
    ids = torch.tensor([[filler] * (T - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
