"""The proof by logits: the model runs on designed inputs, and every position is compared.

The model is called as its user calls it: without hooks and without a tracer that changes what runs.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compat.config import GPT2Config
from compat.errors import ParityError
from compat.parity.compare import ALLOWANCE, Difference
from compat.parity.conditions import LONGEST_PHRASE, BranchObserver, Limit, Observed, TensorObserver
from compat.parity.inputs import (
    LENGTH,
    ProofInput,
    designed_inputs,
    inputs_reaching,
    sequences,
    sequences_of,
    sequences_with,
    special_ids,
)
from compat.parity.state import state_of
from compat.user_code import raised

Call = Callable[[Tensor], Any]  # ids (B, T) → logits (B, T, V), or (B, 1, V) of the last one
Find = Callable[[Any, Tensor], Tensor]

# The worst position of ours may err this many times as much as the worst of the reference.
POSITION_ALLOWANCE = 2 * ALLOWANCE
# The same where there is no float64 run, as for the long sequence: the difference of two float32
# runs, whose rounding errors grow with the length of the sums in attention.
LONG_ALLOWANCE = 4 * ALLOWANCE
EXACT_UP_TO = 64  # ids in a sequence that the reference reads in float64 too
CHUNK = 64  # positions compared at once in float64
OBSERVED = ("equal rows", "a single id")  # inputs on which tensor operations are observed
ROUNDS = 3  # of making inputs from constants


class KnowsLogits(Protocol):
    """What gives the reference's logits; see `compat.parity.check.Reference`."""

    @property
    def modules_run(self) -> int:
        """How often a module of the reference ran."""

    def logits(self, ids: Tensor, exact: bool = True) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, V) in the reference's data type and in float64."""


@dataclass(frozen=True)
class InputResult:
    """How the logits compare on one input.

    Args:
        name: what is special about the input.
        input_shape: (B, T).
        logits: of the worst position; None where the model gave no logits that could be compared.
        error: what the model raised or returned instead, in words.
    """

    name: str
    input_shape: tuple[int, int]
    logits: Difference | None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.logits is not None and self.logits.within


@dataclass
class LogitsProof:
    """What was compared, and how far it reaches.

    Args:
        inputs: one result per input.
        embedding: the comparison of the embedding of every id, of a model that has a tap for it.
        limits: conditions that no input reached, and other bounds on the proof.
        ids_tried: how many of the vocabulary's ids stood in an input.
    """

    inputs: list[InputResult] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    ids_tried: int = 0
    embedding: InputResult | None = None

    @property
    def failed(self) -> list[InputResult]:
        """The comparisons that did not pass."""
        embedding = [] if self.embedding is None else [self.embedding]
        return [result for result in (*self.inputs, *embedding) if not result.passed]

    @property
    def passed(self) -> bool:
        return bool(self.inputs) and not self.failed

    @property
    def max_abs(self) -> float:
        """max|Δlogits| over all inputs."""
        compared = [r.logits.max_abs for r in self.inputs if r.logits is not None]
        return max(compared, default=float("nan"))

    @property
    def smallest_detectable(self) -> float:
        """The relative error of the logits of any one position that fails, whatever its sign.

        The error of ours adds to it or takes away from it, so it is counted in.
        """
        judged = [r.logits for r in self.inputs if r.logits is not None]
        bounds = [min(d.error, d.bound) + d.bound for d in judged if d.bound is not None]
        return max(bounds) if self.inputs and len(bounds) == len(self.inputs) else float("inf")


def prove_logits(
    call: Call,
    model: nn.Module,
    reference: KnowsLogits,
    config: GPT2Config,
    dtype: torch.dtype,
    room: int | None = None,
    fixed_length: int | None = None,
    short_only: bool = False,
    find: Find | None = None,
) -> LogitsProof:
    """Compare the logits of a model with the reference's on designed inputs.

    Conditions in the model's code that these reach from one side only give constants, from which
    further inputs are made.

    Args:
        call: runs the model; what it returns are logits, or `find` finds them there.
        model: whose state is watched.
        reference: gives the logits to compare with.
        config: of the checkpoint.
        dtype: of the model.
        room: positions that both have; None means the checkpoint's `n_positions`.
        fixed_length: the one length that the model takes, or None.
        short_only: compare on short inputs alone; for the second proof of a model in half
            precision, whose code is proved in float32.
        find: the logits in what `call` returns for these ids.
    """
    proof = _Proof(call, find, model, reference, config, dtype, room, fixed_length)
    return proof.run_short() if short_only else proof.run()


