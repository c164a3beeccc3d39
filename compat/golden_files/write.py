"""The writer of golden files: the reference's taps, one block at a time, and their bounds.

The model waits while each hidden state or gradient is handled, so only a few of them are in memory
at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint, Source, open_checkpoint
from compat.checkpoint.layout import POSITIONS, plain_name
from compat.config import HALF, as_dtype, dtype_name
from compat.errors import ParityError, short_repr
from compat.golden_files.arrays import Array, Arrays, Shapes, Write, writable, writing
from compat.golden_files.backward import gradients, next_token_loss
from compat.golden_files.bounds import Bound, Calibration, error, plain_sum_error
from compat.golden_files.contents import (
    BOUND,
    COLUMNS,
    DECODE_IDS,
    DECODE_LOGITS,
    GRADIENT,
    IDS,
    LOSS,
    WEIGHT,
    metadata_of,
    select_taps,
    shape_of,
)
from compat.golden_files.file import Golden
from compat.golden_files.pieces import (
    GPT2,
    TOKENS,
    Weights,
    cached_reads,
    chain,
    inputs_of,
    run_piece,
)
from compat.parity import transformers_gpt2
from compat.parity.check import checked_ids
from compat.parity.patches import explain_exceptions
from compat.parity.reference import true_logits
from compat.parity.trace import Trace
from compat.tap import Tap, hook_taps

VERIFIED = 64  # positions of the first sequence whose logits are verified with NumPy


def golden(
    source: Source,
    path: str | Path | None = None,
    *,
    input_ids: object = None,
    text: str | None = None,
    taps: str = "all",
    dtype: torch.dtype | str | None = None,
    gradients: bool = False,
    decode: int = 0,
    revision: str | None = None,
    verify: bool = False,
    n_head: int | None = None,
) -> Golden:
    """Record what `transformers` computes at every tap, and the bounds for correct ports.

    Args:
        source: "demo", a hub id such as `gpt2`, a folder, a weights file, or a Checkpoint.
        path: the file to write, .safetensors or .npz. By default, the arrays stay in memory.
        input_ids: the token ids (B, T) as a tensor, array or list; by default `random_ids`.
        text: a text to encode with the checkpoint's tokenizer instead of `input_ids`.
        taps: "all"; "layers" for the residual stream after every block; or patterns of names,
            separated by commas, such as "h.0.*,logits".
        dtype: the data type of the reference; by default the checkpoint's.
        gradients: also record the loss of the next ids, and its gradients at all selected taps and
            of all parameters.
        decode: the number of greedy decode steps through the KV cache whose logits are recorded.
        revision, verify, n_head: see `open_checkpoint`.

    Returns:
        The golden arrays. Call their `check` to compare a candidate with them.

    Raises:
        ParityError: an argument is invalid, or the reference's logits are not GPT-2's.
        CompatError: the checkpoint cannot be loaded, or the file cannot be written.
    """
    checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
    dtype = as_dtype(dtype) or checkpoint.dtype
    ids = checked_ids(checkpoint, input_ids, text)
    config, T = checkpoint.config, ids.shape[1]
    if path is not None:
        path = writable(path, (dtype, checkpoint.dtype))
    if type(decode) is not int or not 0 <= decode <= config.n_positions - T:
        raise ParityError(
            f"decode is {short_repr(decode)}, but must be from 0 to {config.n_positions - T}, the "
            f"number of positions after the {T} ids."
        )
    if gradients and T < 2:
        raise ParityError(
            "gradients need a next id to predict, but each sequence has 1 id. Pass 2 ids or more."
        )
    selected = select_taps(taps, config.n_layer)
    with transformers_gpt2.quiet(), explain_exceptions():
        return _Recording(checkpoint, dtype, ids, selected, gradients, decode).write(path)


@dataclass
class _Recording:
    """Computes the arrays of one golden file in the order in which they are written."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    ids: Tensor
    selected: list[str]
    with_gradients: bool
    decode: int

    def __post_init__(self) -> None:
        # The weights are read several times. They are checked for NaN once, while they are hashed.
        self.mapped = self.checkpoint.checked_before()
        self.config = self.checkpoint.config
        self.model: Any = transformers_gpt2.load_reference(self.checkpoint, self.dtype)
        self.taps = transformers_gpt2.taps(self.config.n_layer, "eager")
        self.weights = Weights(self.config, self.ids, cached_reads(self.mapped.read, self.ids))
        # GPT-2 in float64 and two simulations of half precision run along with the reference.
        self.runs = [self.weights, *(_half(self.weights, dtype) for dtype in HALF)]
        infos = self.checkpoint.infos
        self.vectors = [name for name, info in infos.items() if len(info.shape) == 1]
        self.calibrations = _calibrations(self.dtype)
        self.bounds: dict[str, list[Bound]] = {}

    def shapes(self) -> Shapes:
        """Return the shape and data type of every array, in the order in which they are written."""
        B, T = self.ids.shape
        infos, V = self.checkpoint.infos, self.config.vocab_size
        stored = self.checkpoint.dtype
        taps = {tap: (shape_of(tap, self.config, B, T), self.dtype) for tap in self.selected}
        found: Shapes = {IDS: ((B, T), torch.int64)}
        found[WEIGHT + TOKENS] = (B, T, self.config.n_embd), stored
        found |= {WEIGHT + n: (infos[n].shape, stored) for n in [POSITIONS, *self.vectors]}
        found |= taps
        if self.with_gradients:
            found[LOSS] = (), self.dtype
            found |= {GRADIENT + tap: what for tap, what in taps.items()}
            found |= {GRADIENT + n: (infos[n].shape, self.dtype) for n in self.checkpoint.names}
        if self.decode:
            found[DECODE_IDS] = (B, self.decode), torch.int64
            found[DECODE_LOGITS] = (B, self.decode, V), self.dtype
        inputs = [name for name in found if name in (IDS, DECODE_IDS) or name.startswith(WEIGHT)]
        shape = (1 + len(HALF), len(COLUMNS))
        return found | {
            BOUND + name: (shape, torch.float64) for name in found if name not in inputs
        }

    def write(self, path: Path | None) -> Golden:
        shapes = self.shapes()
        B, T = self.ids.shape
        metadata = metadata_of(self.checkpoint, self.dtype, (B, T), self.selected)
        arrays: Arrays = {}
        with ExitStack() as stack:
            if path is not None:
                write = stack.enter_context(writing(path, shapes, json.dumps(metadata)))
            else:
                write = partial(_keep, arrays, shapes)
            write(IDS, self.ids)
            for name in (TOKENS, POSITIONS, *self.vectors):
                write(WEIGHT + name, self.weights.read(name))
            self._write_taps(write)
            if self.with_gradients:
                self._write_gradients(write)
            if self.decode:
                self._write_decode(write)
            for name, bounds in self.bounds.items():
                write(BOUND + name, torch.tensor([astuple(b) for b in bounds], dtype=torch.float64))
        return Golden(metadata, arrays) if path is None else Golden.open(path)

    def _write_taps(self, write: Write) -> None:
        """Run the reference and the other runs in lockstep."""
        known: Trace = {}  # the reference's taps in the block, and the residual stream before it

        def handle(tap: str, ours: Tensor, exact: Tensor, *halves: Tensor) -> None:
            if tap.endswith(".ln_1"):  # a new block
                stream, value = known.popitem()
                known.clear()
                known[stream] = value
            local_errors = self._local_errors(tap, known, ours)
            bounds = _bounds(self.calibrations, [ours, *halves], exact, *local_errors)
            known[tap] = ours
            if tap in self.selected:
                write(tap, ours)
                self.bounds[tap] = bounds
            if tap == "logits":
                self.logits, self.bounds_of_logits = ours, bounds
                self._verify(exact)

        record = in_lockstep(map(chain, self.runs), handle)
        stream_taps(self.model, self.taps, self.ids, record)

    def _local_errors(
        self, tap: str, known: Mapping[str, Tensor], found: Tensor
    ) -> tuple[float, float | None]:
        """Measure the error of the reference's piece on its own inputs, and of sequential sums."""
        inputs = {name: known[name].double() for name in inputs_of(tap, GPT2, self.config.n_layer)}
        local = error(found, run_piece(tap, GPT2, self.weights, inputs)).rms
        first = next(iter(inputs.values()), None)
        return local, None if first is None else plain_sum_error(tap, self.weights, first)

    def _verify(self, exact: Tensor) -> None:
        """Verify the logits of the reference and the float64 run against an independent GPT-2."""
        ids = self.ids[:1, :VERIFIED]
        found, chained = self.logits[:1, :VERIFIED], exact[:1, :VERIFIED]
        true_logits(self.checkpoint, self.dtype, ids, found, self.dtype)
        if self.dtype not in HALF:
            true_logits(self.checkpoint, self.checkpoint.dtype, ids, chained, torch.float64)

    def _write_gradients(self, write: Write) -> None:
        """Run the backward passes in lockstep, as `_write_taps` does the forward passes."""
        calibrations = _calibrations(self.dtype)
        calibrations[0].sums = self.calibrations[0].sums
        recorded = {LOSS, *self.selected, *self.checkpoint.names}

        def handle(name: str, ours: Tensor, exact: Tensor, *halves: Tensor) -> None:
            bounds = _bounds(calibrations, [ours, *halves], exact)
            if name in recorded:
                label = name if name == LOSS else GRADIENT + name
                write(label, ours)
                self.bounds[label] = bounds

        record = in_lockstep(map(gradients, self.runs), handle)
        stream_gradients(self.model, self.taps, self.ids, record)

    def _write_decode(self, write: Write) -> None:
        """Decode greedily through the KV cache, with bounds from a run without a cache."""
        fed, logits = _decode(self.model, self.ids, self.logits[:, -1:], self.decode)
        every = torch.cat([self.ids, fed], dim=1)
        weights = Weights(self.config, every, cached_reads(self.mapped.read, every))
        exact = self.logits
        for _, value in chain(weights):
            exact = value  # the last value is the logits
        write(DECODE_IDS, fed)
        write(DECODE_LOGITS, logits)
        first = self.calibrations[0].bound(logits, exact[:, self.ids.shape[1] :])
        self.bounds[DECODE_LOGITS] = [first, *self.bounds_of_logits[1:]]


