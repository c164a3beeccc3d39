"""Comparison of logits: the model runs on designed inputs, and every position is compared.

The model is called as its users call it, without taps. If the inputs reach only one outcome of a
condition in its code, further inputs are built from the constants in the condition.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compat.errors import CompatError, collapse_layers, listed
from compat.parity.conditions import (
    LONGEST_PHRASE,
    BranchObserver,
    ObservedCondition,
    TensorObserver,
)
from compat.parity.expected import ExpectedLogits
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
from compat.parity.reference import Reference
from compat.parity.report import InputResult, LogitsProof
from compat.parity.run_modes import call_in_thread, in_form, plain_values, random_states, run_mode
from compat.parity.state import state_digests
from compat.user_code import exception_summary, users_frames

Call = Callable[[Tensor], Any]
Find = Callable[[Any, Tensor], Tensor]
Extent = Literal["all", "short", "first"]  # of the inputs

OBSERVED = ("equal rows", "a single id")  # inputs on which tensor operations are observed
OBSERVED_UP_TO = 64  # ids per row of the further inputs on which they are observed
FIRST = 4  # inputs on which a model runs of which nothing is proved, among them the full context
ROUNDS = 3  # rounds of building inputs from constants


def prove_logits(
    model: nn.Module,
    reference: Reference,
    *,
    call: Call | None = None,
    find: Find | None = None,
    n_positions: int | None = None,
    fixed_length: int | None = None,
    extent: Extent = "all",
) -> LogitsProof:
    """Compare the logits of a model with the reference's on designed inputs.

    Args:
        model: the model, whose state is compared before and after.
        reference: the reference, in the model's data type.
        call: runs the model on ids (B, T); by default the model itself. No function of compat
            wraps the model then, so that its code cannot recognise the comparison by the stack.
        find: finds the logits in what `call` returned for these ids: (B, T, V), or (B, 1, V) of the
            last position. By default `call` returns logits.
        n_positions: the number of positions that the model has, if they are fewer than the
            checkpoint's.
        fixed_length: the only length that the model accepts, if it accepts only one.
        extent: on which inputs: "all" is for a proof. The others leave out inputs for conditions in
            the code. "short" inputs are for a model in half precision, whose code is proved in
            float32, and the "first" for a model of which nothing is proved: hidden states differ,
            or a part is replaced.

    Raises:
        ParityError: the reference cannot be trusted in this process.
    """
    limit = reference.checkpoint.config.n_positions
    longest = fixed_length or min(n_positions or limit, limit)
    longest = min(LENGTH, longest) if extent == "short" else longest
    call = model if call is None else call
    find = find or (lambda output, ids: output)
    prover = _LogitsProver(model, reference, call, find, longest, fixed_length)
    if extent == "all":
        return prover.run()
    return prover.compare_designed(FIRST if extent == "first" else None)


@dataclass
class _LogitsProver:
    model: nn.Module
    reference: Reference
    call: Call
    find: Find
    longest: int
    fixed_length: int | None
    proof: LogitsProof = field(default_factory=LogitsProof)
    tried: list[ProofInput] = field(default_factory=list)
    seen_ids: set[int] = field(default_factory=set)
    phrases: set[tuple[int, ...]] = field(default_factory=set)
    branches: BranchObserver = field(default_factory=BranchObserver)
    last_ids: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    n_designed: int = 0  # sequences of the designed inputs

    def __post_init__(self) -> None:
        self.config = self.reference.checkpoint.config
        self.sizes = {self.config.vocab_size, self.config.n_positions}
        self.operations = TensorObserver(self.sizes)
        self.expected = ExpectedLogits(self.reference)

    def run(self) -> LogitsProof:
        state, generators = state_digests(self.model), random_states()
        self.compare_designed()
        observed = [item for item in self.tried if item.name in OBSERVED] or self.tried[:1]
        self._observe(observed)
        tried_constants: set[int] = set()
        for _ in range(ROUNDS):
            constants = self._constants() - tried_constants
            if not constants:
                break
            tried_constants |= constants
            self._try(constants)
        if any(seen.one_sided(self.sizes) for seen in self.operations.conditions.values()):
            self._observe(self.tried[:1])
        self._add_limits(state)
        if generators != random_states() and self._draws_random_numbers():
            error = (
                "the forward pass draws random numbers, so its results may differ from call to call"
            )
            self.proof.inputs.append(InputResult("repeated calls", (1, 1), error=error))
        return self.proof

    def compare_designed(self, most: int | None = None) -> LogitsProof:
        """Compare the inputs that every proof begins with, or the first of them."""
        self.n_designed = len(self.expected.add(sequences(self.config, self.longest)))
        self._compare(self._accepted(designed_inputs(self.n_designed, self.longest))[:most])
        return self.proof

    def _accepted(self, inputs: Sequence[ProofInput]) -> list[ProofInput]:
        """Return those of the inputs that have the only length that the model accepts."""
        return [item for item in inputs if self.fixed_length in (None, item.length)]

    def _compare(self, inputs: Sequence[ProofInput]) -> None:
        for item in inputs:
            ids = self.expected.ids(item)
            self.seen_ids |= set(ids.flatten().tolist())
            result = self._result(item, ids)
            self.tried.append(item)
            if result is not None:
                self.proof.inputs.append(result)

    def _result(self, item: ProofInput, ids: Tensor) -> InputResult | None:
        """Compare the logits of one input; None if the model refuses an optional input."""
        B, T, V = *ids.shape, self.config.vocab_size
        calls, error = self.reference.module_calls, ""
        try:
            logits = self._logits(item, ids)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # such as exit() in the user's code
            if item.optional:
                return None
            if isinstance(raised, CompatError):  # the message says what the model returned
                return InputResult(item.name, (B, T), error=str(raised))
            error, frames = exception_summary(raised), users_frames(raised)
            file, line = (frames[-1].filename, frames[-1].lineno) if frames else (None, None)
            return InputResult(item.name, (B, T), error=error, file=file, line=line)
        if logits.shape not in ((B, T, V), (B, 1, V)):
            error = f"the model returned {list(logits.shape)}, but must return {[B, T, V]}"
        elif self.reference.module_calls != calls:
            error = "the model runs the transformers model that this proof compares it with"
        if error:
            return InputResult(item.name, (B, T), error=error)
        start = T - logits.shape[1]
        if start:
            self.proof.add_limit("the model returns the logits of the last position only")
        pieces = ((row, start, ours) for row, ours in zip(item.rows, logits, strict=True))
        return InputResult(item.name, (B, T), self.expected.difference(pieces))

    def _logits(self, item: ProofInput, ids: Tensor) -> Tensor:
        """Run the model; if a warning was turned into an error, again with warnings ignored."""
        try:
            return self._run(item, ids)
        except Warning:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._run(item, ids)

    def _run(self, item: ProofInput, ids: Tensor) -> Tensor:
        if item.form == "overwritten" and self.last_ids.shape == ids.shape:
            self.last_ids.copy_(ids)
        else:
            self.last_ids = in_form(ids, item.form)
        ids = self.last_ids
        with run_mode(item.mode, self.model), self.branches.watch(ids.shape[1]):
            output = call_in_thread(self.call, ids) if item.mode == "thread" else self.call(ids)
        return plain_values(self.find(output, ids))

    def _observe(self, inputs: Sequence[ProofInput]) -> None:
        """Run again with every tensor operation observed; nothing is compared."""
        failed = {(result.name, result.input_shape[1]) for result in self.proof.failed}
        for item in inputs:
            if (item.name, item.length) in failed:
                continue
            self.operations.shape = (len(item.rows), item.length)
            try:
                with torch.no_grad(), self.operations:
                    self.call(self.expected.ids(item))
            except KeyboardInterrupt:
                raise
            except BaseException:  # the code does not run under a dispatch mode
                self.proof.add_limit(
                    "conditions among the model's tensor operations were not observed"
                )
                return

    @property
    def _conditions(self) -> list[ObservedCondition]:
        return [*self.branches.conditions.values(), *self.operations.conditions.values()]

    def _constants(self) -> set[int]:
        """Return the constants of conditions for which the inputs reached only one outcome."""
        one_sided = (seen.all_constants for seen in self._conditions if len(seen.outcomes) < 2)
        return self.operations.constants.union(*one_sided)

    def _try(self, constants: set[int]) -> None:
        """Compare inputs in which the constants are ids, lengths and batch sizes."""
        ids = {n for n in constants if 0 <= n < self.config.vocab_size}
        ids -= set(special_ids(self.config))
        inputs: list[ProofInput] = []
        if ids:
            phrases = [phrase for phrase in self._phrases(ids) if phrase not in self.phrases]
            self.phrases |= set(phrases)
            with_ids = sequences_with(ids, self.config, self.longest)
            # One call, since the reference reads all weights for each.
            numbers = self.expected.add([*with_ids, *sequences_of(phrases, self.longest)])
            rows, repeated = numbers[: len(with_ids)], numbers[len(with_ids) :]
            length = len(self.expected.sequences[rows[0]])
            name = "ids that the code compares with"
            inputs.append(ProofInput(name, tuple(rows), length))
            inputs += [ProofInput(f"{name}, one row", (row,), length) for row in rows[1:]]
            if repeated:
                inputs.append(ProofInput(f"{name}, repeated", tuple(repeated), length))
        if not self.fixed_length:
            inputs += inputs_reaching(constants, self.n_designed, self.longest, self.tried)
        inputs = self._accepted(inputs)
        self._compare(inputs)
        self._observe([item for item in inputs if item.length <= OBSERVED_UP_TO])

    def _phrases(self, ids: Collection[int]) -> list[tuple[int, ...]]:
        """Return each of the ids alone, and the sequences of ids that conditions contain."""
        phrases = [phrase for seen in self._conditions for phrase in seen.phrases.values()]
        # Several conditions, each with one id, may require these ids in turn.
        in_turn = [n for seen in self._conditions for n in sorted(seen.all_constants & set(ids))]
        in_turn = list(dict.fromkeys(in_turn))[:LONGEST_PHRASE]
        phrases += [tuple(in_turn), tuple(in_turn[::-1])]
        V = self.config.vocab_size
        phrases = [phrase for phrase in phrases if phrase and all(0 <= n < V for n in phrase)]
        return list(dict.fromkeys([*phrases, *((n,) for n in sorted(ids))]))

    def _add_limits(self, state: dict[str, str]) -> None:
        """Add limits for conditions with only one outcome, one per line, and for changed state."""
        self.proof.ids_tried = len(self.seen_ids)
        by_line: dict[tuple[str, int], ObservedCondition] = {}
        for seen in self._conditions:
            if seen.one_sided(self.sizes):
                by_line.setdefault((seen.file, seen.line), seen)
        for (file, line), seen in by_line.items():
            self.proof.add_limit(seen.message, file, line)
        now = state_digests(self.model)
        changed = [name for name in {**state, **now} if now.get(name) != state.get(name)]
        if changed:
            names = listed(collapse_layers(changed), 4)
            self.proof.add_limit(f"the forward pass changes {names}, which later calls may read")

    def _draws_random_numbers(self) -> bool:
        """Return whether a call, and not another thread, changes the state of a generator."""
        before = random_states()
        with suppress(Exception, SystemExit), torch.no_grad():
            self.call(self.expected.ids(self.tried[0]))
        return before != random_states()