class _Proof:
    def __init__(
        self,
        call: Call,
        find: Find | None,
        model: nn.Module,
        reference: KnowsLogits,
        config: GPT2Config,
        dtype: torch.dtype,
        room: int | None,
        fixed_length: int | None,
    ) -> None:
        self.call, self.model, self.config = call, model, config
        self.find = find or (lambda output, ids: output)
        self.last_ids = torch.empty(0, 0, dtype=torch.long)
        self.room = fixed_length or min(room or config.n_positions, config.n_positions)
        self.fixed_length = fixed_length
        self.known = KnownLogits(reference, dtype)
        self.branches = BranchObserver()
        self.sizes = {config.vocab_size, config.n_positions}
        self.tensors = TensorObserver(self.sizes)
        self.proof = LogitsProof()
        self.tried: list[ProofInput] = []
        self.seen_ids: set[int] = set()
        self.phrases: set[tuple[int, ...]] = set()

    def run(self) -> LogitsProof:
        state, drawn = state_of(self.model), _random_states()
        self.count = len(self.known.add(sequences(self.config, self.room)))
        inputs = designed_inputs(self.count, self.room)
        if self.fixed_length:
            inputs = [item for item in inputs if item.length == self.fixed_length]
        self._compare(inputs)
        self._observe([item for item in inputs if item.name in OBSERVED] or inputs[:1])
        tried_constants: set[int] = set()
        for _ in range(ROUNDS):
            constants = self._constants() - tried_constants
            if not constants:
                break
            tried_constants |= constants
            self._try(constants)
        if any(seen.one_sided(self.sizes) for seen in self.tensors.found.values()):
            self._observe(inputs[:1])
        self._report_limits(state, drawn)
        return self.proof

    def run_short(self) -> LogitsProof:
        room = min(LENGTH, self.room)
        count = len(self.known.add(sequences(self.config, room)))
        self._compare(designed_inputs(count, room))
        return self.proof

    def _compare(self, inputs: Sequence[ProofInput]) -> None:
        for item in inputs:
            ids = self.known.ids(item)
            self.seen_ids |= set(ids.flatten().tolist())
            result = self._result(item, ids)
            self.tried.append(item)
            if result is not None:
                self.proof.inputs.append(result)

    def _result(self, item: ProofInput, ids: Tensor) -> InputResult | None:
        shape, run_before = (ids.shape[0], ids.shape[1]), self.known.reference.modules_run
        try:
            try:
                logits = self._logits(item, ids)
            except Warning:  # Python makes errors of warnings here; the model means none
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    logits = self._logits(item, ids)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit() in the user's code is a result too
            if item.optional:
                return None
            return InputResult(item.name, shape, None, raised(error))
        B, T, V = *shape, self.config.vocab_size
        if logits.shape not in ((B, T, V), (B, 1, V)):
            found = f"the model returned {list(logits.shape)}; expected {[B, T, V]}"
            return InputResult(item.name, shape, None, found)
        if self.known.reference.modules_run != run_before:
            found = "the model runs the reference of this proof, transformers' model"
            return InputResult(item.name, shape, None, found)
        start = T - logits.shape[1]
        if start:
            self._only_last()
        pieces = ((row, start, ours) for row, ours in zip(item.rows, logits, strict=True))
        return InputResult(item.name, shape, self.known.difference(pieces))

    def _only_last(self) -> None:
        limit = Limit("the model returns the logits of the last position alone")
        if limit not in self.proof.limits:
            self.proof.limits.append(limit)

    def _logits(self, item: ProofInput, ids: Tensor) -> Tensor:
        given = self._given(item, ids)
        with _mode(item, self.model), self.branches.watch(ids.shape[1]):
            output = _in_a_thread(self.call, given) if item.mode == "thread" else self.call(given)
        return _plain(self.find(output, given))

    def _given(self, item: ProofInput, ids: Tensor) -> Tensor:
        """The tensor that the model gets."""
        if item.as_given == "overwritten" and self.last_ids.shape == ids.shape:
            return self.last_ids.copy_(ids)
        self.last_ids = _as_given(ids, item)
        return self.last_ids

    def _observe(self, inputs: Sequence[ProofInput]) -> None:
        """Run once more with every tensor operation observed; nothing is compared."""
        failed = {(result.name, result.input_shape[1]) for result in self.proof.failed}
        for item in inputs:
            if (item.name, item.length) in failed:
                continue
            self.tensors.shape = (len(item.rows), item.length)
            try:
                with torch.no_grad(), self.tensors:
                    self.call(self.known.ids(item))
            except KeyboardInterrupt:
                raise
            except BaseException:  # code that does not run under a dispatch mode
                limit = Limit("conditions among the model's tensor operations were not observed")
                if limit not in self.proof.limits:
                    self.proof.limits.append(limit)
                return

    def _constants(self) -> set[int]:
        """Constants of conditions that were seen from one side only."""
        found = set(self.tensors.constants)
        for seen in (*self.branches.found.values(), *self.tensors.found.values()):
            if len(seen.outcomes) < 2:
                found |= seen.all_constants
        return found

    def _phrases(self, ids: Collection[int]) -> list[tuple[int, ...]]:
        """Each of the ids alone, and the series of ids that conditions hold or name in turn."""
        V, series, in_turn = self.config.vocab_size, list[tuple[int, ...]](), list[int]()
        for seen in (*self.branches.found.values(), *self.tensors.found.values()):
            series += seen.phrases.values()
            in_turn += sorted(seen.all_constants & set(ids))
        in_turn = list(dict.fromkeys(in_turn))[:LONGEST_PHRASE]
        series += [tuple(in_turn), tuple(in_turn[::-1])]
        series = [s for s in series if s and all(0 <= n < V for n in s)]
        return list(dict.fromkeys([*series, *((n,) for n in sorted(ids))]))

    def _try(self, constants: set[int]) -> None:
        """Inputs in which the constants are ids, lengths and batch sizes."""
        V = self.config.vocab_size
        ids = {n for n in constants if 0 <= n < V} - set(special_ids(self.config))
        inputs: list[ProofInput] = []
        if ids:
            rows = self.known.add(sequences_with(ids, self.config, self.room))
            series = [s for s in self._phrases(ids) if s not in self.phrases]
            self.phrases |= set(series)
            repeated = self.known.add(sequences_of(series, self.room))
            length = len(self.known.rows[rows[0]])
            name = "ids that the code compares with"
            inputs.append(ProofInput(name, tuple(rows), length))
            inputs += [ProofInput(f"{name}, one row", (row,), length) for row in rows[1:]]
            if repeated:
                inputs.append(ProofInput(f"{name}, repeated", tuple(repeated), length))
        if not self.fixed_length:
            inputs += inputs_reaching(constants, self.count, self.room, self.tried)
        inputs = [i for i in inputs if self.fixed_length in (None, i.length)]
        self._compare(inputs)
        self._observe([item for item in inputs if item.length <= 64])

    def _report_limits(self, state: dict[str, str], drawn: object) -> None:
        proof, lines = self.proof, set[tuple[str, int]]()
        proof.ids_tried = len(self.seen_ids)
        observed: Iterable[Observed] = (*self.branches.found.values(), *self.tensors.found.values())
        for seen in observed:
            if not seen.one_sided(self.sizes) or (seen.file, seen.line) in lines:
                continue
            lines.add((seen.file, seen.line))
            proof.limits.append(Limit(seen.message, seen.file, seen.line))
        now = state_of(self.model)
        changed = [name for name in {**state, **now} if now.get(name) != state.get(name)]
        for name in changed:
            proof.limits.append(
                Limit(f"the forward pass changes {name}, which later calls may read")
            )
        if drawn != _random_states() and self._draws():
            proof.inputs.append(
                InputResult(
                    "repeated calls", (1, 1), None,
                    "the forward pass draws random numbers, so its results may differ from call to "
                    "call",
                )
            )  # fmt: skip

    def _draws(self) -> bool:
        """Whether a call changes the state of a random number generator, not another thread."""
        before = _random_states()
        with suppress(Exception, SystemExit), torch.no_grad():
            self.call(self.known.ids(self.tried[0]))
        return before != _random_states()


