"""The reference: transformers' GPT-2, whose logits are verified by an independent one in NumPy.

Other code in this process may have patched torch or transformers. The float64 logits with which
models are compared are therefore computed by NumPy, after the reference's own logits were found to
agree with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from compat.checkpoint import Checkpoint
from compat.checkpoint.layout import plain_name
from compat.collector import collector_paused
from compat.config import dtype_name
from compat.parity import numpy_gpt2
from compat.parity.compare import POSITIONS_AT_ONCE, TapResult, compare, position_errors
from compat.parity.inputs import sequences
from compat.parity.patches import explain_exceptions, find_patches, untrusted_reference
from compat.parity.report import GradientsProof, LogitsProof, ParityReport
from compat.parity.trace import Trace, record
from compat.user_code import library_modules

LARGE = 500_000_000  # parameters; above it, only one matrix at a time is held in float64

# The largest error of a position's logits that is rounding, over the RMS of all logits. In half
# precision only gross faults exceed it; there a proof rests on float32 or float64 logits.
ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 5e-5,
    torch.float16: 0.05,
    torch.bfloat16: 0.4,
}


class Reference:
    """transformers' model of one checkpoint, in the data type of a comparison and in float64.

    Args:
        checkpoint: the checkpoint.
        dtype: the data type of the compared model.
        calibrate: whether hidden states are judged against a float64 run.
        attention: "eager" or "sdpa".

    Attributes:
        model: transformers' module in `dtype`.
        exact: the same module in float64.
        taps: where its hidden states are recorded.
        is_large: whether `exact` shares the parameters of `model` and converts them when they are
            needed.

    Raises:
        ParityError: transformers cannot load the checkpoint in full, or was patched.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        calibrate: bool = True,
        attention: Literal["eager", "sdpa"] = "eager",
    ) -> None:
        with collector_paused(), library_modules():
            from compat.parity import transformers_gpt2  # importing transformers takes seconds

        self.checkpoint, self.dtype, self.calibrate = checkpoint, dtype, calibrate
        self.weights_dtype = dtype  # the weights remain rounded to it after `to_float32`
        self._hf = transformers_gpt2
        self.taps = transformers_gpt2.taps(checkpoint.config.n_layer, attention)
        # transformers imports its GPT-2 here.
        with collector_paused(), explain_exceptions(), library_modules():
            self.model = transformers_gpt2.load_reference(checkpoint, dtype, attention)
            self.is_large = sum(p.numel() for p in self.model.parameters()) >= LARGE
            self.exact = transformers_gpt2.in_float64(self.model, by_module=self.is_large)
        self._last: tuple[Tensor, tuple[Trace, Trace | None]] | None = None
        self._calls = Counter[str]()
        # The hooks refer to the counter alone. A reference to `self` would be a cycle, which keeps
        # the whole model in memory until Python's garbage collector runs.
        for module in self.model.modules():
            module.register_forward_pre_hook(partial(_count_call, self._calls))

    @property
    def module_calls(self) -> int:
        """How often a module of `model` was called.

        The number also grows when a compared model takes its logits from the reference.
        """
        return self._calls["modules"]

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._hf.quiet(), explain_exceptions():
            yield

    def to_float32(self) -> None:
        """Continue in float32, with the weights that were rounded to the data type before."""
        self.model.float()
        self.dtype, self._last = torch.float32, None

    def trace(self, ids: Tensor) -> tuple[Trace, Trace | None]:
        """Record every tap on ids (B, T).

        Returns:
            The traces in the model's data type and, if calibrating, in float64. Those of the last
            ids are kept.
        """
        if self._last is None or not torch.equal(self._last[0], ids):
            with self._running():
                exact = record(self.exact, self.taps, ids) if self.calibrate else None
                self._last = ids, (record(self.model, self.taps, ids), exact)
        return self._last[1]

    def local_in_float64(self, ids: Tensor, inputs: Trace) -> Trace:
        """Record every tap in float64 on ids (B, T), with these hidden states forced."""
        with self._running():
            return record(self.exact, self.taps, ids, forced=inputs)

    def logits(self, ids: Tensor, exact: bool = True) -> tuple[Tensor, Tensor | None]:
        """Compute the logits (B, T, V) of ids (B, T).

        Returns:
            The logits in the model's data type and, if `exact`, in float64 by NumPy.

        Raises:
            ParityError: the two do not agree, as where code in this process patched torch.
        """
        # Without float64 the sequences are long, where eager attention is slow.
        with self._running(), nullcontext() if exact else self._hf.sdpa_attention(self.model):
            found = record(self.model, self.taps[-1:], ids)["logits"]
        if not exact:
            return found, None
        return found, true_logits(self.checkpoint, self.weights_dtype, ids, found, self.dtype)

    def verify(self) -> None:
        """Verify the logits of a long sequence, if anything in this process was patched.

        Raises:
            ParityError: the reference's logits are wrong; the message names the patches.
        """
        if find_patches(kernels=False):
            config = self.checkpoint.config
            ids = sequences(config, config.n_positions)[0][None]
            found, _ = self.logits(ids, exact=False)
            true_logits(self.checkpoint, self.weights_dtype, ids, found, self.dtype)

    def embedding(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, C) that enter the first block, for ids (B, T)."""
        with self._running():
            return record(self.model, self.taps[:1], ids, stop_early=True)["embed"]

    def gradients(
        self, loss: Callable[[Tensor], Tensor], ids: Tensor, exact: bool = False
    ) -> dict[str, Tensor]:
        """Compute the gradients of a loss by the checkpoint's tensors. A tied head has its own.

        Args:
            loss: computes the loss from logits (B, T, V).
            ids: (B, T).
            exact: compute them in float64.

        Returns:
            The gradients by Hugging Face name.
        """
        with self._running():
            model = self.model
            if exact:  # for a large checkpoint, `self.exact` has no parameters of its own
                model = self._hf.in_float64(self.model) if self.is_large else self.exact
            leaves = {
                name: parameter.detach().requires_grad_()
                for name, parameter in model.named_parameters(remove_duplicate=False)
            }
            with torch.enable_grad():
                out: Any = torch.func.functional_call(model, leaves, (ids,), tie_weights=False)
                found = torch.autograd.grad(loss(out.logits), list(leaves.values()))
        return dict(zip(map(plain_name, leaves), found, strict=True))

    def quantization_error(self) -> float:
        """Return the error that rounding the weights to 8 bits causes in the reference.

        It is the relative error of the logits at the worst position of the short sequences of
        `compat.parity.inputs`.
        """
        config = self.checkpoint.config
        ids = torch.stack(sequences(config, config.n_positions)[1:])
        _, truth = self.logits(ids)
        assert truth is not None
        with self._running():
            quantized = self._hf.with_8_bit_weights(self.model)
            found = record(quantized, self.taps[-1:], ids)["logits"]
        return position_errors(found, truth, truth)[1].item()

    def report(
        self,
        name: str,
        ids: Tensor,
        taps: Sequence[str],
        run: Callable[[Trace | None], Trace],
        proof: LogitsProof,
        training: bool = False,
        gradients: GradientsProof | None = None,
        forced: bool = True,
    ) -> ParityReport:
        """Compare a model's hidden states with the reference's, and report.

        Args:
            name: the model's name.
            ids: (B, T), on which the taps are compared.
            taps: the names of the model's taps, in execution order.
            run: returns the model's trace of the ids, with the passed hidden states forced.
            proof: the comparison of the model's logits.
            training: whether the model is in training mode.
            gradients: the comparison of its gradients, if it was made.
            forced: whether `run` can force hidden states; without it, only accumulated errors are
                measured and judged.

        Raises:
            ParityError: the reference cannot be trusted, or a tap has another shape.
        """
        self.verify()
        results: list[TapResult] = []
        if taps:
            expected, exact = self.trace(ids)
            inputs = {tap: expected[tap] for tap in taps}  # a piece lies between two of these taps
            exact_local = None
            if exact is not None and forced:
                exact_local = self.local_in_float64(ids, inputs)
            local = run(inputs) if forced else None
            results = compare(expected, run(None), local, exact, exact_local)
        return ParityReport(
            source=self.checkpoint.source,
            model_name=name,
            dtype=dtype_name(self.dtype),
            input_shape=(ids.shape[0], ids.shape[1]),
            calibrated=self.calibrate,
            training=training,
            taps=results,
            versions=self._hf.versions(),
            logits=proof,
            notes=self._hf.translation_notes(self.checkpoint),
            gradients=gradients,
        )


class SharedReference(Reference):
    """A reference that keeps its logits and traces, for several models of one checkpoint.

    Only for models whose code patches neither torch nor transformers, such as the dialects.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._logits: dict[tuple[object, ...], tuple[Tensor, Tensor | None]] = {}
        self._local: dict[tuple[object, ...], Trace] = {}
        self._verified = False

    def verify(self) -> None:
        if not self._verified:
            super().verify()
        self._verified = True

    def logits(self, ids: Tensor, exact: bool = True) -> tuple[Tensor, Tensor | None]:
        key = (*_key(ids), exact)
        if key not in self._logits:
            self._logits[key] = super().logits(ids, exact)
        return self._logits[key]

    def local_in_float64(self, ids: Tensor, inputs: Trace) -> Trace:
        key = (*_key(ids), *inputs)
        if key not in self._local:
            self._local = {key: super().local_in_float64(ids, inputs)}
        return self._local[key]


