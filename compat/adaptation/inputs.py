"""How a user's model is called, and on which ids it is examined."""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import process_time

from torch import Tensor, nn
from torch.nn import functional as F

from compat.adaptation.part import takes_hidden_states
from compat.adaptation.tracing.calling import (
    MASK_MULTIPLE,
    CallSignature,
    NoLogitsError,
    batch_sizes,
    find_signature,
    one_more,
    only_row,
    setup_methods,
)
from compat.adaptation.tracing.flex_attention import plain_flex_attention
from compat.checkpoint import Checkpoint
from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.parity.check import random_ids
from compat.user_models.accelerators import needs_a_device
from compat.user_models.target import finding_modules
from compat.user_models.usage import users_folders

# The processor time after which a model whose calls fail is not called in further ways: on other
# ids, and on the same ids where a model is one of many.
MOST_SECONDS = 60
MOST_SECONDS_OF_ONE = 5
# The number of logits up to which a model is called on as many sequences as it expects.
MOST_LOGITS = 500_000_000


def find_call(
    model: nn.Module, checkpoint: Checkpoint, ids: Tensor
) -> tuple[CallSignature, Tensor]:
    """Return how to call the model, and on which ids.

    If a method imports a module that is not found, the call is repeated with the folders of its
    project on the import path. The module is kept, so that later calls find it.

    If these ids fail, the model is called on full length, on ids below 16 that every table has,
    also of full length, on a length that the error names or the model's masks have, on ids with
    one more at the end if the model returns logits for all but the last, on 32-bit ids, on ids that
    are floating-point numbers, on one-hot vectors, on ids (T, B) if it then returns logits (B, V),
    after a method of its own that makes masks, on one sequence without the axis of the batch, and
    on the numbers of sequences that it may expect, also of these lengths.

    Raises:
        AdaptError: none of them works.
    """
    try:
        return _find_call(model, checkpoint, ids)
    except AdaptError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
    with finding_modules(users_folders(type(model))):
        return _find_call(model, checkpoint, ids)


def can_be_called(model: nn.Module, checkpoint: Checkpoint) -> bool:
    """Return whether one of the likeliest calls returns logits, or fails for lack of a device.

    They pass a few ids, a full context, and a full context without the axis of the batch.
    """
    full_length = random_ids(checkpoint, length=checkpoint.config.n_positions)
    alone = CallSignature(rows=1, convert=only_row)
    calls = [(full_length[:, :6], CallSignature()), (full_length, CallSignature())]
    for ids, form in (*calls, (full_length[:1], alone)):
        try:
            with plain_flex_attention():
                find_signature(model, ids, form, MOST_SECONDS_OF_ONE)
            return True
        except Exception as error:
            if needs_a_device(error):
                return True
    return False


def _find_call(
    model: nn.Module, checkpoint: Checkpoint, ids: Tensor
) -> tuple[CallSignature, Tensor]:
    try:
        return find_signature(model, ids), ids
    except AdaptError as error:
        if takes_hidden_states(model, checkpoint.config):
            raise AdaptError(
                f"{type(model).__name__} takes hidden states (B, T, C), not ids. Pass which part "
                'of a GPT-2 it is, part="h.0.attn" or --part h.0.attn. The parts are h.0, '
                "h.0.attn, h.0.mlp, h.0.ln_1, h.0.ln_2 and ln_f"
            ) from None
        # What the calls with the full length raise, and those with one sequence.
        longer, alone = list[str](), list[str]()
        end = process_time() + MOST_SECONDS
        for other, form in _other_inputs(model, checkpoint, ids, error):
            if process_time() > end:
                break
            try:
                found = find_signature(model, other, form)
                # A model of one sequence does not return logits (B, V) for ids (T, B).
                if found.last or not form.time_first:
                    return found, other
            except NoLogitsError as failure:
                if needs_a_device(failure):
                    raise
                if form.rows == 0 or form.convert is only_row:
                    alone = _told(failure, f"{other.shape[1]} ids (T,)")
                longer = longer or _told(failure, f"{other.shape[1]} ids")
            except AdaptError:  # a missing library
                continue
        if isinstance(error, NoLogitsError):
            raise NoLogitsError(model, [*error.tried, *longer, *alone]) from None
        raise