class KnownLogits:
    """Sequences, and the reference's logits for them.

    Args:
        reference: gives the logits.
        dtype: of the model that is compared.

    Attributes:
        own_error: of the reference against float64, relative, at its worst position.
    """

    def __init__(self, reference: KnowsLogits, dtype: torch.dtype) -> None:
        self.reference = reference
        self.own_error = torch.finfo(dtype).eps / 4 + torch.finfo(torch.float32).eps
        self.rows: list[Tensor] = []
        self.expected: list[Tensor] = []
        self.exact: list[Tensor | None] = []

    def add(self, rows: Sequence[Tensor]) -> list[int]:
        """Run the reference on these, sequences of one length at once; returns their numbers."""
        first = len(self.rows)
        for length, group in groupby(rows, key=len):
            alike = list(group)
            logits, exact = self.reference.logits(torch.stack(alike), exact=length <= EXACT_UP_TO)
            self.rows += alike
            self.expected += list(logits)
            self.exact += [None] * len(alike) if exact is None else list(exact)
            if exact is not None:
                self.own_error = max(
                    self.own_error, position_errors(logits, exact, exact)[2].item()
                )
        return list(range(first, len(self.rows)))

    def ids(self, item: ProofInput) -> Tensor:
        """The ids (B, T) of an input."""
        return torch.stack([self.rows[row][: item.length] for row in item.rows])

    def difference(self, pieces: Iterable[tuple[int, int, Tensor]]) -> Difference:
        """Judge logits by their worst position.

        Args:
            pieces: number of a sequence, position of the first logits, logits (T, V).
        """
        worst = torch.zeros(3, dtype=torch.float64)
        identical, calibrated = True, True
        for row, start, ours in pieces:
            expected = self.expected[row][start : start + len(ours)]
            exact = self.exact[row]
            calibrated = calibrated and exact is not None
            truth = expected if exact is None else exact[start : start + len(ours)]
            identical = identical and torch.equal(ours, expected.to(ours.dtype))
            worst = torch.maximum(worst, position_errors(ours, expected, truth))  # NaN stays NaN
        max_abs, rel_rms, error = worst.tolist()
        bound = (POSITION_ALLOWANCE if calibrated else LONG_ALLOWANCE) * self.own_error
        ratio = error / self.own_error if calibrated else None
        return Difference(max_abs, rel_rms, identical, ratio, error, bound, error <= bound)


