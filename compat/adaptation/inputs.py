"""How a user's model is called, and on which ids it is examined."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor, nn
from torch.nn import functional as F

from compat.adaptation.part import takes_hidden_states
from compat.adaptation.tracing.calling import (
    CallSignature,
    Convert,
    NoLogitsError,
    batch_sizes,
    describe_error,
    find_signature,
    plain_kernels,
    required_arguments,
)
from compat.checkpoint import Checkpoint
from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.parity.check import random_ids
from compat.user_models.eval_mode import eval_mode

# The number of logits up to which a model is called on as many sequences as it expects.
MOST_LOGITS = 500_000_000

# Ids, how many sequences of them are passed at once, and what converts them; see `find_signature`.
Inputs = tuple[Tensor, int | None, Convert | None]


def find_call(
    model: nn.Module, checkpoint: Checkpoint, ids: Tensor
) -> tuple[CallSignature, Tensor]:
    """Return how to call the model, and on which ids.

    If these ids fail, the model is called on full length, on ids below 16 that every table has,
    also of full length, on a length that the error names, on 32-bit ids, on ids that are
    floating-point numbers, on one-hot vectors, on ids (T, B) if it then returns logits (B, V), on
    one sequence without the axis of the batch, and on the numbers of sequences that it may expect,
    also of full length.

    Raises:
        AdaptError: none of them works.
    """
    try:
        return find_signature(model, ids), ids
    except AdaptError as error:
        config = checkpoint.config
        if takes_hidden_states(model, config):
            raise AdaptError(
                f"{type(model).__name__} takes hidden states (B, T, C), not ids. Pass which part "
                'of a GPT-2 it is, part="h.0.attn" or --part h.0.attn. The parts are h.0, '
                "h.0.attn, h.0.mlp, h.0.ln_1, h.0.ln_2 and ln_f"
            ) from None
        full_length = random_ids(checkpoint, 0, 2, config.n_positions)

        def one_hot(ids: Tensor) -> Tensor:
            return F.one_hot(ids, config.vocab_size).to(next(iter(model.parameters())).dtype)

        others: list[Inputs]
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        few = min([16, *filter(None, tables)])
        others = [(each, None, None) for each in (full_length, ids % few, full_length % few)]
        mismatches = re.findall(r"size of tensor \w \((\d+)\)|\bsize (\d+)\b", str(error))
        lengths = dict.fromkeys(
            int(number) for pair in mismatches for number in pair if int(number or 0)
        )
        others += [
            (random_ids(checkpoint, 0, 2, length), None, None) for length in lengths
            if length < config.n_positions and length not in _sizes(config)
        ]  # fmt: skip
        others += [(ids, None, convert) for convert in (Tensor.int, Tensor.float, one_hot)]
        if found := _first_signature(model, others):
            return found
        with suppress(AdaptError):
            time_first = find_signature(model, ids, time_first=True)
            if time_first.last:  # logits (B, V), which a model of one sequence does not return
                return time_first, ids
        others = [(ids, 0, None), (full_length, 0, None)]
        for rows in batch_sizes(model):
            if rows * config.n_positions * config.vocab_size < MOST_LOGITS:
                full_length = random_ids(checkpoint, 0, rows, config.n_positions)
                others += [(full_length[:, : ids.shape[1]], rows, None), (full_length, rows, None)]
        if found := _first_signature(model, others):
            return found
        if isinstance(error, NoLogitsError) and not required_arguments(model):
            try:
                with eval_mode(model), plain_kernels():
                    CallSignature()(model, random_ids(checkpoint, 0, 2, config.n_positions))
            except Exception as longer:
                text = f"model(ids) with {config.n_positions} ids: {describe_error(longer)}"
                raise NoLogitsError(model, [*error.tried, text]) from None
        raise


def _first_signature(
    model: nn.Module, others: Sequence[Inputs]
) -> tuple[CallSignature, Tensor] | None:
    """Return the first signature that works with one of these inputs, and its ids."""
    for ids, rows, convert in others:
        with suppress(AdaptError):
            return find_signature(model, ids, rows, convert), ids
    return None


def _sizes(config: GPT2Config) -> set[int]:
    """Return the lengths of axes that are not those of the positions."""
    return {
        1, 2, config.n_head, config.n_embd, config.d_head, config.d_inner, config.vocab_size,
        config.n_layer, 3, 3 * config.n_embd, 3 * config.d_head, 2 * config.n_head,
    }  # fmt: skip


def example_length(config: GPT2Config, least: int = 0) -> int:
    """Return a length that no other axis of the model has, so that it identifies the axis."""
    sizes = _sizes(config)
    for length in range(least, config.n_positions) if least else (13, 11, 17, 19, 7, 5, 23):
        if length not in sizes and length <= config.n_positions:
            return length
    return min(least or 9, config.n_positions)