def _told(failure: NoLogitsError, ids: str) -> list[str]:
    """Return the calls that failed, and on which ids."""
    return [text.replace("): ", f") with {ids}: ", 1) for text in failure.tried]


def _other_inputs(
    model: nn.Module, checkpoint: Checkpoint, ids: Tensor, error: AdaptError
) -> Iterator[tuple[Tensor, CallSignature]]:
    """Yield ids and the form in which they are passed, for a model that these ids fail with."""
    config, plain = checkpoint.config, CallSignature()
    full_length = random_ids(checkpoint, 0, 2, config.n_positions)

    def one_hot(ids: Tensor) -> Tensor:
        return F.one_hot(ids, config.vocab_size).to(next(iter(model.parameters())).dtype)

    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    few = min([16, *filter(None, tables)])
    for each in (full_length, ids % few, full_length % few):
        yield each, plain
    mismatches = re.findall(r"size of tensor \w \((\d+)\)|\bsize (\d+)\b", str(error))
    named = {int(number) for pair in mismatches for number in pair if number}
    # A length that another axis has, such as 2 · n_head, comes last.
    candidates = [*sorted(named, key=_sizes(config).__contains__), *_lengths_of(model)]
    lengths = [n for n in dict.fromkeys(candidates) if 3 < n < config.n_positions]
    for length in lengths:
        yield random_ids(checkpoint, 0, 2, length), plain
    B, T = ids.shape
    # Such a model may compute the loss itself, and return it without the logits.
    if re.search(rf"returned (\[{B}, {T - 1}, |\[\](, \[\])* for)", str(error)):
        yield ids, CallSignature(convert=one_more)
    for convert in (Tensor.int, Tensor.float, one_hot):
        yield ids, CallSignature(convert=convert)
    yield ids, CallSignature(time_first=True)
    for method in setup_methods(model):
        length = example_length(config, MASK_MULTIPLE, MASK_MULTIPLE)
        yield random_ids(checkpoint, 0, 2, length), CallSignature(setup=method)
    for each in (ids, full_length):
        yield each, CallSignature(rows=0)
    for each in (ids[:1], full_length[:1]):  # of code that vmap does not support
        yield each, CallSignature(rows=1, convert=only_row)
    for rows in batch_sizes(model):
        if rows * config.n_positions * config.vocab_size < MOST_LOGITS:
            full_length = random_ids(checkpoint, 0, rows, config.n_positions)
            for length in (ids.shape[1], config.n_positions, *lengths):
                yield full_length[:, :length], CallSignature(rows=rows)


def _lengths_of(model: nn.Module) -> list[int]:
    """Return the sizes of the model's square masks, which may be the only length that it takes."""
    shapes = [tuple(buffer.shape[-2:]) for buffer in model.buffers() if buffer.ndim > 1]
    return [rows for rows, columns in dict.fromkeys(shapes) if rows == columns]


def _sizes(config: GPT2Config) -> set[int]:
    """Return the lengths of axes that are not those of the positions."""
    return {
        1, 2, config.n_head, config.n_embd, config.d_head, config.d_inner, config.vocab_size,
        config.n_layer, 3, 3 * config.n_embd, 3 * config.d_head, 2 * config.n_head,
    }  # fmt: skip


def example_length(config: GPT2Config, least: int = 0, step: int = 1) -> int:
    """Return a length that no other axis of the model has, so that it identifies the axis."""
    sizes = _sizes(config)
    for length in range(least, config.n_positions, step) if least else (13, 11, 17, 19, 7, 5, 23):
        if length not in sizes and length <= config.n_positions:
            return length
    return min(least or 9, config.n_positions)