def _calibrations(dtype: torch.dtype) -> list[Calibration]:
    return [Calibration(each) for each in (dtype, *HALF)]


def _bounds(
    calibrations: Sequence[Calibration],
    found: Sequence[Tensor],
    exact: Tensor,
    local: float = 0.0,
    plain: float | None = None,
) -> list[Bound]:
    """Return the bounds of one array, for the reference's data type and for those of `HALF`."""
    first = calibrations[0].bound(found[0], exact, local, plain)
    halves = zip(calibrations[1:], found[1:], strict=True)
    return [first, *(calibration.bound(half, exact) for calibration, half in halves)]


def _keep(arrays: Arrays, shapes: Shapes, name: str, tensor: Tensor) -> None:
    """Keep an array in memory instead of writing it."""
    shape, dtype = shapes[name]
    kept = tensor.detach().to(dtype).clone()
    arrays[name] = Array(name, shape, dtype_name(dtype), lambda: kept)


def _half(weights: Weights, dtype: torch.dtype) -> Weights:
    """Simulate half precision: weights and results of operations are rounded, but not sums."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    read = weights.read
    return replace(
        weights, read=lambda name: rounded(read(name)), dtype=torch.float32, rounded=rounded
    )


@torch.no_grad()
def _decode(model: Any, ids: Tensor, last: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Decode greedily for `steps` steps through the KV cache: ids (B, N), logits (B, N, V)."""
    cache = model(ids, use_cache=True).past_key_values
    fed, found = [], []
    for _ in range(steps):
        fed.append(last.argmax(dim=-1))  # (B, 1)
        output = model(fed[-1], past_key_values=cache, use_cache=True)
        cache, last = output.past_key_values, output.logits
        found.append(last)
    return torch.cat(fed, dim=1), torch.cat(found, dim=1)


