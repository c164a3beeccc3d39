"""The parity check: run both models, compare every tap, report."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.config import as_dtype
from compat.decoding import HasDecoder
from compat.dialects import dialect_of
from compat.errors import CompatError, ParityError, short_repr
from compat.layers import as_ids
from compat.loading import load_pretrained
from compat.parity.compare import Difference, TapResult, compare
from compat.parity.decoded import prove_decoder
from compat.parity.inputs import sequences
from compat.parity.logits import (
    InputResult,
    KnownLogits,
    LogitsProof,
    position_errors,
    prove_logits,
)
from compat.parity.outputs import find_logits
from compat.parity.pristine import check_reference, reference_errors, replaced, true_logits
from compat.parity.report import ParityReport
from compat.parity.trace import Trace, trace, trace_one
from compat.taps import Tap, expand_taps
from compat.tokenizer import load_tokenizer

LARGE = 500_000_000  # parameters; from there on float64 weights exist one matrix at a time
LENGTH, LENGTH_OF_LARGE = 128, 32  # of random ids; traces stay small beside the weights
EMBEDDED_AT_ONCE = 8192  # ids whose embeddings are compared at once
EVERY_ID = "the embedding of every id"
HALF = (torch.bfloat16, torch.float16)


def check_parity(
    model_or_dialect: nn.Module | HasDecoder | str,
    source: Source,
    *,
    input_ids: object = None,
    text: str | None = None,
    dtype: torch.dtype | str | None = None,
    calibrate: bool | None = None,
    taps: Sequence[Tap] | None = None,
    attention: Literal["eager", "sdpa"] = "eager",
    revision: str | None = None,
) -> ParityReport:
    """Compare a model with `transformers` on the CPU: hidden states at every tap, and logits.

    Hidden states are compared on one input, logits on a designed set of inputs as well: the full
    context, single ids, several batch sizes, special ids, repeated calls, with and without
    gradients, and whatever the conditions in the model's code ask for. A model in half precision is
    judged a second time with its parameters in float32, where rounding hides no fault.

    Args:
        model_or_dialect: a dialect's name, loaded here; or a model that has the weights already,
            run in the mode it is in; or an `Engine` or `PlainBlocks`, of which the logits of
            prefill and of every decode step are compared. An int8 engine is judged by what
            rounding its weights to 8 bits costs the reference.
        source: the checkpoint, as in `load_pretrained`.
        input_ids: (B, T), a tensor, array or list, for the taps; by default `random_ids` of the
            checkpoint's vocabulary.
        text: instead of ids, encoded by the checkpoint's tokenizer.
        dtype: of both models, such as torch.float16 or "float16"; None takes the model's or the
            checkpoint's.
        calibrate: False judges hidden states by a fixed number of roundings instead of against a
            float64 run of the reference. Logits are judged against float64 in any case.
        taps: where the model shows its hidden states; a dialect knows its own, for other models the
            default is the logits alone. Logits are compared whatever the taps are.
        attention: "eager" or "sdpa", of the reference; the latter shows no `probs`.
        revision: branch, tag or commit on the hub.

    Raises:
        ParityError: the comparison cannot be made.
        CompatError: the checkpoint cannot be loaded.
    """
    checkpoint = (
        source if isinstance(source, Checkpoint) else open_checkpoint(source, revision=revision)
    )
    dtype = as_dtype(dtype)
    if isinstance(model_or_dialect, str):
        model_or_dialect = load_pretrained(checkpoint, model_or_dialect, dtype=dtype)
    if isinstance(model_or_dialect, HasDecoder):
        return _decoder_report(model_or_dialect, checkpoint)
    model = model_or_dialect
    if not isinstance(model, nn.Module):
        raise ParityError(
            f"check_parity got a {type(model).__name__}; expected a dialect's name, an nn.Module "
            "with the checkpoint's weights, an Engine or PlainBlocks"
        )
    dtype, ids = _dtype_of(model, dtype), _ids(checkpoint, input_ids, text)
    reference = Reference(checkpoint, dtype, calibrate is not False, attention)
    report = _report(model, reference, taps, ids)
    if dtype in HALF:
        reference.to_float32()
        with in_float32(model):
            report = replace(report, float32=_report(model, reference, taps, ids))
    return report


def _decoder_report(model: HasDecoder, checkpoint: Checkpoint) -> ParityReport:
    """Compare what a model with a decoder of its own generates by."""
    blocks = getattr(model, "model", None)
    if isinstance(blocks, nn.Module):  # of PlainBlocks
        precision = str(_dtype_of(blocks, None)).removeprefix("torch.")
    else:
        precision = getattr(model, "dtype", "float32")
    dtype = torch.float32 if precision == "int8" else getattr(torch, precision)
    reference = Reference(checkpoint, dtype)
    known = KnownLogits(reference, dtype)
    if precision == "int8":
        known.own_error = reference.quantization_error()
    most_rows = 1 if getattr(model, "speculate", None) else getattr(model, "max_batch", None)
    proof = prove_decoder(model, known, most_rows)
    name = f"{type(model).__name__}({precision})"
    report = reference.report(name, torch.zeros(1, 1), [], _no_taps, proof)
    report = replace(report, dtype=precision, input_shape=proof.inputs[0].input_shape)
    if precision == "int8":
        errors = [result.logits.error for result in proof.inputs if result.logits is not None]
        note = (
            f"the measured quantization error is {max(errors, default=math.nan):.2g} of the "
            f"logits at the worst position; rounding the weights alone to 8 bits costs the "
            f"reference {known.own_error:.2g}, by which the engine is judged"
        )
        report = replace(report, notes=[*report.notes, note])
    if isinstance(blocks, nn.Module) and dtype in HALF:
        reference.to_float32()
        with in_float32(blocks):
            proof = prove_decoder(model, KnownLogits(reference, torch.float32), most_rows)
        copy = replace(report, logits=proof, dtype="float32")
        report = replace(report, float32=copy)
    return report


def _no_taps(forced: Trace | None) -> Trace:
    return {}


def _report(
    model: nn.Module, reference: Reference, taps: Sequence[Tap] | None, ids: Tensor
) -> ParityReport:
    """Compare in the data type of both; in half precision logits on short inputs alone."""
    config = reference.checkpoint.config
    ours = _our_taps(model, taps, reference.taps, config.n_layer)
    dialect = dialect_of(model)

    hookable = True  # the output is what a tap can show: logits of all positions

    def find(output: Any, ids: Tensor) -> Tensor:
        nonlocal hookable
        first = output[0] if isinstance(output, tuple) and output else output
        hookable = hookable and isinstance(first, Tensor) and first.shape[:-1] == ids.shape
        return _logits_in(output, ids, config.vocab_size)

    half = reference.dtype in HALF
    proof = prove_logits(
        model, model, reference, config, reference.dtype, short_only=half, find=find
    )
    if taps is None and dialect is None and not hookable:
        ours = []
    if ours and ours[0].name == "embed" and not half:
        proof.embedding = _embedding_of_every_id(model, ours[0], reference)
        proof.ids_tried = config.vocab_size
    return reference.report(
        dialect.name if dialect else type(model).__name__,
        ids,
        [tap.name for tap in ours],
        lambda forced: trace(model, ours, ids, forced=forced),
        proof,
        training=model.training,
    )


def _logits_in(output: Any, ids: Tensor, vocab_size: int) -> Tensor:
    """The logits of all positions or, as nanoGPT returns them, of the last one alone."""
    try:
        return find_logits(output, ids, vocab_size=vocab_size)
    except CompatError:
        with suppress(CompatError):
            return find_logits(output, ids, last=True, vocab_size=vocab_size)
        raise


def _embedding_of_every_id(model: nn.Module, tap: Tap, reference: Reference) -> InputResult:
    """Compare the hidden states that enter the first block, for every id of the vocabulary."""
    config = reference.checkpoint.config
    N, V = config.n_positions, config.vocab_size
    rows = -(-V // N)
    ids = (torch.arange(rows * N) % V).view(rows, N)
    worst = torch.zeros(3, dtype=torch.float64)
    identical = True
    for part in torch.split(ids, max(1, EMBEDDED_AT_ONCE // N)):
        ours, theirs = trace_one(model, tap, part), reference.embedding(part)
        if ours.shape != theirs.shape:
            error = f"the embedding has shape {list(ours.shape)}; expected {list(theirs.shape)}"
            return InputResult(EVERY_ID, (rows, N), None, error)
        worst = torch.maximum(worst, position_errors(ours, theirs, theirs))
        identical = identical and torch.equal(ours, theirs)
    max_abs, rel_rms, _ = worst.tolist()
    bound = 4 * torch.finfo(reference.dtype).eps
    found = Difference(max_abs, rel_rms, identical, None, rel_rms, bound, rel_rms <= bound)
    return InputResult(EVERY_ID, (rows, N), found)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """The model with its half-precision parameters and buffers in float32, afterwards as before.

    The parameters stay the same objects, so that closures, hooks and ties keep working. What is
    written into them meanwhile is rounded to the data type that they had.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in HALF]
    try:
        for tensor, data in before:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data.copy_(tensor.data)


