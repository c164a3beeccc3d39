"""The parity check: run both models, compare every tap, report."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Literal

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.dialects import dialect_of
from compat.errors import ParityError
from compat.layers import fault_in_ids
from compat.loading import Source, load_pretrained
from compat.parity.compare import compare
from compat.parity.report import ParityReport
from compat.parity.trace import Trace, trace
from compat.taps import Tap, expand_taps
from compat.tokenizer import load_tokenizer

CALIBRATE_BELOW = 500_000_000  # parameters; above, a float64 copy gets large and slow
LENGTH, LENGTH_ABOVE = 128, 32  # of random ids; above, three traces stay small beside the weights


def check_parity(
    model_or_dialect: nn.Module | str,
    source: Source,
    *,
    input_ids: Tensor | None = None,
    text: str | None = None,
    dtype: torch.dtype | None = None,
    calibrate: bool | None = None,
    taps: Sequence[Tap] | None = None,
    attention: Literal["eager", "sdpa"] = "eager",
    revision: str | None = None,
) -> ParityReport:
    """Compare a model with `transformers` at every tap, on one input, on the CPU.

    Args:
        model_or_dialect: a dialect's name, loaded here; or a model that has the weights already,
            run in the mode it is in.
        source: the checkpoint, as in `load_pretrained`.
        input_ids: (B, T); by default `random_ids` of the checkpoint's vocabulary.
        text: instead of ids, encoded by the checkpoint's tokenizer.
        dtype: of both models; None takes the model's or the checkpoint's.
        calibrate: judge errors against a float64 run of the reference; None does so below 500M
            parameters.
        taps: where the model shows its hidden states; a dialect knows its own, for other models the
            default is the logits alone.
        attention: "eager" or "sdpa", of the reference; the latter shows no `probs`.
        revision: branch, tag or commit on the hub.

    Raises:
        ParityError: the comparison cannot be made.
        CompatError: the checkpoint cannot be loaded.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, revision)
    if isinstance(model_or_dialect, str):
        model: nn.Module = load_pretrained(checkpoint, model_or_dialect, dtype=dtype)
    else:
        model = model_or_dialect
    dtype, ids = _dtype_of(model, dtype), _ids(checkpoint, input_ids, text)
    reference = Reference(checkpoint, dtype, calibrate, attention)
    ours = _our_taps(model, taps, reference.taps, checkpoint.config.n_layer)
    dialect = dialect_of(model)
    return reference.report(
        dialect.name if dialect else type(model).__name__,
        ids,
        [tap.name for tap in ours],
        lambda forced: trace(model, ours, ids, forced=forced),
        training=model.training,
    )


class Reference:
    """`transformers`' model of one checkpoint, in its data type and in float64, run when asked.

    Args:
        checkpoint: the weights.
        dtype: of the model.
        calibrate: whether there is a float64 run; None decides by the number of parameters.
        attention: "eager" or "sdpa".
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        calibrate: bool | None = None,
        attention: Literal["eager", "sdpa"] = "eager",
    ) -> None:
        from compat.parity import reference as hf  # imports transformers, which takes seconds

        self.checkpoint, self.dtype, self._hf = checkpoint, dtype, hf
        self.taps = hf.taps(checkpoint.config.n_layer, attention)
        self.model = hf.load_reference(checkpoint, dtype, attention)
        if calibrate is None:
            calibrate = sum(p.numel() for p in self.model.parameters()) < CALIBRATE_BELOW
        wanted = calibrate and dtype != torch.float64
        self.exact = hf.in_float64(self.model) if wanted else None
        self._last: tuple[Tensor, tuple[Trace, Trace | None]] | None = None

    def trace(self, ids: Tensor) -> tuple[Trace, Trace | None]:
        """Every tap, in the model's data type and in float64; asked again, the same."""
        if self._last is not None and torch.equal(self._last[0], ids):
            return self._last[1]
        with self._hf.quiet():
            exact = None if self.exact is None else trace(self.exact, self.taps, ids)
            self._last = ids, (trace(self.model, self.taps, ids), exact)
        return self._last[1]

    def logits(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits alone, in the model's data type and in float64."""
        last = [tap for tap in self.taps if tap.name == "logits"]
        with self._hf.quiet():
            exact = None if self.exact is None else trace(self.exact, last, ids)["logits"]
            return trace(self.model, last, ids)["logits"], exact

    def report(
        self,
        name: str,
        ids: Tensor,
        taps: Sequence[str],
        run: Callable[[Trace | None], Trace],
        training: bool = False,
    ) -> ParityReport:
        """Compare whatever `run` traces with the reference.

        Args:
            name: of the model that `run` runs.
            ids: (B, T).
            taps: those that `run` shows, in execution order.
            run: forced values for the taps, or None → a trace.
            training: whether that model is in training mode.
        """
        expected, exact = self.trace(ids)
        given = {tap: expected[tap] for tap in taps}  # the borders of the model's pieces
        exact_local = None
        if self.exact is not None:
            with self._hf.quiet():
                exact_local = trace(self.exact, self.taps, ids, forced=given)
        return ParityReport(
            model=self.checkpoint.source,
            dialect=name,
            dtype=str(self.dtype).removeprefix("torch."),
            input_shape=(ids.shape[0], ids.shape[1]),
            calibrated=exact is not None,
            training=training,
            taps=compare(expected, run(None), run(given), exact, exact_local),
            versions=_versions(self._hf.VERSION),
        )


def random_ids(
    checkpoint: Checkpoint, seed: int = 0, batch: int = 2, length: int | None = None
) -> Tensor:
    """Uniformly random ids (batch, length), the length cut to the checkpoint's `n_positions`.

    The default length is 128, or 32 for models of 500M parameters and more.
    """
    if length is None:
        count = sum(math.prod(info.shape) for info in checkpoint.infos.values())
        length = LENGTH if count < CALIBRATE_BELOW else LENGTH_ABOVE
    config, generator = checkpoint.config, torch.Generator().manual_seed(seed)
    shape = (batch, min(length, config.n_positions))
    return torch.randint(config.vocab_size, shape, generator=generator)


def _dtype_of(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    """The one data type of the model's parameters."""
    found = {p.dtype for p in model.parameters()}
    if len(found) != 1 or (wanted is not None and wanted not in found):
        raise ParityError(
            f"the model's parameters are {', '.join(sorted(map(str, found)))}; "
            f"expected {wanted or 'one data type'}; convert it first, as with model.float()"
        )
    return found.pop()


def _ids(checkpoint: Checkpoint, input_ids: Tensor | None, text: str | None) -> Tensor:
    """The ids to compare on, (B, T), checked against the checkpoint's sizes."""
    if input_ids is not None and text is not None:
        raise ParityError("both input_ids and text are given; expected one of them")
    if text is not None:
        input_ids = torch.tensor([load_tokenizer(checkpoint).encode(text)], dtype=torch.long)
    ids = random_ids(checkpoint) if input_ids is None else input_ids
    if fault := fault_in_ids(ids, checkpoint.config.vocab_size):
        raise ParityError(fault)
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
