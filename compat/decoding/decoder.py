"""The interface of all decoders: logits from prefill and decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Protocol, runtime_checkable

from torch import Tensor, tensor

from compat.config import GPT2Config
from compat.errors import GenerationError, described, short_repr

# Chooses a token from logits (1, V) and the previous tokens, in the same way as the caller.
# `PreviewSampling` returns such a function with a copy of the caller's random generator.
Choose = Callable[[Tensor, Sequence[int]], int]
PreviewSampling = Callable[[], Choose]


class Decoder(Protocol):
    """A batch of sequences that grow by one token at a time. Its state is a KV cache."""

    @property
    def config(self) -> GPT2Config:
        """The model's config."""

    def start(
        self, prompts: Sequence[Sequence[int]], preview_sampling: PreviewSampling | None = None
    ) -> Tensor:
        """Prefill: start a new batch.

        Args:
            prompts: the token ids of each sequence, of any lengths.
            preview_sampling: predicts the tokens that the caller will choose, for speculative
                decoding of a single sequence. By default, drafts are chosen greedily.

        Returns:
            float32 logits (B, V) of the token after each prompt.
        """

    def step(self, ids: Tensor) -> Tensor:
        """Decode step: append tokens (B,) and return float32 logits (B, V) of the next ones."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, in this order."""

    def why_not_finite(self, context: Sequence[int]) -> str:
        """Return the error message that names the first non-finite value of a forward pass."""


@runtime_checkable
class HasDecoder(Protocol):
    """A model that provides its own decoder."""

    def decoder(self) -> Decoder:
        """Return a new decoder with its own batch."""


def check_prompts(prompts: Sequence[Sequence[int]], max_batch: int | None = None) -> None:
    """Check the number and the lengths of prompts.

    Raises:
        GenerationError: the batch or a prompt is empty, or there are more than `max_batch` prompts.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise GenerationError(
            "a prompt is empty, but must have at least one token. Start from the end-of-text token."
        )
    if max_batch is not None and len(prompts) > max_batch:
        raise GenerationError(
            f"{len(prompts)} prompts were passed at once, but at most {max_batch} fit. Pass "
            "fewer, or build the engine with a larger max_batch."
        )


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Combine prompts of different lengths to one batch, with padding on the left.

    Args:
        prompts: the token ids of each prompt, B in all, the longest with T ids.
        pad_id: the token id at the padding, which the mask hides.

    Returns:
        The token ids (B, T) and the attention mask (B, T), which is 0 at the padding.

    Raises:
        GenerationError: the batch or a prompt is empty, or a value is not a token id.
    """
    try:
        rows, filler = [[index(i) for i in prompt] for prompt in prompts], index(pad_id)
    except TypeError:
        raise GenerationError(
            f"the prompts are {described(prompts)} and pad_id is {short_repr(pad_id)}, but must be "
            "lists of token ids and a token id, such as left_pad([[15, 7], [4]], pad_id=0)"
        ) from None
    check_prompts(rows)
    T = max(map(len, rows))
    ids = tensor([[filler] * (T - len(row)) + row for row in rows])
    mask = tensor([[0] * (T - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