def _count_run(runs: Counter[str], *_: object) -> None:
    runs["modules"] += 1


class Reference:
    """`transformers`' model of one checkpoint, in its data type and in float64, run when asked.

    Args:
        checkpoint: the weights.
        dtype: of the model.
        calibrate: whether hidden states are judged against a float64 run.
        attention: "eager" or "sdpa".
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        calibrate: bool = True,
        attention: Literal["eager", "sdpa"] = "eager",
    ) -> None:
        from compat.parity import reference as hf  # imports transformers, which takes seconds

        self.checkpoint, self.dtype, self._hf = checkpoint, dtype, hf
        self.weights_dtype = dtype  # to which the checkpoint's weights are rounded
        self.calibrate = calibrate
        self.taps = hf.taps(checkpoint.config.n_layer, attention)
        with reference_errors():
            self.model = hf.load_reference(checkpoint, dtype, attention)
            large = sum(p.numel() for p in self.model.parameters()) >= LARGE
            self.exact = hf.in_float64(self.model, by_module=large)
        self._last: tuple[Tensor, tuple[Trace, Trace | None]] | None = None
        self.runs = Counter[str]()
        # The hooks hold the counter alone: a reference to `self` would be a cycle, in which a whole
        # model stays in memory until Python's garbage collector happens to run.
        count = partial(_count_run, self.runs)
        for module in self.model.modules():
            module.register_forward_pre_hook(count)

    @property
    def modules_run(self) -> int:
        """How often a module of the reference ran; more often than the comparison itself causes,
        if a model takes its logits from the reference."""
        return self.runs["modules"]

    def to_float32(self) -> None:
        """Go on in float32, with the weights as they were rounded to the data type before."""
        self.model.float()
        self.dtype, self._last = torch.float32, None

    def trace(self, ids: Tensor) -> tuple[Trace, Trace | None]:
        """Every tap, in the model's data type and in float64; asked again, the same."""
        if self._last is not None and torch.equal(self._last[0], ids):
            return self._last[1]
        with self._hf.quiet(), reference_errors():
            exact = trace(self.exact, self.taps, ids) if self.calibrate else None
            self._last = ids, (trace(self.model, self.taps, ids), exact)
        return self._last[1]

    def logits(self, ids: Tensor, exact: bool = True) -> tuple[Tensor, Tensor | None]:
        """The logits alone, in the model's data type and, if `exact`, in float64 by NumPy.

        Raises:
            ParityError: the two do not agree, as where code of this process patched torch.
        """
        with self._hf.quiet(), reference_errors():
            with nullcontext() if exact else self._hf.fused_attention(self.model):
                found = trace(self.model, self.taps[-1:], ids)["logits"]
        if not exact:
            return found, None
        return found, true_logits(self.checkpoint, self.weights_dtype, ids, found)

    def confirm(self) -> None:
        """Compare the reference on a long sequence, if anything in this process is replaced.

        Raises:
            ParityError: the reference's logits are wrong; names what was replaced.
        """
        if replaced(kernels=False):
            config = self.checkpoint.config
            ids = sequences(config, config.n_positions)[0][None]
            found = {self.dtype: self.logits(ids, exact=False)[0]}
            check_reference(self.checkpoint, self.weights_dtype, [(ids, found)])

    def embedding(self, ids: Tensor) -> Tensor:
        """The hidden states (B, T, C) that enter the first block."""
        with self._hf.quiet():
            return trace_one(self.model, self.taps[0], ids)

    def quantization_error(self) -> float:
        """What rounding the weights to 8 bits costs the reference: the relative error of its
        logits at the worst position of the proof's short sequences."""
        config = self.checkpoint.config
        ids = torch.stack(sequences(config, config.n_positions)[1:])
        truth = self.logits(ids)[1]
        with self._hf.quiet():
            found = trace(self._hf.with_8_bit_weights(self.model), self.taps[-1:], ids)["logits"]
        assert truth is not None
        worst: float = ((found.double() - truth).norm(dim=-1) / truth.norm(dim=-1)).max().item()
        return worst

    def report(
        self,
        name: str,
        ids: Tensor,
        taps: Sequence[str],
        run: Callable[[Trace | None], Trace],
        proof: LogitsProof,
        training: bool = False,
    ) -> ParityReport:
        """Compare whatever `run` traces with the reference.

        Args:
            name: of the model that `run` runs.
            ids: (B, T).
            taps: those that `run` shows, in execution order.
            run: forced values for the taps, or None → a trace.
            proof: the comparison of that model's logits.
            training: whether that model is in training mode.
        """
        self.confirm()
        results: list[TapResult] = []
        if taps:
            expected, exact = self.trace(ids)
            given = {tap: expected[tap] for tap in taps}  # the borders of the model's pieces
            exact_local = None
            if exact is not None:
                with self._hf.quiet():
                    exact_local = trace(self.exact, self.taps, ids, forced=given)
            results = compare(expected, run(None), run(given), exact, exact_local)
        return ParityReport(
            model=self.checkpoint.source,
            dialect=name,
            dtype=str(self.dtype).removeprefix("torch."),
            input_shape=(ids.shape[0], ids.shape[1]),
            calibrated=self.calibrate,
            training=training,
            taps=results,
            versions=_versions(self._hf.VERSION),
            logits=proof,
            notes=self._hf.translation_notes(self.checkpoint),
        )


