"""The parity check: run the model and the reference, compare, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.config import HALF, as_dtype, dtype_name
from compat.decoding import HasDecoder
from compat.dialects import dialect_of
from compat.errors import CompatError, NameMapError, ParityError, described, short_repr
from compat.export_view import hf_tensors, map_of
from compat.layers import as_ids
from compat.loading import load_pretrained
from compat.name_map import NameMap
from compat.parity.compare import Difference, difference, position_errors
from compat.parity.decoded import prove_decoder
from compat.parity.expected import ExpectedLogits
from compat.parity.functions import FunctionModule
from compat.parity.gradients import prove_gradients
from compat.parity.logits import prove_logits
from compat.parity.outputs import find_logits
from compat.parity.reference import LARGE, Reference, SharedReference
from compat.parity.report import InputResult, ParityReport, WeightDifference
from compat.parity.trace import record
from compat.sharding import reshard
from compat.tap import Tap, expand_taps
from compat.tokenizer import load_tokenizer
from compat.validation import as_module

LENGTH, LENGTH_OF_LARGE = 128, 32  # random ids; traces are then small beside the weights
EMBEDDED_AT_ONCE = 8192  # ids whose embeddings are compared at once
MAX_EMBEDDING_ROUNDINGS = 4  # largest error of an id's embedding that passes, in epsilon


def check_parity(
    model_or_dialect: nn.Module | HasDecoder | Callable[[Any], Any] | str,
    source: Source,
    *,
    input_ids: object = None,
    text: str | None = None,
    dtype: torch.dtype | str | None = None,
    calibrate: bool | None = None,
    taps: Sequence[Tap] | None = None,
    attention: Literal["eager", "sdpa"] = "eager",
    gradients: bool = False,
    name_map: NameMap | None = None,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
) -> ParityReport:
    """Compare a model with `transformers` on the CPU: hidden states at its taps, and logits.

    Hidden states are compared on one input. Logits are also compared on a designed set of inputs:
    the full context, single ids, several batch sizes, special ids, repeated calls, with and without
    gradients, and inputs derived from the conditions in the model's code. A model in half precision
    is compared a second time with its parameters in float32, where rounding hides no mistakes.

    Args:
        model_or_dialect: the name of a dialect, which is loaded from the checkpoint; or a model
            with the checkpoint's weights, which runs in its current mode and without the wrapper of
            `torch.compile`; or an `Engine` or `PlainBlocks`, whose logits of prefill and of every
            decode step are compared. The bound of an int8 engine is based on the error that
            rounding the weights to 8 bits causes in the reference. Or any function of ids, a NumPy
            array (B, T), that returns logits, or arrays by tap with "logits" among them, from
            NumPy, torch, JAX, or any library with `__array__` or `__dlpack__`.
        source: "demo", a hub id such as `gpt2`, a folder, a weights file, or a Checkpoint.
        input_ids: (B, T), a tensor, array or list, on which the taps are compared; by default
            `random_ids` of the checkpoint's vocabulary.
        text: the same as text, encoded by the checkpoint's tokenizer.
        dtype: the data type of both models, such as torch.float16 or "float16"; None means the
            model's, or the checkpoint's for a dialect.
        calibrate: False judges hidden states by a fixed number of roundings instead of against a
            float64 run of the reference. Logits are always judged against float64.
        taps: where the model's hidden states are recorded, see `Tap`. By default those of a
            dialect, and the logits alone for other models.
        attention: the attention implementation of the reference, "eager" or "sdpa"; the latter
            returns no `probs`.
        gradients: compare the gradient of the next-token loss by every parameter too, for a model
            in half precision with its parameters in float32. Both models then need memory for their
            gradients, and the reference also for float64 gradients.
        name_map: which parameters hold which tensor, such as `adapt(model, source).name_map`. The
            gradients of a model that is not a dialect's are compared by it, and if the check fails,
            its weights with the checkpoint's.
        revision, verify, n_head: see `open_checkpoint`.

    Returns:
        The report, which is true if the model passed.

    Raises:
        ParityError: the comparison is not possible.
        CompatError: the checkpoint cannot be loaded.
    """
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    options = _Options(input_ids, text, dtype, gradients, calibrate, taps, attention, name_map)
    return _check(model_or_dialect, checkpoint, options, Reference)


def check_dialects(
    dialects: Iterable[str],
    checkpoint: Checkpoint,
    *,
    input_ids: object = None,
    text: str | None = None,
    dtype: torch.dtype | str | None = None,
    gradients: bool = False,
) -> Iterator[ParityReport]:
    """Yield the report of `check_parity` for each dialect; in float32 and float64 the reference
    is loaded once and runs once on each input. Arguments and errors are those of `check_parity`.
    """
    shared = cache(partial(SharedReference, checkpoint))

    def reference(checkpoint: Checkpoint, dtype: torch.dtype, *rest: Any) -> Reference:
        if dtype in HALF:  # the check changes its data type
            return Reference(checkpoint, dtype, *rest)
        return shared(dtype, *rest)

    options = _Options(input_ids, text, dtype, gradients)
    for dialect in dialects:
        yield _check(dialect, checkpoint, options, reference)


@dataclass(frozen=True)
class _Options:
    """The arguments of `check_parity` after the source."""

    input_ids: object
    text: str | None
    dtype: torch.dtype | str | None
    gradients: bool
    calibrate: bool | None = None
    taps: Sequence[Tap] | None = None
    attention: Literal["eager", "sdpa"] = "eager"
    name_map: NameMap | None = None


def _check(
    model_or_dialect: object,
    checkpoint: Checkpoint,
    options: _Options,
    load_reference: Callable[..., Reference],
) -> ParityReport:
    """Check parity with a reference that `load_reference` returns for its arguments."""
    dtype, model, name_map = as_dtype(options.dtype), model_or_dialect, options.name_map
    if isinstance(model, str):
        model = load_pretrained(checkpoint, model, dtype=dtype)
    run: Callable[[Reference], ParityReport]
    module: object
    if isinstance(model, nn.Module):
        model = as_module(model)
        module, dtype = model, _dtype_of(model, dtype)
        ids = checked_ids(checkpoint, options.input_ids, options.text)
        if options.gradients and name_map is None and dialect_of(model) is None:
            raise ParityError(
                f"gradients=True needs to know which parameters of {type(model).__name__} hold "
                "which tensor. Pass name_map=adapt(model, source).name_map."
            )
        trained = map_of(model, name_map) if options.gradients else None
        run = partial(_report_on_module, model, options.taps, ids, trained)
    elif options.gradients and isinstance(model, HasDecoder):
        raise ParityError(
            f"{type(model).__name__} has no gradients to compare. Pass the nn.Module instead."
        )
    elif isinstance(model, HasDecoder):
        module = getattr(model, "model", None)  # of PlainBlocks; an Engine has packed weights
        precision = _precision(model)
        dtype = torch.float32 if precision == "int8" else getattr(torch, precision)
        run = partial(_report_on_decoder, model)
    elif callable(model) and not isinstance(model, type):
        module, dtype = None, dtype or torch.float32
        ids = checked_ids(checkpoint, options.input_ids, options.text)
        run = partial(_report_on_function, model, ids)
    else:
        raise ParityError(
            f"model_or_dialect is {described(model)}, but must be a dialect's name, an nn.Module "
            "with the checkpoint's weights, an Engine, PlainBlocks, or a function of ids."
        )
    calibrate = options.calibrate is not False
    reference = load_reference(checkpoint, dtype, calibrate, options.attention)
    report = run(reference)
    if isinstance(module, nn.Module) and dtype in HALF:
        reference.to_float32()
        with converted(module):
            report = replace(report, float32=run(reference))
    if isinstance(module, nn.Module):
        reshard(module)
    if isinstance(model, nn.Module) and not report.passed:
        with suppress(NameMapError):  # the model has no name map, or other parameters
            report = replace(report, weights=weight_differences(model, name_map, checkpoint))
    return report


def _report_on_module(
    model: nn.Module,
    taps: Sequence[Tap] | None,
    ids: Tensor,
    name_map: NameMap | None,
    reference: Reference,
) -> ParityReport:
    """Compare taps and logits in the data type of both; in half precision on short inputs only."""
    config, dialect = reference.checkpoint.config, dialect_of(model)
    is_default = taps is None and dialect is None
    if taps is None:
        taps = dialect.taps if dialect else [Tap("logits", "")]
    available = {tap.name for tap in reference.taps}
    taps = [tap for tap in expand_taps(taps, config.n_layer) if tap.name in available]
    has_logits_tap = True  # the output itself is the logits of all positions, which a tap requires

    def find(output: Any, ids: Tensor) -> Tensor:
        nonlocal has_logits_tap
        first = output[0] if isinstance(output, tuple) and output else output
        has_shape = isinstance(first, Tensor) and first.shape[:-1] == ids.shape
        has_logits_tap = has_logits_tap and has_shape
        return _logits_in(output, ids, config.vocab_size)

    half = reference.dtype in HALF
    proof = prove_logits(model, reference, find=find, extent="short" if half else "all")
    if is_default and not has_logits_tap:
        taps = []
    if taps and taps[0].name == "embed" and not half:
        proof.embedding = _compare_every_embedding(model, taps[0], reference)
        proof.ids_tried = config.vocab_size
    trained = None
    if name_map is not None and not half:
        trained = prove_gradients(
            model, reference, name_map, ids, lambda ids: find(model(ids), ids)
        )
    return reference.report(
        dialect.name if dialect else type(model).__name__,
        ids,
        [tap.name for tap in taps],
        lambda forced: record(model, taps, ids, forced=forced),
        proof,
        training=model.training,
        gradients=trained,
    )


def _report_on_function(
    function: Callable[[Any], Any], ids: Tensor, reference: Reference
) -> ParityReport:
    """Compare the logits of a function, and the taps that it returns for the ids."""
    model = FunctionModule(function)
    expected, _ = reference.trace(ids)
    found = model.trace(ids, expected)
    proof = prove_logits(
        model,
        reference,
        find=partial(_logits_in, vocab_size=reference.checkpoint.config.vocab_size),
        extent="short" if reference.dtype in HALF else "all",
    )
    name = getattr(function, "__name__", type(function).__name__)
    return reference.report(name, ids, list(found), lambda forced: found, proof, forced=False)


def _report_on_decoder(model: HasDecoder, reference: Reference) -> ParityReport:
    """Compare the logits of prefill and of decode steps."""
    precision = _precision(model)
    cost = reference.quantization_error() if precision == "int8" else None
    proof = prove_decoder(model, ExpectedLogits(reference, cost))
    name, shape = f"{type(model).__name__}({precision})", proof.inputs[0].input_shape
    report = reference.report(name, torch.empty(shape), [], lambda forced: {}, proof)
    if cost is None:
        return report
    errors = [result.logits.error for result in proof.inputs if result.logits is not None]
    note = (
        f"The engine's error at the worst position is {max(errors, default=math.nan):.2g} of the "
        f"logits. Its bound is based on the quantization error of the reference, "
        f"{cost:.2g}, measured by rounding the reference's weights to 8 bits."
    )
    return replace(report, dtype=precision, notes=[*report.notes, note])


def _precision(model: HasDecoder) -> str:
    """Return the data type of a decoder's weights, such as "int8"."""
    module = getattr(model, "model", None)
    if isinstance(module, nn.Module):
        return dtype_name(_dtype_of(module, None))
    precision: str = getattr(model, "dtype", "float32")
    return precision