# Hidden states and gradients, passed on while the model runs


def stream_taps(model: nn.Module, taps: Sequence[Tap], ids: Tensor, record: Write) -> None:
    """Run a model on ids (B, T) and record a copy of each hidden state when it is computed."""

    def copy(tap: Tap, value: Tensor) -> None:
        record(tap.name, value.detach().clone())

    with torch.no_grad(), hook_taps(dict(model.named_modules()), taps, copy):
        model(ids)


def stream_gradients(model: nn.Module, taps: Sequence[Tap], ids: Tensor, record: Write) -> None:
    """Run a reference forward and backward, and record every gradient when it is computed.

    Args:
        model: a model of transformers. Its parameters are set to require gradients.
        taps: the taps whose gradients are recorded.
        ids: the token ids (B, T).
        record: called with "loss" and the mean cross-entropy of the next ids, and then with the
            name of each tap or parameter and its gradient.
    """
    # The model does not read the views q, k and v, so the gradient of their fused tensor is used.
    parts: dict[Tap, list[Tap]] = {}
    for tap in taps:
        fused = tap if tap.part is None else replace(tap, name=tap.module, part=None)
        parts.setdefault(fused, []).append(tap)
    without: dict[str, Any] = {
        plain_name(name): parameter for name, parameter in model.named_parameters()
    }

    def record_tap(fused: Tap, gradient: Tensor) -> None:
        for tap in parts[fused]:
            part = gradient if tap.part is None else gradient.chunk(3, dim=-1)[tap.part]
            record(tap.name, part.clone())

    def observe(fused: Tap, value: Any) -> None:
        value.register_hook(partial(record_tap, fused))

    def record_parameter(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        del without[name]
        record(name, gradient)

    with torch.enable_grad(), hook_taps(dict(model.named_modules()), parts, observe) as hooks:
        for name, parameter in without.items():
            parameter.requires_grad_(True)
            hook = parameter.register_post_accumulate_grad_hook(partial(record_parameter, name))
            hooks.callback(hook.remove)
        loss = next_token_loss(model(ids).logits, ids)
        record(LOSS, loss.detach())
        torch.autograd.backward(loss)
    for name, parameter in without.items():
        record(name, torch.zeros_like(parameter))


def in_lockstep(runs: Iterable[Iterator[tuple[str, Tensor]]], handle: Callable[..., None]) -> Write:
    """Advance other runs with the reference, which computes tensors in a slightly different order.

    Args:
        runs: the names and tensors of the other runs, which share one order and have the same
            names as the reference.
        handle: called with a name, the reference's tensor and those of the other runs.

    Returns:
        A function that records the next tensor of the reference.
    """
    steps = zip(*runs, strict=True)
    waiting: dict[str, Tensor] = {}
    waiting_others: dict[str, tuple[Tensor, ...]] = {}

    def record(name: str, tensor: Tensor) -> None:
        waiting[name] = tensor
        (other, *_), values = zip(*next(steps), strict=True)
        waiting_others[other] = values
        for each in (name, other):
            if each in waiting and each in waiting_others:
                handle(each, waiting.pop(each), *waiting_others.pop(each))

    return record
