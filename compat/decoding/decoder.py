"""The interface of all decoders: logits, one decode step after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Protocol, runtime_checkable

from torch import Tensor, tensor

from compat.config import GPT2Config
from compat.errors import GenerationError, described, short_repr

# Chooses a token from logits (1, V) and the tokens before it, as the caller will choose it.
# `PreviewSampling` returns a function that draws ahead. The caller draws the same numbers again.
Choose = Callable[[Tensor, Sequence[int]], int]
PreviewSampling = Callable[[], Choose]


class Decoder(Protocol):
    """A batch of sequences that grow by one token at a time. Its state is the KV cache."""

    @property
    def config(self) -> GPT2Config:
        """The model's config."""

    def start(
        self, prompts: Sequence[Sequence[int]], preview_sampling: PreviewSampling | None = None
    ) -> Tensor:
        """Prefill: begin a new batch.

        Args:
            prompts: token ids of each sequence, of any lengths.
            preview_sampling: how the tokens of a single sequence will be chosen, for drafts of
                speculative decoding. None: greedily.

        Returns:
            float32 logits (B, V) of the token after each prompt.
        """

    def step(self, ids: Tensor) -> Tensor:
        """Decode step: add a token to each sequence, (B,); float32 logits (B, V) of the next."""

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows of the batch only, in this order."""

    def why_not_finite(self, context: Sequence[int]) -> str:
        """A message that says where the first non-finite value of a forward pass appears."""


@runtime_checkable
class HasDecoder(Protocol):
    """A model that brings its own decoder."""

    def decoder(self) -> Decoder:
        """A decoder with a batch of its own."""


def check_prompts(prompts: Sequence[Sequence[int]], max_batch: int | None = None) -> None:
    """Refuse an empty batch, an empty prompt, and more prompts than `max_batch`.

    Raises:
        GenerationError: one of these.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise GenerationError(
            "a prompt is empty; at least one token is expected. Start from the end-of-text token."
        )
    if max_batch is not None and len(prompts) > max_batch:
        raise GenerationError(
            f"{len(prompts)} prompts were passed at once; this decoder has room for {max_batch}. "
            "Pass fewer, or build the engine with a larger max_batch."
        )


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Make one batch of prompts of different lengths, with padding on the left.

    Returns:
        Token ids (B, T) and the attention mask (B, T), which is 0 at the padding.

    Raises:
        GenerationError: no prompt, an empty one, or one that is not made of token ids.
    """
    try:
        rows, filler = [[index(i) for i in prompt] for prompt in prompts], index(pad_id)
    except TypeError:
        raise GenerationError(
            f"the prompts are {described(prompts)} and pad_id is {short_repr(pad_id)}; expected "
            "lists of token ids and a token id, such as left_pad([[15, 7], [4]], pad_id=0)"
        ) from None
    check_prompts(rows)
    T = max(map(len, rows))
    ids = tensor([[filler] * (T - len(row)) + row for row in rows])
    mask = tensor([[0] * (T - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