def random_ids(
    checkpoint: Checkpoint, seed: int = 0, batch: int = 2, length: int | None = None
) -> Tensor:
    """Uniformly random ids (batch, length).

    The default length is 128, or 32 for models of 500M parameters and more, or `n_positions` where
    that is less.

    Raises:
        ParityError: the batch or the length is not an integer of 1 or more, or the length is beyond
            `n_positions`.
    """
    config, generator = checkpoint.config, torch.Generator().manual_seed(seed)
    if length is None:
        count = sum(math.prod(info.shape) for info in checkpoint.infos.values())
        length = min(LENGTH if count < LARGE else LENGTH_OF_LARGE, config.n_positions)
    if type(batch) is not int or batch < 1:
        raise ParityError(f"batch is {short_repr(batch)}; expected an integer of 1 or more")
    if type(length) is not int or not 1 <= length <= config.n_positions:
        raise ParityError(
            f"length is {short_repr(length)}; expected an integer from 1 to {config.n_positions}, "
            f"the "
            "positions that the model has"
        )
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def _dtype_of(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    """The one data type of the model's parameters."""
    found = {p.dtype for p in model.parameters()}
    if not found:
        raise ParityError(
            f"{type(model).__name__} has no parameters, so it holds no weights to compare; "
            "expected a model with a checkpoint's weights, or a dialect's name"
        )
    if len(found) != 1 or (wanted is not None and wanted not in found):
        raise ParityError(
            f"the model's parameters are {', '.join(sorted(map(str, found)))}; "
            f"expected {wanted or 'one data type'}; convert it first, as with model.float()"
        )
    return found.pop()


def _ids(checkpoint: Checkpoint, input_ids: object, text: str | None) -> Tensor:
    """The ids to compare on, (B, T), checked against the checkpoint's sizes."""
    if input_ids is not None and text is not None:
        raise ParityError("both input_ids and text are given; expected one of them")
    if text is not None:
        input_ids = torch.tensor([load_tokenizer(checkpoint).encode(text)], dtype=torch.long)
    if input_ids is None:
        input_ids = random_ids(checkpoint)
    ids = as_ids(input_ids, checkpoint.config.vocab_size, ParityError)
    if ids.shape[1] > checkpoint.config.n_positions:
        raise ParityError(
            f"input_ids have shape {list(ids.shape)}; expected (B, T), T from 1 to "
            f"{checkpoint.config.n_positions}"
        )
    return ids


def _our_taps(
    model: nn.Module, taps: Sequence[Tap] | None, theirs: Sequence[Tap], n_layer: int
) -> list[Tap]:
    """The model's taps written out, without those that this reference does not show."""
    dialect = dialect_of(model)
    if taps is None:
        taps = dialect.taps if dialect else [Tap("logits", "")]
    shown = {tap.name for tap in theirs}
    return [tap for tap in expand_taps(taps, n_layer) if tap.name in shown]


def _versions(transformers: str) -> dict[str, str]:
    return {
        "compat": version("gpt2-compat"),
        "torch": torch.__version__,
        "transformers": transformers,
        "python": platform.python_version(),
    }