def _key(ids: Tensor) -> tuple[object, ...]:
    return *ids.shape, ids.contiguous().numpy().tobytes()


def _count_call(calls: Counter[str], *_: object) -> None:
    calls["modules"] += 1


def true_logits(
    checkpoint: Checkpoint,
    weights_dtype: torch.dtype,
    ids: Tensor,
    found: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the float64 logits (B, T, V) by NumPy, and verify the reference's against them.

    Args:
        checkpoint: the weights.
        weights_dtype: the data type to which the weights are rounded before they are used.
        ids: (B, T).
        found: the reference's logits (B, T, V).
        dtype: the data type in which the reference was asked to compute.

    Raises:
        ParityError: the reference's logits differ by more than rounding; the message names what
            was patched in this process.
    """
    with np.errstate(all="ignore"):  # infinite logits are an infinite error, not a warning
        truth = torch.from_numpy(numpy_gpt2.logits(checkpoint, weights_dtype, ids))
    if found.shape != truth.shape or found.dtype != dtype:
        raise untrusted_reference(
            f"its logits are {found.dtype} {list(found.shape)}, but must be {dtype} "
            f"{list(truth.shape)}"
        )
    errors = logit_errors(found, truth)
    if bool((errors <= ROUNDING[dtype]).all()):  # False for NaN
        return truth
    row, position = divmod(int(errors.nan_to_num(math.inf).argmax()), errors.shape[1])
    raise untrusted_reference(
        f"at input_ids[{row}, {position}] its {dtype} logits differ from GPT-2's, computed in "
        f"NumPy, by {errors[row, position]:.2g} of their RMS, but rounding stays below "
        f"{ROUNDING[dtype]:.2g}"
    )


def logit_errors(found: Tensor, truth: Tensor) -> Tensor:
    """Return the RMS error (B, T) of logits (B, T, V) over the RMS of all true ones."""
    split = partial(torch.split, split_size_or_sections=POSITIONS_AT_ONCE, dim=1)
    parts = zip(split(found), split(truth), strict=True)
    errors = [(part.double() - true).square().mean(-1).sqrt() for part, true in parts]
    return torch.cat(errors, dim=1) / truth.square().mean().sqrt()