def position_errors(ours: Tensor, expected: Tensor, truth: Tensor) -> Tensor:
    """max|Δ| from `expected`, and of the worst position the relative errors against both: (3,).

    All are (…, T, V). A NaN in them is a NaN in what is returned. Where the truth is no wider than
    what is compared, neither is this arithmetic: it is the long sequence that is so.
    """
    worst = torch.zeros(3, dtype=torch.float64)
    wide = torch.promote_types(torch.promote_types(ours.dtype, truth.dtype), torch.float32)
    flat = (t.reshape(-1, t.shape[-1]) for t in (ours, expected, truth))
    chunks = zip(*(torch.split(t, CHUNK) for t in flat), strict=True)
    for mine, theirs, true in chunks:
        mine, theirs, true = mine.to(wide), theirs.to(wide), true.to(wide)
        delta, tiny = mine - theirs, torch.finfo(wide).tiny
        rel_rms = (delta.norm(dim=-1) / theirs.norm(dim=-1).clamp(min=tiny)).max()
        error = rel_rms
        if truth is not expected:
            error = ((mine - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=tiny)).max()
        found = torch.stack([delta.abs().max(), rel_rms, error])
        worst = torch.maximum(worst, found.double())  # NaN stays NaN
    return worst


def _as_given(ids: Tensor, item: ProofInput) -> Tensor:
    """The ids in the data type and layout of an input; never at the start of their memory."""
    if item.as_given == "strided":
        return ids.repeat_interleave(2, dim=1)[:, ::2]
    below = torch.cat([ids[:1], ids])[1:]
    return below.int() if item.as_given == "int32" else below


@contextmanager
def _mode(item: ProofInput, model: nn.Module) -> Iterator[None]:
    """Run in the mode of an input.

    In inference mode the parameters are frozen, as they often are for generation, and a module that
    keeps a tensor of it is afterwards as it was before.
    """
    if item.mode == "hooks":
        with _hooks(model), torch.no_grad():
            yield
        return
    if item.mode != "inference":
        with torch.set_grad_enabled(item.mode == "gradients"):
            yield
        return
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with torch.inference_mode():
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        for module, attributes, buffers in before:
            if _made_in_inference([*vars(module).values(), *module._buffers.values()]):
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _made_in_inference(values: Iterable[Any], depth: int = 4) -> bool:
    """Whether there is a tensor of inference mode among these or in what they hold."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_inference():
                return True
        elif depth and not isinstance(value, (str, bytes, type, nn.Module)):
            inner: Iterable[Any] = ()
            if isinstance(value, Mapping):
                inner = list(value.values())
            elif isinstance(value, (list, tuple)):
                inner = value
            elif isinstance(getattr(value, "__dict__", None), dict):
                inner = list(vars(value).values())
            if _made_in_inference(inner, depth - 1):
                return True
    return False


@contextmanager
def _hooks(model: nn.Module) -> Iterator[None]:
    """A forward hook on every module, as a profiler has it."""
    handles = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_a_thread(call: Call, ids: Tensor) -> Any:
    """Call the model in another thread, where neither a tracer nor a caller of ours is seen."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(call), ids).result()


def _plain(logits: Tensor) -> Tensor:
    """The values as an ordinary tensor: a subclass could answer comparisons in a way of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = logits.detach().as_subclass(Tensor)
        if plain.device.type == "meta":
            raise ParityError("the logits are on meta, so they have no values")
        return plain.cpu().to_dense()


def _random_states() -> tuple[object, ...]:
    return random.getstate(), torch.random.get_rng_state().numpy().tobytes()