def _logits_in(output: Any, ids: Tensor, vocab_size: int) -> Tensor:
    """Return the logits of all positions or, as nanoGPT returns them, of the last one only."""
    try:
        return find_logits(output, ids, vocab_size=vocab_size)
    except CompatError:
        with suppress(CompatError):
            return find_logits(output, ids, last=True, vocab_size=vocab_size)
        raise


def _compare_every_embedding(model: nn.Module, tap: Tap, reference: Reference) -> InputResult:
    """Compare the hidden states that enter the first block, for every id of the vocabulary."""
    config, name = reference.checkpoint.config, "the embedding of every id"
    N, V = config.n_positions, config.vocab_size
    B = -(-V // N)
    ids = (torch.arange(B * N) % V).view(B, N)
    worst = torch.zeros(3, dtype=torch.float64)
    identical = True
    for part in torch.split(ids, max(1, EMBEDDED_AT_ONCE // N)):
        ours = record(model, [tap], part, stop_early=True)[tap.name]
        theirs = reference.embedding(part)
        if ours.shape != theirs.shape:
            error = (
                f"the embedding has shape {list(ours.shape)}, but must have {list(theirs.shape)}"
            )
            return InputResult(name, (B, N), error=error)
        worst = torch.maximum(worst, position_errors(ours, theirs, theirs))
        identical = identical and torch.equal(ours, theirs)
    max_abs, rel_rms, _ = worst.tolist()
    bound = MAX_EMBEDDING_ROUNDINGS * torch.finfo(reference.dtype).eps
    found = Difference(max_abs, rel_rms, identical, None, rel_rms, bound, rel_rms <= bound)
    return InputResult(name, (B, N), found)


def weight_differences(
    model: nn.Module, name_map: NameMap | None, checkpoint: Checkpoint
) -> list[WeightDifference]:
    """Return the checkpoint's tensors whose values differ in the model, largest difference first.

    The checkpoint's values are rounded to the model's data type first.

    Raises:
        NameMapError: the map does not fit the model, or there is none.
        CheckpointError: a tensor has NaN or infinite values.
    """
    found = []
    for name, held in hf_tensors(model, name_map).items():
        if name in checkpoint.infos:
            ours, stored = held.view(), checkpoint.read(name)
            part = tuple(slice(n) for n in ours.shape)  # of a model with fewer positions
            theirs = stored.to(ours.dtype)[part]
            if ours.shape == theirs.shape and not torch.equal(ours, theirs):
                measured = difference(ours, theirs, None, None)
                found.append(WeightDifference(name, measured.max_abs, measured.rel_rms))
    return sorted(found, key=lambda each: -each.rel_rms)


@contextmanager
def converted(
    model: nn.Module, dtypes: Collection[torch.dtype] = HALF, to: torch.dtype = torch.float32
) -> Iterator[None]:
    """Convert a model's parameters and buffers of some types to another type for the block.

    The parameters stay the same objects, so that closures, hooks and ties keep working. Values that
    are written into them in the block are rounded to the data type that they had.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in dtypes]
    try:
        for tensor, data in before:
            tensor.data = data.to(to)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data.copy_(tensor.data)


def random_ids(
    checkpoint: Checkpoint, seed: int = 0, batch: int = 2, length: int | None = None
) -> Tensor:
    """Return uniformly random ids (batch, length).

    Args:
        checkpoint: states the vocabulary and the number of positions.
        seed: the seed of the random number generator.
        batch: the number of sequences.
        length: ids in each; by default 128, or 32 for models of 500M parameters and more, and at
            most `n_positions`.

    Raises:
        ParityError: the batch or the length is not an integer of 1 or more, or the length is larger
            than `n_positions`.
    """
    config, generator = checkpoint.config, torch.Generator().manual_seed(seed)
    if length is None:
        count = sum(math.prod(info.shape) for info in checkpoint.infos.values())
        length = min(LENGTH if count < LARGE else LENGTH_OF_LARGE, config.n_positions)
    if type(batch) is not int or batch < 1:
        raise ParityError(f"batch is {short_repr(batch)}, but must be an integer of 1 or more.")
    if type(length) is not int or not 1 <= length <= config.n_positions:
        raise ParityError(
            f"length is {short_repr(length)}, but must be an integer from 1 to "
            f"{config.n_positions}, the number of positions of the model."
        )
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def _dtype_of(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    """Return the data type that all of the model's parameters have."""
    found = {p.dtype for p in model.parameters()}
    if not found:
        raise ParityError(
            f"{type(model).__name__} has no parameters, so it has no weights to compare. Pass a "
            "model with a checkpoint's weights, or a dialect's name."
        )
    if len(found) != 1 or (wanted is not None and wanted not in found):
        raise ParityError(
            f"the model's parameters are {', '.join(sorted(map(str, found)))}, but all must "
            f"be {wanted or 'of one data type'}. Convert the model first, as with model.float()."
        )
    return found.pop()


def checked_ids(checkpoint: Checkpoint, input_ids: object, text: str | None) -> Tensor:
    """Return the ids (B, T) on which the taps are compared."""
    if input_ids is not None and text is not None:
        raise ParityError("both input_ids and text were passed. Pass one of them.")
    if text is not None:
        input_ids = torch.tensor([load_tokenizer(checkpoint).encode(text)], dtype=torch.long)
    if input_ids is None:
        input_ids = random_ids(checkpoint)
    config = checkpoint.config
    ids = as_ids(input_ids, config.vocab_size, ParityError)
    if ids.shape[1] > config.n_positions:
        raise ParityError(
            f"input_ids have shape {list(ids.shape)}, but must have (B, T) with T from 1 "
            f"to {config.n_positions}. Pass shorter sequences."
        )
    return ids
